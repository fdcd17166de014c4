"""`objckpt/docs/guarantees.md`: the guarantees of the README, each with tests that exist."""

from __future__ import annotations

import re

import pytest
from support.node_ids import ROOT, exists, named

PAGE = (ROOT / "objckpt/docs/guarantees.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
SECTIONS = {int(n): (title, body) for n, title, body in re.findall(r"(?ms)^## (\d+)\. (.+?)$(.*?)(?=^## |\Z)", PAGE)}


def test_there_are_eight():
    assert list(SECTIONS) == list(range(1, 9))


@pytest.mark.parametrize("number", SECTIONS)
def test_a_guarantee_names_tests_that_exist(number):
    found = named(SECTIONS[number][1])
    assert len(found) >= 2 and len(found) == len(set(found))
    assert [node_id for node_id in found if not exists(node_id)] == []


@pytest.mark.parametrize("number", SECTIONS)
def test_the_readme_gives_it_in_the_same_words(number):
    listed = re.search(rf"(?ms)^{number}\. (.+?)\.$(?=\n(?:\d\. |\n))", README.partition("## Guarantees")[2])
    assert listed, f"guarantee {number} is not in the README"
    assert " ".join(listed[1].split()) == SECTIONS[number][0]


def test_the_readme_leads_here():
    assert "](objckpt/docs/guarantees.md)" in README.partition("## Guarantees")[2]
