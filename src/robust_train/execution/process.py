"""``isolation=process``: every attempt is a child of a warm fork server."""

from __future__ import annotations

import base64
import contextlib
import io
import logging
import pickle
import shlex
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from robust_train.errors import ConfigError
from robust_train.events import Event, MalformedEvent, ScriptEnded, Stalled, parse
from robust_train.execution import at_hand, sleep_until_readable
from robust_train.execution.child import (
    failure_from_json,
    finally_returned,
    micro_batch_in_use,
)
from robust_train.execution.fork_server import (
    Exited,
    ForkServer,
    ServerDied,
    ServerNeverStarted,
)
from robust_train.execution.request import AttemptRequest, TrainerRef
from robust_train.execution.signals import SignalWatch
from robust_train.failures import classify_exit
from robust_train.memory.oom_killer import OomKillWatch
from robust_train.script.ending import last_words, script_failure
from robust_train.values import Evidence, Failure, FailureKind, Outcome

log = logging.getLogger("robust_train")


class ProcessExecutor:
    """Runs attempts in processes of their own.

    Args:
        trainer: what to run.
        cfg: the composed config, for what the trainer's module wants to have imported early.
        run_dir: where the attempts' output is kept, as ``attempt-<n>.log``.
        signals: the launcher's signals.
        stop_grace_seconds: time for a last checkpoint when stopped.
    """

    def __init__(
        self,
        trainer: TrainerRef,
        cfg: Any,
        run_dir: Path,
        signals: SignalWatch,
        stop_grace_seconds: float,
    ) -> None:
        self.trainer = trainer
        self._cfg = cfg
        self._run_dir = run_dir
        self._signals = signals
        self._stop_grace_seconds = stop_grace_seconds
        self._server: ForkServer | None = None
        self._fork_is_safe = True
        self._start(at_hand.take(trainer))

    def sleep(self, seconds: float, wake: int | None = None) -> None:
        """Wait, but not for a trainer that cannot be imported, nor past a readable ``wake``.

        Raises:
            ConfigError: the trainer cannot be imported.
        """
        until = time.monotonic() + seconds
        with contextlib.suppress(ServerDied):  # told by the attempt, with its output
            if self._server is not None:
                self._poll_loading(seconds, wake)
        sleep_until_readable(max(until - time.monotonic(), 0), wake)

    def prepare(self) -> None:
        """Wait until the trainer is imported.

        Raises:
            ConfigError: it cannot be.
        """
        with contextlib.suppress(ServerDied):  # an outcome of the first attempt
            self._ready_server()

    def run(
        self,
        request: AttemptRequest,
        on_event: Callable[[Event], None],
        *,
        hold: tuple[int, ...] = (),
        tick: Callable[[], None] = lambda: None,
    ) -> Outcome:
        """Run one attempt.

        Raises:
            ConfigError: the trainer cannot be imported.
        """
        started = time.monotonic()
        collector = _Collector(on_event, OomKillWatch.start())
        log_path = self._run_dir / f"attempt-{request.attempt}.log"
        try:
            server = self._ready_server()
            server.pump.start_log(log_path)
            exited = server.run(
                request,
                on_event=collector,
                signals=self._signals,
                stop_grace_seconds=self._stop_grace_seconds,
                hold=hold,
                tick=tick,
            )
            server.pump.end_log()
            tail = server.pump.tail
        except ServerDied as death:
            exited = Exited(None, death.returncode)
            tail = self._end_server()
        seconds = time.monotonic() - started
        stacks = _stacks(request, keep=not collector.runs_script)
        if exited.stalled:
            on_event(Stalled(request.stall_timeout_seconds, stacks["stacks"]))
        was_stopped = self._signals.received is not None
        outcome = collector.outcome(exited, tail, seconds, was_stopped)
        if collector.runs_script and outcome.failure is not None:
            outcome = replace(outcome, traceback=last_words(tail, log_path.name), error=None)
        if exited.stalled and outcome.failure is not None and not was_stopped:
            failure = _stalled(request, has_stacks=bool(stacks["stacks"]))
            return replace(outcome, failure=failure, traceback=stacks["stacks"] or None)
        return outcome

    def close(self, *, keep_server: bool) -> None:
        """Release the server: for the next job of this process, or for good."""
        server, self._server = self._server, None
        if server is None:
            return
        if keep_server and self._fork_is_safe and server.is_alive:
            at_hand.park(server)
        else:
            server.close()

    def _start(self, server: ForkServer) -> None:
        self._server = server
        with contextlib.suppress(ServerDied):
            server.begin_loading(self.trainer, self._cfg)

    def _ready_server(self) -> ForkServer:
        if not self._fork_is_safe:
            # a trainer that must not be forked after its import gets a bare interpreter each time
            self._server = self._server or ForkServer(warm=False)
            return self._server
        if self._server is None:
            self._start(at_hand.take(self.trainer))
        server = self._poll_loading(None)
        if server.unsafe is None:
            return server
        log.warning(
            "%s: every attempt starts in a fresh interpreter instead of a fork, and that takes "
            "seconds longer",
            server.unsafe,
        )
        self._fork_is_safe = False
        self._end_server()
        return self._ready_server()

    def _poll_loading(self, seconds: float | None, wake: int | None = None) -> ForkServer:
        """As the server's own; one that never was forked is replaced by an interpreter of ours."""
        assert self._server is not None
        try:
            self._server.poll_loading(self.trainer, seconds, wake)
        except ServerNeverStarted as death:
            log.warning("%s: this job imports torch and its trainer by itself", death.reason)
            self._end_server()
            server = ForkServer()
            self._start(server)
            server.poll_loading(self.trainer, seconds, wake)
        return self._server

    def _end_server(self) -> str:
        """End the server; what it or its attempt printed last."""
        server, self._server = self._server, None
        if server is None:
            return ""
        server.close()
        return server.pump.tail


class _Collector:
    """Listens to an attempt's events and makes its outcome of them."""

    def __init__(self, forward: Callable[[Event], None], oom_kills: OomKillWatch) -> None:
        self._forward = forward
        self._oom_kills = oom_kills
        self._ending: dict[str, Any] | None = None
        self._start_step = 0
        self._end_step: int | None = None
        self._memory: dict[str, int] = {}
        self._micro_batch: int | None = None
        self._returned: dict[str, Any] | None = None
        self.runs_script = False
        self._script_ended: dict[str, Any] | None = None
        self._rank_died: dict[str, Any] | None = None

    def __call__(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind in ("finished", "failed"):
            self._ending = event
            self._memory.update(event["memory"])
            if event["step"] is not None:
                self._end_step = event["step"]
            return
        if kind == "rank_died":
            self._rank_died = event
            self._memory.update(event["memory"])
        elif kind == "training_started":
            self._start_step = event["step"]
        elif kind == "progress":
            self._end_step = event["step"]
        elif kind == "memory" and event["rank"] is None:
            figures = {k: v for k, v in event.items() if isinstance(v, int)}
            self._memory.update(figures)
        elif kind == "script_started":
            self.runs_script = True
            # said here, because what the attempt prints is evidence
            log.info("running %s", shlex.join(event["argv"]))
        elif kind == "script_ended":
            self._script_ended = event
        self._micro_batch = micro_batch_in_use(event) or self._micro_batch
        self._returned = finally_returned(event) or self._returned
        try:
            self._forward(parse(event))
        except MalformedEvent as problem:
            log.debug("event dropped: %s", problem)

    def outcome(
        self,
        exited: Exited,
        tail: str,
        seconds: float,
        was_stopped: bool,
    ) -> Outcome:
        ending = self._ending or {}
        if ending.get("config_error"):
            raise ConfigError(ending["config_error"])
        failure = self._failure(exited, tail, was_stopped)
        on_gpu = "max_allocated" in self._memory
        peak = self._memory["max_allocated"] if on_gpu else exited.max_resident_bytes or None
        return Outcome(
            failure=failure,
            result=ending.get("result"),
            seconds=seconds,
            start_step=self._start_step,
            end_step=self._end_step,
            peak_memory_bytes=peak,
            memory=dict(self._memory) if on_gpu else None,
            memory_returned=self._returned,
            micro_batch=self._micro_batch,
            stopped_for=ending.get("stopped_for"),
            traceback=ending.get("traceback") or _native_stack(tail),
            error=_unpickled(ending.get("error")),
        )

    def _failure(self, exited: Exited, tail: str, was_stopped: bool) -> Failure | None:
        if self._ending is None:
            if was_stopped:
                return Failure(FailureKind.INTERRUPTED, "did not stop in time and was killed")
            died = self._rank_died
            if died is None:
                return self._death(exited.pid, exited.returncode, tail)
            return replace(self._death(died["pid"], died["returncode"], tail), rank=died["rank"])
        if self._ending["event"] == "finished":
            return None
        failure = failure_from_json(self._ending["failure"])
        if self._script_ended is None or failure.kind is FailureKind.INTERRUPTED:
            return failure
        ended = parse(self._script_ended)
        assert isinstance(ended, ScriptEnded)
        return script_failure(ended, tail, self._oom_kills.killed)

    def _death(self, pid: int | None, returncode: int, tail: str) -> Failure:
        """Of a process that gave no account of its end."""
        if returncode == 0:
            return Failure(FailureKind.BUG, "the trainer ended its process without returning")
        oom_killed = None
        if returncode == -signal.SIGKILL and pid is not None:
            oom_killed = self._oom_kills.killed(pid)
        return classify_exit(returncode, tail, oom_killed=oom_killed)


def _stalled(request: AttemptRequest, *, has_stacks: bool) -> Failure:
    minutes = request.stall_timeout_seconds / 60
    return Failure(
        FailureKind.COMM,
        f"stalled: no progress for {minutes:g} min (stall_timeout_minutes)",
        Evidence(library="robust_train"),
        (f"see what the threads were doing in {request.stacks_file}",) if has_stacks else (),
    )


def _stacks(request: AttemptRequest, *, keep: bool) -> dict[str, str]:
    """What the attempt wrote when it was asked what its threads do; the file goes if empty.

    Not kept of an attempt that only waits for a script.
    """
    try:
        text = request.stacks_file.read_text(errors="replace") if keep else ""
        if not text:
            request.stacks_file.unlink()
    except OSError:
        return {"stacks": ""}
    return {"stacks": text}


def _native_stack(tail: str) -> str | None:
    """The stack that faulthandler printed when the process crashed, None if it did not."""
    start = tail.rfind("Fatal Python error: ")
    return None if start < 0 else tail[start:].strip() + "\n"


class _LoadedOnlyUnpickler(pickle.Unpickler):
    """Builds exceptions only from modules that are here already: no torch in the launcher."""

    def find_class(self, module: str, name: str) -> Any:
        if module not in sys.modules:
            raise pickle.UnpicklingError(module)
        return super().find_class(module, name)


def _unpickled(encoded: str | None) -> BaseException | None:
    if encoded is None:
        return None
    try:
        error = _LoadedOnlyUnpickler(io.BytesIO(base64.b64decode(encoded))).load()
    except Exception:
        return None
    return error if isinstance(error, BaseException) else None
