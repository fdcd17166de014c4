"""The command `objckpt`: its verbs, and what becomes of errors.

Exit codes: 0 done; 1 `diff` found differences; 2 wrong usage; others are those of the exception classes in
`objckpt.errors`; 128 + n for signal n.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import TYPE_CHECKING

from objckpt.cli import output
from objckpt.errors import ObjckptError

if TYPE_CHECKING:
    import typer


def main() -> int:
    """The entry point: runs the command of `sys.argv`, returns the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):
        # nohup and the background jobs of scripts ignore them on purpose
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end_at_once)
    return run(sys.argv[1:])


def run(arguments: Sequence[str]) -> int:
    """Run one command line (without the program's name) and return its exit code. Errors become messages on stderr."""
    output.prepare()
    debug = os.environ.get("OBJCKPT_DEBUG", "") not in ("", "0") or "--debug" in arguments
    try:
        code = _run(list(arguments) or ["--help"])
        output.flush()
        return code
    except KeyboardInterrupt:
        output.message("interrupted")
        return 128 + signal.SIGINT
    except ObjckptError as err:
        return _failed(err, err.exit_code, debug, str(err))
    except OSError as err:  # local files and the terminal; what the store raises is translated there
        where = f": {os.fspath(err.filename)}" if isinstance(err.filename, (str, os.PathLike)) else ""
        return _failed(err, 1, debug, f"{err.strerror or type(err).__name__}{where}")
    except Exception as err:
        hint = "" if debug else "; OBJCKPT_DEBUG=1 shows where"
        return _failed(err, 1, debug, f"{type(err).__name__}: {err} (a bug in objckpt{hint})")


def _run(arguments: list[str]) -> int:
    import typer

    try:
        result = build_app()(args=arguments, prog_name="objckpt", standalone_mode=False)
    except typer.Abort as err:  # made of KeyboardInterrupt by some versions
        raise KeyboardInterrupt from err
    except SystemExit:  # only when the reader of a help text has gone away (`--help | true`), which is no error
        return 0
    except Exception as err:
        # typer carries a copy of click or uses the package, by version: so the class is told by what it has.
        if not hasattr(err, "format_message"):
            raise
        context = getattr(err, "ctx", None)
        hint = f"; see {context.command_path} --help" if context is not None else ""
        output.message("error: " + err.format_message().rstrip(".") + hint)
        return int(getattr(err, "exit_code", 2))
    return result if isinstance(result, int) else 0


def _failed(err: BaseException, code: int, debug: bool, text: str) -> int:
    if debug:
        import traceback

        for line in "".join(traceback.format_exception(err)).splitlines():
            output.message_line(line)
    output.message("error: " + text)
    if isinstance(err, ObjckptError):
        for line in str(err.context.get("log", "")).splitlines():  # of a server that we started
            output.message_line("  " + line)
    return code


def _end_at_once(number: int, frame: FrameType | None) -> None:
    """Nothing has to be unwound but temporary files, and waiting for requests in flight could take minutes."""
    output.end_at_once(128 + number)


def build_app() -> typer.Typer:
    """The typer application, made on each call: importing this module imports no typer."""
    import typer

    from objckpt.cli import diff, doctor, gc, local, ls, restore, rm, show, tag, verify

    app = typer.Typer(
        name="objckpt",
        help="Checkpoints of PyTorch training on object storage. URLs are s3://bucket/prefix; credentials and endpoint "
        "come from the standard AWS chain.",
        rich_markup_mode=None,  # plain text: square brackets stay, and nothing is drawn around it
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @app.callback(invoke_without_command=True)
    def root(version: bool = typer.Option(False, "--version", help="Print the version.")) -> None:
        if version:
            from objckpt import __version__

            output.line(f"objckpt {__version__}")
            raise typer.Exit

    verbs = {"ls": ls, "show": show, "restore": restore, "verify": verify, "diff": diff}
    verbs |= {"rm": rm, "tag": tag, "gc": gc, "doctor": doctor, "local": local}
    for name, module in verbs.items():
        app.command(name)(module.command)
    return app
