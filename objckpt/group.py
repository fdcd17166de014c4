"""The ranks of this job, as the default process group has them. Collectives are for construction and restore only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from objckpt.errors import PeerError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Group:
    """Rank and size. Methods that communicate must be called by all ranks; with one rank they do nothing."""

    rank: int = 0
    size: int = 1

    @classmethod
    def of_this_process(cls) -> Group:
        """The default process group; one rank where there is none."""
        if not (dist.is_available() and dist.is_initialized()):
            return cls()
        return cls(dist.get_rank(), dist.get_world_size())

    def broadcast(self, value: T) -> T:
        """Rank 0's value, on all ranks."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        out: T = box[0]
        return out

    def together(self, work: Callable[[], T]) -> T:
        """Do something on every rank; when it fails anywhere, raise everywhere, so that no rank goes on alone.

        Raises:
            what `work` raised here; PeerError on the ranks where it did not, naming a rank where it did.
        """
        if self.size == 1:
            return work()
        error: BaseException | None = None
        result: Any = None
        try:
            result = work()
        except BaseException as err:
            error = err
        words = None if error is None else f"{type(error).__name__}: {error}"
        failed = self.gather(words)
        if error is not None:
            raise error
        ranks = [rank for rank, text in enumerate(failed) if text is not None]
        if ranks:
            also = f" (so did {len(ranks) - 1} more)" if len(ranks) > 1 else ""
            raise PeerError(f"rank {ranks[0]} failed{also}: {failed[ranks[0]]}", ranks=ranks)
        out: T = result
        return out

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in the order of ranks."""
        if self.size == 1:
            return [value]
        out: list[Any] = [None] * self.size
        dist.all_gather_object(out, value)
        return out

    def send(self, tensor: torch.Tensor, src: int) -> None:
        """Rank `src`'s bytes of a tensor, on all ranks."""
        dist.broadcast(tensor, src=src)


def can_send(device: torch.device) -> bool:
    """Whether the default process group moves tensors of this device."""
    return dist.is_initialized() and device.type in str(dist.get_backend_config())
