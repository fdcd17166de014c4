"""The soak in its short form; and that it notices what it looks for."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import soak

SOAK = Path(soak.__file__)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_few_rounds(tmp_path):
    done = subprocess.run(
        [sys.executable, str(SOAK), "--rounds", "6", "--seed", "3", "--mib", "0.5", "--minutes", "2", "--directory", tmp_path],
        capture_output=True, text=True, timeout=220, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.splitlines()[-1]
    assert last.startswith("soak: ") and last.endswith(" 0 violations") and " 0 kills" not in last, last
    assert "(0 acknowledged" not in last and " 0 checkpoints" not in last, last


def test_the_same_seed_gives_the_same_faults():
    args = [soak.parse(["--seed", "7"]) for _ in range(2)]
    first, second = (soak.Soak(a, Path()) for a in args)
    assert [first.next_fault() for _ in range(50)] == [second.next_fault() for _ in range(50)]
    assert {name for name, _ in (first.next_fault() for _ in range(300))} == set(first.FAULTS)


def test_a_training_that_resumes_wrongly_is_noticed():
    found: list[str] = []
    book = soak.Book(Counter(), found.append)
    book.states["S", 3], book.resumable = "right", 5
    book.resumed(5, "right")
    book.check_resumed({5: ("S", 3)})
    assert not found
    book.resumed(5, "wrong")
    book.check_resumed({5: ("S", 3)})
    book.resumed(4, "right")
    book.resumed(-1, "-")
    assert len(found) == 3 and "another state" in found[0] and "older" in found[1]


def test_a_lost_or_damaged_checkpoint_is_noticed(weed_url, monkeypatch):
    from support.handmade import SESSION, put_checkpoint

    from objckpt.format import keys
    from objckpt.store import open_store

    tried = soak.Soak(soak.parse([]), Path())
    tried.url, tried.book = weed_url, soak.Book(tried.counts, tried.violation)
    store = open_store(weed_url)
    state = {"step": 1, "history": []}
    commit = put_checkpoint(store, 1, state)
    tried.book.states[SESSION, 1] = soak.fingerprint(state)
    tried.book.acknowledged[0] = (SESSION, 1)
    assert tried.check() == 1 and not tried.violations

    tried.book.states[SESSION, 1] = "another"
    tried.check()
    assert len(tried.violations) == 1 and "not that which was saved" in tried.violations.pop()
    tried.book.states[SESSION, 1] = soak.fingerprint(state)

    tried.book.acknowledged[1] = (SESSION, 2)
    tried.check()
    assert [text for text in tried.violations if "record 1 was acknowledged as" in text]
    tried.violations.clear()
    del tried.book.acknowledged[1]

    store.delete([commit.index_key(0)])
    tried.check()
    assert len(tried.violations) == 1 and "is missing" in tried.violations.pop()

    store.put(keys.record(1), b"no record")
    tried.check()
    assert "damaged" in tried.violations[0]
    store.close()
