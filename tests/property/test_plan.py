"""Any box of any sharding equals numpy's; every byte is fetched at most once, and only chunks that are needed."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from support.written import write_shards

from objckpt.geometry import Box
from objckpt.restore import lazy
from objckpt.restore.fetch import fetch
from objckpt.restore.plan import Region, box_runs, chunks_for, coalesce, overlaps, split

DTYPES = ["uint8", "int16", "float32", "complex128"]


@st.composite
def sharded(draw: Any) -> tuple[np.ndarray[Any, Any], list[Box]]:
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=0, max_size=4)))
    array = np.arange(int(np.prod(shape)), dtype="int64").reshape(shape).astype(draw(st.sampled_from(DTYPES)))
    cuts = [sorted(draw(st.sets(st.integers(1, n - 1), max_size=3))) if n > 1 else [] for n in shape]
    spans = [list(itertools.pairwise([0, *c, n])) for c, n in zip(cuts, shape, strict=True)]
    boxes = [Box(tuple(a for a, _ in cell), tuple(b - a for a, b in cell)) for cell in itertools.product(*spans)]
    return array, draw(st.permutations(boxes))


@st.composite
def box_in(draw: Any, shape: tuple[int, ...]) -> Box:
    spans = [sorted((draw(st.integers(0, n - 1)), draw(st.integers(0, n - 1)))) for n in shape]
    return Box(tuple(a for a, _ in spans), tuple(b - a + 1 for a, b in spans))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_box_of_any_sharding(data: st.DataObject) -> None:
    array, boxes = data.draw(sharded())
    chunk_bytes = data.draw(st.sampled_from([1, 3, 7, 16, 64, 4096]))
    store, checkpoint = write_shards({"w": (array, boxes)}, ranks=data.draw(st.integers(1, 3)), chunk_bytes=chunk_bytes)
    target = data.draw(box_in(array.shape))
    tensor = checkpoint.tensors["w"]
    wanted = array[tuple(slice(o, o + n) for o, n in zip(target.offset, target.shape, strict=True))]
    out = np.zeros(wanted.shape, array.dtype)
    regions, chunks = [], []
    for shard, part in overlaps(tensor, target):
        for piece in split(part, array.dtype.itemsize, data.draw(st.sampled_from([1, 8, 100, 1 << 20]))):
            memory = np.zeros(piece.shape, array.dtype)
            region = Region("w", memory.reshape(-1).view(np.uint8).data)
            chunks += chunks_for(shard, box_runs(shard, piece), region)
            regions.append((piece.relative_to(target), memory, region))
    gap, limit = data.draw(st.sampled_from([0, 5, 1000])), data.draw(st.sampled_from([1, 20, 1 << 20]))
    requests = coalesce(chunks, max_gap_bytes=gap, max_request_bytes=limit)
    fetch(store, requests, what="step 7")
    for box, memory, region in regions:
        assert region.pending == 0
        out[tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))] = memory
    np.testing.assert_array_equal(out, wanted)
    spans = sorted((r.key, r.start, r.start + r.nbytes) for r in requests)
    for (key, _, end), (next_key, start, _) in itertools.pairwise(spans):
        assert key != next_key or end <= start, "a byte was fetched twice"
    assert all(r.nbytes <= limit or len(r.chunks) == 1 for r in requests)
    _only_needed(tensor, target, requests)


def _only_needed(tensor: Any, target: Box, requests: Any) -> None:
    """Element by element: the chunks in which some wanted element has a byte."""
    expected = set()
    for shard in tensor.shards:
        entry, table = shard.entry, shard.index.chunks
        part = entry.box.intersect(target)
        if part is None:
            continue
        mask = np.zeros(entry.shape, bool)
        local = part.relative_to(entry.box)
        mask[tuple(slice(o, o + n) for o, n in zip(local.offset, local.shape, strict=True))] = True
        flags = np.repeat(mask.reshape(-1), entry.itemsize)
        at = 0
        for row in range(entry.first_chunk, entry.first_chunk + entry.chunk_count):
            size = int(table.raw[row])
            if flags[at : at + size].any():
                expected.add((shard.index.packs[int(table.pack[row])][0], int(table.offset[row])))
            at += size
    found = [(c.key, c.offset) for r in requests for c in r.chunks]
    assert sorted(found) == sorted(expected)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_lazy_indexing_is_numpys(data: st.DataObject) -> None:
    array, boxes = data.draw(sharded())
    store, checkpoint = write_shards(
        {"w": (array, boxes)}, ranks=2, chunk_bytes=data.draw(st.sampled_from([3, 16, 4096]))
    )
    index = []
    for n in array.shape:
        bound = st.one_of(st.none(), st.integers(-n - 2, n + 2))
        step = st.sampled_from([None, 1, 2, 3, -1, -2])
        index.append(data.draw(st.one_of(st.integers(-n, n - 1), st.builds(slice, bound, bound, step))))
    if data.draw(st.booleans()):
        at = data.draw(st.integers(0, len(index)))
        index = [*index[:at], ..., *index[at + data.draw(st.integers(0, len(index) - at)) :]]
    expected = array[tuple(index)]
    np.testing.assert_array_equal(lazy(store, checkpoint)["w"][tuple(index)].numpy(), expected)
