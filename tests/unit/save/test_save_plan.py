"""Sizes of parts and packs: within what S3 takes, whatever the size of the state."""

from __future__ import annotations

import pytest

from objckpt import StoreOptions, limits
from objckpt.limits import GiB, MiB
from objckpt.save.plan import LeafPlan, chunks_of, lay_out, pack_limit, slabs_for

SIZES = [0, 1, 5 * MiB, 100 * GiB, 529_168_322_560, 50 * 1024 * GiB]


@pytest.mark.parametrize("total_bytes", SIZES)
@pytest.mark.parametrize("connections", [1, 8, 1024])
def test_e079_e090_no_pack_needs_more_parts_than_allowed(total_bytes, connections):
    part = StoreOptions(connections=connections).piece_bytes(total_bytes)
    assert limits.MIN_PART_BYTES <= part <= limits.SLAB_BYTES <= limits.MAX_BODY_BYTES
    assert limits.SLAB_BYTES % part == 0
    pack = pack_limit(part)
    assert pack <= limits.MAX_OBJECT_BYTES and -(-pack // part) <= limits.MAX_PARTS
    packs = -(-total_bytes // pack)
    assert packs <= 10_000  # the number in a pack's key has at least four digits


def test_e079_a_pack_of_the_smallest_parts():
    part = 8 * MiB  # the smallest that divides a slab and that S3 takes
    assert pack_limit(part) == part * limits.MAX_PARTS < limits.MAX_OBJECT_BYTES


def test_leaves_lie_back_to_back_and_chunks_cover_them():
    leaves, total = lay_out([10, 0, 7])
    assert leaves == [LeafPlan(0, 10), LeafPlan(10, 0), LeafPlan(10, 7)] and total == 17
    assert [list(chunks_of(leaf, 4)) for leaf in leaves] == [[(0, 4), (4, 4), (8, 2)], [], [(10, 4), (14, 3)]]
    assert [slabs_for(n, 4) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]
