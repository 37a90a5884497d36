"""How long a lost daemon is sought."""

from __future__ import annotations

import pytest

from gpufeed.cachefs.errors import DaemonUnavailableError
from gpufeed.cachefs.reconnect import DELAY_FIRST_S, DELAY_MAX_S, LIMIT_S, Patience

LOST = DaemonUnavailableError("it went away")


@pytest.mark.parametrize("seed", range(5))
def test_delays_grow_to_a_limit_and_end(seed: int) -> None:
    patience = Patience(seed)
    now_s, delays = 1000.0, []
    while now_s - 1000.0 < LIMIT_S - 1e-6:
        delays.append(patience.delay_s(LOST, now_s))
        now_s += delays[-1]
    with pytest.raises(DaemonUnavailableError, match="sought for 60 s: it went away"):
        patience.delay_s(LOST, now_s + 1e-6)
    assert now_s - 1000.0 == pytest.approx(LIMIT_S)
    assert DELAY_FIRST_S / 2 <= delays[0] <= DELAY_FIRST_S
    assert max(delays) <= DELAY_MAX_S
    assert LIMIT_S / DELAY_MAX_S < len(delays) < 3 * LIMIT_S / DELAY_MAX_S


def test_what_was_read_begins_it_anew() -> None:
    patience = Patience(1)
    for _ in range(10):
        patience.delay_s(LOST, 0.0)
    patience.read()
    assert patience.delay_s(LOST, 2 * LIMIT_S) <= DELAY_FIRST_S
