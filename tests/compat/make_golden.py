"""Write the golden files of a format version: `python tests/compat/make_golden.py`. Run once for each version, never again.

What version 1 writes to a real server, as the objects of the bucket. `v1`: step 0, retired; step 1 raw; step 2 zstd, tagged
"best"; step 3 by two ranks. `v1-keyed`: a checkpoint and a tag in a store that does not keep writers apart.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]
from support.memory_engine import memory_engine
from support.memory_store import MemoryBucket, MemoryStore
from support.ranks import Ranks
from support.servers import WeedServer

from objckpt import Checkpointer, SaveOptions, collect
from objckpt.log import read_log
from objckpt.store import Store, open_store

GOLDEN = Path(__file__).parent / "golden"
AUTHOR = collect.Author(session="01ARZ3NDEKTSV4RRFFQ69G5FAV")


def state() -> dict[Any, Any]:
    """Deterministic; every kind of leaf that version 1 knows."""
    base = torch.arange(4096, dtype=torch.float32).reshape(64, 64)
    return {
        "model": OrderedDict(w=base / 7, b=(base[0] / 3).bfloat16(), tied=base[1]),
        "strided": base.t()[:, ::2].double(),
        "scalar": torch.tensor(7, dtype=torch.int64),
        "empty": torch.zeros(0, 3),
        "bools": torch.tensor([True, False]),
        "values": {"lr": 0.1, 3: (1, None, b"x"), "big": 2**80, "dtype": torch.bfloat16, "size": torch.Size([1, 2])},
    }


def state_of_ranks() -> dict[Any, Any]:
    """What two ranks save, as it is read by one: rank 0 has rows 0 to 4 of `sharded`, rank 1 the others."""
    return {
        "sharded": torch.arange(54, dtype=torch.float64).reshape(9, 6) / 7,
        "alike": [torch.arange(1000, dtype=torch.int32), torch.arange(1000, dtype=torch.float16)],
        "step": 3,
        "per_rank": {rank: own(rank) for rank in (0, 1)},
    }


def own(rank: int) -> dict[str, Any]:
    return {"seed": 100 + rank, "noise": torch.full((3,), float(rank))}


def save_as_ranks(rank: int, size: int, url: str) -> None:
    """Called on each of the two ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    whole = state_of_ranks()
    del whole["per_rank"]
    whole["sharded"] = distribute_tensor(whole["sharded"], init_device_mesh("cpu", (size,)), [Shard(0)])
    with Checkpointer(url, options=SaveOptions(uploader="thread", chunk_bytes=4096)) as ckpt:
        ckpt.save(3, whole, per_rank=own(rank), meta={"by": "make_golden"})


def save(url: str, step: int, compression: str, what: dict[Any, Any]) -> None:
    options = SaveOptions(uploader="thread", compression=compression, chunk_bytes=4096)
    with Checkpointer(url, options=options) as ckpt:
        ckpt.save(step, what, meta={"by": "make_golden"})


def tag(store: Store, name: str, step: int) -> None:
    log = read_log(store)
    collect.tag(store, log, name, log.at(step).seq, author=AUTHOR, deadline_s=10)


def write(store: Store, name: str) -> None:
    """The objects as files."""
    shutil.rmtree(GOLDEN / name, ignore_errors=True)
    for info in store.list():
        path = GOLDEN / name / info.key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(store.get(info.key, max_bytes=1 << 30))


def main() -> None:
    os.environ["PYTHONPATH"] = str(ROOT)
    with tempfile.TemporaryDirectory() as directory:
        server = WeedServer(Path(directory))
        server.start()
        try:
            os.environ.update(server.environment())
            url = f"s3://{server.bucket}/golden"
            store = open_store(url)
            save(url, 0, "none", {"x": torch.zeros(3)})
            save(url, 1, "none", state())
            save(url, 2, "zstd", state())
            with Ranks() as ranks:
                ranks.run(2, Path(__file__), "save_as_ranks", url)
            tag(store, "best", 2)
            first = read_log(store).at(0).seq
            collect.retire(
                store, read_log(store), lambda log: ([first], []), author=AUTHOR, reason="golden", deadline_s=10
            )
            write(store, "v1")
        finally:
            server.stop()
    bucket = MemoryBucket(conditional=False)
    store = MemoryStore(bucket, "s3://bucket/keyed")
    with memory_engine(bucket):
        save(store.url, 1, "none", state())
    tag(store, "best", 1)
    write(store, "v1-keyed")


if __name__ == "__main__":
    main()
