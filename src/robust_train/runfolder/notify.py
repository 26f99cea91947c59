"""Notify somebody of a job: a program of the user's, or Apprise's URLs.

Each delivery is a child process with a time limit, so none can fail, delay or hang a job.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

from robust_train.events import Event, Json, Stalled
from robust_train.readable import duration, shortened
from robust_train.runfolder.journal import strict_json
from robust_train.runfolder.state import RunState
from robust_train.runfolder.summary import read_summary

log = logging.getLogger("robust_train")

URLS_VARIABLE = "ROBUST_TRAIN_NOTIFY_URLS"
TEXT_VARIABLE = "ROBUST_TRAIN_NOTIFY_TEXT"
EVENTS = ("completed", "failed", "interrupted", "cpu", "waiting", "stalled")
_LIMIT_SECONDS = 30.0
_LAST_CHANCE_SECONDS = 10.0
_POLL_SECONDS = 0.05
_MOST_RESULT_CHARACTERS = 200


@dataclass(frozen=True)
class NotifySettings:
    """Who is notified, and of what; empty for nobody."""

    command: tuple[str, ...] = ()
    urls: tuple[str, ...] = field(default=(), repr=False)
    on: tuple[str, ...] = EVENTS
    waiting_seconds: float = 1800.0


def news(before: RunState, after: RunState, now: float, waiting_seconds: float) -> str | None:
    """Return the event that a change of a job's state is; None where nobody is notified.

    Args:
        before: the state at the last look; of a job that waited, ``waiting`` stays until it has a
            device.
        after: the state now.
        now: seconds of the epoch.
        waiting_seconds: how long a job waits until that is news.
    """
    if after.is_final:
        if before.is_final:
            return None
        return "failed" if after.state == "no_device" else after.state
    if after.device == "cpu" and before.device != "cpu":
        had_hope = before.device is not None or before.waiting is not None
        return "cpu" if had_hope else None
    if after.state == "waiting" and now - after.since >= waiting_seconds:
        return "waiting"
    return None


def sentence(event: str, state: RunState, result: Json, now: float) -> str:
    """Return a notification's line of text."""
    job, reason = f"{state.name} on {state.host}", shortened(state.reason or "", 300)
    spent = duration(max(now - state.started, 0.0))
    if event == "completed":
        shown = "" if result is None else f": {shortened(str(result), _MOST_RESULT_CHARACTERS)}"
        return f"{job} completed in {spent}{shown}"
    if event == "cpu":
        return f"{job} trains on the CPU now, which may take far longer"
    if event == "waiting":
        why = shortened(str((state.waiting or {}).get("reason", "")), 300)
        return f"{job} has waited {duration(max(now - state.since, 0.0))}: {why}"
    if event == "stalled":
        return f"{job} makes no progress in attempt {state.attempt}: the attempt is ended"
    what = "was interrupted" if event == "interrupted" else "failed"
    return f"{job} {what} after {spent}: {reason or state.state}"


def is_secret(word: str) -> bool:
    """Return whether a word of a command line may hold a URL that nobody must read."""
    return word.lstrip("+~").startswith(("notify.urls=", "notify="))


class Notifier:
    """Watches a job's state and notifies of what happens, where anybody is to be notified.

    ``has_failed``: whether a delivery has.
    """

    def __init__(self, settings: NotifySettings, run_dir: Path | None = None) -> None:
        self._settings = settings
        self._run_dir = run_dir
        self._seen: RunState | None = None
        self._waited_since: float | None = None
        self._deliveries: list[_Delivery] = []
        self.has_failed = False
        self._lock = threading.Lock()  # in-process attempts: their thread ticks

    def look(self, state: RunState) -> None:
        """Notify of what is new in a job's state, and log deliveries that have failed."""
        if not (self._settings.command or self._settings.urls):
            return
        with self._lock:
            before, now = self._seen or replace(state, state="starting", device=None), time.time()
            waiting = state.waiting if state.state == "waiting" else before.waiting
            self._seen = state if state.attempt is not None else replace(state, waiting=waiting)
            event = news(before, state, now, self._settings.waiting_seconds)
            if event == "waiting":
                event = None if self._waited_since == state.since else event
                self._waited_since = state.since
            if event is not None:
                self._tell(event, state, now)
            self._reap()

    def on_event(self, event: Event, state: RunState) -> None:
        """Notify of an attempt that stands still."""
        if isinstance(event, Stalled):
            with self._lock:
                self._tell("stalled", state, time.time())

    def _tell(self, event: str, state: RunState, now: float) -> None:
        summary = None
        if event == "completed" and self._run_dir is not None:
            summary = read_summary(self._run_dir)
        result = None if summary is None else summary.objective
        fields = ("id", "state", "reason", "host", "user", "run_dir", "device", "attempt", "step")
        about = {name: getattr(state, name) for name in fields}
        about |= {"job": state.name, "result": result, "total_steps": state.total_steps}
        about |= {"checkpoint": state.checkpoint, "seconds": round(now - state.started, 1)}
        self.send(event, sentence(event, state, result, now), about)

    def send(self, event: str, text: str, about: Mapping[str, Json]) -> None:
        """Begin to deliver a notification, if its event is asked for."""
        if event not in self._settings.on and event != "test":
            return
        text = shortened(text, 1000)
        content = strict_json({"event": event, "text": text, "time": time.time(), **about})
        command, urls = self._settings.command, self._settings.urls
        if command:
            self._start(event, command, content, {TEXT_VARIABLE: text})
        if urls:
            child = (sys.executable, "-m", "robust_train.runfolder.send_urls")
            message = {"urls": urls, "title": f"robust-train: {event}", "body": text}
            self._start(event, child, message, {"PYTHONSAFEPATH": "1"})

    def _start(
        self, event: str, command: Sequence[str], given: Json, variables: Mapping[str, str]
    ) -> None:
        what = command[0] if TEXT_VARIABLE in variables else "notify.urls"
        environ = {key: value for key, value in os.environ.items() if key != URLS_VARIABLE}
        try:
            errors = tempfile.TemporaryFile()  # noqa: SIM115 - read after the end of the child
            with tempfile.TemporaryFile() as stdin:
                stdin.write(json.dumps(given, ensure_ascii=False, default=str).encode())
                stdin.seek(0)
                process = subprocess.Popen(
                    command,
                    stdin=stdin,
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                    env={**environ, **variables},
                    start_new_session=True,
                )
        except OSError as error:
            self._failed(event, what, error.strerror or "")
            return
        self._deliveries.append(_Delivery(event, what, process, errors))

    def _reap(self) -> None:
        """Log deliveries that have failed; those under way stay."""
        for delivery in list(self._deliveries):
            problem = delivery.problem(_LIMIT_SECONDS)
            if problem is None:
                continue
            self._deliveries.remove(delivery)
            if problem:
                self._failed(delivery.event, delivery.what, problem)

    def _failed(self, event: str, what: str, problem: str) -> None:
        self.has_failed = True
        log.warning("notification (%s) not delivered by %s: %s", event, what, problem)

    def finish(self, seconds: float = _LAST_CHANCE_SECONDS) -> None:
        """Wait a moment for what is being delivered, and end the rest."""
        deadline = time.monotonic() + seconds
        try:
            while self._deliveries and time.monotonic() < deadline:
                self._reap()
                time.sleep(_POLL_SECONDS if self._deliveries else 0)
        finally:
            for delivery in self._deliveries:
                delivery.started -= _LIMIT_SECONDS
            self._reap()


@dataclass
class _Delivery:
    """A child process that delivers ``event``."""

    event: str
    what: str
    process: subprocess.Popen[bytes]
    errors: IO[bytes]
    started: float = field(default_factory=time.monotonic)

    def problem(self, limit_seconds: float) -> str | None:
        """Return why it failed, "" once it has delivered, None while it is at work."""
        code = self.process.poll()
        if code is None:
            if time.monotonic() - self.started < limit_seconds:
                return None
            with contextlib.suppress(OSError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.errors.close()
            return "it took too long"
        self.errors.seek(0)
        lines = self.errors.read().decode(errors="replace").strip().splitlines()
        self.errors.close()
        return "" if code == 0 else shortened(lines[-1] if lines else f"exit code {code}", 300)
