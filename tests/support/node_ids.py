"""Node ids of tests in documents (`tests/unit/test_log.py::test_x`): which a text names, and whether they exist.

Found by parsing the files, not by importing them. A parametrised test is named without its parameters.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_NODE_ID = re.compile(r"tests/[\w/]+\.py(?:::\w+)*")


def named(text: str) -> list[str]:
    """The node ids and paths of test files in `text`."""
    return _NODE_ID.findall(text)


def exists(node_id: str) -> bool:
    """Whether pytest would collect a test of that id."""
    path, _, name = node_id.partition("::")
    return Path(path).name.startswith("test_") and name in tests_of(path)


@cache
def tests_of(path: str) -> frozenset[str]:
    """Names of the tests in a file, `Class::test` for methods; those that `from support.x import *` brings in too."""
    file = ROOT / path
    if not file.is_file():
        return frozenset()
    body = ast.parse(file.read_text(encoding="utf-8")).body
    found = set(_functions(body))
    for node in body:
        if isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            found |= {f"{node.name}::{name}" for name in _functions(node.body)}
        elif isinstance(node, ast.ImportFrom) and node.module and any(alias.name == "*" for alias in node.names):
            found |= tests_of(f"tests/{node.module.replace('.', '/')}.py")
    return frozenset(found)


def _functions(body: list[ast.stmt]) -> list[str]:
    defined = (node for node in body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))
    return [node.name for node in defined if node.name.startswith("test_")]
