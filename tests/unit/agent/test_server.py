"""The agent's side, as far as it is a matter of single functions; the whole is tested with processes."""

from __future__ import annotations

import logging
import socket
from types import SimpleNamespace
from typing import Any

import pytest
from support.written import write_ranks

from objckpt.agent import server
from objckpt.agent.protocol import Channel
from objckpt.errors import FormatError, SaveError
from objckpt.format.values import TensorLeaf
from objckpt.restore import open_checkpoint


def record(text: str, *args: object) -> logging.LogRecord:
    return logging.LogRecord("objckpt", logging.WARNING, __file__, 1, text, args, None)


def test_what_is_logged_goes_to_the_trainer_and_never_raises(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging, "raiseExceptions", False)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        handler, trainer = server._ToTrainer(Channel(ours)), Channel(theirs)
        handler.emit(record("key %s is slow", "a\ud800b"))
        handler.emit(record("%d", "no number"))
        assert trainer.receive() == {"type": "warning", "text": "key a\\ud800b is slow"}
    handler.emit(record("nobody is there"))
    assert capsys.readouterr().err == "objckpt: nobody is there\n"


def opened(ranks: list[Any], tree: Any) -> None:
    store, commit = write_ranks(ranks, tree, opened=False)
    index = open_checkpoint(store, commit, ranks=[]).indexes[0]
    agent: Any = SimpleNamespace(store=store, session=commit.session, world_size=commit.world_size)
    server._Agent._open_as_a_reader(agent, index, commit.ranks)


def test_only_tensors_that_do_not_fit_together_are_told_of_their_meshes() -> None:
    def piece(name: str, offset: int, value: int) -> Any:
        return ((name,), "uint8", (8,), (offset,), (4,), bytes([value]) * 4)

    tree = {"w": TensorLeaf("w")}
    opened([[piece("w", 0, 1)], [piece("w", 4, 2)]], tree)
    with pytest.raises(SaveError, match=r"w: ranks 0 and 1 hold different bytes; .*names of their own"):
        opened([[piece("w", 0, 1)], [piece("w", 0, 2)], [piece("w", 4, 2)]], tree)
    with pytest.raises(FormatError, match="no mapping of ranks"):
        opened([[piece("w", 0, 1)], [piece("w", 4, 2)]], tree | {"per_rank": 5})
