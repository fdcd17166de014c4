from __future__ import annotations

import io
import json
import os
import sys

import pytest

from objckpt.cli import output, plain
from objckpt.format.values import Pickled, TensorLeaf, TorchDtype


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (1 << 20, "1.0 MiB"),
        (3 << 30, "3.0 GiB"),
        (1 << 60, "1.0 EiB"),
        (1 << 75, "32768.0 EiB"),
    ],
)
def test_sizes(nbytes, text):
    assert output.human(nbytes) == text


@pytest.mark.parametrize(
    "hostile", ["\x1b[2J", "\x9b2J", "\r", "\n", "\u202e", "\u2028", "\u200b", "\ud800", "\x07", "\x7f"]
)
def test_nothing_unprintable_is_printed(hostile):
    shown = output.printable(f"a{hostile}é漢b")
    assert shown.isprintable()
    assert "é漢" in shown


def test_table_aligns_and_escapes():
    lines = list(output.table(("NAME", "N"), [("a", "1"), ("b\x1b[m", "200")], right=("N",)))
    assert lines == ["NAME       N", "a          1", "b\\x1b[m  200"]


def test_a_closed_pipe_is_no_error(monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", buffering=1) as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        for _ in range(3):
            output.line("x" * 100_000)
        output.flush()


def test_no_stdout_at_all(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    output.line("x")
    output.flush()


def test_a_document_of_a_list_has_a_line_for_each_element(capsys):
    output.document([{"a": "\x1bé"}, {"a": 2}])
    text = capsys.readouterr().out
    assert len(text.splitlines()) == 2
    assert text.isascii() and "\x1b" not in text
    assert json.loads(text) == [{"a": "\x1bé"}, {"a": 2}]


def test_empty_list_is_one_line(capsys):
    output.document([])
    assert capsys.readouterr().out == "[]\n"


def test_progress_is_drawn_on_terminals_only(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with output.progress("verify") as listener:
        listener("verify", 1, 2)
    assert stream.getvalue() == ""


def test_unfinished_files_are_removed(tmp_path):
    file = tmp_path / "f"
    file.write_text("")
    with pytest.raises(ZeroDivisionError), output.removed_on_end(str(file)):
        raise ZeroDivisionError
    assert not file.exists()
    file.write_text("")
    with output.removed_on_end(str(file)) as keep:
        keep()
    assert file.exists()


def test_values_as_json():
    value = {
        "int": 3,
        "huge": 10**5000,
        "nan": float("nan"),
        0: (1, [2.5, None]),
        "bytes": b"abc",
        "pickled": Pickled(b"12345"),
        "dtype": TorchDtype("bfloat16"),
        "leaf": TensorLeaf("model/w"),
        "set": {3, 1},
    }
    shown = plain.plain(value)
    json.dumps(shown, allow_nan=False)
    assert shown["%(0)"] == [1, [2.5, None]]
    assert shown["pickled"] == "<5 bytes, pickled>" and shown["dtype"] == "torch.bfloat16"
    assert shown["huge"].startswith("0x") and shown["nan"] == "nan" and shown["set"] == "{1, 3}"
    assert len(plain.short(value)) <= 200
