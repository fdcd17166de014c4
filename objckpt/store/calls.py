"""One synchronous client, made on first use, and the loop that repeats its failed requests."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from botocore.config import Config

from objckpt import limits
from objckpt.config import StoreOptions
from objckpt.errors import ObjckptError
from objckpt.store import deadline
from objckpt.store import session as sessions
from objckpt.store.location import Location
from objckpt.store.outage import Outage
from objckpt.store.retry import FIRST_CONTACT_S, Tries, Verdict, classify
from objckpt.store.translate import Where, error_of, fault_of

T = TypeVar("T")


class Calls:
    """Requests to one bucket. Thread-safe; one client and one pool of connections for all threads."""

    def __init__(self, location: Location, options: StoreOptions) -> None:
        self.location = location
        self.options = options
        self._lock = threading.Lock()
        self._client: Any = None
        self._answered = False  # the store has answered once, so the address is right
        self.outage = Outage()

    def client(self) -> Any:
        """The client, made on the first call. Raises AccessError or UsageError for unusable configuration."""
        with self._lock:
            if self._client is None:
                self._client = self._make()
            return self._client

    def _make(self) -> Any:
        try:
            session = sessions.make_session(self.options)
            settings = sessions.client_settings(session, self.options)
            config = sessions.config_settings(self.options, self.options.request_timeout_s)
            # Readers of small objects and a few calls beside them: without a place for each, urllib3 drops warm
            # connections with a warning.
            config["max_pool_connections"] = max(self.options.connections, limits.READERS) + 4
            client = session.create_client(config=Config(tcp_keepalive=True, **config), **settings)
        except ObjckptError:
            raise
        except Exception as error:
            raise error_of(fault_of(error), self.where("Connect", None)) from error
        sessions.tame(client)
        deadline.impose(client)
        return client

    def close(self) -> None:
        """Close the connections; a later call opens new ones."""
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def where(self, operation: str, key: str | None) -> Where:
        """What an error message names; `key` is relative to the location."""
        client = self._client
        endpoint = client.meta.endpoint_url if client is not None else self.options.endpoint_url
        full = self.location.prefix + key if key is not None else self.location.prefix
        return Where(operation, endpoint or sessions.DEFAULT_ENDPOINT, self.location.bucket, full)

    def run(self, operation: str, key: str | None, send: Callable[[Any], T]) -> T:
        """`send(client)`, repeated until it succeeds, fails for good, or `retry_deadline_s` is over.

        Each time it gets `request_timeout_s`, however the answer arrives.
        """
        tries = Tries.within(self.options.retry_deadline_s)
        while True:
            client = self.client()
            signed_with = sessions.current_credentials(client)
            try:
                with deadline.Limit(min(self.options.request_timeout_s, tries.left_s())):
                    result = send(client)
            except ObjckptError:
                raise
            except Exception as error:
                self.failed(error, self.where(operation, key), tries, signed_with)
            else:
                self._answered = True
                self.outage.succeeded(self.where(operation, key), tries)
                return result

    def failed(self, error: Exception, where: Where, tries: Tries, signed_with: Any, note: str = "") -> None:
        """Sleep and return when the request should be sent again, else raise the final error, `note` included."""
        fault = fault_of(error)
        verdict, told = classify(fault), tries.telling(fault)
        self._answered = self._answered or fault.source == "answer"
        if verdict is Verdict.REFRESH:
            verdict = Verdict.RETRY if tries.count < 3 and self.refresh(signed_with) else Verdict.FAIL
        pause = tries.next_pause_s(verdict)
        # A port for TLS hangs up on http: that is a wrong address, too.
        hung_up = fault.source == "network" and where.endpoint.startswith("http://")
        if (fault.source == "refused" or hung_up) and not self._answered:
            waited = self.options.retry_deadline_s - tries.left_s()
            pause = None if waited >= FIRST_CONTACT_S else pause
        if verdict is Verdict.FAIL or pause is None:
            off = self.options.checksums == "off"
            raise error_of(told, where, tries=tries.total, checksums_off=off, note=note) from error
        self.outage.failed(told, where, tries)
        time.sleep(pause)

    def refresh(self, signed_with: Any) -> bool:
        """Read the credentials again. True when there are others than those that a refused request was signed with."""
        with self._lock:
            if self._client is None:
                return True
            if sessions.current_credentials(self._client) is not signed_with:
                return True  # another thread has done it meanwhile
            fresh = sessions.make_session(self.options).get_credentials()
            if fresh is None or fresh.get_frozen_credentials() == signed_with.get_frozen_credentials():
                return False
            sessions.swap_credentials(self._client, fresh)
            return True
