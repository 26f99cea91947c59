"""How an attempt runs: in a process of its own, or inline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from robust_train.execution.request import AttemptRequest
from robust_train.types import Outcome


class Executor(Protocol):
    """What the launcher needs of a way to run attempts."""

    def sleep(self, seconds: float) -> None:
        """Wait while a device is waited for; may raise what makes waiting pointless."""

    def prepare(self) -> None:
        """Make sure that the trainer can be called.

        Raises:
            ConfigError: it cannot be imported.
        """

    def run(self, request: AttemptRequest, on_event: Callable[[dict[str, Any]], None]) -> Outcome:
        """Run one attempt to its end, however it ends."""

    def close(self, *, keep_server: bool) -> None:
        """Release what was started; ``keep_server``: another job may follow in this process."""
