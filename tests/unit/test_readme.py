"""The README promises no command that CI does not run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def fenced(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def commands() -> list[str]:
    lines = (line.split("  #")[0].strip() for block in fenced("bash") for line in block.splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def run_by_ci() -> str:
    paths = [ROOT / ".ci/run", ROOT / "tools/test.sh", ROOT / "tools/quickstart.sh", *(ROOT / "tests").rglob("*.py")]
    return "\n".join(path.read_text(encoding="utf-8") for path in paths if path != Path(__file__))


@pytest.mark.parametrize("command", commands())
def test_ci_runs_the_command(command):
    words = command.split()
    if words[0] == "objckpt":  # tests call the command line with their own URLs: the verb has to appear
        assert re.search(rf"objckpt {words[1]}\b|[\"']{words[1]}[\"']", run_by_ci()), command
    else:
        assert command in run_by_ci() or " ".join(words[:2]) in run_by_ci(), command


def test_there_are_commands():
    assert {"bash tools/quickstart.sh", "bash tools/test.sh"} <= set(commands())


def test_python_blocks_compile():
    assert fenced("python")
    for block in fenced("python"):
        compile(block, "README.md", "exec")


def test_named_files_exist():
    for name in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / name).exists(), name


def test_length():
    assert len(README.splitlines()) <= 150
