"""`objckpt tag`: names for checkpoints; retention keeps what has one."""

from __future__ import annotations

from typing import Annotated

import typer

from objckpt.cli import output
from objckpt.cli.options import Json, Url, takes_store
from objckpt.cli.rm import find
from objckpt.config import StoreOptions
from objckpt.errors import UsageError

Which = Annotated[
    str | None, typer.Argument(metavar="STEP", help="The checkpoint: STEP, STEP@SEQ or a tag.", show_default=False)
]
Name = Annotated[str | None, typer.Argument(metavar="NAME", help="Its new name, as best.", show_default=False)]
Delete = Annotated[str | None, typer.Option("--delete", metavar="NAME", help="Take this name away instead.")]


@takes_store
def command(
    url: Url,
    step: Which = None,
    name: Name = None,
    delete: Delete = None,
    json: Json = False,
    *,
    options: StoreOptions,
) -> int:
    """Give a checkpoint a name, or take one away.

    Retention keeps tagged checkpoints, and other commands take the name in place of a step. A name that another
    checkpoint has moves to this one. Names begin with a letter, and have at most 64 letters, digits, ".", "_" and "-".
    """
    from objckpt import collect
    from objckpt.log import read_log
    from objckpt.store import open_store

    if (step is None or name is None) if delete is None else step is not None:
        raise UsageError("give STEP and NAME, or --delete NAME")
    store = open_store(url, options)
    log = read_log(store)
    commit = find(log, step) if step is not None else None
    tag = name if name is not None else str(delete)
    before = log.tags.get(tag)
    collect.tag(
        store, log, tag, commit.seq if commit is not None else None,
        author=collect.Author(session=collect.new_session()), deadline_s=store.options.retry_deadline_s,
    )  # fmt: skip
    if json:
        target = {"step": commit.step, "seq": commit.seq} if commit is not None else {"step": None, "seq": None}
        output.document({"url": store.url, "tag": tag} | target | {"was_seq": before})
    elif commit is None:
        output.line(f"{tag}: no name any more")
    else:
        moved = [f"{c.step}@{c.seq}" for c in log.checkpoints if c.seq == before and c.seq != commit.seq]
        output.line(f"{tag}: step {commit.step}@{commit.seq}" + (f", was {moved[0]}" if moved else ""))
    return 0
