"""One exception tree. The class says what the handler would do; the message names key, leaf and remedy.

Every error carries a stable `kind` (machine readable), an `exit_code` (command line) and a `context` of plain values
(step, key, fqn …). The original exception is chained by `raise … from`, never flattened into text. Instances pickle, and
cross the agent's socket as `to_wire()` / `from_wire()`.
"""

from __future__ import annotations

from typing import Any, ClassVar


class ObjckptError(Exception):
    """Base of every error raised by objckpt."""

    kind: ClassVar[str] = "error"
    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, **context: Any) -> None:
        super().__init__(message)
        self.message = message
        self.context = context

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.message, self.context))

    def to_wire(self) -> dict[str, Any]:
        """Plain data for the agent's socket; values that are not plain become text."""
        plain = {
            k: v if isinstance(v, (str, int, float, bool, type(None))) else str(v) for k, v in self.context.items()
        }
        return {"class": type(self).__name__, "message": self.message, "context": plain}


def _rebuild(cls: type[ObjckptError], message: str, context: dict[str, Any]) -> ObjckptError:
    return cls(message, **context)


def from_wire(data: dict[str, Any]) -> ObjckptError:
    """The error that `to_wire` described; an unknown class becomes `ObjckptError`."""
    found = globals().get(data["class"])
    cls = found if isinstance(found, type) and issubclass(found, ObjckptError) else ObjckptError
    return cls(data["message"], **data["context"])


# ---- what the caller gave ------------------------------------------------------------------------------------------


class UsageError(ObjckptError, ValueError):
    """An argument, option or URL is not acceptable. Nothing was written."""

    kind, exit_code = "usage", 2


class UnsupportedTypeError(ObjckptError, TypeError):
    """A leaf of the training state has a type that is not stored. Raised by `save()` before anything is written."""

    kind, exit_code = "unsupported-type", 2


class UnsupportedDtypeError(UnsupportedTypeError):
    """A tensor has a dtype whose bytes cannot be stored."""

    kind = "unsupported-dtype"


class MismatchError(ObjckptError):
    """The checkpoint and the state given to `restore` differ; `context` lists missing, unexpected, shape and dtype."""

    kind, exit_code = "mismatch", 3


class StepOrderError(UsageError):
    """This step, or a later one, is already saved in this line of checkpoints."""

    kind = "step-order"


class ForkError(ObjckptError):
    """A Checkpointer made before os.fork() is used in the child."""

    kind = "fork"


class ArenaFullError(ObjckptError, MemoryError):
    """The state does not fit the host memory that the options allow. Nothing was allocated."""

    kind = "arena-full"


class BusyError(ObjckptError):
    """An earlier save still holds the snapshot arena and `on_busy="raise"` was given."""

    kind = "busy"


# ---- what is in the store ------------------------------------------------------------------------------------------


class NotCommittedError(ObjckptError, LookupError):
    """No committed checkpoint answers the request."""

    kind, exit_code = "not-committed", 4


class FormatError(ObjckptError):
    """Bytes are not a valid record, index or chunk of a known format version."""

    kind, exit_code = "format", 5


class IntegrityError(ObjckptError):
    """Bytes are missing, short, altered or foreign: a checksum, digest or length does not hold."""

    kind, exit_code = "integrity", 5


class WriterFencedError(ObjckptError):
    """A newer writer has opened this prefix; this one may not commit any more."""

    kind, exit_code = "fenced", 6


# ---- what happened on the way --------------------------------------------------------------------------------------


class SaveError(ObjckptError):
    """A background save did not commit; the checkpoint of that step does not exist."""

    kind = "save-failed"


class PeerError(ObjckptError):
    """Another rank failed in what all ranks do together; `context`: ranks."""

    kind = "peer"


class AgentError(SaveError):
    """The uploader process died or cannot be started."""

    kind = "agent"


class WaitTimeout(ObjckptError, TimeoutError):
    """The time given to wait is over; the save goes on."""

    kind = "timeout"


class StoreError(ObjckptError):
    """A request to the object store failed for good. `context`: key, operation, code, status, endpoint."""

    kind, exit_code = "store", 7


class NotFoundError(StoreError, LookupError):
    """The key does not exist (for a bucket: `BucketError`)."""

    kind = "not-found"


class PreconditionFailedError(StoreError):
    """A conditional PUT met an existing key (412) or a concurrent one (409)."""

    kind = "precondition"


class AmbiguousWriteError(StoreError):
    """A conditional PUT ended without a trustworthy answer; it may or may not have taken effect."""

    kind = "ambiguous"


class AccessError(StoreError, PermissionError):
    """Credentials are missing, wrong or expired, or the permission is denied."""

    kind, exit_code = "access", 8


class BucketError(StoreError):
    """The bucket does not exist, or lives in another region."""

    kind, exit_code = "bucket", 9


class ConnectError(StoreError, ConnectionError):
    """The endpoint cannot be reached: refused, unresolved, TLS failure."""

    kind, exit_code = "connect", 10


class StoreFullError(StoreError):
    """The store refuses more data: disk full or quota."""

    kind, exit_code = "store-full", 11
