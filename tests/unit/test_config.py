"""Sizes that follow from options."""

from __future__ import annotations

from objckpt import StoreOptions


def test_a_request_is_large_but_every_connection_gets_its_share() -> None:
    options = StoreOptions(connections=8)
    assert {gib: options.piece_bytes(gib << 30) >> 20 for gib in (0, 1, 2, 100)} == {0: 16, 1: 32, 2: 64, 100: 64}
    assert StoreOptions(connections=64).piece_bytes(2 << 30) == 16 << 20
