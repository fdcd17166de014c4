"""Frozen options, checked when they are made. Units come last in the names."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import Any, Literal

from objckpt import limits
from objckpt.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class StoreOptions:
    """How to reach the store. Credentials are not options: they come from the standard AWS chain, and are refreshed by it."""

    endpoint_url: str | None = None  # None: AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, the profile, or AWS itself
    region: str | None = None  # None: the AWS chain; "us-east-1" where the chain has none
    profile: str | None = None  # a profile of the AWS configuration files
    addressing: Literal["path", "virtual"] = "path"
    ca_bundle: str | None = None  # path of a PEM file; None: AWS_CA_BUNDLE or the system's
    sign_payload: bool = False  # True: SHA-256 of every body (0.6 CPU s/GB)
    checksums: Literal["auto", "off"] = "auto"  # CRC-64/NVME header on uploads; auto stops when the store refuses it
    connections: int = 8  # parallel requests of one process
    connect_timeout_s: float = 10.0
    request_timeout_s: float = 120.0  # one request, its body included; the commit gets it too
    retry_deadline_s: float = 300.0  # all tries of one operation together

    def __post_init__(self) -> None:
        if self.addressing not in ("path", "virtual"):
            raise UsageError(f'addressing must be "path" or "virtual", not {self.addressing!r}')
        if self.checksums not in ("auto", "off"):
            raise UsageError(f'checksums must be "auto" or "off", not {self.checksums!r}')
        if not 1 <= self.connections <= 1024:
            raise UsageError(f"connections must be in [1, 1024], not {self.connections}")
        for name in ("connect_timeout_s", "request_timeout_s", "retry_deadline_s"):
            if not getattr(self, name) > 0:
                raise UsageError(f"{name} must be > 0 seconds, not {getattr(self, name)}")
        if self.endpoint_url is not None and not self.endpoint_url.startswith(("http://", "https://")):
            raise UsageError("endpoint_url must start with http:// or https://")
        if self.ca_bundle is not None and not os.path.isfile(self.ca_bundle):
            raise UsageError(f"ca_bundle: no such file: {self.ca_bundle}")

    def to_wire(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class SaveOptions:
    """How states are saved."""

    compression: Literal["none", "zstd"] = "none"
    chunk_bytes: int = limits.CHUNK_BYTES  # unit of checksum, codec and fetch
    part_bytes: int | None = None  # size of a multipart piece; None: 16 to 64 MiB, by the size of the state
    arena_bytes: int | None = None  # limit of the snapshot memory of this rank; None: one snapshot of the largest state
    on_busy: Literal["wait", "raise"] = "wait"  # a save while the arena is full
    uploader: Literal["process", "thread"] = "process"
    rank_deadline_s: float = 600.0  # how long a rank that is done waits for the others, and they for rank 0's commit
    linger_s: float = 600.0  # how long the agent goes on uploading after the trainer died
    pickle: bool = False  # True: values outside the format's types are pickled
    # After each commit all older checkpoints under the URL go, but for tagged ones and the one resumed from. None: all stay.
    keep_last: int | None = None  # so many stay, in the order of the log
    keep_every: int | None = None  # beside them, the steps that it divides

    def __post_init__(self) -> None:
        choices = {"compression": ("none", "zstd"), "on_busy": ("wait", "raise"), "uploader": ("process", "thread")}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise UsageError(f"{name} must be one of {allowed}, not {getattr(self, name)!r}")
        if not 4096 <= self.chunk_bytes <= limits.MAX_CHUNK_RAW_BYTES or self.chunk_bytes % 4096:
            raise UsageError(
                f"chunk_bytes must be a multiple of 4096 in [4096, {limits.MAX_CHUNK_RAW_BYTES}], not {self.chunk_bytes}"
            )
        if self.part_bytes is not None and (
            not limits.MIN_PART_BYTES <= self.part_bytes <= limits.SLAB_BYTES or limits.SLAB_BYTES % self.part_bytes
        ):
            raise UsageError(
                f"part_bytes must divide {limits.SLAB_BYTES} and be in "
                f"[{limits.MIN_PART_BYTES}, {limits.SLAB_BYTES}] (S3 refuses smaller parts), not {self.part_bytes}"
            )
        if self.arena_bytes is not None and self.arena_bytes < limits.SLAB_BYTES:
            raise UsageError(f"arena_bytes must be >= one slab ({limits.SLAB_BYTES}), not {self.arena_bytes}")
        if not self.rank_deadline_s > 0:
            raise UsageError(f"rank_deadline_s must be > 0 seconds, not {self.rank_deadline_s}")
        if not self.linger_s >= 0:
            raise UsageError(f"linger_s must be >= 0 seconds, not {self.linger_s}")
        for name in ("keep_last", "keep_every"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise UsageError(f"{name} must be an int >= 1, or None to keep all checkpoints, not {value!r}")
        if self.keep_every is not None and self.keep_last is None:
            raise UsageError("keep_every spares steps from keep_last: give keep_last, too")

    def to_wire(self) -> dict[str, Any]:
        return asdict(self)
