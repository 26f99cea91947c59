"""How an attempt runs: in a process of its own, or inline."""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # attempts do without it
    import tenacity

TICK_SECONDS = 0.5


def sleep_with_ticks(seconds: float, wake: int | None, tick: Callable[[], None]) -> None:
    """Sleep, calling ``tick`` twice a second; return early when ``wake`` becomes readable."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        tick()
        if sleep_until_readable(min(left, TICK_SECONDS), wake):
            return


def sleep_until_readable(seconds: float, wake: int | None) -> bool:
    """Sleep; return early, and True, when the descriptor ``wake`` becomes readable."""
    if wake is None:
        time.sleep(seconds)
        return False
    poll = select.poll()  # not select.select: descriptors may be above 1023
    poll.register(wake, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def decided_pause(state: tenacity.RetryCallState) -> float:
    """Return the seconds that the last decision asks to let pass."""
    return float(state.outcome.result().decision.pause_seconds) if state.outcome else 0.0
