"""Sleep in ticks, until time has passed or a descriptor is readable."""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Iterable

TICK_SECONDS = 0.5
FOREVER_SECONDS = 1e6


def sleep_with_ticks(seconds: float, tick: Callable[[], None]) -> None:
    """Sleep, calling ``tick`` at least twice a second."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        tick()
        time.sleep(min(left, TICK_SECONDS))


def sleep_until_readable(seconds: float, wake: int | None) -> bool:
    """Sleep; return early, and True, when the descriptor ``wake`` becomes readable."""
    if wake is None:
        time.sleep(seconds)
        return False
    poll = select.poll()  # not select.select: descriptors may be above 1023
    poll.register(wake, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def readable(descriptors: Iterable[int], seconds: float) -> set[int]:
    """Wait for one of the descriptors to become readable; return those that are."""
    poll = select.poll()  # not select.select: descriptors may be above 1023
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return {descriptor for descriptor, _ in poll.poll(seconds * 1000)}
