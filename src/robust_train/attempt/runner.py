"""The one way to run a trainer: in the launcher's process, in its own, or as one of several."""

from __future__ import annotations

import base64
import contextlib
import logging
import multiprocessing.util
import os
import pickle
import re
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from omegaconf import DictConfig
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from robust_train.attempt.hooks import load_hooks
from robust_train.attempt.live import LiveAttempt, memory_in_use
from robust_train.attempt.loading import (
    CHECKPOINTING,
    WORKERS,
    Trainer,
    call_with_run,
    note_reads,
    support_of,
)
from robust_train.attempt.run import Run, live_of
from robust_train.config.attempt import AttemptRequest
from robust_train.config.placeholders import SplitRule
from robust_train.config.schema import RobustConfig
from robust_train.failures import classify_failure
from robust_train.files import plain
from robust_train.folder.checkpoints import CheckpointError
from robust_train.host.signals import STOP_SIGNALS, UNDER_SUBMITIT
from robust_train.host.votes import Flags
from robust_train.model.errors import (
    ConfigError,
    RankFailure,
    TrainingDiverged,
    TrainingStopped,
    UserError,
)
from robust_train.model.events import AttemptProcess, Event, Failed, Finished, TrainerSupports
from robust_train.model.failure import Clue, Evidence, Failure, FailureKind
from robust_train.policy.sizes import BatchSearch

log = logging.getLogger("robust_train")

Send = Callable[[Event], None]
Stopping = Callable[[Callable[[], None]], AbstractContextManager[Any]]
"""Within such a context signals call the given function, which asks the trainer to stop."""

TICK_SECONDS = 0.5
_JOIN_SECONDS = 1.0
_LARGEST_ERROR_BYTES = 20_000
_WORKER_REPRIEVE_SECONDS = 5.0
_WAKES_MAIN_THREAD = signal.SIGURG
_NO_RESOLVER = re.compile(r"Unsupported interpolation type (\w[\w.]*)")
_shields: list[Callable[[object], None]] = []


def run_attempt(
    request: AttemptRequest,  # the attempt
    load: Callable[[], Trainer],  # returns the trainer, imported if need be
    send: Send,  # takes the events
    *,
    stopping: Stopping,  # how this process is asked to stop
    # called twice a second, where the launcher itself runs the attempt
    tick: Callable[[], None] = lambda: None,
    # with the attempt, so memory need not be returned
    process_ends: bool = True,
    rank: int = 0,  # of all on all nodes
    flags: Flags | None = None,  # how several ranks agree
) -> BaseException | None:
    """Run the trainer and send :class:`Finished` or :class:`Failed`. Returns the exception that
    ended it (for a caller in the same process), None if it completed."""
    run = Run(
        run_dir=request.run_dir,
        attempt=request.attempt,
        resume_checkpoint=request.resume_checkpoint,
        report=send,
        rank=rank,
        world_size=request.ranks,
        flags=flags,
        has_live_status=request.has_live_status,
    )
    live = live_of(run)
    live.saving.start_writer()
    live.hooks = load_hooks(request.features, live, request.config)
    live.asked = request.asked
    live.skips_to = request.spec.skips_to
    live.split_rule = SplitRule.of(request.config, request.spec)
    if request.spec.searches:
        live.batch_search = BatchSearch.of(request.config, request.spec)
    error: BaseException | None = None
    ending: Finished | Failed
    with contextlib.ExitStack() as signals:
        try:
            # a signal may be waiting to stop it at once
            signals.enter_context(stopping(stop_trainer(live)))
            with beside_the_trainer(live, tick):
                try:
                    result = call_trainer(load(), request.trainer_cfg(), request.config, run)
                finally:
                    live.finish_saving()
                # a signal has nothing to interrupt any more
                live.is_cooperative = True
                live.save_owed_checkpoint()
            result = figures_of(result, request.config.objective)
            ending = Finished(plain(result, "the trainer's result"))
        except BaseException as raised:
            if isinstance(raised, SystemExit) and raised.code in (None, 0):
                ending = Finished()
            else:
                error = raised
                if not request.config.runs_inline:
                    error = _lacks_resolver(raised) or raised
                ending = _failed(failure_of(error, live), error)
        # one that has done its last step had nothing left to stop, and keeps its result
        was_cut_short = live.was_told_to_stop and not live.is_done
        if was_cut_short and isinstance(ending, Finished):
            why = "it was asked to stop, and did"
            ending = Failed(Failure(FailureKind.INTERRUPTED, why))
        live.send_last_progress()
        live.speed.send()
        if live.supports(CHECKPOINTING):
            send(TrainerSupports((CHECKPOINTING,)))
        memory, now = memory_in_use(), time.monotonic()
        send(replace(ending, step=live.last_step, memory=memory, at=now))
        if error is None or not process_ends:
            live.hooks.close(error)
    return error


def figures_of(result: Any, objective: str | None) -> Any:
    """Return a trainer's result; of metrics and objects together, ``(metrics, objects)``, the
    metrics. ``objective`` is the name of one that is to be optimised."""
    if isinstance(result, tuple) and result and isinstance(result[0], Mapping):
        result = result[0]
    if objective is None or not isinstance(result, Mapping):
        return result
    if objective not in result:
        names = ", ".join(map(str, result))
        log.warning("objective=%s: not in the result, which has %s", objective, names)
    return {**result, "objective": result.get(objective)}


def call_trainer(trainer: Trainer, cfg: DictConfig, config: RobustConfig, run: Run) -> Any:
    """Call the trainer with its config, and with ``run`` if it takes that; return its result."""
    live = live_of(run)
    live.configure(config)
    live.has_read = note_reads(cfg, config.training.batch_size)
    live.supports = support_of(trainer, live.has_read)
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
    """Do what is due twice a second in a thread beside the trainer of the first rank.

    Args:
        live: the attempt.
        tick: the launcher's share, if it runs the attempt itself.
    """
    if not live.is_main:
        yield
        return
    ended = threading.Event()

    def work() -> None:
        while not ended.wait(TICK_SECONDS):
            live.hooks.tick()
            tick()

    live.send(AttemptProcess(os.getpid()))
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
            thread.join(_JOIN_SECONDS)  # a disk may hang


def failure_of(error: BaseException, live: LiveAttempt) -> Failure:
    """Return why an attempt failed, from the exception that has ended it."""
    if isinstance(error, (TrainingStopped, KeyboardInterrupt)):
        return Failure(FailureKind.INTERRUPTED, str(error) or "interrupted")
    if isinstance(error, SystemExit):
        return Failure(
            FailureKind.BUG,
            f"the trainer called sys.exit({error.code!r})",
            Evidence(clue=Clue.UNKNOWN if error.code else None),
        )
    if isinstance(error, TrainingDiverged):
        return error.failure
    if isinstance(error, (ConfigError, UserError)):
        evidence = Evidence(clue=Clue.USER_ERROR)
        return Failure(FailureKind.BUG, str(error), evidence)
    failure = classify_failure(error)
    if isinstance(error, CheckpointError) and error.bytes:
        # by which the launcher knows when the disk has room for it
        evidence = replace(failure.evidence, requested_bytes=error.bytes)
        failure = replace(failure, evidence=evidence)
    if isinstance(error, (ConfigKeyError, ConfigAttributeError)):
        failure = replace(failure, message=_missing_key(error))
    if failure.kind is FailureKind.HOST_OOM and not live.supports(WORKERS):
        failure = replace(failure, evidence=replace(failure.evidence, no_workers=True))
    return failure


def _lacks_resolver(raised: BaseException) -> UserError | None:
    """Return one line about a resolver that this process lacks; None if it is another error. The
    frames of OmegaConf say nothing of the reason: the script has registered it for the launcher
    alone."""
    error: BaseException | None = raised
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        found = _NO_RESOLVER.search(str(error))
        if isinstance(error, OmegaConfBaseException) and found is not None:
            key = f"{error.full_key}: " if error.full_key else ""
            return UserError(
                f"{key}no resolver {found[1]!r} in the attempt, a process of its own that imports "
                "the script: register it beside the imports, not under "
                'if __name__ == "__main__":'
            )
        error = error.__cause__ or error.__context__
    return None


def _missing_key(error: ConfigKeyError | ConfigAttributeError) -> str:
    """Return one line about a key that the trainer reads and its config does not have."""
    frames = traceback.extract_tb(_without_omegaconf(error.__traceback__))
    place = f"{Path(frames[-1].filename).name}, line {frames[-1].lineno}, reads"
    key = error.full_key
    return f"{place} {key}, which the config lacks; give it with +{key}=VALUE"


def _without_omegaconf(frames: TracebackType | None) -> TracebackType | None:
    """Cut off what a config does when a key is read: the reader's line is the mistake."""
    here = frames
    while here is not None:
        inner = here.tb_next
        if inner is not None and "omegaconf" in _module(inner).split("."):
            here.tb_next = None
        here = here.tb_next
    return frames


def _module(frames: TracebackType) -> str:
    return str(frames.tb_frame.f_globals.get("__name__", ""))


def _failed(failure: Failure, error: BaseException) -> Failed:
    of_rank = error if isinstance(error, RankFailure) else None
    is_in_words = isinstance(error, (TrainingDiverged, UserError))
    classes = type(error).__mro__
    return Failed(
        failure,
        config_error=str(error) if isinstance(error, ConfigError) else "",
        traceback="" if is_in_words else trainer_traceback(error),
        error=_pickled(error),
        others_know=of_rank is not None,
        caused_by_rank=of_rank.rank if of_rank and of_rank.is_elsewhere else None,
        exceptions=tuple(f"{cls.__module__}.{cls.__qualname__}" for cls in classes),
    )


def trainer_traceback(error: BaseException) -> str:
    """Return the traceback as the trainer's author sees it: without the launcher's own frames."""
    frames = error.__traceback__
    ours = (__name__, "robust_train.attempt.loading")
    while frames is not None and _module(frames) in ours:
        frames = frames.tb_next
    if isinstance(error, (ConfigKeyError, ConfigAttributeError)):
        frames = _without_omegaconf(frames)
    return "".join(traceback.format_exception(type(error), error, frames))


def _pickled(error: BaseException) -> str:
    try:
        data = pickle.dumps(error)
        pickle.loads(data)  # many exceptions can be dumped but not built again
    except Exception:
        return ""
    if len(data) >= _LARGEST_ERROR_BYTES:
        return ""
    return base64.b64encode(data).decode()


def stop_trainer(live: LiveAttempt) -> Callable[[], None]:
    """Return what asks a trainer to stop; one that never reads ``run`` is interrupted, once.

    More signals change nothing: a job's processes may get each of them several times, and only the
    launcher kills, when the time for a last checkpoint is over.
    """
    is_interrupted = False

    def stop() -> None:
        nonlocal is_interrupted
        live.request_stop()
        if not live.is_cooperative and not is_interrupted:
            is_interrupted = True
            raise TrainingStopped("interrupted by a signal")

    return stop


@contextlib.contextmanager
def stop_on_signals(stop: Callable[[], None], *, is_script: bool = False) -> Iterator[None]:
    """Have signals call ``stop``, in a process that runs the attempt alone.

    Processes that the trainer starts take the signals' default actions, or their parent could not
    end them. Data-loader workers put off a signal that is not their parent's, perhaps one to every
    process of the job: the trainer needs them to reach the end of its step and save. Under submitit
    SIGTERM comes with every preemption: it changes nothing, unless a script has received it, too.
    """
    me = os.getpid()
    watched, no_stop = _watched_signals(is_script=is_script)

    def on_signal(signum: int, frame: FrameType | None) -> None:
        if os.getpid() == me and signum not in no_stop:
            stop()

    for signum in watched:
        signal.signal(signum, on_signal)
        signal.siginterrupt(signum, signum not in no_stop)
    shield_workers(is_script=is_script)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    yield


def _watched_signals(*, is_script: bool) -> tuple[list[signal.Signals], list[signal.Signals]]:
    """Return the signals that ask for a stop, and of these the ones that change nothing."""
    watched = [s for s in STOP_SIGNALS if signal.getsignal(s) != signal.SIG_IGN]
    is_preempted_by_it = UNDER_SUBMITIT in os.environ and not is_script
    return watched, [signal.SIGTERM] if is_preempted_by_it else []


def shield_workers(*, is_script: bool = False) -> None:
    """Keep this process's handlers out of the processes that a trainer starts, from here on."""
    watched, no_stop = _watched_signals(is_script=is_script)

    def in_fork() -> None:
        with contextlib.suppress(ValueError):  # forked by a thread
            for signum in watched:
                signal.signal(signum, signal.SIG_DFL)

    def in_worker(of: object) -> None:
        # torch's workers have handlers in C, which a blocked signal does not reach
        signal.pthread_sigmask(signal.SIG_BLOCK, watched)
        with contextlib.suppress(ValueError):
            signal.signal(_WAKES_MAIN_THREAD, lambda *_: None)
        threading.Thread(target=_end_at_signal, args=(watched, no_stop), daemon=True).start()

    os.register_at_fork(after_in_child=in_fork)
    multiprocessing.util.register_after_fork(in_worker, in_worker)
    _shields.append(in_worker)  # only a weak reference is kept there


def _end_at_signal(watched: Sequence[signal.Signals], no_stop: Sequence[signal.Signals]) -> None:
    """End this process at a signal: at once if its parent sent it, else some seconds later, or not
    at all."""
    while True:  # it may ignore one, and must still be ended by the next
        info = signal.sigwaitinfo(watched)
        if info.si_pid != os.getppid():
            if info.si_signo in no_stop:
                continue
            info = signal.sigtimedwait(watched, _WORKER_REPRIEVE_SECONDS) or info
        signal.pthread_sigmask(signal.SIG_UNBLOCK, watched)
        os.kill(os.getpid(), info.si_signo)
        # a handler in Python runs in the main thread, which may wait for its next task for ever
        signal.pthread_kill(threading.main_thread().ident or 0, _WAKES_MAIN_THREAD)
        signal.pthread_sigmask(signal.SIG_BLOCK, watched)
