"""`objckpt rm`: removes checkpoints, first from the log and then their data."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from objckpt.cli import output
from objckpt.cli.gc import tell_later
from objckpt.cli.ls import describe
from objckpt.cli.options import Json, Url, takes_store
from objckpt.config import StoreOptions
from objckpt.errors import StoreError, UsageError

if TYPE_CHECKING:
    from objckpt.format.records import Commit
    from objckpt.log import Log

Steps = Annotated[
    list[str], typer.Argument(metavar="STEP...", help="What to remove: STEP, STEP@SEQ or a tag.", show_default=False)
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
Force = Annotated[bool, typer.Option("--force", help="Remove the newest and tagged checkpoints, too.")]


@takes_store
def command(
    url: Url,
    steps: Steps,
    yes: Yes = False,
    force: Force = False,
    json: Json = False,
    *,
    options: StoreOptions,
) -> int:
    """Remove checkpoints: all that are named, or none.

    They vanish from the log first, in one step, then their data is deleted; what is still needed by others stays. A
    restore that is reading one of them ends with an error. The newest one, which a restarted training resumes from, and
    tagged ones are refused without --force, unless they are named by their only tag. Data that the store refuses to
    delete now is told, and left to `objckpt gc`.
    """
    from objckpt import collect
    from objckpt.log import read_log
    from objckpt.store import open_store

    store = open_store(url, options)
    log = read_log(store)
    collect.require_sound(log)
    chosen = [find(log, name) for name in steps]
    seqs = sorted({commit.seq for commit in chosen})

    def choose(log: Log) -> collect.Choice:
        left = [seq for seq in seqs if seq not in log.retired]  # others may have removed some of them meanwhile
        _check(log, left, steps, force)
        return left, []

    choose(log)
    total = sum(c.stored_bytes for c in log.checkpoints if c.seq in seqs)
    names = ", ".join(f"{c.step}@{c.seq}" for c in log.checkpoints if c.seq in seqs)
    if not yes and not _confirmed(f"remove {names} ({output.human(total)}) from {store.url}?"):
        output.message("nothing was removed")
        return 1
    record, log = collect.retire(
        store, log, choose, author=collect.Author(session=collect.new_session()), reason="rm",
        deadline_s=store.options.retry_deadline_s,
    )  # fmt: skip
    removed = [c for c in log.commits if record is not None and c.seq in record.seqs]
    try:
        report = collect.delete_attempts(store, log, [c.attempt for c in removed])
    except StoreError:
        output.message(f"removed from the log; data of it is left: `objckpt gc {store.url}` deletes it")
        raise
    if json:
        sizes = {"deleted_objects": len(report.deleted), "deleted_bytes": sum(o.size for o in report.deleted)}
        later = [{"key": key, "message": str(why)} for key, why in report.later]
        output.document({"url": store.url, "removed": [describe(c) for c in removed]} | sizes | {"later": later})
    else:
        for commit in removed:
            output.line(f"removed step {commit.step}@{commit.seq}, {output.human(commit.stored_bytes)}")
        tell_later(report.later)
    return 0


def find(log: Log, name: str) -> Commit:
    """The live checkpoint of that name. UsageError when the name is a step of which there are several."""
    same = [c for c in log.checkpoints if name.isascii() and name.isdecimal() and c.step == int(name)]
    if len(same) > 1:
        names = ", ".join(f"{c.step}@{c.seq}" for c in same)
        raise UsageError(f"step {name} was committed several times under {log.url}; name one of {names}")
    return log.find(name)


def _check(log: Log, seqs: Sequence[int], names: Sequence[str], force: bool) -> None:
    from objckpt import collect

    collect.require_sound(log)
    if force:
        return
    live = log.checkpoints
    if live and live[-1].seq in seqs:
        newest = f"{live[-1].step}@{live[-1].seq}"
        raise UsageError(f"{newest} is the newest checkpoint, from which training resumes; --force removes it")
    for tag, seq in log.tags.items():
        if seq in seqs and tag not in names:
            step = next((f"{c.step}@{seq}" for c in live if c.seq == seq), f"the checkpoint of seq {seq}")
            raise UsageError(f"{step} is tagged {tag!r}; --force removes it")


def _confirmed(question: str) -> bool:
    if sys.stdin is None or not sys.stdin.isatty():
        raise UsageError("nobody is there to confirm it: --yes removes without asking")
    sys.stderr.write(output.printable(f"objckpt: {question} [y/N] "))
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")
