"""Reading a replicated tensor once for a job: each rank fetches its part of the leaves, and passes them on.

Only whole tensors that every rank wants alike take part: those that all replicas of a data-parallel job hold. Which rank
reads what is chosen by bytes, the same everywhere; the only messages are one exchange of names and the tensors themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from objckpt.format.values import TensorLeaf
from objckpt.state.dtypes import as_bits
from objckpt.state.shards import Replicated, choose_writers, is_distributed

Fill = tuple[torch.Tensor, TensorLeaf]


class Ranks(Protocol):
    """The ranks of the job; both methods are collectives."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in the order of ranks."""

    def send(self, tensor: torch.Tensor, src: int) -> None:
        """Rank `src`'s bytes of a tensor, on all ranks."""


class Sharing:
    """Used by all ranks of a job in one restore. `usable` tells whether tensors of a device can be sent."""

    def __init__(self, ranks: Ranks, usable: Callable[[torch.device], bool]) -> None:
        self.ranks = ranks
        self._usable = usable
        self._todo: list[tuple[torch.Tensor, int]] = []

    def mine(self, fills: Sequence[Fill]) -> list[Fill]:
        """The fills that this rank fetches itself; the others come by `exchange`. A collective."""
        offered: dict[tuple[Any, ...], Fill] = {}
        for target, leaf in fills:
            if leaf.view is not None or is_distributed(target) or not target.numel() or not self._usable(target.device):
                continue
            if target.is_contiguous():
                name = (leaf.fqn, target.nbytes, str(target.dtype), target.device.type)
                offered.setdefault(name, (target, leaf))
        common = set.intersection(*map(set, self.ranks.gather(list(offered))))
        readers = choose_writers(Replicated(fqn, nbytes, (), self.ranks.size) for fqn, nbytes, *_ in common)
        self._todo = [(offered[name][0], readers[name[0]]) for name in sorted(common)]
        taken = {id(offered[name][0]) for name in common if readers[name[0]] != self.ranks.rank}
        return [(target, leaf) for target, leaf in fills if id(target) not in taken]

    def exchange(self) -> None:
        """Pass on what this rank has read, and receive the rest. A collective."""
        for target, reader in self._todo:
            with torch.no_grad():
                self.ranks.send(as_bits(target.detach()), reader)
        self._todo = []
