"""``isolation=none`` and ``train.py``: attempts run in this process."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping

from robust_train.config.attempt import AttemptSettings
from robust_train.errors import ConfigError
from robust_train.events import Event, Failed, Finished, MemoryHeld
from robust_train.execution.progress import AttemptProgress
from robust_train.execution.request import AttemptRequest
from robust_train.execution.runner import Trainer, new_run, run_attempt
from robust_train.execution.signals import SignalWatch
from robust_train.failures.shortage import do_without_onednn
from robust_train.memory.allocator import VARIABLE
from robust_train.memory.cleanup import StartingMemory, release_and_check
from robust_train.readable import first_line
from robust_train.runfolder import trackers
from robust_train.values import FailureKind, Outcome

log = logging.getLogger("robust_train")


class InlineExecutor:
    """Calls the trainer directly."""

    def __init__(
        self, trainer: Callable[[], Trainer], signals: SignalWatch, *, can_restart: bool = True
    ) -> None:
        self._trainer = trainer
        self._signals = signals
        self._can_restart = can_restart
        self._memory_at_first: StartingMemory | None = None

    def poll(self) -> None:
        """Do nothing: nothing goes on beside this process."""

    def close(self, *, keep_server: bool) -> None:
        """Do nothing: nothing was started."""

    def prepare(self, tick: Callable[[], None] = lambda: None) -> None:
        """Import the trainer; raises ConfigError if it cannot be imported."""
        self._trainer()

    def run(
        self,
        request: AttemptRequest,
        on_event: Callable[[Event], None],
        *,
        hold: tuple[int, ...] = (),
        tick: Callable[[], None] = lambda: None,
    ) -> Outcome:
        """Run one attempt; ``hold`` is open in this process anyway."""
        progress = AttemptProgress()

        def take(event: Event) -> None:
            nonlocal progress
            progress = progress.after(event)
            self._signals.is_over = isinstance(progress.ending, Finished)
            if not isinstance(event, (Finished, Failed)):
                on_event(event)

        def stop(ask_trainer: Callable[[], None]) -> None:
            log.info("stopping: waiting for the trainer's last checkpoint")
            ask_trainer()

        if self._memory_at_first is None:
            self._memory_at_first = StartingMemory()
        started = time.monotonic()
        with _variables_set(request.environ):
            error = run_attempt(
                request,
                new_run(request, take, can_restart=self._can_restart),
                self._trainer,
                take,
                stopping=lambda ask: self._signals.handed_to(lambda signum: stop(ask)),
                tick=tick,
                process_ends=False,
            )
        if isinstance(progress.ending, Failed) and progress.ending.config_error:
            raise ConfigError(progress.ending.config_error) from error
        failure = progress.failure
        was_bug = failure is not None and failure.kind is FailureKind.BUG
        if failure is not None:
            do_without_onednn(failure)
        # a debugger may need what the frames hold
        if error is not None and AttemptSettings.of(request.cfg).memory.clear_on_failure:
            left = None
            try:
                left = release_and_check(error, self._memory_at_first, keep_traceback=was_bug)
            except RuntimeError as refusal:  # after a fault the device answers nothing
                log.warning("the attempt's memory is not released: %s", first_line(refusal))
            if left is not None:
                log.warning("%s", left)
                on_event(MemoryHeld(left))
        # only what ends the job may keep its frames, and the tensors in them, alive
        kept = error if was_bug else None
        return progress.outcome(failure, time.monotonic() - started, error=kept)


_VARIABLES = (VARIABLE, *trackers.VARIABLES)


@contextlib.contextmanager
def _variables_set(environ: Mapping[str, str]) -> Iterator[None]:
    """Set the allocator's variable, which is read when CUDA starts, and those of trackers, for this
    attempt only."""
    before = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    os.environ.update({name: environ[name] for name in _VARIABLES if name in environ})
    try:
        yield
    finally:
        for name in _VARIABLES:
            os.environ.pop(name, None)
        os.environ.update(before)
