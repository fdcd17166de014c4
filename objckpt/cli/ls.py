"""`objckpt ls`: the committed checkpoints under a URL."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from objckpt.cli import output
from objckpt.cli.options import (
    Addressing,
    CaBundle,
    Debug,
    EndpointUrl,
    Json,
    Profile,
    Region,
    Url,
    store_options,
)
from objckpt.format.records import Commit

_HEAD = ("STEP", "SEQ", "TIME (UTC)", "EPOCH", "RANKS", "SIZE", "TENSORS", "")
_FIELDS = (  # of an object in JSON; sizes in bytes
    "step", "seq", "time", "epoch", "session", "attempt", "host", "parent", "world_size", "raw_bytes", "stored_bytes",
    "tensors",
)  # fmt: skip
_RIGHT = ("STEP", "SEQ", "EPOCH", "RANKS", "SIZE", "TENSORS")


def command(
    url: Url,
    json: Json = False,
    endpoint_url: EndpointUrl = None,
    region: Region = None,
    profile: Profile = None,
    addressing: Addressing = "path",
    ca_bundle: CaBundle = None,
    debug: Debug = False,
) -> int:
    """List the committed checkpoints, in the order of their commits.

    The newest is the one that was committed last: after a resume from an older step it need not have the highest
    number. A log record that cannot be read is told on stderr, and is an object with its "seq" and "damaged" in JSON;
    when it is the last one, no checkpoint is marked as the newest.
    """
    from objckpt.log import read_log
    from objckpt.store import open_store

    store = open_store(url, store_options(endpoint_url, region, profile, addressing, ca_bundle))
    log = read_log(store)
    found = log.checkpoints
    # A damaged record above the last one may be the newest: then none is marked.
    sure = bool(found) and all(seq < found[-1].seq for seq, _ in log.damaged)
    newest = found[-1].seq if sure else None
    if json:
        rows = [describe(c) | {"newest": c.seq == newest, "damaged": None} for c in found]
        rows += [
            dict.fromkeys(_FIELDS) | {"seq": seq, "newest": False, "damaged": str(why)} for seq, why in log.damaged
        ]
        output.document(sorted(rows, key=lambda row: row["seq"]))
    elif found:
        for line in output.table(_HEAD, [_row(c, c.seq == newest) for c in found], _RIGHT):
            output.line(line)
    else:
        what = "no checkpoint that can be read" if log.damaged else "no committed checkpoint"
        output.message(f"{what} under {store.url}")
    for seq, why in log.damaged:
        output.message(f"warning: log record {seq} cannot be read: {why}")
    return 0


def describe(commit: Commit) -> dict[str, Any]:
    """A commit record as plain data for JSON; sizes in bytes."""
    time = utc(commit.time_s, "%Y-%m-%dT%H:%M:%SZ")
    return {name: time if name == "time" else getattr(commit, name) for name in _FIELDS}


def utc(time_s: float, form: str = "%Y-%m-%d %H:%M:%S") -> str | None:
    """The time as text; None for a number that is no time."""
    try:
        return datetime.fromtimestamp(time_s, UTC).strftime(form)
    except (ValueError, OverflowError, OSError):
        return None


def _row(commit: Commit, newest: bool) -> list[str]:
    when = utc(commit.time_s) or "?"
    numbers = (commit.epoch, commit.world_size, output.human(commit.raw_bytes), commit.tensors)
    return [str(commit.step), str(commit.seq), when, *(str(n) for n in numbers), "newest" if newest else ""]
