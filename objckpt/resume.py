"""A restore by all ranks of a job together: nobody goes on alone, and nothing is touched before all have matched."""

from __future__ import annotations

import logging
from collections.abc import Mapping, MutableMapping
from dataclasses import replace
from typing import Any, Literal

from objckpt.events import Progress
from objckpt.format.fqn import to_fqn
from objckpt.format.index import PER_RANK
from objckpt.format.records import Commit
from objckpt.geometry import forget_layouts
from objckpt.group import Group, can_exchange
from objckpt.restore.into import Report, Restoration
from objckpt.restore.open import open_checkpoint, opened_for
from objckpt.restore.place import boxes_of
from objckpt.restore.removed import unless_removed
from objckpt.restore.share import Sharing, alone
from objckpt.store import Store

logger = logging.getLogger("objckpt")


def restore_together(
    store: Store,
    group: Group,
    commit: Commit,
    into: Mapping[Any, Any],
    per_rank: MutableMapping[Any, Any] | None,
    *,
    strict: bool,
    only: str | list[str] | None,
    cast: bool,
    pickle: bool,
    sharing: Literal["auto", "off"],
    progress: Progress,
) -> Report:
    """Fill `into` and `per_rank` on every rank of the group; see `Checkpointer.restore`. Blocks; a collective.

    In steps that all ranks end before one begins the next: match, fetch, pass on, hand over.
    """
    extended = {} if per_rank is None else {**into, PER_RANK: {group.rank: per_rank}}
    target = into if per_rank is None else extended

    def match() -> Restoration:
        checkpoint = open_checkpoint(store, commit, ranks={group.rank})
        saved = checkpoint.tree.get(PER_RANK)
        if not isinstance(saved, dict) or group.rank not in saved:
            extended.pop(PER_RANK, None)  # saved by fewer ranks
        checkpoint = replace(checkpoint, tree=_own_part(checkpoint.tree, target, group.rank))
        work = Restoration(
            store, checkpoint, target, strict=strict, only=only, cast=cast, pickle=pickle, progress=progress
        )
        if per_rank is not None and PER_RANK not in target:
            work.report.missing.append(to_fqn((PER_RANK, group.rank)))
        return work

    with unless_removed(store, commit):
        work = group.together(match)
        shared = None
        if sharing == "auto" and group.size > 1 and can_exchange():
            shared = Sharing(group, store, work.checkpoint, progress)
            work.fills = shared.take(work.fills)

        def open_for_all() -> None:
            wanted = work.wanted()
            for fqn, boxes in shared.wanted().items() if shared is not None else ():
                wanted.setdefault(fqn, []).extend(boxes)
            opened = work.checkpoint if shared is None else shared.checkpoint
            work.use(opened_for(store, opened, wanted))

        group.together(open_for_all)
        if sharing == "auto" and group.size > 1 and shared is None:
            _tell_what_sharing_saves(group, work)
        group.together(work.fetch)
        if shared is not None:
            shared.run(work.checkpoint)
        group.together(work.hand_over)
    forget_layouts()
    if per_rank is not None:
        own = target[PER_RANK][group.rank] if PER_RANK in target else per_rank
        if own is not per_rank:  # replaced as a whole
            per_rank.clear()
            per_rank.update(own)
        for key in [k for k in into if target[k] is not into[k]]:  # values: they were put into the copy
            into[key] = target[key]  # type: ignore[index]
    return work.report


def _tell_what_sharing_saves(group: Group, work: Restoration) -> None:
    """A warning by rank 0 where ranks read much that others read, too. A collective."""
    checkpoint = work.checkpoint

    def wanted() -> dict[str, int]:
        out: dict[str, int] = {}
        for target, leaf in work.fills:
            if not alone(leaf):
                boxes, stored = boxes_of(checkpoint, leaf, target), checkpoint.tensors[leaf.fqn]
                out[leaf.fqn] = out.get(leaf.fqn, 0) + sum(box.elements for box in boxes) * stored.itemsize
        return out

    mine = group.together(wanted)
    names = group.gather(list(mine) if group.rank == 0 else [])[0]
    every = sum(group.gather(sum(mine.get(name, 0) for name in names)))
    there = sum(checkpoint.tensors[name].nbytes for name in names)
    # Of a layout that has changed across rows each rank needs a few bytes of nearly all chunks.
    known = any(checkpoint.tensors[name].entry.layout is not None for name in names)
    across = known and checkpoint.complete and len(checkpoint.indexes) > 2
    if group.rank == 0 and (every > 1.1 * there or across):
        logger.warning(
            "each rank reads from the store what it needs of step %d, also what others read; "
            'init_process_group("cpu:gloo,cuda:nccl"), whose ranks can pass on host memory, lets them read it once',
            checkpoint.commit.step,
        )


def _own_part(tree: dict[Any, Any], wanted: Mapping[Any, Any], rank: int) -> dict[Any, Any]:
    """The tree; of the parts that belong to single ranks only this rank's, and none where none is wanted."""
    if PER_RANK not in tree:
        return tree
    rest = {key: part for key, part in tree.items() if key != PER_RANK}
    part = tree[PER_RANK]
    if PER_RANK not in wanted:
        return rest
    return rest | {PER_RANK: {rank: part[rank]} if isinstance(part, dict) and rank in part else part}
