"""torch.distributed.checkpoint on objckpt: a StorageWriter and a StorageReader.

    dcp.save(state_dict, checkpoint_id="100", storage_writer=ObjckptWriter("s3://models/run42"))
    dcp.load(state_dict, checkpoint_id="100", storage_reader=ObjckptReader("s3://models/run42"))

What DCP writes this way is an ordinary checkpoint: one commit in the same log, for the command line and for
`Checkpointer.restore`; and the reader reads what `Checkpointer.save` wrote. Nothing is pickled: metadata and values are
the format's own. `checkpoint_id` names the step: a number, or a path that ends with one ("outputs/step-100").
As DCP has it, the keys of mappings become text, and an empty mapping that is not in a list is not stored.

DCP's collectives decide how a save ends here, unlike in `Checkpointer`: a rank's failure reaches the others by them.
"""

from __future__ import annotations

import asyncio
import io
import os
import re
import secrets
from bisect import bisect_right
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from objckpt import collect
from objckpt.config import SaveOptions, StoreOptions
from objckpt.errors import SaveError, UnsupportedTypeError, UsageError
from objckpt.format import keys, values
from objckpt.format.fqn import to_fqn
from objckpt.format.index import Index
from objckpt.geometry import Box
from objckpt.integrations.dcp_names import dcp_name, describe, named, named_by, tree_of
from objckpt.log import read_log
from objckpt.restore.lazy import lazy
from objckpt.restore.open import Checkpoint, open_checkpoint
from objckpt.restore.place import Filler, NewTensors
from objckpt.save.commit import LeafMeta, LogWriter, Sizes
from objckpt.save.journey import Journey, Snapshot, upload_index
from objckpt.state.dtypes import as_bytes, dtype_name
from objckpt.state.flatten import flatten
from objckpt.state.unflatten import to_python
from objckpt.store import Uploads, open_store, open_uploads

T = TypeVar("T")
Path = tuple[Any, ...]
_STEP = re.compile(r"(\d+)/?$")


class ObjckptWriter(StorageWriter):
    """Writes checkpoints for `dcp.save` and `dcp.async_save` (by thread and by process).

    One object serves many saves, one after the other. The tensors that DCP hands over (for `async_save` its own copies)
    are uploaded from where they lie when they are contiguous on the host. `write_data` blocks until the rank's packs are in
    the store. A save becomes visible by the commit record that `finish` appends, after comparing what was planned with
    what was written.
    """

    def __init__(self, url: str, *, store: StoreOptions | None = None, options: SaveOptions | None = None) -> None:
        """No request is made. Of the options `compression`, `chunk_bytes`, `part_bytes` and `pickle` count here."""
        self.url, self.store_options, self.options = url, store or StoreOptions(), options or SaveOptions()
        open_store(url, self.store_options).close()  # an unacceptable URL is told now
        self.session = collect.new_session()
        self.checkpoint_id: str | os.PathLike[str] | None = None
        self._next: int | None = None  # the step of the save to come; DCP calls reset() only when it is given an id
        self._step: int | None = None
        self._rank = 0
        self._planned: list[SavePlan] = []
        self._held: Index | None = None  # the coordinator's, which gets the tree at the end

    # ---- what DCP calls, in this order ------------------------------------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A new save begins. UsageError for an id that does not end with a step."""
        self.checkpoint_id = checkpoint_id
        self._next = None if checkpoint_id is None else step_of(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """`rank` and `use_collectives` reach only a parameter of the name `kwargs`."""
        self._rank, self._held = int(kwargs.get("rank", 0) or 0), None
        self._step, self._next = self._next, None
        if not kwargs.get("use_collectives", True):
            raise UsageError(
                "objckpt commits one checkpoint for all ranks: use_collectives=False is not possible with it"
            )
        if self._step is None:
            raise UsageError("dcp.save needs checkpoint_id, the step: a number, or a path that ends with one")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the coordinator: it gives the attempt its name, and each rank its number; its own is 0, which has the tree."""
        assert self._step is not None
        global _last_plans
        plans = self._in_full(plans)
        _last_plans = (self.session, plans)
        attempt = keys.attempt(self._step, self.session, secrets.randbelow(10**9))
        order = [self._rank, *(rank for rank in range(len(plans)) if rank != self._rank)]
        self._planned = [
            SavePlan(
                plan.items,
                {"attempt": attempt, "rank": order.index(rank), "world_size": len(plans), "step": self._step},
                plan.planner_data,
            )
            for rank, plan in enumerate(plans)
        ]
        with self._log_writer(len(plans)):  # opens the log: a collection knows then whose packs these are
            return self._planned

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Upload what this rank has. Blocks; the future is done."""
        place = plan.storage_data
        if place is None or place["step"] != self._step:  # its packs would take the place of another save's
            raise SaveError(
                f"step {self._step}: the plan to write is that of another save; is the planner in use twice?"
            )
        mappings: dict[str, Path] = getattr(planner, "mappings", {}) or {}
        leaves: list[tuple[torch.Tensor, LeafMeta]] = []
        inner: list[torch.Tensor] = []  # those that DCP does not know, inside of values
        found: list[tuple[WriteItem, int, bytes | None]] = []  # item, its bytes, a value's packed form
        for item in plan.items:
            if item.type == WriteItemType.BYTE_IO:
                packed, parts = _value_of(item, planner, mappings, self.options.pickle)
                found.append((item, len(packed) + sum(tensor.nbytes for tensor, _ in parts), packed))
                inner += [tensor for tensor, _ in parts]
                leaves += parts
            else:
                leaves.append(_tensor_of(item, planner, mappings))
                found.append((item, leaves[-1][0].nbytes, None))
        leaves.sort(key=lambda leaf: -leaf[0].element_size())  # each starts aligned
        tensors = [tensor for tensor, _ in leaves]
        snapshot = Snapshot(
            [meta for _, meta in leaves],
            [t.nbytes for t in tensors],
            [t.element_size() for t in tensors],
            _Reader(tensors),
        )

        async def upload(uploads: Uploads, journey: Journey) -> tuple[Index, tuple[str, int] | None]:
            index = await journey.upload(
                uploads,
                snapshot,
                step=place["step"],
                attempt=place["attempt"],
                rank=place["rank"],
                world_size=place["world_size"],
                tree=None,
            )
            return index, await upload_index(uploads, index) if place["rank"] else None

        index, named = self._run(upload)
        self._held = index if place["rank"] == 0 else None
        about = {
            "rank": place["rank"],
            "index": named,
            "packs": sum(size for _, size in index.packs),
            "inner": (sum(tensor.nbytes for tensor in inner), len(inner)),
        }
        results = [
            WriteResult(index=item.index, size_in_bytes=nbytes, storage_data={"value": packed})
            for item, nbytes, packed in found
        ]
        results.append(WriteResult(index=MetadataIndex(_ABOUT), size_in_bytes=0, storage_data=about))
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator: compare, write the tree, commit. SaveError when something planned was not written."""
        assert self._held is not None and self._step is not None
        abouts = [r.storage_data for rank in results for r in rank if r.index.fqn == _ABOUT]
        written = {r.index: r for rank in results for r in rank if r.index.fqn != _ABOUT}
        planned = {item.index for plan in self._planned for item in plan.items} | named_by(metadata)
        if planned - written.keys() or len(abouts) != len(self._planned):
            lost = sorted(index.fqn for index in planned - written.keys())
            raise SaveError(
                f"step {self._step} was not committed to {self.url}: {len(lost)} planned items were not written, "
                f"{', '.join(lost[:5])}, by {len(self._planned)} ranks of which {len(abouts)} answered"
            )
        packed = {index.fqn: r.storage_data["value"] for index, r in written.items()}
        tree = tree_of(metadata, packed)
        self._held.tree = values.pack(tree)
        held = self._held

        async def upload(uploads: Uploads, journey: Journey) -> tuple[str, int]:
            return await upload_index(uploads, held)

        ranks = {about["rank"]: about["index"] for about in abouts} | {0: self._run(upload)}
        stored = [m for m in metadata.state_dict_metadata.values() if isinstance(m, TensorStorageMetadata)]
        sizes = Sizes(
            raw_bytes=sum(m.size.numel() * m.properties.dtype.itemsize for m in stored)
            + sum(about["inner"][0] for about in abouts),
            stored_bytes=sum(about["packs"] for about in abouts),
            tensors=len(stored) + sum(about["inner"][1] for about in abouts),
        )
        with self._log_writer(len(abouts)) as writer:
            live = writer.log.checkpoints
            commit = writer.commit(
                held, [ranks[n] for n in range(len(abouts))], live[-1].seq if live else None, {"by": "dcp"}, sizes
            )
        metadata.storage_meta = self.storage_meta()
        metadata.storage_data = dict.fromkeys(written, commit.attempt)
        self._step = self._held = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return _STEP.search(str(checkpoint_id)) is not None

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self.session)

    @contextmanager
    def _log_writer(self, world_size: int) -> Iterator[LogWriter]:
        """This session's place in the log, opened."""
        store = open_store(self.url, self.store_options)
        try:
            writer = LogWriter(store, self.session, world_size, self.store_options.retry_deadline_s)
            writer.open()
            yield writer
        finally:
            store.close()

    def _in_full(self, plans: list[SavePlan]) -> list[SavePlan]:
        """With `enable_plan_caching` a plan that is that of the save before comes without its items, and a rank would take
        the old plan from its cache, with the old attempt's name.
        """
        if all(getattr(plan, "usable", True) for plan in plans):
            return plans
        session, before = _last_plans
        if session != self.session or len(before) != len(plans):
            raise UsageError(
                "the planner has kept the plans of another writer's save: use one ObjckptWriter for all saves, or "
                "enable_plan_caching=False"
            )
        return [plan if plan.usable else old for plan, old in zip(plans, before, strict=True)]

    def _run(self, work: Callable[[Uploads, Journey], Coroutine[Any, Any, T]]) -> T:
        async def main() -> T:
            journey = Journey(self.store_options, self.options)
            try:
                async with open_uploads(self.url, self.store_options) as uploads:
                    return await work(uploads, journey)
            finally:
                journey.close()

        with ThreadPoolExecutor(1, "objckpt-dcp") as pool:  # the caller may be inside an event loop
            return pool.submit(lambda: asyncio.run(main())).result()


class ObjckptReader(StorageReader):
    """Reads checkpoints for `dcp.load`: those of DCP through `ObjckptWriter`, and those of `Checkpointer.save`."""

    def __init__(self, url: str, *, store: StoreOptions | None = None, pickle: bool = False) -> None:
        """`pickle=True` permits pickled values, which run code when they are read. No request is made."""
        self._options, self._pickle = store or StoreOptions(), pickle
        self._store = open_store(url, self._options)
        self.url = self._store.url
        self.checkpoint_id: str | os.PathLike[str] | None = None
        self._step: int | None = None
        self._checkpoint: Checkpoint | None = None
        self._leaves: dict[str, tuple[Path, Any]] = {}  # DCP's name → path and leaf
        self._metadata: Metadata | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Which step to read; None: the newest. UsageError for an id that does not end with a step."""
        self._step = None if checkpoint_id is None else step_of(checkpoint_id)
        self.checkpoint_id = checkpoint_id
        self._checkpoint = None

    def read_metadata(self) -> Metadata:
        """Reads log and indexes. DCP takes any exception from here for "no metadata", and puts its text into its own."""
        checkpoint = open_checkpoint(self._store, read_log(self._store).find(self._step))
        self._leaves, paths = {}, {}
        for path, theirs, leaf in named(checkpoint.tree, (), ()):
            name = dcp_name(theirs)
            if name in self._leaves:
                raise UsageError(
                    f"DCP has one name, {name!r}, for {to_fqn(self._leaves[name][0])} and {to_fqn(path)} of this "
                    "checkpoint; restore it by objckpt.Checkpointer"
                )
            self._leaves[name], paths[name] = (path, leaf), theirs
        self._metadata = Metadata(
            state_dict_metadata={name: describe(leaf, checkpoint) for name, (_, leaf) in self._leaves.items()},
            planner_data=paths,
            storage_data={},
            storage_meta=StorageMeta(checkpoint_id=self.checkpoint_id),
        )
        self._checkpoint = checkpoint
        return self._metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._metadata = metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fetch, verify and place what the plan asks for. Blocks; the future is done."""
        assert self._checkpoint is not None and self._metadata is not None
        checkpoint = self._checkpoint
        filler = Filler(self._store, checkpoint)
        made = NewTensors(checkpoint, torch.device("cpu"))  # of the values that hold tensors
        found: list[tuple[ReadItem, Any]] = []
        taken: list[tuple[ReadItem, torch.Tensor]] = []
        for item in plan.items:
            path, leaf = self._leaves[item.storage_index.fqn]
            if item.type == LoadItemType.BYTE_IO:
                found.append((item, to_python(leaf, made.tensor_of, pickle=self._pickle, path=path)))
                continue
            target = planner.resolve_tensor(item).detach()
            taken.append((item, target))
            box = self._box(item)
            if leaf.view is None:
                filler.add_box(checkpoint.tensors[leaf.fqn], target, box)
            else:
                spot = tuple(slice(at, at + n) for at, n in zip(box.offset, box.shape, strict=True))
                target.copy_(lazy(self._store, checkpoint)[to_fqn(path)][spot])
        for fqn, tensor in made.stored.items():
            filler.add(checkpoint.tensors[fqn], tensor)
        filler.run()
        for item, target in taken:
            planner.commit_tensor(item, target)
        for item, value in found:
            buffer = io.BytesIO()
            torch.save(value, buffer)
            buffer.seek(0)
            planner.load_bytes(item, buffer)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return _STEP.search(str(checkpoint_id)) is not None

    def _box(self, item: ReadItem) -> Box:
        """What an item wants, in global elements: DCP counts from the stored chunk's first element."""
        assert self._metadata is not None
        about = self._metadata.state_dict_metadata[item.storage_index.fqn]
        assert isinstance(about, TensorStorageMetadata)
        number, offset = item.storage_index.index, item.storage_index.offset
        chunk = about.chunks[number] if number is not None and number < len(about.chunks) else None
        if chunk is None or (offset is not None and chunk.offsets != offset):
            chunk = next(c for c in about.chunks if offset is None or c.offsets == offset)
        first = tuple(a + b for a, b in zip(chunk.offsets, item.storage_offsets, strict=True))
        return Box(first, tuple(item.lengths))


_ABOUT = "\0about"  # in place of a name: what a rank tells of itself
_last_plans: tuple[str, list[SavePlan]] = ("", [])  # of the coordinator's last save, and its writer's session


def step_of(checkpoint_id: str | os.PathLike[str] | int) -> int:
    """The step that an id of DCP names: the digits at its end. UsageError when there are none."""
    found = _STEP.search(str(checkpoint_id))
    if found is None:
        raise UsageError(f"checkpoint_id={str(checkpoint_id)!r} must be a step, or a path that ends with one")
    return int(found[1])


class _Reader:
    """The bytes of tensors back to back. A tensor that is not contiguous on the host is copied when its turn comes."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = [tensor for tensor in tensors if tensor.nbytes]
        self._starts = list(accumulate((tensor.nbytes for tensor in self._tensors), initial=0))
        self._at = -1
        self._bytes = memoryview(b"")

    def __call__(self, start: int, nbytes: int) -> list[memoryview]:
        out = []
        while nbytes > 0:
            number = bisect_right(self._starts, start) - 1
            if number != self._at:
                self._at = number
                self._bytes = as_bytes(self._tensors[number].detach().cpu().contiguous()).numpy().data
            inside = start - self._starts[number]
            take = min(nbytes, self._starts[number + 1] - start)
            out.append(self._bytes[inside : inside + take])
            start, nbytes = start + take, nbytes - take
        return out


def _tensor_of(item: WriteItem, planner: SavePlanner, mappings: dict[str, Path]) -> tuple[torch.Tensor, LeafMeta]:
    about = item.tensor_data
    assert about is not None
    tensor = planner.resolve_data(item)
    assert isinstance(tensor, torch.Tensor)
    tensor = tensor.detach().resolve_conj().resolve_neg()
    path = tuple(mappings.get(item.index.fqn, (item.index.fqn,)))
    fqn = to_fqn(path)
    shape, offset = tuple(about.chunk.sizes), tuple(about.chunk.offsets)
    if tuple(tensor.shape) != shape or tensor.layout is not torch.strided:
        raise UnsupportedTypeError(
            f"{fqn}: DCP planned a piece of shape {shape} and gave {type(tensor).__qualname__} of {tuple(tensor.shape)}; "
            "a strided shard that is not one box is saved by objckpt.Checkpointer only",
            fqn=fqn,
        )
    return tensor, LeafMeta(path, dtype_name(tensor.dtype, fqn), tuple(about.size), offset, shape)


def _value_of(
    item: WriteItem, planner: SavePlanner, mappings: dict[str, Path], pickle: bool
) -> tuple[bytes, list[tuple[torch.Tensor, LeafMeta]]]:
    """A value's packed form, and the tensors and arrays in it: DCP does not look into tuples and arrays."""
    name = item.index.fqn
    if not hasattr(planner, "lookup_object"):
        raise UnsupportedTypeError(
            f"{name}: the planner {type(planner).__qualname__} has no lookup_object(), and its torch.save() of "
            "values is a pickle; derive it from DefaultSavePlanner"
        )
    path = tuple(mappings.get(name, (name,)))
    tree: Any = planner.lookup_object(item.index)
    for key in reversed(path):
        tree = {key: tree}
    flat = flatten(tree, pickle=pickle)
    tree, parts = flat.tree, []
    for key in path:
        tree = tree[key]
    for leaf in flat.leaves:
        if leaf.global_shape is not None:
            raise UnsupportedTypeError(
                f"{leaf.fqn}: DCP takes {name} for one value, and it holds a distributed tensor; put that into a dict or "
                "list, and use flatten_state_dict=True",
                fqn=leaf.fqn,
            )
        meta = LeafMeta(leaf.path, leaf.dtype, leaf.shape, (0,) * len(leaf.shape), leaf.shape)
        parts.append((leaf.tensor.resolve_conj().resolve_neg(), meta))
    return values.pack(tree), parts
