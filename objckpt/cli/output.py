"""What the command line writes. Text from checkpoints is never printed raw: it may hold terminal control sequences."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any

from objckpt.events import Progress, ignore

_SHOW_CURSOR = b"\x1b[?25h"
_unfinished: set[str] = set()  # temporary files, to be removed when a signal ends us
_drawing = False


def prepare() -> None:
    """Make stdout and stderr take any text, whatever the locale, and the library's warnings messages of ours."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")
    logger = logging.getLogger("objckpt")
    if not any(isinstance(handler, _Messages) for handler in logger.handlers):
        logger.addHandler(_Messages(logging.WARNING))


class _Messages(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        message(f"warning: {record.getMessage()}")


def line(text: str = "") -> None:
    """Print a line. A reader that has gone away (`| head`) is no error: the rest goes nowhere."""
    _write(sys.stdout, text + "\n")


def document(value: Any) -> None:
    """Print one JSON document; of a list, each element on a line of its own."""
    if isinstance(value, list) and value:
        line("[" + ",\n ".join(_json(v) for v in value) + "]")
    else:
        line(_json(value))


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=True, allow_nan=False)  # ASCII: control characters are escaped with the rest


def message(text: str) -> None:
    """Print one line `objckpt: text` to stderr."""
    message_line("objckpt: " + text)


def message_line(text: str) -> None:
    """Print one line to stderr, made printable."""
    _write(sys.stderr, printable(text) + "\n")


def flush() -> None:
    """Write out what is buffered; an error of stdout shows here at the latest."""
    _write(sys.stdout, "", flush=True)


def _write(stream: IO[str] | None, text: str, flush: bool = False) -> None:
    if stream is None:  # closed by the caller (`>&-`)
        return
    try:
        stream.write(text)
        if flush:
            stream.flush()
    except BrokenPipeError:
        # Not only now: what is buffered would be written again when Python ends, and complain then.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def printable(text: str) -> str:
    r"""`text` with everything that does not print (control, bidi and other format characters) as `\x1b`, `\u202e`, …"""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def human(nbytes: int) -> str:
    """A size in binary units: 1536 is "1.5 KiB"."""
    size, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB"):
        if size < 1000:  # four digits at most
            break
        size, unit = size / 1024, larger
    return f"{nbytes} B" if unit == "B" else f"{size:.1f} {unit}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[str] = ()) -> Iterator[str]:
    """Lines of aligned columns, their texts made printable. Columns named in `right` are aligned to the right."""
    cells = [[printable(text) for text in row] for row in (head, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    for row in cells:
        parts = (
            text.rjust(width) if name in right else text.ljust(width)
            for name, text, width in zip(head, row, widths, strict=True)
        )
        yield "  ".join(parts).rstrip()


@contextmanager
def progress(what: str) -> Iterator[Progress]:
    """A listener that draws a bar on stderr where that is a terminal, and nothing elsewhere."""
    global _drawing
    if sys.stderr is None or not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield ignore
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True))
    bars = Bars(*columns, TransferSpeedColumn(), TimeRemainingColumn(), console=Console(stderr=True), transient=True)
    task = bars.add_task(what, total=None)

    def listener(stage: str, done_bytes: int, total_bytes: int) -> None:
        bars.update(task, completed=done_bytes, total=total_bytes)

    with bars:
        _drawing = True
        try:
            yield listener
        finally:
            _drawing = False


@contextmanager
def removed_on_end(path: str) -> Iterator[Callable[[], None]]:
    """Remove the file `path` when the block or the process ends, by whatever; unless the function given was called."""
    _unfinished.add(path)
    try:
        yield lambda: _unfinished.discard(path)
    finally:
        if path in _unfinished:
            _remove(path)
            _unfinished.discard(path)


def end_at_once(code: int) -> None:
    """End the process from a signal handler."""
    for path in list(_unfinished):
        _remove(path)
    if _drawing:
        os.write(2, _SHOW_CURSOR)
    os.write(2, b"\n" if _drawing else b"objckpt: interrupted\n")
    os._exit(code)


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass
