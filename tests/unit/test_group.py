"""A Checkpointer belongs to the process group that was there when it was made."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from objckpt import Checkpointer
from objckpt.errors import UsageError


def test_made_before_the_process_group_it_refuses_to_save_a_part_as_a_whole() -> None:
    early = Checkpointer("s3://bucket/run")
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        with pytest.raises(
            UsageError, match=r"made as rank 0 of 1, and this process is rank 1 of 2 now: make it after"
        ):
            early.save(1, {"n": 1})
        with pytest.raises(UsageError, match="make it after"):
            early.restore({"n": 1})
    finally:
        dist.destroy_process_group()
