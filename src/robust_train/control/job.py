"""A job as its owner sees and steers it from outside while it runs."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from robust_train.control.place import PlaceProblem
from robust_train.control.protocol import Refused, Reply, own_user_name
from robust_train.control.server import ControlServer
from robust_train.events import (
    AttemptStarted,
    BatchSizeFound,
    CheckpointSaved,
    Event,
    MemoryReported,
    MicroBatchChanged,
    Progress,
    TrainingStarted,
)
from robust_train.execution.signals import SignalWatch
from robust_train.queue.wait import WaitStatus
from robust_train.values import Attempt, AttemptSpec, Decision, Retry

log = logging.getLogger("robust_train")

_NO_TICKET = 0


class JobControl:
    """How a job stands, told by whoever runs it and shown to whoever asks at its socket.

    A context manager: within it the socket is there. Whatever is wrong with the socket's directory,
    the job goes on, after one warning.

    Args:
        name: what people know the job by.
        run_dir: its run folder.
        signals: the job's; stopping is one of them.
        environ: says where the socket belongs.

    Attributes:
        token: the part of the job's id that it has from the start.
        queue_id: gives the job's id in the host's queue, None before it has one.
    """

    def __init__(
        self, name: str, run_dir: Path, signals: SignalWatch, environ: Mapping[str, str]
    ) -> None:
        self.token = os.urandom(3).hex()
        self.queue_id: Callable[[], str | None] = lambda: None
        self._signals = signals
        self._environ = environ
        self._server: ControlServer | None = None
        now = time.time()
        self._state = "starting"
        self._since = now
        self._known: dict[str, Any] = {
            "pid": os.getpid(),
            "user": own_user_name(),
            "name": name,
            "run_dir": str(run_dir),
            "started": now,
        }
        self._waiting: dict[str, Any] | None = None
        self._attempt: dict[str, Any] = {}

    def __enter__(self) -> JobControl:
        try:
            self._server = ControlServer(self, self.token, self._environ)
        except PlaceProblem as problem:
            log.warning("%s; this run goes on, but cannot be talked to", problem)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        frames: TracebackType | None,
    ) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.close()

    @contextlib.contextmanager
    def attempt(self, number: int, started: AttemptStarted) -> Iterator[socket.socket | None]:
        """An attempt runs within this block.

        Args:
            number: counted from 1.
            started: the event with which it begins.

        Yields:
            The attempt's end of the channel for requests; None where nobody can ask.
        """
        spec = started.as_json()
        del spec["event"]
        spec["gpu_uuid"] = next(iter(started.gpu_uuids), None)
        self._attempt = {"attempt": number, **spec}
        self._waiting = None
        self._be("running")
        if self._server is None:
            yield None
            return
        # packets: one that is cut short would leave the other side waiting for its end
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._server.attach(ours)
        try:
            yield theirs
        finally:
            theirs.close()
            self._server.detach()

    def waits(self, status: WaitStatus) -> None:
        """The job waits for a GPU."""
        self._waiting = {
            "position": status.position,
            "reason": status.sentence(),
            "seconds_left": round(status.seconds_left, 1),
        }
        self._be("waiting")

    def goes_on(self) -> None:
        """It has a device, and the trainer is got ready."""
        self._waiting = None
        self._be("starting")

    def decided(self, attempt: Attempt, decision: Decision | None, checkpoint: Path | None) -> None:
        """An attempt has ended, and what comes next is known. Who asked for that hears of it."""
        if decision is not None:
            self._attempt["reason"] = decision.reason
        self._be("between attempts")
        if self._server is not None:
            self._server.restarted(_reply_after(attempt, decision, checkpoint))

    def on_event(self, event: Event) -> None:
        """Fold one event of the attempt into the job's state."""
        if isinstance(event, Progress):
            self._note(step=event.step, total_steps=event.total_steps)
            self._note(loss=event.metrics.get("loss"))
        elif isinstance(event, TrainingStarted):
            self._note(step=event.step)
        elif isinstance(event, CheckpointSaved):
            self._known["checkpoint"] = event.path
            self._known["checkpoint_step"] = event.step
        elif isinstance(event, MemoryReported) and event.rank is None:
            self._attempt["memory"] = event.figures
        elif isinstance(event, MicroBatchChanged) and event.training:
            self._attempt["micro_batch"] = event.after
        elif isinstance(event, BatchSizeFound):
            self._note(
                batch_size=event.batch_size,
                gradient_accumulation_steps=event.gradient_accumulation_steps,
            )

    def hear(self, message: Mapping[str, Any]) -> None:
        """What the attempt's own thread says (see :class:`.control.server.Desk`)."""
        self._attempt["attempt_pid"] = message.get("pid")

    def about(self) -> dict[str, Any]:
        """How the job stands (see :class:`.control.server.Desk`)."""
        now = time.time()
        own_id = f"{_NO_TICKET}-{self.token}"
        job_id = self.queue_id() or own_id
        state = self._state if self._signals.received is None else "stopping"
        attempt = dict(self._attempt)
        size, steps = attempt.get("batch_size"), attempt.get("gradient_accumulation_steps")
        if size is not None and steps is not None:
            attempt["effective_batch_size"] = size * steps * attempt.get("ranks", 1)
        return {
            "id": job_id,
            "earlier_ids": [] if job_id == own_id else [own_id],
            **self._known,
            "state": state,
            "since": self._since,
            "seconds_in_state": round(now - self._since, 1),
            "seconds": round(now - self._known["started"], 1),
            "waiting": self._waiting,
            **attempt,
        }

    def carry_out(self, verb: str, options: Mapping[str, Any]) -> dict[str, Any] | None:
        """What needs no attempt (see :class:`.control.server.Desk`)."""
        if verb == "who":
            return self.about()
        if verb == "stop":
            return self._stop(now=bool(options.get("now")))
        return None

    def _stop(self, *, now: bool) -> dict[str, Any]:
        if not self._signals.watches(signal.SIGTERM):
            raise Refused(
                "this job takes no signals (it is under a scheduler, or not in its process's main "
                "thread); stop it where it was started"
            )
        if self._signals.received is not None and not now:
            raise Refused("it is stopping already; --now ends it without waiting for a checkpoint")
        before = self.about()["state"]
        main = threading.main_thread().ident
        assert main is not None
        # to that thread, or one that sleeps would not wake up
        signal.pthread_kill(main, signal.SIGTERM)
        return {"before": before, "after": "stopping", "signal": "SIGTERM", "exit_code": 143}

    def _be(self, state: str) -> None:
        if state != self._state:
            self._state, self._since = state, time.time()

    def _note(self, **fields: Any) -> None:
        self._attempt |= {name: value for name, value in fields.items() if value is not None}


def _reply_after(attempt: Attempt, decision: Decision | None, checkpoint: Path | None) -> Reply:
    """What to tell those who asked the attempt to stop for another one."""
    if attempt.outcome.stopped_for is None or not isinstance(decision, Retry):
        return {"error": f"the attempt ended first ({attempt.outcome.label})"}
    spec = decision.spec
    where = "from the beginning, for the trainer told of no checkpoint"
    if checkpoint is not None:
        where = f"from {checkpoint}"
    return {
        "answer": {
            "before": _sizes(attempt.spec),
            "after": _sizes(spec),
            "how": f"in a new attempt {where}; effective batch size {spec.effective_batch_size}",
        }
    }


def _sizes(spec: AttemptSpec) -> dict[str, int]:
    return {
        "micro_batch": spec.batch_size,
        "gradient_accumulation_steps": spec.gradient_accumulation_steps,
    }
