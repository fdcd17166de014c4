"""What the benchmarks compare: objckpt, and its peers as their documentation shows them.

Every contender saves to, and loads from, `url` at `endpoint` (path style, http), and runs in a process of its own.
"""

from __future__ import annotations

import io
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

import measure
import numpy as np
import torch

State = dict[str, dict[str, torch.Tensor]]
MiB = 1 << 20


def make_state(nbytes: int) -> State:
    """fp32 weights and Adam moments of transformer blocks: matrices of 16 and 64 MiB, vectors; `nbytes` in all."""
    shapes = [(2048, 2048), (2048, 2048), (8192, 2048), (2048, 8192), (2048,), (2048,)]
    state: State = {"weights": {}, "exp_avg": {}, "exp_avg_sq": {}}
    pattern = torch.rand(1 << 20, generator=torch.Generator().manual_seed(0))
    left, n = nbytes // 4, 0
    while left > 0:
        for part in state.values():
            shape = shapes[n % len(shapes)]
            if left < math.prod(shape):
                shape = (left,)  # the rest
            if left > 0:
                tensor = torch.empty(
                    math.prod(shape)
                )  # filled in place: temporaries would stay in the process's memory
                for piece in tensor.split(len(pattern)):
                    torch.add(pattern[: len(piece)], n, out=piece)
                part[f"block{n // len(shapes)}.{n % len(shapes)}"] = tensor.view(shape)
                left -= math.prod(shape)
        n += 1
    return state


def tensors(state: State) -> Iterator[torch.Tensor]:
    for part in state.values():
        yield from part.values()


def memcpy_s(state: State, repeats: int = 3) -> float:
    """Seconds of a plain copy of the state into touched memory by one thread (median): what blocking is measured by."""
    target = np.empty(sum(t.nbytes for t in tensors(state)), np.uint8)
    target.fill(1)

    def copy() -> None:
        at = 0
        for tensor in tensors(state):
            np.copyto(target[at : at + tensor.nbytes], tensor.view(-1).view(torch.uint8).numpy())
            at += tensor.nbytes

    return measure.median([measure.timed(copy) for _ in range(repeats)])


@dataclass(frozen=True)
class Saved:
    """One save: how long it kept training, how long until all was stored, and the CPU seconds of both processes."""

    blocked_s: float
    total_s: float
    trainer_cpu_s: float
    agent_cpu_s: float = 0.0
    upload_s: float | None = None  # of total_s, where it is told


class Contender(Protocol):
    name: str

    def prepare(self, state: State) -> None: ...
    def save(self, state: State) -> Saved: ...
    def load(self, into: State) -> None: ...
    def close(self) -> None: ...


class Objckpt:
    """This package; `uploader` is "process" or "thread"."""

    def __init__(self, endpoint: str, url: str, uploader: str = "process", **options: Any) -> None:
        from objckpt import Checkpointer, SaveOptions, StoreOptions

        self.name = "objckpt" if uploader == "process" else "objckpt (thread)"
        self.ckpt = Checkpointer(
            url,
            store=StoreOptions(endpoint_url=endpoint, region="us-east-1"),
            options=SaveOptions(uploader=uploader, **options),
        )
        self.step = 0

    def prepare(self, state: State) -> None:
        """Call `prepare` and wait until the snapshot memory is resident, as it is after some seconds of training."""
        before, nbytes = measure.pss_bytes(os.getpid()), sum(t.nbytes for t in tensors(state))
        self.ckpt.prepare(state)
        end = time.monotonic() + 120
        while measure.pss_bytes(os.getpid()) < before + 0.97 * nbytes:
            if time.monotonic() > end:
                raise RuntimeError("the snapshot memory did not become resident within 120 s")
            time.sleep(0.1)
        time.sleep(0.5)

    def save(self, state: State) -> Saved:
        self.step += 1
        cpu, start = time.process_time(), time.perf_counter()
        handle = self.ckpt.save(self.step, state)
        blocked_s = time.perf_counter() - start
        handle.wait_committed(600)
        total_s, cpu_s, stats = time.perf_counter() - start, time.process_time() - cpu, handle.stats
        agent_cpu_s = 0.0 if self.ckpt.options.uploader == "thread" else stats.agent_cpu_s
        return Saved(blocked_s, total_s, cpu_s, agent_cpu_s, stats.upload_s)

    def load(self, into: State) -> None:
        if self.ckpt.restore(into) is None:
            raise RuntimeError("nothing to restore")

    def close(self) -> None:
        self.ckpt.close()


class ConnectorDcp:
    """torch.distributed.checkpoint through s3torchconnector's writer and reader; asynchronous with `dcp.async_save`."""

    def __init__(self, endpoint: str, url: str, asynchronous: bool = False) -> None:
        from s3torchconnector import S3ClientConfig
        from s3torchconnector._s3client import S3Client
        from s3torchconnector.dcp import S3StorageReader, S3StorageWriter

        self.name = "DCP async_save + s3torchconnector" if asynchronous else "DCP + s3torchconnector"
        self.url, self.asynchronous, self.saves = url, asynchronous, 0
        config = S3ClientConfig(force_path_style=True)

        def at_endpoint(storage: Any) -> Any:
            # Neither class takes an endpoint; its client does.
            storage.fs._client = S3Client(region="us-east-1", endpoint=endpoint, s3client_config=config)
            return storage

        self.writer = lambda url: at_endpoint(S3StorageWriter("us-east-1", url, s3client_config=config))
        self.reader = lambda url: at_endpoint(S3StorageReader("us-east-1", url, s3client_config=config))
        if asynchronous:  # async_save wants a process group
            torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)

    def prepare(self, state: State) -> None:
        pass

    def save(self, state: State) -> Saved:
        from torch.distributed import checkpoint as dcp

        self.saves += 1
        cpu, start = time.process_time(), time.perf_counter()
        writer = self.writer(f"{self.url}/{self.saves}/")
        if self.asynchronous:
            future = dcp.async_save(state, storage_writer=writer)
            blocked_s = time.perf_counter() - start
            future.result()
        else:
            dcp.save(state, storage_writer=writer, no_dist=True)
            blocked_s = time.perf_counter() - start
        return Saved(blocked_s, time.perf_counter() - start, time.process_time() - cpu)

    def load(self, into: State) -> None:
        from torch.distributed import checkpoint as dcp

        dcp.load(into, storage_reader=self.reader(f"{self.url}/1/"), no_dist=True)

    def close(self) -> None:
        if self.asynchronous:
            torch.distributed.destroy_process_group()


class TorchBoto3:
    """torch.save into memory, then boto3's managed transfer; get_object and torch.load back."""

    name = "torch.save + boto3"

    def __init__(self, endpoint: str, url: str) -> None:
        import boto3
        from botocore.config import Config

        config = Config(s3={"addressing_style": "path"})
        self.s3 = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1", config=config)
        parts = urlsplit(url)
        self.bucket, self.prefix, self.saves = parts.netloc, parts.path.strip("/"), 0

    def prepare(self, state: State) -> None:
        pass

    def save(self, state: State) -> Saved:
        self.saves += 1
        cpu, start = time.process_time(), time.perf_counter()
        body = io.BytesIO()
        torch.save(state, body)
        body.seek(0)
        self.s3.upload_fileobj(body, self.bucket, f"{self.prefix}/{self.saves}.pt")
        took_s = time.perf_counter() - start
        return Saved(took_s, took_s, time.process_time() - cpu)

    def load(self, into: State) -> None:
        body = io.BytesIO()
        self.s3.download_fileobj(self.bucket, f"{self.prefix}/1.pt", body)
        body.seek(0)
        loaded = torch.load(body, weights_only=True)
        for target, source in zip(tensors(into), tensors(loaded), strict=True):
            target.copy_(source)

    def close(self) -> None:
        pass


def contender(name: str, endpoint: str, url: str) -> Contender:
    """By its name on the command line."""
    if name == "objckpt":
        return Objckpt(endpoint, url)
    if name == "objckpt-zstd":
        made = Objckpt(endpoint, url, compression="zstd")
        made.name = "objckpt, zstd"
        return made
    if name == "objckpt-thread":
        return Objckpt(endpoint, url, "thread")
    if name == "dcp":
        return ConnectorDcp(endpoint, url)
    if name == "dcp-async":
        return ConnectorDcp(endpoint, url, asynchronous=True)
    if name == "torch-boto3":
        return TorchBoto3(endpoint, url)
    raise SystemExit(f"unknown contender {name!r}")


PEERS = ("dcp", "dcp-async", "torch-boto3")
