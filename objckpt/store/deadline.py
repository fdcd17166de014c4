"""A total time limit on each request of the synchronous client.

urllib3's timeouts bound one receive, so a peer that drips a byte a second outlasts them. Here the sockets ask before each
receive and each send how much is left of the time that the calling thread has given the request.
"""

from __future__ import annotations

import socket
import ssl
import threading
import time
from typing import Any

from botocore.awsrequest import (
    AWSHTTPConnection,
    AWSHTTPConnectionPool,
    AWSHTTPSConnection,
    AWSHTTPSConnectionPool,
)

# A connection that brings less is as good as dead: 16 MiB would take a quarter of an hour. 8 such are a link of 1 Mbit/s.
SLOWEST_BYTES_PER_S = 16 * 1024

_of_thread = threading.local()


class Limit:
    """The time of one request. Inside `with limit:` the thread's sockets raise TimeoutError when it is over.

    Args:
        seconds: for the whole request, from the making of this object.
        renewed: the time begins again whenever as many bytes have come as the slowest link brings in it, so that a
            large body may take as long as it needs.
    """

    def __init__(self, seconds: float, *, renewed: bool = False) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds
        self._renew_bytes = max(1, int(seconds * SLOWEST_BYTES_PER_S)) if renewed else None
        self._received = 0  # since the last renewal

    def __enter__(self) -> None:
        _of_thread.limit = self

    def __exit__(self, *_: object) -> None:
        _of_thread.limit = None

    def left_s(self) -> float:
        """Seconds until the end; raises TimeoutError when there are none."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"no complete answer within {self.seconds:g} s")
        return left

    def count(self, received: int) -> None:
        """So many bytes have come."""
        self._received += received
        if self._renew_bytes is not None and self._received >= self._renew_bytes:
            self._received = 0
            self._end = time.monotonic() + self.seconds


def impose(client: Any) -> None:
    """Let all connections that a botocore client opens from now on obey a `Limit`."""
    # Shared by the plain pools and those of proxies.
    client._endpoint.http_session._pool_classes_by_scheme.update(http=_Pool, https=_TlsPool)


class _Timed:
    """A socket that never waits longer than the request may still take."""

    def recv_into(self, *args: Any, **kwargs: Any) -> int:
        limit: Limit | None = getattr(_of_thread, "limit", None)
        if limit is None:
            received: int = super().recv_into(*args, **kwargs)  # type: ignore[misc]
            return received
        self.settimeout(limit.left_s())  # type: ignore[attr-defined]
        received = super().recv_into(*args, **kwargs)  # type: ignore[misc]
        limit.count(received)
        return received

    def send(self, *args: Any, **kwargs: Any) -> int:
        limit: Limit | None = getattr(_of_thread, "limit", None)
        if limit is not None:
            self.settimeout(limit.left_s())  # type: ignore[attr-defined]
        sent: int = super().send(*args, **kwargs)  # type: ignore[misc]
        return sent

    def sendall(self, *args: Any, **kwargs: Any) -> None:
        # The timeout of a plain socket's sendall() is for the whole of it; a TLS socket's calls send() again and again.
        limit: Limit | None = getattr(_of_thread, "limit", None)
        if limit is not None:
            self.settimeout(limit.left_s())  # type: ignore[attr-defined]
        super().sendall(*args, **kwargs)  # type: ignore[misc]


class _Socket(_Timed, socket.socket):
    pass


class _TlsSocket(_Timed, ssl.SSLSocket):
    pass


class _Connects:
    """urllib3's connection, over sockets of ours."""

    def _new_conn(self) -> socket.socket:
        made: socket.socket = super()._new_conn()  # type: ignore[misc]
        context = getattr(self, "ssl_context", None)
        if context is not None:
            context.sslsocket_class = _TlsSocket
        timeout_s = made.gettimeout()
        ours = _Socket(fileno=made.detach())
        ours.settimeout(timeout_s)
        return ours


class _Connection(_Connects, AWSHTTPConnection):  # type: ignore[misc]
    pass


class _TlsConnection(_Connects, AWSHTTPSConnection):  # type: ignore[misc]
    pass


class _Pool(AWSHTTPConnectionPool):  # type: ignore[misc]
    ConnectionCls = _Connection


class _TlsPool(AWSHTTPSConnectionPool):  # type: ignore[misc]
    ConnectionCls = _TlsConnection
