"""Notifications of a job: by a user program, or by Apprise URLs.

Each delivery is a process with a time limit, which the launcher's tick enforces, so a delivery
cannot fail, delay or hang a job. Run as a program, this file sends a notification through Apprise:
``{"urls": […], "title": …, "body": …}`` comes on standard input, so that no URL is in a command
line. Failures are printed in one line, by the URLs' schemes.
"""

from __future__ import annotations

import contextlib
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
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO

from robust_train.config.schema import NotifyConfig
from robust_train.config.values import URLS_VARIABLE
from robust_train.files import strict_json
from robust_train.folder.hydra_state import sweep_folder
from robust_train.folder.state import RunState, read_summary
from robust_train.model.attempt import Attempt, AttemptEnded
from robust_train.model.events import CheckpointFailed, CheckpointSaved, Event, Json, Notice
from robust_train.model.failure import FailureKind
from robust_train.readable import duration, shorten

log = logging.getLogger("robust_train")

TEXT_VARIABLE = "ROBUST_TRAIN_NOTIFY_TEXT"
_LIMIT_SECONDS = 30
_LONG_WAIT_SECONDS = 1800.0
LAST_CHANCE_SECONDS = 10.0
_POLL_SECONDS = 0.05
_AFTER_KILL_SECONDS = 1.0
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
    """Return the targets of a job's notifications. ``environ`` holds the URLs (see
    ``hide_urls``)."""
    if sweep_folder() is not None:  # the sweep sends one notification for all of its jobs
        return NotifyConfig()
    urls = tuple(environ.get(URLS_VARIABLE, "").split())
    if urls and importlib.util.find_spec("apprise") is None:
        log.warning("notify.urls is ignored: it needs pip install 'robust-train[notify]'")
    return replace(config, urls=urls)


def sentence(event: str, state: RunState, result: Json, now: float) -> str:
    """Return the line of text about a state that is an event."""
    job = f"{state.name} on {state.host}"
    spent = duration(state.seconds(now))
    reason = shorten(state.reason or "", 300)
    match event:
        case "completed":
            outcome = reason if result is None else shorten(str(result), 200)
            result_or_reason = f": {outcome}" if outcome else ""
            return f"{job} completed in {spent}{result_or_reason}"
        case "cpu":
            return f"{job} trains on the CPU now, which may take far longer"
        case "waiting":
            why = shorten(str((state.waiting or {}).get("reason", "")), 300)
            return f"{job} has waited {duration(max(now - state.since, 0.0))}: {why}"
    what = "was interrupted" if event == "interrupted" else "failed"
    return f"{job} {what} after {spent}: {reason or state.state}"


class Notifier:
    """Watches a job's state and sends a message about each change, if there is anyone to notify.

    Attributes:
        has_failed: a delivery has.
    """

    def __init__(self, settings: NotifyConfig) -> None:
        self.has_failed = False
        self._settings = settings
        # Whether the job last waited for a GPU or had one: then training on the CPU is news.
        self._hopes_for_gpu = False
        # Whether the last checkpoint failed. A disk that stays full is reported once.
        self._is_unsaved = False
        # The last event and when its state began, so that each is reported once.
        self._last_news = ("", 0.0)
        self._deliveries: list[_Delivery] = []
        # If the launcher itself runs the attempt, `poll` is called in another thread.
        self._lock = threading.Lock()

    def poll(self, state: RunState) -> None:
        """Send what is new in a job's state, and check the deliveries under way."""
        with self._lock:
            event = self._news(state)
            if event and self._last_news != (event, state.since):
                self._last_news = event, state.since
                self._notify(event, state)
            self._collect()

    def on_event(self, event: Event, state: RunState) -> None:
        """Notify of an event that has a notice. A series of failed checkpoints is reported once."""
        attempt = None if state.attempt is None else state.attempt.number
        match event:
            case CheckpointSaved():
                self._is_unsaved = False
                return
            case CheckpointFailed():
                notice: Notice | None = Notice(
                    "disk", f": no checkpoint could be saved: {event.reason}"
                )
            case AttemptEnded(record=Attempt(kind=FailureKind.DISK_FULL) as record):
                notice = Notice("disk", f": {record.message}")
            case _:
                notice = event.notice(attempt)
        if notice is None:
            return
        is_of_disk = notice.kind == "disk"
        if is_of_disk and self._is_unsaved:
            return
        self._is_unsaved |= is_of_disk
        with self._lock:
            self._notify(notice.kind, state, f"{state.name} on {state.host}{notice.text}")

    def _news(self, state: RunState) -> str:
        """Return the event to report for a job's state, empty if there is nothing to report."""
        hoped = self._hopes_for_gpu
        is_waiting = state.state == "waiting"
        if is_waiting or state.device is not None:
            self._hopes_for_gpu = is_waiting or state.device != "cpu"
        if state.is_final:
            same = {"no_device": "failed", "pruned": "interrupted"}
            return same.get(state.state, state.state)
        if hoped and not self._hopes_for_gpu:
            return "cpu"
        is_long = time.time() - state.since >= _LONG_WAIT_SECONDS
        return "waiting" if is_waiting and is_long else ""

    def _notify(self, event: str, state: RunState, text: str = "") -> None:
        now = time.time()
        summary = read_summary(Path(state.run_dir)) if event == "completed" else None
        result = None if summary is None else summary.objective
        facts = state.about()
        about = {
            **{name: facts.get(name) for name in _FIELDS},
            "job": state.name,
            "result": result,
            "seconds": round(state.seconds(now), 1),
        }
        if not text:
            text = sentence(event, state, result, now)
        self.send(event, text, about)

    def send(self, event: str, text: str, about: Mapping[str, Json]) -> None:
        """Begin to deliver a notification, if its event is asked for."""
        if event not in self._settings.on and event != "test":
            return
        text = shorten(text, 1000)
        content = strict_json({"event": event, "text": text, "time": time.time(), **about})
        command = self._settings.command
        urls = self._settings.urls
        if command:
            self.deliver(event, command[0], command, content, {TEXT_VARIABLE: text})
        if urls:
            program = (sys.executable, "-m", __name__)
            message = {"urls": urls, "title": f"robust-train: {event}", "body": text}
            self.deliver(event, "notify.urls", program, message, {"PYTHONSAFEPATH": "1"})

    def deliver(
        self, event: str, what: str, command: Sequence[str], given: Json, more: Mapping[str, str]
    ) -> None:
        """Start a program that delivers what is ``given``."""
        environ = {**os.environ, **more}
        environ.pop(URLS_VARIABLE, None)
        name = f"({event}) not delivered by {what}"
        try:
            # closed with the delivery
            errors = tempfile.TemporaryFile()  # noqa: SIM115
            with tempfile.TemporaryFile() as stdin:
                stdin.write(json.dumps(given, default=str).encode())
                stdin.seek(0)
                process = subprocess.Popen(
                    command,
                    stdin=stdin,
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                    env=environ,
                    start_new_session=True,
                    # If this process is killed, the alarm still ends the program: exec keeps it.
                    preexec_fn=partial(signal.alarm, 2 * _LIMIT_SECONDS),
                )
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None)
            self._log_failure(name, str(error) if why is None else why)
            return
        until = time.monotonic() + _LIMIT_SECONDS
        self._deliveries.append(_Delivery(name, process, errors, until))

    def _collect(self) -> None:
        """End deliveries that take too long, and log failures."""
        for delivery in tuple(self._deliveries):
            if delivery.process.poll() is not None or time.monotonic() >= delivery.until:
                self._deliveries.remove(delivery)
                problem = delivery.ended()
                if problem:
                    self._log_failure(delivery.name, problem)

    def _log_failure(self, name: str, problem: str) -> None:
        self.has_failed = True
        log.warning("notification %s: %s", name, problem)

    def finish(self, seconds: float = LAST_CHANCE_SECONDS) -> None:
        """Wait a moment for what is being delivered, and end the rest."""
        until = time.monotonic() + seconds
        for delivery in self._deliveries:
            delivery.until = min(delivery.until, until)
        self._collect()
        while self._deliveries:
            time.sleep(_POLL_SECONDS)
            self._collect()

    def hurry(self) -> None:
        """End the current deliveries at once. A signal handler may call this."""
        for delivery in self._deliveries:
            delivery.until = 0.0


@dataclass
class _Delivery:
    """A process that delivers a notification."""

    name: str
    process: subprocess.Popen[bytes]
    errors: IO[bytes]  # its standard error
    # The deadline by the monotonic clock. 0: end it at once, for a signal.
    until: float

    def ended(self) -> str:
        """Return why the delivery failed, empty if it succeeded. Ends it if it still runs."""
        process = self.process
        with self.errors as errors:
            if process.poll() is None:
                # A program of another user, such as sudo's, must not be signalled.
                with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait(_AFTER_KILL_SECONDS)
                return "it took too long" if self.until else "ended by a signal"
            if process.returncode == 0:
                return ""
            errors.seek(max(errors.seek(0, os.SEEK_END) - _MOST_ERROR_BYTES, 0))
            lines = errors.read().decode(errors="replace").strip().splitlines()
        return shorten(lines[-1], 300) if lines else f"exit code {process.returncode}"


def main() -> None:
    """Send a notification through Apprise. The exit code is 0 if every URL accepted it."""
    given = json.load(sys.stdin)
    try:
        import apprise
    except ImportError:
        sys.exit("Apprise is not installed: pip install 'robust-train[notify]'")
    logging.disable(logging.CRITICAL)  # its lines may name parts of a URL
    failed = []
    for number, url in enumerate(given["urls"], start=1):
        target = apprise.Apprise()
        is_sent = False
        with contextlib.suppress(Exception):
            is_sent = target.add(url) and bool(target.notify(given["body"], given["title"]))
        if not is_sent:
            scheme, separator, _ = url.partition("://")
            failed.append(f"{scheme if separator else 'no scheme'} (URL {number})")
    if failed:
        sys.exit(f"not delivered: {', '.join(failed)}")


if __name__ == "__main__":
    main()
