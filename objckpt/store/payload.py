"""aiohttp's side of the zero-copy body. Imported for its effect, and only for uploads: aiohttp takes long to import."""

from __future__ import annotations

from aiohttp import payload
from aiohttp.abc import AbstractStreamWriter

from objckpt.store.body import UploadBody


class _UploadPayload(payload.Payload):
    """Writes the slices of an `UploadBody` to the socket."""

    _value: UploadBody
    _autoclose = True

    @property
    def size(self) -> int | None:
        return len(self._value)

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        raise TypeError("an upload body is not text")

    async def write(self, writer: AbstractStreamWriter) -> None:
        transport = getattr(writer, "transport", None)
        self._value.seek(0)  # aiohttp repeats a PUT by itself when a kept-alive connection turns out to be dead
        try:
            for view in self._value.slices():
                await writer.write(view)
            # Python >= 3.12 keeps views, not copies, in the transport: the pieces are free only when it has sent them.
            if transport is not None and transport.get_write_buffer_size():
                transport.set_write_buffer_limits(high=0)
                try:
                    await writer.drain()
                finally:
                    transport.set_write_buffer_limits()
        except BaseException:
            if transport is not None:
                transport.abort()  # close() would still send what is buffered, from memory that is free again by then
            raise

    async def write_with_length(self, writer: AbstractStreamWriter, content_length: int | None) -> None:
        await self.write(writer)


# Importing this module teaches aiohttp about `UploadBody`.
payload.PAYLOAD_REGISTRY.register(_UploadPayload, UploadBody, order=payload.Order.try_first)
