"""How an attempt runs: in a process of its own, or inline."""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from typing import Protocol

from robust_train.events import Event
from robust_train.execution.request import AttemptRequest
from robust_train.values import Outcome


class Executor(Protocol):
    """What the launcher needs of a way to run attempts.

    ``tick`` is called at least every half second.
    """

    def sleep(
        self, seconds: float, wake: int | None = None, tick: Callable[[], None] = lambda: None
    ) -> None:
        """Wait while a device is waited for; may raise what makes waiting pointless.

        Returns early when the descriptor ``wake`` becomes readable.
        """

    def prepare(self) -> None:
        """Make sure that the trainer can be called.

        Raises:
            ConfigError: it cannot.
        """

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
        """

    def close(self, *, keep_server: bool) -> None:
        """Release what was started; ``keep_server``: another job may follow in this process."""


def sleep_until_readable(seconds: float, wake: int | None) -> bool:
    """Sleep; return early, and True, when the descriptor ``wake`` becomes readable."""
    if wake is None:
        time.sleep(seconds)
        return False
    poll = select.poll()  # not select.select: descriptors may be above 1023
    poll.register(wake, select.POLLIN)
    return bool(poll.poll(seconds * 1000))
