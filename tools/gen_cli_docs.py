"""Writes objckpt/docs/cli.md from the command line itself. `--check` only tells whether the file is current."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from objckpt import errors
from objckpt.cli.main import build_app

TARGET = Path(__file__).resolve().parents[1] / "objckpt" / "docs" / "cli.md"

INTRO = """\
# Command line

Written by `python tools/gen_cli_docs.py`; do not edit.

URLs are `s3://bucket/prefix`. Credentials and endpoint come from the standard AWS chain: environment variables,
configuration files, instance roles. Results go to stdout, messages to stderr, each message on one line that begins with
`objckpt:`. Progress bars appear where stderr is a terminal. Text from a checkpoint is printed with its control
characters escaped.
"""

# What a class name alone does not say; the rest comes from the classes.
FIRST_CODES = {0: "done", 1: "`diff`: the two differ; another error", 2: "wrong usage"}


def page() -> str:
    """The whole page."""
    group: Any = typer.main.get_command(build_app())
    parts = [INTRO]
    for name, command in group.commands.items():
        parts.append(section(name, command))
    parts.append("## Exit codes\n\n| code | meaning |\n| --- | --- |\n" + "\n".join(exit_codes()) + "\n")
    return "\n".join(parts)


def section(name: str, command: Any) -> str:
    """One verb: its help text, and a table of its arguments and options."""
    rows = [row(p) for p in command.params if not p.hidden]
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    takes = (p.metavar if p.required else f"[{p.metavar}]" for p in arguments)
    usage = " ".join(["objckpt", name, "[OPTIONS]", *takes])
    text = inspect.cleandoc(command.help or "").replace("\b\n", "")
    table = "\n".join(["| option | meaning | default |", "| --- | --- | --- |", *rows])
    return f"## objckpt {name}\n\n```\n{usage}\n```\n\n{text}\n\n{table}\n"


def row(param: Any) -> str:
    """A line of the table."""
    if param.param_type_name == "argument":
        return f"| `{param.metavar}` | {param.help} | {'required' if param.required else ''} |"
    takes = f" {param.metavar}" if param.metavar else ""
    names = ", ".join(f"`{name}{takes}`" for name in [*param.opts, *param.secondary_opts]).replace("|", "\\|")
    return f"| {names} | {param.help.replace('|', chr(92) + '|')} | {default(param)} |"


def default(param: Any) -> str:
    """The default as a user would give it."""
    if isinstance(param.show_default, str):
        return f"`{param.show_default}`"
    if param.required:
        return "required"
    if param.default is None or param.default is False:
        return ""
    return "yes" if param.default is True else f"`{param.default}`"


def exit_codes() -> Iterator[str]:
    """One row a code: the exceptions that have it."""
    classes: dict[int, list[str]] = {}
    for name, cls in vars(errors).items():
        if inspect.isclass(cls) and issubclass(cls, errors.ObjckptError):
            classes.setdefault(cls.exit_code, []).append(f"`{name}`")
    for code in sorted({*FIRST_CODES, *classes}):
        found = ", ".join(classes.get(code, []))
        yield f"| {code} | {': '.join(part for part in (FIRST_CODES.get(code), found) if part)} |"
    yield "| 128 + n | ended by signal n (130: Ctrl-C) |"


def main() -> int:
    if "--check" in sys.argv[1:]:
        current = TARGET.exists() and TARGET.read_text(encoding="utf-8") == page()
        if not current:
            print(f"{TARGET} is not current: python tools/gen_cli_docs.py", file=sys.stderr)
        return 0 if current else 1
    TARGET.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
