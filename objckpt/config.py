"""Frozen options, checked when they are made. Units come last in the names."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import Any, Literal

from objckpt import limits
from objckpt.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class StoreOptions:
    """How to reach the store. Credentials are not options: they come from the standard AWS chain, and are refreshed by it.

    Attributes:
        endpoint_url: http:// or https:// of the server. None: AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, the profile, or AWS itself.
        region: None: that of the AWS chain; "us-east-1" where the chain has none.
        profile: one of the AWS configuration files.
        addressing: the bucket in the "path" or, "virtual", in the host name of requests.
        ca_bundle: path of a PEM file with the authorities to trust. None: AWS_CA_BUNDLE or the system's.
        sign_payload: True: SHA-256 of every body (0.6 CPU seconds per GB).
        checksums: "auto": a CRC-64/NVME header on uploads, until the store refuses it; "off": none.
        connections: parallel requests of one process.
        connect_timeout_s: seconds until a connection is given up.
        request_timeout_s: seconds of one request, its body included; of a ranged GET, without progress. An upload part of
            64 MiB needs 0.6 MB/s for each connection: for slower links set `SaveOptions.part_bytes` lower.
        retry_deadline_s: seconds of all tries of one operation together. A server that refuses the very first connection is
            taken for a wrong address after some seconds.
    """

    endpoint_url: str | None = None
    region: str | None = None
    profile: str | None = None
    addressing: Literal["path", "virtual"] = "path"
    ca_bundle: str | None = None
    sign_payload: bool = False
    checksums: Literal["auto", "off"] = "auto"
    connections: int = 8
    connect_timeout_s: float = 10.0
    request_timeout_s: float = 120.0
    retry_deadline_s: float = 300.0

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

    def piece_bytes(self, total_bytes: int) -> int:
        """Bytes of one request's body when so many are moved: large, but at least four for each connection.

        A request costs 2 ms of CPU whatever its size. Measured with 2 GiB on two cores: bodies of 16 MiB go up with 2.1 GB/s and
        0.57 CPU s/GB, and come down with 2.2 and 0.52; of 64 MiB up with 2.7 and 0.45, down with 2.9 and 0.40.
        """
        piece = limits.PART_BYTES
        while piece < limits.SLAB_BYTES and total_bytes >= 2 * piece * 4 * self.connections:
            piece *= 2
        return piece

    def to_wire(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class SaveOptions:
    """How states are saved, and what of the older checkpoints is kept.

    Attributes:
        compression: "zstd" takes CPU time of the uploader, and saves about a third of bf16 weights.
        chunk_bytes: the unit of checksum, codec and fetch.
        part_bytes: size of a multipart piece. None: 16 to 64 MiB, by the size of the state.
        arena_bytes: limit of this rank's snapshot memory. None: one snapshot of the largest state, so that a save waits for the
            upload of the one before; twice the state or more lets so many saves be in flight.
        on_busy: what a save does while the snapshot memory is in use: "wait" for it, or "raise" BusyError.
        uploader: a "process" of its own; a "thread" of the trainer where none can be started.
        rank_deadline_s: seconds that a rank which is done waits for the others, and they for rank 0's commit.
        linger_s: seconds that the uploader goes on after the trainer has died; then it waits only for the end of a commit that
            has begun (for other ranks up to `rank_deadline_s`).
        pickle: True: values outside the format's types are pickled, and unpickled by restore, which runs their code.
        keep_last: None: nothing is ever deleted. N: after each commit only the last N checkpoints of the log stay, in the order of
            their commits and whatever branch they are of; beside them tagged ones, that which this session resumed from, and those
            of a foreign run under the same URL whose steps are higher. Their data is deleted in the background.
        keep_every: beside `keep_last`: steps that this number divides stay too.
    """

    compression: Literal["none", "zstd"] = "none"
    chunk_bytes: int = limits.CHUNK_BYTES
    part_bytes: int | None = None
    arena_bytes: int | None = None
    on_busy: Literal["wait", "raise"] = "wait"
    uploader: Literal["process", "thread"] = "process"
    rank_deadline_s: float = 600.0
    linger_s: float = 600.0
    pickle: bool = False
    keep_last: int | None = None
    keep_every: int | None = None

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
