"""Runs a trainer: in the launcher's process, in its own process, or as a rank of several.

``attempt.interpreter`` and ``launcher.inline`` call :func:`run_attempt` in the process that trains.
It calls the trainer and sends its end to the launcher.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from omegaconf import DictConfig

from robust_train.attempt.ending import failed, lacks_resolver
from robust_train.attempt.last_save import save_owed_checkpoint
from robust_train.attempt.live import LiveAttempt
from robust_train.attempt.loading import (
    CHECKPOINTING,
    Trainer,
    call_with_run,
    note_reads,
    support_of,
)
from robust_train.attempt.run import Run, live_of
from robust_train.config.attempt import AttemptRequest
from robust_train.config.schema import RobustConfig
from robust_train.files import to_plain
from robust_train.host.votes import Flags
from robust_train.memory.stats import memory_in_use
from robust_train.model.errors import TrainingStopped
from robust_train.model.events import AttemptProcess, Event, Failed, Finished, TrainerSupports
from robust_train.model.failure import Failure, FailureKind

log = logging.getLogger("robust_train")

Send = Callable[[Event], None]
Stopping = Callable[[Callable[[], None]], AbstractContextManager[Any]]
"""A context within which signals call the given function, which asks the trainer to stop."""

TICK_SECONDS = 0.5
_JOIN_SECONDS = 1.0


def run_attempt(
    request: AttemptRequest,  # the attempt
    load: Callable[[], Trainer],  # returns the trainer, imported if necessary
    send: Send,  # sends events to the launcher
    *,
    stopping: Stopping,  # how signals ask this process to stop
    # Called twice a second if the launcher itself runs the attempt.
    tick: Callable[[], None] = lambda: None,
    # Whether the process ends with the attempt, so that memory need not be returned.
    process_ends: bool = True,
    rank: int = 0,  # among the ranks of all nodes
    flags: Flags | None = None,  # how several ranks agree
) -> BaseException | None:
    """Run the trainer and send :class:`Finished` or :class:`Failed`.

    Returns:
        The exception that ended it, for a caller in the same process, or None if it completed.
    """
    run = Run(
        run_dir=request.run_dir,
        attempt=request.attempt,
        resume_checkpoint=request.resume_checkpoint,
        report=send,
        rank=rank,
        world_size=request.ranks,
        flags=flags,
    )
    live = live_of(run)
    live.saving.start_writer()
    live.prepare(request)
    error: BaseException | None = None
    ending: Finished | Failed
    with contextlib.ExitStack() as signals:
        try:
            # A signal may already be waiting, and stops the trainer at once.
            signals.enter_context(stopping(stop_trainer(live)))
            ending = _train(request, load, run, tick)
        except BaseException as raised:
            error = _failure_in(raised, request)
            ending = Finished() if error is None else failed(error, live.hooks.evidence)
        # A trainer that has done its last step had nothing left to stop, and keeps its result.
        was_cut_short = live.stops.has_stopped_trainer and not live.reports.is_done
        if was_cut_short and isinstance(ending, Finished):
            why = "it was asked to stop, and did"
            ending = Failed(Failure(FailureKind.INTERRUPTED, why))
        _report_end(live, ending, send)
        if error is None or not process_ends:
            live.hooks.close(error)
    return error


def _train(
    request: AttemptRequest, load: Callable[[], Trainer], run: Run, tick: Callable[[], None]
) -> Finished:
    """Call the trainer and save its last checkpoint. Returns its result as the attempt's end."""
    live = live_of(run)
    with beside_the_trainer(live, tick):
        try:
            result = call_trainer(load(), request.trainer_cfg(), request.config, run)
        finally:
            live.saves.finish()
        # From here on a signal has nothing left to interrupt.
        live.stops.note_cooperation()
        save_owed_checkpoint(live)
    figures = figures_of(result, request.config.objective)
    return Finished(to_plain(figures, "the trainer's result"))


def _failure_in(raised: BaseException, request: AttemptRequest) -> BaseException | None:
    """Return the error to report for an exception, or None for ``sys.exit`` with success."""
    if isinstance(raised, SystemExit) and raised.code in (None, 0):
        return None
    if request.config.runs_inline:
        return raised
    return lacks_resolver(raised) or raised


def _report_end(live: LiveAttempt, ending: Finished | Failed, send: Send) -> None:
    """Send the last figures of an attempt, and its end after them."""
    live.reports.send_last_progress()
    live.speed.send()
    if live.supports(CHECKPOINTING):
        send(TrainerSupports((CHECKPOINTING,)))
    memory = memory_in_use()
    now = time.monotonic()
    send(replace(ending, step=live.reports.last_step, memory=memory, at=now))


def figures_of(result: Any, objective: str | None) -> Any:
    """Return a trainer's result. Of ``(metrics, objects)`` that is the metrics.

    ``objective`` is the name of the metric to optimise.
    """
    if isinstance(result, tuple) and result and isinstance(result[0], Mapping):
        result = result[0]
    if objective is None or not isinstance(result, Mapping):
        return result
    if objective not in result:
        names = ", ".join(map(str, result))
        log.warning("objective=%s: not in the result, which has %s", objective, names)
    return {**result, "objective": result.get(objective)}


def call_trainer(trainer: Trainer, cfg: DictConfig, config: RobustConfig, run: Run) -> Any:
    """Call the trainer with its config, and with ``run`` if it takes that. Returns its result."""
    live = live_of(run)
    live.configure(config)
    training = config.training
    has_read = note_reads(cfg, training.batch_size, training.gradient_accumulation_steps)
    live.describe_trainer(has_read, support_of(trainer, has_read))
    live.hooks.begin()
    try:
        result = call_with_run(trainer, cfg, run)
    except BaseException as error:
        live.hooks.end(error)
        raise
    live.hooks.end(None)
    return result


@contextlib.contextmanager
def beside_the_trainer(
    live: LiveAttempt, tick: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Do periodic work twice a second in another thread, on rank 0, while the trainer runs.

    Args:
        live: the attempt.
        tick: the launcher's work, if it runs the attempt itself.
    """
    if not live.is_main:
        yield
        return
    ended = threading.Event()

    def work() -> None:
        while not ended.wait(TICK_SECONDS):
            live.hooks.tick()
            tick()

    live.reports.send(AttemptProcess(os.getpid()))
    thread = threading.Thread(target=work, name="robust-train ticks", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        log.warning("this attempt takes no requests: %s", error)
    try:
        yield
    finally:
        ended.set()
        if thread.ident is not None:
            thread.join(_JOIN_SECONDS)  # the disk may hang


def stop_trainer(live: LiveAttempt) -> Callable[[], None]:
    """Return a function that asks a trainer to stop, and interrupts, once, a trainer that never
    reads ``run``.

    Further signals change nothing: a job's processes may get each signal several times, and only
    the launcher kills, when the time for a last checkpoint is over.
    """
    is_interrupted = False

    def stop() -> None:
        nonlocal is_interrupted
        live.stops.request_stop()
        if not live.stops.is_cooperative and not is_interrupted:
            is_interrupted = True
            raise TrainingStopped("interrupted by a signal")

    return stop
