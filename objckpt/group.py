"""The ranks of this job, as the default process group has them. Collectives are for construction and restore only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from objckpt.errors import PeerError, UsageError

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

    def check(self) -> None:
        """UsageError when the process group is another one than when this object was made."""
        now = Group.of_this_process()
        if now != self:
            raise UsageError(
                f"this Checkpointer was made as rank {self.rank} of {self.size}, and this process is rank {now.rank} of "
                f"{now.size} now: make it after init_process_group(), and use it before the group is destroyed"
            )

    def broadcast(self, value: T) -> T:
        """Rank 0's value, on all ranks."""
        if self.size == 1:
            return value
        box = [value]
        _collective(lambda: dist.broadcast_object_list(box, src=0))
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
        if self._anywhere(error is not None):
            words = None if error is None else f"{type(error).__name__}: {error}"
            failed = self.gather(words)
            if error is not None:
                raise error
            ranks = [rank for rank, text in enumerate(failed) if text is not None]
            also = f" (so did {len(ranks) - 1} more)" if len(ranks) > 1 else ""
            raise PeerError(f"rank {ranks[0]} failed{also}: {failed[ranks[0]]}", ranks=ranks)
        out: T = result
        return out

    def _anywhere(self, flag: bool) -> bool:
        """Whether it is so on any rank. A reduction takes steps by the logarithm of the size, gathering objects by the size."""
        if not can_exchange():
            return any(self.gather(flag))
        number = torch.tensor([int(flag)], device="cpu")
        _collective(lambda: dist.all_reduce(number, dist.ReduceOp.MAX))
        return bool(number.item())

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in the order of ranks."""
        if self.size == 1:
            return [value]
        out: list[Any] = [None] * self.size
        _collective(lambda: dist.all_gather_object(out, value))
        return out

    def exchange(self, out: dict[int, torch.Tensor], into: dict[int, torch.Tensor]) -> None:
        """Send a host buffer to each of some ranks, and fill one from each of some. All ranks must mean the same sizes."""

        def work() -> None:
            sent = [dist.isend(buffer, rank) for rank, buffer in sorted(out.items())]
            for each in [*sent, *(dist.irecv(buffer, rank) for rank, buffer in sorted(into.items()))]:
                if each is not None:
                    each.wait()

        _collective(work)


def _collective(work: Callable[[], None]) -> None:
    """PeerError when the process group fails: a rank is gone, or did not answer within the group's timeout."""
    try:
        work()
    except RuntimeError as err:
        raise PeerError(f"a rank is gone or does not answer: {err}") from err


def can_exchange() -> bool:
    """Whether the default process group moves tensors of the host: not one of NCCL alone."""
    return dist.is_initialized() and "cpu" in str(dist.get_backend_config())
