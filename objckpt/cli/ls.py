"""`objckpt ls`: the committed checkpoints under a URL."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from objckpt.cli import output
from objckpt.cli.options import Json, Url, takes_store
from objckpt.config import StoreOptions
from objckpt.errors import ObjckptError
from objckpt.format import keys
from objckpt.format.records import Commit

if TYPE_CHECKING:
    from objckpt.log import Log

_HEAD = ("STEP", "SEQ", "TIME (UTC)", "WRITER", "RANKS", "SIZE", "TENSORS", "")
_FIELDS = (  # of an object in JSON; sizes in bytes
    "step", "seq", "time", "epoch", "session", "attempt", "host", "parent", "world_size", "raw_bytes", "stored_bytes",
    "tensors",
)  # fmt: skip
_RIGHT = ("STEP", "SEQ", "WRITER", "RANKS", "SIZE", "TENSORS")

All = Annotated[
    bool, typer.Option("--all", help="Also what was removed (retired), and late commits of replaced writers (fenced).")
]


@takes_store
def command(
    url: Url,
    all: All = False,
    json: Json = False,
    *,
    options: StoreOptions,
) -> int:
    """List the committed checkpoints, in the order of their commits.

    The newest is the one that was committed last: after a resume from an older step it need not have the highest
    number. Those that it does not descend from are marked as abandoned; tags stand in brackets. SEQ is the place in the
    log, which has records of sessions, tags and removals, too; WRITER is the number of the session that saved (its
    epoch). A log record that cannot be read is told on stderr, and is an object with its "seq" and "damaged" in JSON;
    when it is the last one, no checkpoint is marked as the newest.
    """
    from objckpt.log import read_log
    from objckpt.store import open_store

    store = open_store(url, options)
    log = read_log(store)
    listed = sorted({c.seq: c for c in (*log.commits, *log.fenced)}.values(), key=_seq) if all else log.checkpoints
    standing = Standing(log)
    if json:
        rows = [describe(c) | standing.describe(c) | {"damaged": None} for c in listed]
        nothing = dict.fromkeys((*_FIELDS, "state", "tags", "abandoned"))
        rows += [nothing | {"seq": seq, "newest": False, "damaged": str(why)} for seq, why in log.damaged]
        output.document(sorted(rows, key=lambda row: row["seq"]))
    elif listed:
        for line in output.table(_HEAD, [_row(c, standing) for c in listed], _RIGHT):
            output.line(line)
    if not log.checkpoints and not json:
        what = "no checkpoint that can be read" if log.damaged else "no committed checkpoint"
        output.message(f"{what} under {store.url}{_near(store)}")
    for seq, why in log.damaged:
        output.message(f"warning: log record {seq} cannot be read: {why}")
    if log.keyed:
        output.message(
            "warning: this store has no conditional writes: two jobs that write here at once are not kept apart"
        )
    return 0


def _near(store: Any) -> str:
    """The folders below the URL, or else those beside it: one with checkpoints may have been meant."""
    from objckpt.store import parse_url

    prefix = parse_url(store.url).prefix
    own = {prefix + folder for folder in (keys.LOG, keys.DATA, keys.BUNDLES)}
    beside = prefix.rstrip("/").rpartition("/")
    for at, where in ((prefix, "below it"), (beside[0] + beside[1], "beside it")):
        try:
            answer = store.once("ListObjectsV2", None, Prefix=at, Delimiter="/", MaxKeys=1000)
        except ObjckptError:  # it was a help only
            return ""
        found = sorted({each["Prefix"] for each in answer.get("CommonPrefixes", ())} - own - {prefix})
        if found:
            names = [f"s3://{parse_url(store.url).bucket}/{name.rstrip('/')}" for name in found[:8]]
            more = f" and {len(found) - 8} more" if len(found) > 8 else ""
            return output.printable(f"; {where} are {', '.join(names)}{more}")
    return ""


def describe(commit: Commit) -> dict[str, Any]:
    """A commit record as plain data for JSON; sizes in bytes."""
    time = utc(commit.time_s, "%Y-%m-%dT%H:%M:%SZ")
    return {name: time if name == "time" else getattr(commit, name) for name in _FIELDS}


class Standing:
    """What a log says of its checkpoints."""

    def __init__(self, log: Log) -> None:
        found = log.checkpoints
        # A damaged record above the last one may be the newest: then none is marked, and nothing said of its line.
        sure = bool(found) and all(seq < found[-1].seq for seq, _ in log.damaged)
        self.newest = found[-1].seq if sure else None
        self.live = {c.seq for c in found}
        self.abandoned = self.live - log.lineage() if sure else set()
        self.retired = log.retired
        self.tags: dict[int, list[str]] = {}
        for name, seq in sorted(log.tags.items()):
            self.tags.setdefault(seq, []).append(name)

    def describe(self, commit: Commit) -> dict[str, Any]:
        """As plain data for JSON. "state" is live; retired: removed; or fenced: too late, its writer had been replaced."""
        seq = commit.seq
        return {
            "state": "live" if seq in self.live else "retired" if seq in self.retired else "fenced",
            "tags": self.tags.get(seq, []),
            "abandoned": seq in self.abandoned,
            "newest": seq == self.newest,
        }

    def notes(self, commit: Commit) -> str:
        """In a few words."""
        is_ = self.describe(commit)
        words = [f"[{tag}]" for tag in is_["tags"]] + [name for name in ("abandoned", "newest") if is_[name]]
        return " ".join(words if is_["state"] == "live" else [is_["state"]])


def utc(time_s: float, form: str = "%Y-%m-%d %H:%M:%S") -> str | None:
    """The time as text; None for a number that is no time."""
    try:
        return datetime.fromtimestamp(time_s, UTC).strftime(form)
    except (ValueError, OverflowError, OSError):
        return None


def _row(commit: Commit, standing: Standing) -> list[str]:
    when = utc(commit.time_s) or "?"
    numbers = (commit.epoch, commit.world_size, output.human(commit.raw_bytes), commit.tensors)
    return [str(commit.step), str(commit.seq), when, *(str(n) for n in numbers), standing.notes(commit)]


def _seq(commit: Commit) -> int:
    return commit.seq
