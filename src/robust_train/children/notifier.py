"""Sends notifications about a job or a sweep, through a user's program or through Apprise URLs.

The feature ``notifications`` passes each state and event of a job to a :class:`Notifier` in the
launcher. A sweep has one notifier for all of its jobs. Each notification is sent by a child process
with a time limit (:mod:`.delivery`).
"""

from __future__ import annotations

import importlib.util
import logging
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from robust_train.children.delivery import Delivery, start_delivery
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
LAST_CHANCE_SECONDS = 10.0
"""The time that deliveries still have when their job has ended."""

_APPRISE_PROGRAM = "robust_train.children.apprise_program"
_LONG_WAIT_SECONDS = 1800.0
_POLL_SECONDS = 0.05
# Fields of the state that a notification also has.
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


def notify_settings(config: NotifyConfig, environ: Mapping[str, str]) -> NotifyConfig:
    """Return the settings of a job's notifications. The URLs come from ``environ``, to which
    ``hide_urls`` moved them from the config. A job of a sweep gets no targets, because the sweep
    sends one notification for all of its jobs."""
    if sweep_folder() is not None:
        return NotifyConfig()
    urls = tuple(environ.get(URLS_VARIABLE, "").split())
    if urls and importlib.util.find_spec("apprise") is None:
        log.warning("notify.urls is ignored: it needs pip install 'robust-train[notify]'")
    return replace(config, urls=urls)


def describe_event(event: str, state: RunState, result: Json, now: float) -> str:
    """Return one line of text about an event. ``state`` is the job's new state."""
    job = f"{state.name} on {state.host}"
    spent = duration(state.seconds(now))
    reason = shorten(state.reason or "", 300)
    match event:
        case "completed":
            outcome = reason
            if result is not None:
                outcome = shorten(str(result), 200)
            line = f"{job} completed in {spent}"
            return f"{line}: {outcome}" if outcome else line
        case "cpu":
            return f"{job} trains on the CPU now, which may take far longer"
        case "waiting":
            why = shorten(str((state.waiting or {}).get("reason", "")), 300)
            waited = duration(max(now - state.since, 0.0))
            return f"{job} has waited {waited}: {why}"
    ending = "was interrupted" if event == "interrupted" else "failed"
    return f"{job} {ending} after {spent}: {reason or state.state}"


class Notifier:
    """Watches a job's states and events, and sends notifications about those that the settings
    name.

    Attributes:
        has_failed: whether a delivery has failed.
    """

    def __init__(self, settings: NotifyConfig) -> None:
        self.has_failed = False
        self._settings = settings
        # Whether the job last waited for a GPU or had a GPU. Training on the CPU is then an event.
        self._hopes_for_gpu = False
        # Whether the last checkpoint failed. A disk that stays full is reported once.
        self._is_unsaved = False
        # The last event, and the start of its state, so that each event is reported once.
        self._last_event = ("", 0.0)
        self._deliveries: list[Delivery] = []
        # If the attempt runs in the launcher's process, `poll` is called in another thread.
        self._lock = threading.Lock()

    def poll(self, state: RunState) -> None:
        """Send a notification if a job's new state is an event, and check current deliveries."""
        with self._lock:
            event = self._event_of(state)
            if event and self._last_event != (event, state.since):
                self._last_event = event, state.since
                self._notify(event, state)
            self._collect()

    def on_event(self, event: Event, state: RunState) -> None:
        """Send a notification if an event has a notice. A series of failed checkpoints is reported
        once."""
        if isinstance(event, CheckpointSaved):
            self._is_unsaved = False
            return
        notice = _notice_of(event, state)
        if notice is None:
            return
        is_disk_full = notice.kind == "disk"
        if is_disk_full and self._is_unsaved:
            return
        self._is_unsaved |= is_disk_full
        with self._lock:
            self._notify(notice.kind, state, f"{state.name} on {state.host}{notice.text}")

    def _event_of(self, state: RunState) -> str:
        """Return the name of the event for a job's state, empty if the state is not an event."""
        hoped_for_gpu = self._hopes_for_gpu
        is_waiting = state.state == "waiting"
        if is_waiting or state.device is not None:
            self._hopes_for_gpu = is_waiting or state.device != "cpu"
        if state.is_final:
            events = {"no_device": "failed", "pruned": "interrupted"}
            return events.get(state.state, state.state)
        if hoped_for_gpu and not self._hopes_for_gpu:
            return "cpu"
        is_long = time.time() - state.since >= _LONG_WAIT_SECONDS
        return "waiting" if is_waiting and is_long else ""

    def _notify(self, event: str, state: RunState, text: str = "") -> None:
        now = time.time()
        result: Json = None
        if event == "completed":
            summary = read_summary(Path(state.run_dir))
            if summary is not None:
                result = summary.objective
        facts = state.about()
        fields = {name: facts.get(name) for name in _FIELDS}
        fields["job"] = state.name
        fields["result"] = result
        fields["seconds"] = round(state.seconds(now), 1)
        if not text:
            text = describe_event(event, state, result, now)
        self.send(event, text, fields)

    def send(self, event: str, text: str, fields: Mapping[str, Json]) -> None:
        """Start to deliver a notification if the settings name its event."""
        if event not in self._settings.on and event != "test":
            return
        text = shorten(text, 1000)
        content = strict_json({"event": event, "text": text, "time": time.time(), **fields})
        command = self._settings.command
        urls = self._settings.urls
        if command:
            self.deliver(event, command[0], command, content, {TEXT_VARIABLE: text})
        if urls:
            program = (sys.executable, "-m", _APPRISE_PROGRAM)
            message = {"urls": urls, "title": f"robust-train: {event}", "body": text}
            self.deliver(event, "notify.urls", program, message, {"PYTHONSAFEPATH": "1"})

    def deliver(
        self,
        event: str,
        target: str,
        command: Sequence[str],
        content: Json,
        variables: Mapping[str, str],
    ) -> None:
        """Start a program that delivers the notification ``content``."""
        name = f"({event}) not delivered by {target}"
        try:
            self._deliveries.append(start_delivery(name, command, content, variables))
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None)
            self._log_failure(name, str(error) if why is None else why)

    def _collect(self) -> None:
        """End deliveries that take too long, and log failures."""
        for delivery in tuple(self._deliveries):
            if delivery.is_over:
                self._deliveries.remove(delivery)
                problem = delivery.end()
                if problem:
                    self._log_failure(delivery.name, problem)

    def _log_failure(self, name: str, problem: str) -> None:
        self.has_failed = True
        log.warning("notification %s: %s", name, problem)

    def finish(self, seconds: float = LAST_CHANCE_SECONDS) -> None:
        """Wait for the current deliveries, and end those that take longer than ``seconds``."""
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
            delivery.cut_short()


def _notice_of(event: Event, state: RunState) -> Notice | None:
    """Return the notice about an event, None if it has none."""
    match event:
        case CheckpointFailed():
            return Notice("disk", f": no checkpoint could be saved: {event.reason}")
        case AttemptEnded(record=Attempt(kind=FailureKind.DISK_FULL) as record):
            return Notice("disk", f": {record.message}")
    attempt = None if state.attempt is None else state.attempt.number
    return event.notice(attempt)
