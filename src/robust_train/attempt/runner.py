"""Runs one attempt: calls the trainer, and sends its result or failure to the launcher.

``attempt.interpreter`` calls :func:`run_attempt` in a process for this attempt, or for one of its
ranks. ``launcher.inline`` calls it in the launcher's own process.
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

from robust_train.attempt.ending import describe_end, find_missing_resolver
from robust_train.attempt.last_save import save_owed_checkpoint
from robust_train.attempt.live import LiveAttempt
from robust_train.attempt.loading import Trainer, call_with_run
from robust_train.attempt.run import Run, live_of
from robust_train.attempt.supports import CHECKPOINTING, find_support, watch_reads
from robust_train.config.attempt import AttemptRequest
from robust_train.config.schema import RobustConfig
from robust_train.files import to_plain
from robust_train.host.votes import Flags
from robust_train.memory.in_use import memory_in_use
from robust_train.model.errors import TrainingStopped
from robust_train.model.events import AttemptProcess, Event, Failed, Finished, TrainerSupports
from robust_train.model.failure import Failure, FailureKind

log = logging.getLogger("robust_train")

Send = Callable[[Event], None]
Stopping = Callable[[Callable[[], None]], AbstractContextManager[Any]]
"""A context within which signals call the given function, which asks the trainer to stop."""

TICK_SECONDS = 0.5
# At the end of training, a tick that hangs is given up after this time.
_JOIN_SECONDS = 1.0


def run_attempt(
    request: AttemptRequest,
    load: Callable[[], Trainer],
    send: Send,
    *,
    stopping: Stopping,
    tick: Callable[[], None] = lambda: None,
    process_ends: bool = True,
    rank: int = 0,
    flags: Flags | None = None,
) -> BaseException | None:
    """Run the trainer and send :class:`Finished` or :class:`Failed`.

    Args:
        request: the attempt.
        load: returns the trainer, and imports it if necessary.
        send: sends an event to the launcher.
        stopping: returns a context within which signals stop the trainer.
        tick: work that the launcher does twice a second, if it runs the attempt itself.
        process_ends: whether the process ends with the attempt, so that it need not return memory.
        rank: the rank of this process among those of all nodes.
        flags: how several ranks agree to stop or save at the same step.

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
    ending: Finished | Failed = Finished()
    with contextlib.ExitStack() as signals:
        try:
            # A signal may already be waiting, and stops the trainer at once.
            signals.enter_context(stopping(stop_trainer(live)))
            ending = _train(request, load, run, tick)
        except BaseException as raised:
            error = _failure_in(raised, request)
            if error is not None:
                ending = describe_end(error, live.hooks.evidence)
        # A trainer that returned because of a stop has not finished, unless it had already done its
        # last step.
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
    with run_ticks(live, tick):
        try:
            result = call_trainer(load(), request.trainer_cfg(), request.config, run)
        finally:
            live.saves.finish()
        # From here on a signal has nothing left to interrupt.
        live.stops.note_cooperation()
        save_owed_checkpoint(live)
    figures = select_figures(result, request.config.objective)
    return Finished(to_plain(figures, "the trainer's result"))


def _failure_in(raised: BaseException, request: AttemptRequest) -> BaseException | None:
    """Return the error to report for an exception, or None for ``sys.exit`` with success."""
    if isinstance(raised, SystemExit) and raised.code in (None, 0):
        return None
    if request.config.runs_inline:
        return raised
    return find_missing_resolver(raised) or raised


def _report_end(live: LiveAttempt, ending: Finished | Failed, send: Send) -> None:
    """Send the last figures of an attempt, and its end after them."""
    live.reports.send_last_progress()
    live.speed.send()
    if live.supports(CHECKPOINTING):
        send(TrainerSupports((CHECKPOINTING,)))
    memory = memory_in_use()
    now = time.monotonic()
    send(replace(ending, step=live.reports.last_step, memory=memory, at=now))


def select_figures(result: Any, objective: str | None) -> Any:
    """Return the part of a trainer's result that the job records.

    From ``(metrics, objects)`` only the metrics are kept. If ``objective`` names a metric, its
    value is added under the key ``objective``.
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
    """Call the trainer with its config, and with ``run`` if it accepts a second argument. Returns
    its result."""
    live = live_of(run)
    live.configure(config)
    training = config.training
    has_read = watch_reads(cfg, training.batch_size, training.gradient_accumulation_steps)
    live.describe_trainer(has_read, find_support(trainer, has_read))
    live.hooks.begin()
    try:
        result = call_with_run(trainer, cfg, run)
    except BaseException as error:
        live.hooks.end(error)
        raise
    live.hooks.end(None)
    return result


@contextlib.contextmanager
def run_ticks(live: LiveAttempt, tick: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Do the features' periodic work twice a second within the block, in another thread of rank 0.

    Args:
        live: the attempt.
        tick: the launcher's periodic work, if it runs the attempt itself.
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
        log.warning("this attempt cannot take requests, no thread can be started: %s", error)
    try:
        yield
    finally:
        ended.set()
        if thread.ident is not None:
            thread.join(_JOIN_SECONDS)


def stop_trainer(live: LiveAttempt) -> Callable[[], None]:
    """Return a function for signal handlers, which asks the trainer to stop.

    A trainer that never asks :meth:`.run.Run.should_stop` is interrupted by an exception, once. A
    job's processes may get each signal several times, so further signals change nothing. If the
    trainer continues, the launcher kills it when the time for a last checkpoint is over.
    """
    is_interrupted = False

    def stop() -> None:
        nonlocal is_interrupted
        live.stops.request_stop()
        if not live.stops.is_cooperative and not is_interrupted:
            is_interrupted = True
            raise TrainingStopped("interrupted by a signal")

    return stop
