"""Notify of a job: by a program of the user's, or by Apprise's URLs.

Each delivery is a thread and a process with a time limit, so none can fail, delay or hang a job.
"""

from __future__ import annotations

import importlib.util
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
from dataclasses import replace
from pathlib import Path

from robust_train.config.schema import NotifyConfig
from robust_train.config.values import URLS_VARIABLE
from robust_train.files import printable, strict_json
from robust_train.folder.state import RunState
from robust_train.folder.summary import read_summary
from robust_train.launcher.hydra_state import sweep_folder
from robust_train.model.events import Event, Json, Stalled, StallWarning
from robust_train.readable import duration, shortened

log = logging.getLogger("robust_train")

TEXT_VARIABLE = "ROBUST_TRAIN_NOTIFY_TEXT"
_LIMIT_SECONDS = 30.0
LAST_CHANCE_SECONDS = 10.0
_POLL_SECONDS = 0.05
AFTER_KILL_SECONDS = 1.0
_MOST_ERROR_BYTES = 4096
_FIELDS = (
    "id",
    "state",
    "reason",
    "host",
    "user",
    "run_dir",
    "device",
    "attempt",
    "step",
    "total_steps",
    "checkpoint",
)


def notifications(config: NotifyConfig, environ: Mapping[str, str]) -> NotifyConfig:
    """Return where a job's notifications go; ``environ`` holds the URLs (see ``hide_urls``)."""
    if sweep_folder() is not None and not config.sweep_jobs:
        return NotifyConfig()
    urls = tuple(environ.get(URLS_VARIABLE, "").split())
    if urls and importlib.util.find_spec("apprise") is None:
        log.warning(
            "notify.urls: not used: pip install 'robust-train[notify]' is missing"
        )
    return replace(config, urls=urls)


def news(
    before: RunState, after: RunState, now: float, waiting_seconds: float
) -> str | None:
    """Return the event that a change of a job's state is; None if no one is notified. ``before``
    is the state at the last look; of a job that waited, its ``waiting`` stays until it has a
    device."""
    if before.is_final:
        return None
    if after.is_final:
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
    spent = duration(state.seconds(now))
    if event == "completed":
        shown = "" if result is None else f": {shortened(str(result), 200)}"
        return f"{job} completed in {spent}{shown}"
    if event == "cpu":
        return f"{job} trains on the CPU now, which may take far longer"
    if event == "waiting":
        why = shortened(str((state.waiting or {}).get("reason", "")), 300)
        return f"{job} has waited {duration(max(now - state.since, 0.0))}: {why}"
    if event == "stalled":
        return (
            f"{job} made no progress in attempt {_number(state)}: the attempt is ended"
        )
    what = "was interrupted" if event == "interrupted" else "failed"
    return f"{job} {what} after {spent}: {reason or state.state}"


def _number(state: RunState) -> int | None:
    return None if state.attempt is None else state.attempt.number


class Notifier:
    """Watches a job's state and notifies of what happens, if there is anyone to notify.
    ``has_failed``: whether a delivery has."""

    def __init__(self, settings: NotifyConfig, run_dir: Path | None = None) -> None:
        self._settings, self.urls = settings, settings.urls
        self._run_dir = run_dir
        self._seen: RunState | None = None
        self._waited_since: float | None = None
        self._deliveries: list[_Delivery] = []
        self.has_failed = False
        self._lock = threading.Lock()  # in-process attempts: their thread ticks

    def poll(self, state: RunState) -> None:
        """Notify of what is new in a job's state, and log deliveries that have failed."""
        if not (self._settings.command or self._settings.urls):
            return
        with self._lock:
            before, now = (
                self._seen or replace(state, state="starting", attempt=None),
                time.time(),
            )
            waiting = state.waiting if state.state == "waiting" else before.waiting
            self._seen = (
                state if state.attempt is not None else replace(state, waiting=waiting)
            )
            event = news(before, state, now, 60 * self._settings.waiting_minutes)
            if event == "waiting":
                event = None if self._waited_since == state.since else event
                self._waited_since = state.since
            if event is not None:
                self._notify(event, state, now)
            self._log_failures()

    def on_event(self, event: Event, state: RunState) -> None:
        """Notify of an attempt without progress, at half of its limit and at its end."""
        if isinstance(event, (StallWarning, Stalled)):
            text = None
            if isinstance(event, StallWarning):
                text = f"{state.name} on {state.host} shows no progress for "
                text += f"{duration(event.seconds)} in attempt {_number(state)}, "
                text += f"which is ended after {duration(event.limit_seconds)}"
            with self._lock:
                self._notify("stalled", state, time.time(), text)

    def _notify(
        self, event: str, state: RunState, now: float, text: str | None = None
    ) -> None:
        summary = (
            read_summary(self._run_dir)
            if event == "completed" and self._run_dir
            else None
        )
        result = None if summary is None else summary.objective
        known = state.about()
        about = {name: known.get(name) for name in _FIELDS}
        about |= {
            "job": state.name,
            "result": result,
            "seconds": round(state.seconds(now), 1),
        }
        self.send(event, text or sentence(event, state, result, now), about)

    def send(self, event: str, text: str, about: Mapping[str, Json]) -> None:
        """Begin to deliver a notification, if its event is asked for."""
        if event not in self._settings.on and event != "test":
            return
        text = printable(shortened(text, 1000))
        content = strict_json(
            {"event": event, "text": text, "time": time.time(), **about}
        )
        command, urls = self._settings.command, self._settings.urls
        if command:
            self.deliver(event, command[0], command, content, {TEXT_VARIABLE: text})
        if urls:
            child = (sys.executable, "-m", "robust_train.launcher.send_urls")
            message = {"urls": urls, "title": f"robust-train: {event}", "body": text}
            self.deliver(event, "notify.urls", child, message, {"PYTHONSAFEPATH": "1"})

    def deliver(
        self,
        event: str,
        what: str,
        command: Sequence[str],
        given: Json,
        more: Mapping[str, str],
    ) -> None:
        """Start a program that delivers what is ``given``."""
        delivery = _Delivery(f"({event}) not delivered by {what}", command, given, more)
        self._deliveries.append(delivery)
        try:
            delivery.start()
        except RuntimeError:  # the interpreter is shutting down
            delivery.run()

    def _log_failures(self, *, over: bool = False) -> None:
        """Log deliveries that have failed; those under way stay, unless all is over."""
        for delivery in [one for one in self._deliveries if over or not one.is_alive()]:
            self._deliveries.remove(delivery)
            if delivery.problem:
                self.has_failed = True
                log.warning("notification %s: %s", delivery.name, delivery.problem)

    def finish(self, seconds: float = LAST_CHANCE_SECONDS) -> None:
        """Wait a moment for what is being delivered, and end the rest; Ctrl-C ends it at once."""
        until = time.monotonic() + seconds
        for delivery in self._deliveries:
            delivery.until = min(delivery.until, until)
        while any(delivery.may_end() for delivery in self._deliveries):
            try:
                time.sleep(_POLL_SECONDS)
            except KeyboardInterrupt:
                self.hurry()
        self._log_failures(over=True)

    def hurry(self) -> None:
        """End the deliveries under way at once."""
        for delivery in self._deliveries:
            if delivery.is_alive():
                delivery.problem, delivery.until = "ended by a signal", time.monotonic()


class _Delivery(threading.Thread):
    """A process that delivers one notification; ``problem``: why it has not, empty once it has. A
    thread, for starting a program may hang as well, as on a disk that does."""

    def __init__(
        self, name: str, command: Sequence[str], given: Json, more: Mapping[str, str]
    ) -> None:
        super().__init__(name=name, daemon=True)
        self.problem = "it took too long"
        self.until = time.monotonic() + _LIMIT_SECONDS
        environ = {
            key: value for key, value in os.environ.items() if key != URLS_VARIABLE
        }
        self._command, self._environ = command, {**environ, **more}
        self._given = json.dumps(given, default=str).encode()

    def may_end(self) -> bool:
        """Return whether it is under way, and worth waiting for."""
        return self.is_alive() and time.monotonic() < self.until + AFTER_KILL_SECONDS

    def run(self) -> None:
        """Deliver, until the time is over."""
        try:
            with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as errors:
                stdin.write(self._given)
                stdin.seek(0)
                process = subprocess.Popen(
                    self._command,
                    stdin=stdin,
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                    env=self._environ,
                    start_new_session=True,
                )
                while process.poll() is None and time.monotonic() < self.until:
                    time.sleep(_POLL_SECONDS)
                if process.returncode is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
                    return
                errors.seek(max(errors.seek(0, os.SEEK_END) - _MOST_ERROR_BYTES, 0))
                lines = errors.read().decode(errors="replace").strip().splitlines()
            problem = (
                shortened(lines[-1], 300)
                if lines
                else f"exit code {process.returncode}"
            )
            self.problem = problem if process.returncode else ""
        except (OSError, ValueError) as error:
            self.problem = getattr(error, "strerror", None) or str(error)
