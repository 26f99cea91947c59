"""Calls the trainer in the launcher's process: for ``isolation=none`` and for an engine's ranks.

:class:`.driver.InlineDriver` and :class:`.guest.RankDriver` use :class:`InlineExecutor`. This
module is the launcher's only import of ``attempt/``, and thus of torch. Jobs whose attempts run in
interpreters of their own never import it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections.abc import Callable, Iterator, Mapping

from robust_train.attempt.code import find_user_modules as find_user_modules
from robust_train.attempt.loading import Trainer, load
from robust_train.attempt.runner import run_attempt
from robust_train.attempt.signals import shield_workers as shield_workers
from robust_train.config.attempt import AttemptRequest
from robust_train.config.trainers import TrainerRef
from robust_train.failures.shortage import do_without_onednn
from robust_train.folder import trackers
from robust_train.host.allocator import VARIABLE
from robust_train.host.signals import SignalWatch
from robust_train.host.votes import Flags
from robust_train.memory.clearing import StartingMemory, release_and_check
from robust_train.model.errors import RunFolderLostError
from robust_train.model.events import Event, Failed, MemoryHeld
from robust_train.model.exit import Exit
from robust_train.model.failure import FailureKind
from robust_train.readable import first_line

log = logging.getLogger("robust_train")


def load_trainer(trainer: str | Trainer, ref: TrainerRef) -> Trainer:
    """Return the trainer as a function, imported if it is given by its path.

    Raises:
        ConfigError: its path cannot be imported.
    """
    if isinstance(trainer, str):
        return load(ref)
    return trainer


class InlineExecutor:
    """Runs attempts by calling the trainer in this process.

    Args:
        trainer: returns the trainer.
        rank: this process's rank.
        flags: how several ranks agree when to stop, None for a single rank. With several ranks,
            each process ends with its attempt, so it releases no memory.
        on_failure: called when an attempt has failed, before the event is passed on.
    """

    def __init__(
        self,
        trainer: Callable[[], Trainer],
        *,
        rank: int = 0,
        flags: Flags | None = None,
        on_failure: Callable[[AttemptRequest, Failed], None] = lambda request, event: None,
    ) -> None:
        self._trainer = trainer
        self._rank = rank
        self._flags = flags
        self._on_failure = on_failure
        self._memory_at_first: StartingMemory | None = None

    def poll(self) -> None:
        """Do nothing, because no other process runs."""

    def close(self) -> None:
        """Do nothing, because nothing was started."""

    def prepare(self, tick: Callable[[], None]) -> None:
        """Import the trainer.

        Raises:
            ConfigError: the trainer cannot be imported.
        """
        self._trainer()

    def run(
        self,
        request: AttemptRequest,
        on_event: Callable[[Event], None],
        signals: SignalWatch,
        *,
        hold: tuple[int, ...] = (),
        tick: Callable[[], None] = lambda: None,
    ) -> Exit:
        """Run an attempt, with ``tick`` in another thread.

        ``hold`` is not used: the reservations' descriptors are open in this process anyway.
        """
        was_bug = False

        def tick_in_thread() -> None:
            try:
                tick()
            except RunFolderLostError:
                # An exception in this thread would not stop the trainer. A signal does.
                if not signals.received:
                    signals.deliver(signal.SIGTERM)

        def take(event: Event) -> None:
            nonlocal was_bug
            if isinstance(event, Failed):
                was_bug = event.failure.kind is FailureKind.BUG
                do_without_onednn(event.failure)
                self._on_failure(request, event)
            on_event(event)

        @contextlib.contextmanager
        def stop_on_signal(ask_trainer: Callable[[], None]) -> Iterator[None]:
            def stop(signum: int) -> None:
                log.info("stopping: waiting for the trainer's last checkpoint")
                ask_trainer()

            with signals.hand_signals_to(stop):
                if signals.received:  # a signal arrived before the handler was set
                    stop(signals.received)
                yield

        if self._memory_at_first is None:
            self._memory_at_first = StartingMemory()
        process_ends = self._flags is not None
        with _set_variables(request.environ):
            error = run_attempt(
                request,
                self._trainer,
                take,
                stopping=stop_on_signal,
                tick=tick_in_thread,
                process_ends=process_ends,
                rank=self._rank,
                flags=self._flags,
            )
        # A debugger may need the values in the frames.
        cleared_after = request.config.chosen("clear_after")
        keeps_frames = cleared_after is not None and "failure" not in cleared_after
        if error is not None and not keeps_frames and not process_ends:
            _release_memory(error, self._memory_at_first, on_event, keep_traceback=was_bug)
        # The exception's frames keep tensors alive. Only a bug is returned, since it ends the job.
        if was_bug:
            return Exit(error=error)
        return Exit()


def _release_memory(
    error: BaseException,
    memory_at_first: StartingMemory,
    on_event: Callable[[Event], None],
    *,
    keep_traceback: bool,
) -> None:
    """Release the memory of an attempt that ``error`` ended, and warn of memory still in use."""
    try:
        left = release_and_check(error, memory_at_first, keep_traceback=keep_traceback)
        if left is not None:
            log.warning("%s", left)
            on_event(MemoryHeld(left))
    # CUDA refuses every call after a fault of the device.
    except RuntimeError as refusal:
        log.warning("the attempt's memory is not released: %s", first_line(refusal))


# CUDA reads the allocator's variable when it starts.
_VARIABLES = (VARIABLE,) + trackers.VARIABLES


@contextlib.contextmanager
def _set_variables(environ: Mapping[str, str]) -> Iterator[None]:
    """Set the attempt's variables for the allocator and for trackers, for this attempt only."""
    before = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    os.environ.update({name: environ[name] for name in _VARIABLES if name in environ})
    try:
        yield
    finally:
        for name in _VARIABLES:
            os.environ.pop(name, None)
        os.environ.update(before)
