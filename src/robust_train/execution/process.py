"""``isolation=process``: every attempt is a child of a warm fork server."""

from __future__ import annotations

import base64
import contextlib
import io
import logging
import os
import pickle
import shlex
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from robust_train.config.attempt import early_imports
from robust_train.errors import ConfigError
from robust_train.events import Event, Failed, Finished, ScriptStarted, Stalled
from robust_train.execution import at_hand
from robust_train.execution.flight_recorder import remove_pipes
from robust_train.execution.fork_messages import Exited
from robust_train.execution.fork_server import ForkServer, OtherNodes, ServerDied
from robust_train.execution.progress import AttemptProgress
from robust_train.execution.request import AttemptRequest
from robust_train.execution.signals import SignalWatch
from robust_train.execution.stall import Standstill
from robust_train.execution.trainer_ref import TrainerRef
from robust_train.failures import classify_exit
from robust_train.failures.shortage import no_room_to_import
from robust_train.failures.stack import native_stack_in, where_it_stands
from robust_train.memory.oom_killer import OomKillWatch
from robust_train.script.ending import last_words, script_failure
from robust_train.values import Clue, Evidence, Failure, FailureKind, Outcome

log = logging.getLogger("robust_train")

_SIGNAL_SECONDS = 0.5


class ProcessExecutor:
    """Runs attempts in processes of their own. Raises ConfigError: the config's own list of
    libraries is none."""

    def __init__(
        self,
        trainer: TrainerRef,
        libraries: Sequence[str],
        cfg: DictConfig,
        run_dir: Path,
        signals: SignalWatch,
    ) -> None:
        self._trainer = trainer
        self._cfg = cfg
        self._run_dir = run_dir
        self.signals = signals
        self._libraries = early_imports(cfg, libraries)
        self._unsafe: set[str] = set()
        self._server: ForkServer | None = None
        self._start()

    def poll(self) -> None:
        """Raise ConfigError if the trainer has refused the config meanwhile."""
        with contextlib.suppress(ServerDied):  # reported by the attempt, with its output
            if self._server is not None:
                self._server.poll_import(waits=False)

    def prepare(self, tick: Callable[[], None] = lambda: None) -> None:
        """Wait until libraries are imported; raises ConfigError if the trainer refuses."""
        self._ready_server(tick=tick)

    def run(
        self,
        request: AttemptRequest,
        on_event: Callable[[Event], None],
        *,
        hold: tuple[int, ...] = (),
        tick: Callable[[], None] = lambda: None,
        others: OtherNodes | None = None,
    ) -> Outcome:
        """Run one attempt; raises ConfigError if the trainer cannot be imported or refuses.
        ``others``: what of it runs on other nodes."""
        started = time.monotonic()
        oom_kills = OomKillWatch()
        progress = AttemptProgress()

        def take(event: Event) -> None:
            nonlocal progress
            progress = progress.after(event)
            self.signals.is_over = isinstance(progress.ending, Finished)
            if isinstance(event, ScriptStarted):
                # logged here, because what the attempt prints is evidence
                log.info("running %s", shlex.join(event.argv))
            if not isinstance(event, (Finished, Failed)):
                on_event(event)

        try:
            server = self._ready_server(request.environ, tick)
            server.pump.start_log(request.log_file)
            run = partial(server.run, request, on_event=take, signals=self.signals)
            exited = run(hold=hold, tick=tick, others=others)
            server.pump.end_log()
            tail = server.pump.tail
            if not server.is_alive:
                self._end_server()
        except ServerDied as death:
            exited = Exited(None, death.returncode)
            for event in [] if self._server is None else self._server.unread_events():
                take(event)  # what was reported counts, whichever process was killed then
            tail = self._end_server()
        remove_pipes(request.run_dir)
        self._await_signal(progress)
        if isinstance(progress.ending, Failed) and progress.ending.config_error:
            raise ConfigError(progress.ending.config_error)
        runs_script = progress.script_started is not None
        stacks = _stacks(request, keep=not runs_script or exited.stalled is not None)
        if exited.stalled is not None:
            on_event(Stalled(round(exited.stalled.seconds, 1), stacks))
        was_stopped = self.signals.received is not None
        crash = None if exited.stalled is not None else native_stack_in(stacks or tail)
        printed = tail if crash is None or not stacks else f"{tail}\n{crash}"
        failure = failure_of(progress, exited, printed, was_stopped, oom_kills.killed)
        outcome = progress.outcome(
            failure,
            time.monotonic() - started,
            max_resident_bytes=exited.max_resident_bytes,
            error=_unpickled(progress.ending),
        )
        outcome = replace(outcome, output=tail)
        if exited.stalled is not None and failure is not None and not was_stopped:
            failure = _stalled(request, exited.stalled, stacks)
            return replace(outcome, failure=failure, traceback=stacks or None)
        if runs_script and failure is not None:
            return replace(outcome, traceback=last_words(tail, request.log_file.name), error=None)
        stack = None if crash is None else str(crash)
        return replace(outcome, traceback=outcome.traceback or stack)

    def close(self, *, keep_server: bool) -> None:
        """Release the server: for the next job of this process, or for good."""
        server = self._server
        if keep_server and not self._unsafe and server is not None and server.is_alive:
            self._server = None
            at_hand.park(server)
        self._end_server()

    def _await_signal(self, progress: AttemptProgress) -> None:
        """Wait a moment for our own signal: a stop of all processes may reach the attempt first."""
        ending = progress.ending
        if not isinstance(ending, Failed) or ending.stopped_for is not None:
            return
        deadline = time.monotonic() + _SIGNAL_SECONDS
        is_stop = ending.failure.kind is FailureKind.INTERRUPTED
        while is_stop and self.signals.received is None and time.monotonic() < deadline:
            time.sleep(0.02)

    def _start(self) -> ForkServer:
        self._server = server = at_hand.take()
        safe = [name for name in self._libraries if name not in self._unsafe]
        # which would import again what must not be
        ours = self._trainer if self._trainer.is_ours and not self._unsafe else None
        with contextlib.suppress(ServerDied):
            server.begin_import(safe, ours, self._cfg if ours else None)
        return server

    def _ready_server(
        self, environ: Mapping[str, str] | None = None, tick: Callable[[], None] = lambda: None
    ) -> ForkServer:
        """Return a server that may be forked, with as many libraries imported as that allows."""
        while True:
            server = self._server
            if server is None or not server.is_alive or not server.suits(environ or os.environ):
                self._end_server()
                server = self._start()
            try:
                server.poll_import(waits=True, tick=tick)
            except ServerDied as death:
                problem = no_room_to_import(next(iter(self._libraries), "Python"), None)
                if problem is not None:
                    raise ConfigError(problem) from death
                server.pump.release()
                if not self._libraries:
                    raise
                log.warning(
                    "importing %s ended the process (%d): attempts import by themselves",
                    ", ".join(self._libraries),
                    death.returncode,
                )
                self._libraries = []
                self._end_server()
                continue
            if not server.unsafe:
                return server
            for name, reason in server.unsafe.items():
                log.warning("%s %s: every attempt imports it anew", name, reason)
            self._unsafe |= server.unsafe.keys()
            self._end_server()

    def _end_server(self) -> str:
        """End the server; return what it or its attempt printed last."""
        server, self._server = self._server, None
        if server is None:
            return ""
        server.close()
        return server.pump.tail


def failure_of(
    progress: AttemptProgress,
    exited: Exited,
    tail: str,
    was_stopped: bool,
    oom_killed: Callable[[], bool | None],
) -> Failure | None:
    """Return why an attempt failed, by its own report or by its process's end.

    ``tail`` is the end of what it printed; ``was_stopped``: the launcher had asked it to stop.
    """

    def death(pid: int | None, returncode: int) -> Failure:
        if returncode == 0:
            return Failure(FailureKind.BUG, "the trainer ended its process without returning")
        was_killed = returncode == -signal.SIGKILL
        killed = oom_killed() if was_killed and pid is not None else None
        return classify_exit(returncode, tail, oom_killed=killed)

    if isinstance(progress.ending, Finished):
        return None
    if progress.failure is not None:
        is_scripts = progress.failure.kind is not FailureKind.INTERRUPTED
        if progress.script_ended is None or not is_scripts:
            return progress.failure
        return script_failure(progress.script_ended, tail, oom_killed)
    if was_stopped:
        return Failure(FailureKind.INTERRUPTED, "did not stop in time and was killed")
    died = progress.rank_died
    if died is not None:
        return replace(death(died.pid, died.returncode), rank=died.rank)
    return death(exited.pid, exited.returncode)


def _stalled(request: AttemptRequest, found: Standstill, stacks: str) -> Failure:
    where = where_it_stands(stacks)
    return Failure(
        FailureKind.COMM,
        f"stalled: {found.what} (stall_timeout_minutes){where and '; '}{where}",
        Evidence(library="robust_train", clue=Clue.STALLED),
        (f"see what the threads were doing in {request.stacks_file}",) if stacks else (),
    )


def _stacks(request: AttemptRequest, *, keep: bool) -> str:
    """Return what the attempt wrote of its threads, if that is to be kept; remove an empty file."""
    try:
        text = request.stacks_file.read_text(errors="replace") if keep else ""
        if not text:
            request.stacks_file.unlink()
    except OSError:
        return ""
    return text


class _LoadedOnlyUnpickler(pickle.Unpickler):
    """Builds exceptions only from modules that are here already: no torch in the launcher."""

    def find_class(self, module: str, name: str) -> Any:
        if module not in sys.modules:
            raise pickle.UnpicklingError(module)
        return super().find_class(module, name)


def _unpickled(ending: Finished | Failed | None) -> BaseException | None:
    if not isinstance(ending, Failed) or ending.error is None:
        return None
    try:
        error = _LoadedOnlyUnpickler(io.BytesIO(base64.b64decode(ending.error))).load()
    except Exception:
        return None
    return error if isinstance(error, BaseException) else None
