"""`tests/cases.md`: every case has tests that exist, or says why not."""

from __future__ import annotations

import re

import pytest
from support.node_ids import ROOT, exists, named

ROWS = re.findall(r"^\| (E\d+) \| (.+?) \| (.*?) \|$", (ROOT / "tests/cases.md").read_text(encoding="utf-8"), re.M)
REASONS = ("not yet: ", "not a test: ", "not ours: ")


def test_there_are_cases():
    ids = [case for case, _, _ in ROWS]
    assert len(ids) == len(set(ids)) > 70


@pytest.mark.parametrize(("case", "what", "tests"), ROWS, ids=[case for case, _, _ in ROWS])
def test_a_case_names_tests_that_exist_or_says_why_not(case, what, tests):
    assert 10 < len(what) < 110
    if tests.startswith(REASONS):
        assert len(tests) > 20
        return
    found = named(tests)
    assert found and "`" + "`<br>`".join(found) + "`" == tests, "node ids only"
    assert [node_id for node_id in found if not exists(node_id)] == []


def test_a_test_that_carries_a_number_carries_that_of_a_case():
    known = {case.lower() for case, _, _ in ROWS}
    for path in (ROOT / "tests").rglob("test_*.py"):
        for name in re.findall(r"^ *def (test_\w+)", path.read_text(encoding="utf-8"), re.M):
            assert set(re.findall(r"(?<=_)e\d{3}(?=[a-z]?_)", name)) <= known, f"{path}: {name}"


@pytest.mark.parametrize(
    "node_id",
    [
        "tests/unit/test_cases.py::test_missing",
        "tests/unit/test_cases.py::",
        "tests/unit/nowhere.py::test_x",
        "tests/support/store_suite.py::test_put_if_absent",
        "tests/unit/test_cases.py::ROWS",
    ],
)
def test_what_does_not_exist_is_noticed(node_id):
    assert not exists(node_id)
    assert exists("tests/conformance/test_store_memory.py::test_put_if_absent")
