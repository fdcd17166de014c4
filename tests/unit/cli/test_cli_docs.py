from __future__ import annotations

import gen_cli_docs


def test_the_page_is_current():
    assert gen_cli_docs.TARGET.read_text(encoding="utf-8") == gen_cli_docs.page()


def test_every_verb_is_on_it():
    page = gen_cli_docs.page()
    for verb in ("ls", "show", "restore", "verify", "diff", "rm", "tag", "gc", "doctor", "local"):
        assert f"## objckpt {verb}\n" in page
