"""`objckpt gc`: deletes what no checkpoint needs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated

import typer

from objckpt.cli import output
from objckpt.cli.options import Json, Url, takes_store
from objckpt.config import StoreOptions
from objckpt.errors import StoreError, UsageError

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_SHOWN = 5

DryRun = Annotated[bool, typer.Option("--dry-run", help="Delete nothing; tell what would be.")]
Grace = Annotated[
    str,
    typer.Option("--grace", metavar="TIME", help="Age from which an unfinished save is given up: 90s, 30m, 24h, 7d."),
]


@takes_store
def command(
    url: Url,
    dry_run: DryRun = False,
    grace: Grace = "24h",
    json: Json = False,
    *,
    options: StoreOptions,
) -> int:
    """Delete data that no checkpoint needs: of removed checkpoints, failed saves and unfinished uploads.

    What sessions left behind that a newer one has replaced goes at once, as they cannot commit any more. An unfinished
    save of the last session may still be under way: it is given up, and fails if it is, once nothing of it is younger
    than --grace by the clocks of store and this host. Nothing is deleted when something cannot be read. Objects that
    the log does not explain stay, and so does, for now, what the store refuses to delete; both are told.
    """
    from objckpt import collect
    from objckpt.store import open_store

    grace_s = seconds(grace)
    store = open_store(url, options)
    author = collect.Author(session=collect.new_session())
    report, _ = collect.collect(store, author=author, grace_s=grace_s, dry_run=dry_run)
    plan = report.plan
    objects, uploads = (plan.objects, plan.uploads) if dry_run else (report.deleted, report.aborted)
    nbytes = sum(info.size for info in objects)
    if json:
        output.document(
            {
                "url": store.url,
                "dry_run": dry_run,
                "objects": [info.key for info in objects],
                "bytes": nbytes,
                "uploads": [{"key": u.key, "upload_id": u.upload_id} for u in uploads],
                "given_up": plan.abort,
                "waiting": plan.waiting,
                "unknown": plan.unknown,
                "later": [{"key": key, "message": str(why)} for key, why in report.later],
                "uploads_unlisted": None if report.unlisted is None else str(report.unlisted),
            }
        )
        return 0
    would = "would delete" if dry_run else "deleted"
    output.line(f"{would} {len(objects)} objects, {output.human(nbytes)}, and {len(uploads)} unfinished uploads")
    if plan.abort:
        output.line(f"{'would give' if dry_run else 'gave'} up {len(plan.abort)} unfinished saves: {_some(plan.abort)}")
    if plan.waiting:
        output.line(f"left {len(plan.waiting)} saves that may still be under way: {_some(plan.waiting)}")
    if plan.unknown:
        output.message(f"left {len(plan.unknown)} objects that the log does not explain: {_some(plan.unknown)}")
    if report.unlisted is not None:
        output.message(f"unfinished uploads cannot be listed, so no save was given up: {report.unlisted}")
    tell_later(report.later)
    return 0


def tell_later(later: Sequence[tuple[str, StoreError]]) -> None:
    """A message on stderr about keys that the store refused to delete."""
    if later:
        output.message(f"the store refused to delete {len(later)} objects, for now: {_some([key for key, _ in later])}")
        output.message(f"its reason: {later[0][1]}")


def seconds(text: str) -> float:
    """A time such as 90s, 30m, 24h, 7d or 0. UsageError for another text."""
    found = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)([smhd])", text) or re.fullmatch(r"(0)()", text)
    if found is None:
        raise UsageError(f"--grace must be a number with s, m, h or d, as 24h, not {text!r}")
    return float(found[1]) * _UNITS_S.get(found[2], 1)


def _some(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return output.printable(", ".join(names[:_SHOWN])) + (f" and {more} more" if more > 0 else "")
