"""Write the golden files of a format version: `python tests/compat/make_golden.py`. Run once for each version, never again.

Two checkpoints as version 1 wrote them: step 1 raw, step 2 zstd. The files are the objects of the bucket.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]
from support.memory_engine import memory_engine
from support.memory_store import MemoryBucket

from objckpt import Checkpointer, SaveOptions

GOLDEN = Path(__file__).parent / "golden" / "v1"
URL = "s3://bucket/golden"


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


def main() -> None:
    bucket = MemoryBucket()
    with memory_engine(bucket):
        for step, compression in ((1, "none"), (2, "zstd")):
            options = SaveOptions(uploader="thread", compression=compression, chunk_bytes=4096)
            with Checkpointer(URL, options=options) as ckpt:
                ckpt.save(step, state(), meta={"by": "make_golden"})
    for key, (data, _) in bucket.objects.items():
        path = GOLDEN / key.removeprefix("golden/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


if __name__ == "__main__":
    main()
