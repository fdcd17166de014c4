"""torch.distributed.checkpoint on objckpt: a StorageWriter and a StorageReader.

    dcp.save(state_dict, checkpoint_id="100", storage_writer=ObjckptWriter("s3://models/run42"))
    dcp.load(state_dict, checkpoint_id="100", storage_reader=ObjckptReader("s3://models/run42"))

What DCP writes this way is an ordinary checkpoint: one commit in the same log, for the command line and for
`Checkpointer.restore`; and the reader reads what `Checkpointer.save` wrote. Nothing is pickled: metadata and values are
the format's own. `checkpoint_id` names the step: a number, or a path that ends with one ("outputs/step-100").

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
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
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
from objckpt.format.values import TensorLeaf
from objckpt.geometry import Box
from objckpt.log import read_log
from objckpt.restore.lazy import lazy
from objckpt.restore.match import leaves
from objckpt.restore.open import Checkpoint, open_checkpoint
from objckpt.restore.place import Filler
from objckpt.save.commit import LeafMeta, LogWriter, Sizes
from objckpt.save.journey import Journey, Snapshot, upload_index
from objckpt.state.dtypes import as_bytes, dtype_name, dtype_of
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
        self._step: int | None = None
        self._rank = 0
        self._planned: list[SavePlan] = []
        self._held: Index | None = None  # the coordinator's, which gets the tree at the end

    # ---- what DCP calls, in this order ------------------------------------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A new save begins. UsageError for an id that does not end with a step."""
        self.checkpoint_id = checkpoint_id
        self._step = None if checkpoint_id is None else step_of(checkpoint_id)
        self._held = None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """`rank` and `use_collectives` reach only a parameter of the name `kwargs`."""
        self._rank = int(kwargs.get("rank", 0) or 0)
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
        return self._planned

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Upload what this rank has. Blocks; the future is done."""
        place = plan.storage_data
        mappings: dict[str, Path] = getattr(planner, "mappings", {}) or {}
        tensors: list[torch.Tensor] = []
        metas: list[LeafMeta] = []
        found: list[tuple[WriteItem, int, bytes | None]] = []  # item, its bytes, a value's packed form
        sharded = [item for item in plan.items if item.type != WriteItemType.BYTE_IO]
        for item in sorted(sharded, key=lambda item: -_itemsize(item)):
            tensor, meta = _tensor_of(item, planner, mappings)
            tensors.append(tensor)
            metas.append(meta)
            found.append((item, tensor.nbytes, None))
        for item in plan.items:
            if item.type == WriteItemType.BYTE_IO:
                packed = _value_of(item, planner, self.options.pickle)
                found.append((item, len(packed), packed))
        snapshot = Snapshot(metas, [t.nbytes for t in tensors], [t.element_size() for t in tensors], _Reader(tensors))

        async def upload(uploads: Uploads, journey: Journey) -> tuple[Index, tuple[str, int] | None]:
            index = await journey.upload(
                uploads,
                snapshot,
                step=place["step"],
                attempt=place["attempt"],
                rank=place["rank"],
                world_size=place["world_size"],
                tree=None,
                replicated=[],
            )
            return index, await upload_index(uploads, index) if place["rank"] else None

        index, named = self._run(upload)
        self._held = index if place["rank"] == 0 else None
        about = {"rank": place["rank"], "index": named, "packs": sum(size for _, size in index.packs)}
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
        planned = {item.index for plan in self._planned for item in plan.items}
        if planned - written.keys() or len(abouts) != len(self._planned):
            lost = sorted(index.fqn for index in planned - written.keys())
            raise SaveError(
                f"step {self._step} was not committed to {self.url}: {len(lost)} planned items were not written, "
                f"{', '.join(lost[:5])}, by {len(self._planned)} ranks of which {len(abouts)} answered"
            )
        packed = {index.fqn: r.storage_data["value"] for index, r in written.items()}
        tree = _tree(metadata, packed)
        self._held.tree = values.pack(tree)
        held = self._held

        async def upload(uploads: Uploads, journey: Journey) -> tuple[str, int]:
            return await upload_index(uploads, held)

        ranks = {about["rank"]: about["index"] for about in abouts} | {0: self._run(upload)}
        stored = [m for m in metadata.state_dict_metadata.values() if isinstance(m, TensorStorageMetadata)]
        sizes = Sizes(
            raw_bytes=sum(m.size.numel() * m.properties.dtype.itemsize for m in stored),
            stored_bytes=sum(about["packs"] for about in abouts),
            tensors=len(stored),
        )
        store = open_store(self.url, self.store_options)
        try:
            writer = LogWriter(store, self.session, len(abouts), self.store_options.retry_deadline_s)
            writer.open()
            live = writer.log.checkpoints
            commit = writer.commit(
                held, [ranks[n] for n in range(len(abouts))], live[-1].seq if live else None, {"by": "dcp"}, sizes
            )
        finally:
            store.close()
        metadata.storage_meta = self.storage_meta()
        metadata.storage_data = dict.fromkeys(written, commit.attempt)
        self._step = self._held = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return _STEP.search(str(checkpoint_id)) is not None

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self.session)

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
        self._checkpoint: Checkpoint | None = None
        self._leaves: dict[str, tuple[Path, Any]] = {}  # DCP's name → path and leaf
        self._metadata: Metadata | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Which step to read; None: the newest. UsageError for an id that does not end with a step."""
        self.checkpoint_id = checkpoint_id
        self._checkpoint = None

    def read_metadata(self) -> Metadata:
        """Reads log and indexes. DCP takes any exception from here for "no metadata", and puts its text into its own."""
        which = None if self.checkpoint_id is None else step_of(self.checkpoint_id)
        checkpoint = open_checkpoint(self._store, read_log(self._store).find(which))
        self._leaves = {_dcp_name(path): (path, leaf) for path, leaf in _named(checkpoint.tree, ()) if path}
        self._metadata = Metadata(
            state_dict_metadata={name: _describe(leaf, checkpoint) for name, (_, leaf) in self._leaves.items()},
            planner_data={name: path for name, (path, _) in self._leaves.items()},
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
        taken: list[tuple[ReadItem, torch.Tensor]] = []
        for item in plan.items:
            path, leaf = self._leaves[item.storage_index.fqn]
            if item.type == LoadItemType.BYTE_IO:
                buffer = io.BytesIO()
                torch.save(to_python(leaf, lambda path, leaf: None, pickle=self._pickle, path=path), buffer)
                buffer.seek(0)
                planner.load_bytes(item, buffer)
                continue
            target = planner.resolve_tensor(item).detach()
            taken.append((item, target))
            box = self._box(item)
            if leaf.view is None:
                filler.add_box(checkpoint.tensors[leaf.fqn], target, box)
            else:
                spot = tuple(slice(at, at + n) for at, n in zip(box.offset, box.shape, strict=True))
                target.copy_(lazy(self._store, checkpoint)[to_fqn(path)][spot])
        filler.run()
        for item, target in taken:
            planner.commit_tensor(item, target)
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


def _itemsize(item: WriteItem) -> int:
    assert item.tensor_data is not None
    return item.tensor_data.properties.dtype.itemsize


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


def _value_of(item: WriteItem, planner: SavePlanner, pickle: bool) -> bytes:
    if not hasattr(planner, "lookup_object"):
        raise UnsupportedTypeError(
            f"{item.index.fqn}: the planner {type(planner).__qualname__} has no lookup_object(), and its torch.save() of "
            "values is a pickle; derive it from DefaultSavePlanner"
        )
    flat = flatten({item.index.fqn: planner.lookup_object(item.index)}, pickle=pickle)
    if flat.leaves:
        raise UnsupportedTypeError(
            f"{item.index.fqn}: DCP takes it for one value, and it holds tensors; use flatten_state_dict=True",
            fqn=item.index.fqn,
        )
    return values.pack(flat.tree[item.index.fqn])


def _tree(metadata: Metadata, packed: dict[str, bytes | None]) -> dict[Any, Any]:
    """The nested tree from DCP's flat names. Containers whose keys are all numbers from 0 on are lists, as DCP has it."""
    paths: dict[str, Path] = metadata.planner_data or {}
    root = _Node()
    for fqn, about in metadata.state_dict_metadata.items():
        path = tuple(paths.get(fqn, (fqn,)))
        value = packed.get(fqn)
        if isinstance(about, TensorStorageMetadata):
            leaf: Any = TensorLeaf(to_fqn(path))
        elif value is not None:
            leaf = values.unpack(value, fqn)
        else:
            raise SaveError(f"{fqn}: its value reached nobody")
        node = root
        for key in path[:-1]:
            node = node.setdefault(key, _Node())
        node[path[-1]] = leaf
    return {key: _with_lists(child) for key, child in root.items()}


class _Node(dict[Any, Any]):
    """A container of the tree; a plain dict is a value."""


def _with_lists(node: Any) -> Any:
    if type(node) is not _Node:
        return node
    made = {key: _with_lists(child) for key, child in node.items()}
    numbers = [key for key in made if type(key) is int]
    if made and sorted(numbers) == list(range(len(made))):
        return [made[n] for n in range(len(made))]
    return made


def _named(node: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    """What DCP has names for, as its planner walks a state: mappings are entered, and lists that hold tensors or mappings;
    any other list and every tuple is one value. One name too many, and it takes the checkpoint for one of torch 2.3.
    """
    if isinstance(node, dict):
        for key, child in node.items():
            yield from _named(child, (*path, key))
    elif type(node) is list and not _is_one_value(node):
        for number, child in enumerate(node):
            yield from _named(child, (*path, number))
    elif type(node) is TensorLeaf or not any(type(leaf) is TensorLeaf for _, leaf in leaves(node)):
        yield path, node


def _is_one_value(node: list[Any]) -> bool:
    return not any(
        isinstance(child, (dict, TensorLeaf)) or (type(child) is list and not _is_one_value(child)) for child in node
    )


def _dcp_name(path: Path) -> str:
    """The name that DCP's planner gives to a path."""
    return ".".join(map(str, path))


def _describe(leaf: Any, checkpoint: Checkpoint) -> TensorStorageMetadata | BytesStorageMetadata:
    if type(leaf) is not TensorLeaf:
        return BytesStorageMetadata()
    dtype, shape = checkpoint.describe(leaf)
    if leaf.view is None:
        boxes = [shard.entry.box for shard in checkpoint.tensors[leaf.fqn].shards]
    else:
        boxes = [Box((0,) * len(shape), shape)]
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=dtype_of(dtype, leaf.fqn)),
        size=torch.Size(shape),
        chunks=[ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.shape)) for box in boxes],
    )
