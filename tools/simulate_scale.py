"""What thousands of ranks cost: sizes of index and manifest, CPU seconds of the commit; CPU seconds and memory of a plan.

    python tools/simulate_scale.py                            1,024 and 8,192 ranks of 1,000 tensors
    python tools/simulate_scale.py --ranks 64 --tensors 50

Indexes, commit and plans are made by the code that jobs run; only the store is simulated, and makes an index when it is asked
for it: its time is not counted, nor is a network's. Each case runs in a process of its own, so that peaks are its own. Plans are
those of one rank in the middle: from the commit record to the list of ranged GETs.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from objckpt.config import StoreOptions
from objckpt.format import checksums, keys, values, wire
from objckpt.format.index import Index
from objckpt.format.records import Commit
from objckpt.format.tables import ChunkTable, ShardEntry, TensorEntry
from objckpt.geometry import Box, Layout
from objckpt.restore.open import Checkpoint, open_checkpoint, opened_for
from objckpt.restore.plan import ChunkRead, Region, box_runs, chunks_for, coalesce, overlaps
from objckpt.save import gather
from objckpt.save.encode import CODECS
from objckpt.store import ObjectInfo

SESSION = "01ARZ3NDEKTSV4RRFFQ69G5FAV"
ATTEMPT = keys.attempt(1000, SESSION, 1)
CHUNK_BYTES = 4 << 20
SHAPES = ((16384, 4096), (4096, 16384), (8192, 8192), (1024, 8192), (8192,))  # of a layer, again and again


@functools.cache
def tensors(ranks: int, count: int) -> list[TensorEntry]:
    """Sharded along the first dimension over all ranks, as FSDP2 does."""
    layout = Layout(tuple(range(ranks)), (ranks,), ((0, 1),))
    names = [("model", "layers", n // len(SHAPES), f"block.{n % len(SHAPES)}.weight") for n in range(count)]
    return [TensorEntry(path, "bfloat16", SHAPES[n % len(SHAPES)], layout) for n, path in enumerate(names)]


def index_of(rank: int, ranks: int, count: int) -> Index:
    shards, rows, at = [], [], 0
    for entry in tensors(ranks, count):
        assert entry.layout is not None
        for piece in entry.layout.pieces(entry.shape, (rank,)):
            box, first = piece.box, len(rows)
            nbytes = box.elements * 2
            for start in range(0, nbytes, CHUNK_BYTES):
                length = min(CHUNK_BYTES, nbytes - start)
                rows.append((0, at, length, length, 0, hash((rank, at)) & (1 << 64) - 1))
                at += length
            digest = hash((rank, entry.path)) & (1 << 64) - 1
            shards.append(
                ShardEntry(entry.path, "bfloat16", entry.shape, box.offset, box.shape, digest, first, len(rows) - first)
            )
    alike = wire.pack([[entry.fqn, 1] for entry in tensors(ranks, count)])
    tree = values.pack({}) if rank else values.pack(tree_of(ranks, count))
    return Index(
        1000, ATTEMPT, rank, ranks, [(keys.pack(ATTEMPT, rank, 0), at)], shards, ChunkTable.from_rows(rows), CODECS,
        None if rank else tree, alike, () if rank else tensors(ranks, count),
    )  # fmt: skip


def tree_of(ranks: int, count: int) -> dict[Any, Any]:
    layers: dict[Any, dict[str, Any]] = {}
    for entry in tensors(ranks, count):
        layers.setdefault(entry.path[2], {})[entry.path[3]] = values.TensorLeaf(entry.fqn)
    return {"model": {"layers": layers}}


class Simulated:
    """A store that has one checkpoint; counts its requests, and the seconds that making the answers took."""

    url = "s3://simulated/run"
    options = StoreOptions()

    def __init__(self, ranks: int, count: int) -> None:
        self.ranks, self.count = ranks, count
        self.made_s, self.requests, self.got_bytes = 0.0, 0, 0
        self.data: dict[int, bytes] = {}

    def encoded(self, rank: int) -> bytes:
        if rank not in self.data:
            began_s = time.thread_time()
            self.data[rank] = index_of(rank, self.ranks, self.count).encode()
            self.made_s += time.thread_time() - began_s
        return self.data[rank]

    def get(self, key: str, *, max_bytes: int) -> bytes:
        name = keys.parse_index(key)
        assert name is not None
        self.requests += 1
        data = self.data.pop(name.rank)
        self.got_bytes += len(data)
        return data

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        signature = index_of(0, self.ranks, self.count).signature
        for rank in range(self.ranks):
            yield ObjectInfo(keys.pack(ATTEMPT, rank, 0), 1 << 30, 0.0)
            yield ObjectInfo(keys.index(ATTEMPT, rank, f"{rank:032x}", signature), 100_000, 0.0)


class Digests(Sequence[tuple[str, int]]):
    """Of the indexes, each made when it is asked for."""

    def __init__(self, store: Simulated) -> None:
        self.store = store

    def __len__(self) -> int:
        return self.store.ranks

    def __getitem__(self, rank: Any) -> Any:
        data = self.store.encoded(rank)
        return checksums.digest_hex(data), len(data)


def commit_of(ranks: Any, world_size: int, signature: str) -> Commit:
    return Commit(
        seq=1, write_id=os.urandom(16), epoch=1, session=SESSION, time_s=0.0, host="host", step=1000, attempt=ATTEMPT,
        parent=None, world_size=world_size, raw_bytes=0, stored_bytes=0, tensors=0, ranks=ranks, signature=signature,
    )  # fmt: skip


def committing(ranks: int, count: int) -> dict[str, Any]:
    """Rank 0's work between the last index and the manifest."""
    store, index = Simulated(ranks, count), index_of(0, ranks, count)
    listed = list(store.list(""))
    store.list = lambda prefix: iter(listed)  # type: ignore[method-assign]
    began_s = time.process_time()
    found, _ = gather.wait_for_ranks(store, index, 60.0)  # type: ignore[arg-type]
    manifest = commit_of(found, ranks, index.signature).encode()
    took_s = time.process_time() - began_s
    middle = index_of(ranks // 2, ranks, count).encode()
    return {
        "case": f"commit by rank 0 of {ranks}",
        "seconds": took_s,
        "manifest_bytes": len(manifest),
        "index_bytes": len(middle),
        "index_0_bytes": len(index.encode()),
        "objects_listed": len(listed),
    }


def planning(ranks: int, count: int, onto: int, dim: int) -> dict[str, Any]:
    """One rank of `onto` that take the checkpoint back, cut along `dim`."""
    store, rank = Simulated(ranks, count), onto // 2
    signature = index_of(0, ranks, count).signature
    target = Layout(tuple(range(onto)), (onto,), ((dim, 1),))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began_s = time.process_time()
    commit = commit_of(Digests(store), ranks, signature)
    checkpoint = open_checkpoint(store, commit, ranks={rank})  # type: ignore[arg-type]
    wanted: dict[str, list[Box]] = {}
    for fqn, stored in checkpoint.tensors.items():
        cut = target if dim < len(stored.shape) else Layout(target.ranks, target.mesh, ((0, 1),))
        wanted[fqn] = [piece.box for piece in cut.pieces(stored.shape, (rank,))]
    checkpoint = opened_for(store, checkpoint, wanted)  # type: ignore[arg-type]
    return planned(f"plan of one rank: {ranks} onto {onto}" + ("" if dim == 0 else f", Shard({dim})"),
        checkpoint, wanted, store, began_s, before)  # fmt: skip


def planned(
    case: str, checkpoint: Checkpoint, wanted: dict[str, list[Box]], store: Simulated, began_s: float, before: int
) -> dict[str, Any]:
    """The rest of a plan, from boxes to requests, and what all of it took."""
    chunks: list[ChunkRead] = []
    for fqn, boxes in wanted.items():
        for box in boxes:
            for shard, part in overlaps(checkpoint.tensors[fqn], box):
                chunks += chunks_for(shard, box_runs(shard, part), Region(fqn, None))
    requests = coalesce(chunks)
    return {
        "case": case,
        "seconds": time.process_time() - began_s - store.made_s,
        "peak_mb": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1000,
        "indexes_read": store.requests,
        "index_bytes": store.got_bytes,
        "chunks": len(chunks),
        "requests": len(requests),
    }


class Alike:
    """The group of a job whose other ranks say what this one says."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def gather(self, value: Any) -> list[Any]:
        return [value] * self.size

    def together(self, work: Any) -> Any:
        return work()


def sharing(ranks: int, count: int, onto: int, dim: int) -> dict[str, Any]:
    """The same for a job of `onto` ranks that reads each byte once; dim -1: every rank wants all. Targets are DTensors of torch's
    own fake process group, whose memory is never touched."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from objckpt.restore.place import boxes_of
    from objckpt.restore.share import Sharing
    from objckpt.state.shards import layout_of

    store, rank = Simulated(ranks, count), 0  # which decides for all what is shared
    signature = index_of(0, ranks, count).signature
    dist.init_process_group("fake", rank=rank, world_size=onto, store=FakeStore())
    mesh = init_device_mesh("cpu", (onto,))
    fills = []
    for entry in tensors(ranks, count):
        shape = list(entry.shape)
        if dim >= 0:
            cut = min(dim, len(shape) - 1)
            shape[cut] = len(range(shape[cut])[rank * -(-shape[cut] // onto) :][: -(-shape[cut] // onto)])
        target = torch.empty(shape, dtype=torch.bfloat16)
        if dim >= 0:
            strides = torch.empty(entry.shape, device="meta").stride()
            target = DTensor.from_local(
                target, mesh, [Shard(cut)], run_check=False, shape=torch.Size(entry.shape), stride=strides
            )
            layout_of(target, entry.fqn)  # first use of torch's own code
        fills.append((target, values.TensorLeaf(entry.fqn)))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began_s = time.process_time()
    commit = commit_of(Digests(store), ranks, signature)
    checkpoint = open_checkpoint(store, commit, ranks={rank})  # type: ignore[arg-type]
    shared = Sharing(Alike(rank, onto), store, checkpoint)  # type: ignore[arg-type]
    rest = shared.take(fills)
    wanted: dict[str, list[Box]] = {leaf.fqn: boxes_of(checkpoint, leaf, target) for target, leaf in rest}
    for fqn, boxes in shared.wanted().items():
        wanted.setdefault(fqn, []).extend(boxes)
    checkpoint = opened_for(store, checkpoint, wanted)  # type: ignore[arg-type]
    kind = f", Shard({dim})" if dim >= 0 else ", replicas"
    result = planned(f"shared plan of one rank: {ranks} onto {onto}{kind}", checkpoint, wanted, store, began_s, before)
    # What this rank packs for the others, and places of what comes from them, but for the reading and the sending.
    shared._read = lambda units: [torch.zeros(unit.box.shape, dtype=torch.bfloat16) for unit in units]  # type: ignore[method-assign]
    began_s, gb = time.process_time(), 0.0
    for this in shared._rounds[:8]:
        _, into, starts = shared._prepare(this)
        shared._place(this, starts)
        gb += sum(buffer.numel() for buffer in into.values()) / 1e9
    pieces = sum(len(this.taken) for this in shared._rounds[:8])
    return result | {
        "rounds": len(shared._rounds),
        "pieces": pieces,
        "moved_gb": gb,
        "moving_s": time.process_time() - began_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1024, 8192])
    parser.add_argument("--tensors", type=int, default=1000)
    parser.add_argument("--columns", action="store_true", help="also onto Shard(1), where every rank needs every index")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        kind, *numbers = json.loads(args.case)
        print(json.dumps({"commit": committing, "plan": planning, "sharing": sharing}[kind](*numbers)))
        return
    for ranks in args.ranks:
        cases: list[list[Any]] = [["commit", ranks, args.tensors]]
        cases += [["plan", ranks, args.tensors, onto, 0] for onto in (ranks, ranks // 2, ranks * 3 // 4)]
        cases += [["sharing", ranks, args.tensors, ranks, dim] for dim in (1, -1)]
        cases += [["plan", ranks, args.tensors, ranks, 1]] if args.columns else []
        for case in cases:
            command = [sys.executable, __file__, "--case", json.dumps(case)]
            result = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
            rest = [f"{name} {value:,.1f}" if isinstance(value, float) else f"{name} {value:,}" for name, value in result.items()
                if name not in ("case", "seconds")]  # fmt: skip
            print(f"{result['case']:44} {result['seconds']:6.2f} s  " + "  ".join(rest), flush=True)


if __name__ == "__main__":
    main()
