"""How an attempt runs: in a process of its own, or inline."""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from typing import Protocol

from robust_train.events import Event
from robust_train.execution.request import AttemptRequest
from robust_train.values import Outcome

TICK_SECONDS = 0.5


class Executor(Protocol):
    """What the launcher needs of a way to run attempts."""

    def poll(self) -> None:
        """Check, without waiting, that the trainer accepts its config; raises ConfigError."""

    def prepare(self) -> None:
        """Wait until the trainer can be called; raises ConfigError if it cannot."""

    def run(
        self,
        request: AttemptRequest,
        on_event: Callable[[Event], None],
        *,
        hold: tuple[int, ...] = (),
        tick: Callable[[], None] = lambda: None,
    ) -> Outcome:
        """Run one attempt to its end, however it ends.

        The attempt and what it starts keep copies of the descriptors ``hold`` open. ``tick`` is
        called at least twice a second.

        Raises:
            ConfigError: the trainer cannot be imported, or refuses the config.
        """

    def close(self, *, keep_server: bool) -> None:
        """Release what was started; ``keep_server``: another job may follow in this process."""


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
