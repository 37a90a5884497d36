"""Versions: what two sides agree on, and what they say when they cannot."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpufeed.cachefs import handshake, wire
from gpufeed.cachefs.errors import ProtocolError
from gpufeed.cachefs.handshake import Hello, agree, check_welcome, hello

# What clients and daemons of the first version sent, byte for byte.
FIRST_HELLO = b"GPFD\x01\x00\x01\x00\x00\x00\x00\x00" + b'{"window_bytes":0}'
FIRST_WELCOME = (
    b"GPFD\x01\x00\x02\x00\x00\x00\x00\x00"
    b'{"arena_bytes":4194304,"extent_bytes":65536,"window_extents":6}'
)


def test_a_client_of_the_first_version_is_understood() -> None:
    message = wire.unpack(FIRST_HELLO)
    assert message.kind is wire.Kind.HELLO
    assert agree(Hello.unpack(message.json())) == 1


def test_a_daemon_of_the_first_version_is_understood() -> None:
    assert check_welcome(wire.unpack(FIRST_WELCOME).json()) == 1


def test_what_is_said_is_what_is_heard() -> None:
    said = hello(window_bytes=7, whole=True, token="t")
    assert Hello.unpack(json.loads(json.dumps(said.pack()))) == said


@pytest.mark.parametrize(
    ("client", "daemon", "expected"),
    [((1, 3), (1, 2), 2), ((1, 1), (1, 2), 1), ((2, 5), (1, 4), 4), ((3, 3), (2, 3), 3)],
)
def test_the_newest_that_both_speak_is_taken(monkeypatch, client, daemon, expected) -> None:
    monkeypatch.setattr(handshake, "PROTOCOL_OLDEST", daemon[0])
    monkeypatch.setattr(handshake, "PROTOCOL_NEWEST", daemon[1])
    assert agree(Hello(protocol=client)) == expected


@pytest.mark.parametrize(
    ("client", "daemon", "words"),
    [
        (
            (1, 1),
            (2, 3),
            r"speaks session protocol 2 to 3, the client \(gpufeed 0.0\) 1: .*client$",
        ),
        ((4, 5), (1, 3), r"speaks session protocol 1 to 3, the client .* 4 to 5: .*daemon$"),
    ],
)
def test_without_one_the_side_to_upgrade_is_named(monkeypatch, client, daemon, words) -> None:
    monkeypatch.setattr(handshake, "PROTOCOL_OLDEST", daemon[0])
    monkeypatch.setattr(handshake, "PROTOCOL_NEWEST", daemon[1])
    with pytest.raises(ProtocolError, match=words):
        agree(Hello(protocol=client, software="gpufeed 0.0"))


@pytest.mark.parametrize(("chosen", "side"), [(1, "daemon"), (4, "client")])
def test_a_client_refuses_what_it_does_not_speak(monkeypatch, chosen, side) -> None:
    monkeypatch.setattr(handshake, "PROTOCOL_OLDEST", 2)
    monkeypatch.setattr(handshake, "PROTOCOL_NEWEST", 3)
    with pytest.raises(ProtocolError, match=rf"chose {chosen}: upgrade the {side}$"):
        check_welcome({"protocol": chosen, "software": "gpufeed 9"})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
FIELDS = ["protocol", "software", "window_bytes", "whole", "token"]


# Recursive values are slow to be made while other programs use the CPUs.
@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.dictionaries(st.sampled_from(FIELDS), JSON))
def test_whatever_a_client_says_is_understood_or_refused(value) -> None:
    try:
        heard = Hello.unpack(value)
        agree(heard)
    except ProtocolError:
        return
    assert heard.software.isprintable()
    assert 0 <= heard.window_bytes < 1 << 63
