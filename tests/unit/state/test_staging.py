"""Staging: every bit of every dtype and layout, across slabs; and that device copies are waited for before any read."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from support.roundtrip import bits, extents, staged

from objckpt.errors import UnsupportedDtypeError
from objckpt.format.dtypes import ITEMSIZE
from objckpt.state import staging
from objckpt.state.dtypes import dtype_name, dtype_of
from objckpt.state.flatten import flatten
from objckpt.state.staging import DeviceLane, Stager, lane_of

CPU = torch.device("cpu")


def noise(nbytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


# ---- bytes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str))
@pytest.mark.filterwarnings("ignore")
def test_e006_every_dtype_of_torch_is_staged_or_refused(dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    if name not in ITEMSIZE:
        assert name.startswith("q") or name in ("int0", "uint0")
        with pytest.raises(UnsupportedDtypeError, match=f"w: dtype {dtype}"):
            dtype_name(dtype, "w")
        return
    assert dtype_of(name, "w") is dtype and ITEMSIZE[name] == dtype.itemsize
    raw = noise(24 * dtype.itemsize)
    plain = raw.view(dtype).view(4, 6)
    for tensor in (plain, plain.t(), plain[:, ::2], plain[1], plain[2, 3], plain[:1].expand(3, 6), plain[4:]):
        (got,) = staged(flatten({"w": tensor}), slab_bytes=64)
        assert got == bits(tensor)


def test_a_stored_dtype_that_this_torch_lacks() -> None:
    with pytest.raises(UnsupportedDtypeError, match=r"w: stored as float2.*upgrade"):
        dtype_of("float2", "w")


@pytest.mark.parametrize("slab_bytes", [4096, 1 << 20, 3 << 20])
def test_leaves_across_slabs(slab_bytes: int) -> None:
    base = noise(6 << 20).view(torch.float32).view(3, 512, 1024)
    state = {
        "plain": base,
        "t": base.permute(2, 0, 1),
        "thin": base[:, :, 7],
        "odd": noise(12345),
        "end": base[2, 1, ::3],
    }
    state["x"] = torch.ones(1).expand(700_000)
    flat = flatten(state)
    by_name = dict(zip([leaf.fqn for leaf in flat.leaves], staged(flat, slab_bytes=slab_bytes), strict=True))
    for leaf in flat.leaves:
        want = leaf.tensor.clone(memory_format=torch.contiguous_format).reshape(-1)
        assert by_name[leaf.fqn] == bytes(want.view(torch.uint8).numpy())


def test_a_strided_leaf_across_slabs_takes_a_small_temporary(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    contiguous = torch.Tensor.contiguous

    def spy(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        sizes.append(self.numel() * self.itemsize)
        return contiguous(self, *args, **kwargs)

    flat = flatten({"t": noise(16 << 20).view(torch.int32).view(2048, 2048).t()})
    want = bytes(contiguous(flat.leaves[0].tensor).view(torch.uint8).reshape(-1).numpy())
    monkeypatch.setattr(torch.Tensor, "contiguous", spy)
    assert staged(flat, slab_bytes=(5 << 20) + 4096)[0] == want
    assert sizes and max(sizes) <= staging._TEMPORARY_BYTES


def test_nothing_to_stage() -> None:
    Stager().stage([], [], [])
    assert staged(flatten({"e": torch.empty(0, 3)})) == [b""]


def test_e036_what_was_staged_does_not_follow_the_tensor() -> None:
    w = torch.ones(1 << 18)
    flat = flatten({"w": w, "slice": w[5:9], "zero": torch.tensor(1.0)})
    slabs = [memoryview(bytearray(1 << 21))]
    Stager().stage(flat.leaves, extents(flat), slabs)
    before = bytes(slabs[0])
    w.fill_(2)
    flat.leaves[-1].tensor.fill_(2)
    assert bytes(slabs[0]) == before and torch.frombuffer(slabs[0], dtype=torch.float32)[: 1 << 18].eq(1).all()


def test_e039_one_stager_for_states_of_changing_shape() -> None:
    stager = Stager()
    for state in (
        {"m": torch.ones(10)},
        {"m": torch.ones(10), "o": torch.zeros(5)},
        {"m": torch.ones(7, dtype=torch.float64)},
        {"m": torch.ones(10)},
    ):
        flat = flatten(state)
        assert staged(flat, stager=stager) == [bits(leaf.tensor) for leaf in flat.leaves]


# ---- devices -------------------------------------------------------------------------------------------------------


class FakeLane:
    """A device whose copies take until they are waited for: what was copied shows in the slab only then."""

    def __init__(self, slabs: list[memoryview], log: list[str], fails: bool = False) -> None:
        self.slabs, self.log, self.fails = slabs, log, fails
        self.arriving: list[tuple[memoryview, bytes]] = []

    def begin(self) -> None:
        self.log.append("begin")

    @contextmanager
    def copying(self) -> Iterator[None]:
        before = [bytes(slab) for slab in self.slabs]
        yield
        for slab, old in zip(self.slabs, before, strict=True):
            changed = [i for i, (a, b) in enumerate(zip(slab, old, strict=True)) if a != b]
            if changed:
                span = slab[changed[0] : changed[-1] + 1]
                self.arriving.append((span, bytes(span)))
                span[:] = old[changed[0] : changed[-1] + 1]
        self.log.append("copy")

    def sent(self, tensor: torch.Tensor) -> None:
        self.log.append("sent")

    def wait(self) -> None:
        self.log.append("wait")
        if self.fails:
            raise RuntimeError("device lost")
        for span, late in self.arriving:
            span[:] = late


def test_e041_copies_under_way_are_waited_for_before_stage_returns() -> None:
    log: list[str] = []
    flat = flatten({"a": noise(300, 1), "b": noise(500, 2)})
    slabs = [memoryview(bytearray(512)) for _ in range(2)]
    Stager(lambda device: FakeLane(slabs, log)).stage(flat.leaves, extents(flat), slabs)
    assert b"".join(slabs)[:800] == b"".join(bits(leaf.tensor) for leaf in flat.leaves)
    assert log[0] == "begin" and log.count("begin") == 1 and log[-1] == "wait" and log.count("sent") == 2


def test_e041_after_an_error_copies_under_way_are_waited_for_too() -> None:
    log: list[str] = []
    flat = flatten({"a": noise(300, 1), "b": noise(500, 2)})
    slabs = [memoryview(bytearray(512))]  # one too few
    with pytest.raises(IndexError):
        Stager(lambda device: FakeLane(slabs, log)).stage(flat.leaves, extents(flat), slabs)
    assert log[-1] == "wait" and log.count("sent") == 2


def test_every_lane_is_waited_for_though_one_fails() -> None:
    log: list[str] = []
    lanes = [FakeLane([], log, fails=True), FakeLane([], log)]
    with pytest.raises(RuntimeError, match="device lost"):
        staging._wait_all(list(lanes))
    assert log == ["wait", "wait"]


class FakeModule:
    """The streams and events of a device, written down."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.numbers = itertools.count()

    def Stream(self, device: torch.device) -> Any:
        module, log = self, self.log

        class Event:
            def synchronize(self) -> None:
                log.append("synchronize")

        class Stream:
            def wait_stream(self, other: Any) -> None:
                log.append(f"wait for {other}")

            def record_event(self) -> Event:
                log.append("record")
                return Event()

        assert module is self
        return Stream()

    def current_stream(self, device: torch.device) -> str:
        return "the caller's stream"

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self.log.append("enter")
        yield
        self.log.append("leave")


class Recorded:
    def __init__(self, log: list[str]) -> None:
        self.log = log

    def record_stream(self, stream: Any) -> None:
        self.log.append("keep the source")


def test_e041_a_device_lane_waits_for_the_caller_and_for_its_event() -> None:
    module = FakeModule()
    lane = DeviceLane(torch.device("cuda:0"), module)
    lane.begin()
    with lane.copying():
        module.log.append("copy")
    lane.sent(Recorded(module.log))  # type: ignore[arg-type]
    lane.wait()
    assert module.log == [
        "wait for the caller's stream", "enter", "copy", "leave", "keep the source", "record", "synchronize",
    ]  # fmt: skip


def test_host_memory_needs_no_lane_and_pinning_without_cuda_does_nothing() -> None:
    assert lane_of(CPU) is None
    if not torch.cuda.is_available():
        stager = Stager()
        stager.pin(4096, 4096)
        stager.unpin(4096)
        assert not stager._pinned


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_e041_temporaries_of_a_device_are_copied_before_their_memory_is_used_again() -> None:
    source = torch.arange(1 << 24, dtype=torch.float32, device="cuda")
    other = torch.cuda.Stream()
    stager = Stager()
    for turn in range(5):
        flat = flatten({str(i): source * 1.0 + i for i in range(4)})
        places = extents(flat)
        slabs = [memoryview(bytearray(64 << 20)) for _ in range(4)]
        stager.stage(flat.leaves, places, slabs)
        del flat
        with torch.cuda.stream(other):
            for _ in range(4):
                torch.full((1 << 24,), -1.0, device="cuda")
        for i, slab in enumerate(slabs):
            assert torch.equal(torch.frombuffer(slab, dtype=torch.float32), source.cpu() + i), turn
