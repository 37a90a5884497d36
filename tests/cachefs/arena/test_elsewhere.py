"""Arenas of earlier daemons are counted once each, for as long as somebody says he maps them."""

from __future__ import annotations

from gpufeed.cachefs.arena.elsewhere import Elsewhere


def test_what_several_map_counts_once_and_until_the_last_lets_go() -> None:
    elsewhere = Elsewhere("own")
    elsewhere.hold(1, [("old", 100), ("older", 10)])
    elsewhere.hold(2, [("old", 120)])
    assert elsewhere.total_bytes == 130
    elsewhere.drop(1, "old")
    assert elsewhere.total_bytes == 130
    elsewhere.drop(2, "old")
    assert elsewhere.total_bytes == 10
    elsewhere.forget(1)
    assert elsewhere.total_bytes == 0
    assert not elsewhere._told


def test_the_daemons_own_arena_is_not_elsewhere_and_strange_drops_are_nothing() -> None:
    elsewhere = Elsewhere("own")
    elsewhere.hold(1, [("own", 100)])
    elsewhere.drop(1, "own")
    elsewhere.drop(7, "never")
    elsewhere.forget(7)
    assert elsewhere.total_bytes == 0
