"""Keeps a job's run folder during a launch: its lock, journal, ``state.json`` and ``requests/``.

:class:`.job.Job` enters one :class:`RunFolder` for its whole launch, in the launcher's process, and
sends it each event. Other processes read the files through :mod:`robust_train.folder`.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from robust_train.config.trainers import name_of
from robust_train.folder import run_list
from robust_train.folder.best import best_in
from robust_train.folder.hydra_state import about_job, working_directory
from robust_train.folder.identity import (
    Beginning,
    begin_job,
    complete_job,
    count_launch,
    resume_from,
    shown_id,
)
from robust_train.folder.journal import Journal
from robust_train.folder.lock import RunLock
from robust_train.folder.requests import (
    LAUNCHERS_VERB,
    NEW,
    REQUESTS,
    TAKEN,
    Request,
    find_requests,
    open_requests,
    sweep_stop_requested,
)
from robust_train.folder.state import EXIT_CODES, RunState, StateFile, read_state
from robust_train.gpu.processes import user_name
from robust_train.host.signals import SignalWatch
from robust_train.launcher.plan import Plan
from robust_train.model.attempt import Attempt, AttemptEnded
from robust_train.model.errors import EXIT_BAD_CONFIG, RunFolderLostError, RunFolderUnavailableError
from robust_train.model.events import SCHEMA, AttemptStarted, DeviceAcquired, Event, JobStarted
from robust_train.model.gpu import Group, device_name
from robust_train.model.json import finite
from robust_train.model.spec import Decision
from robust_train.queue.waiting import WaitStatus
from robust_train.report import narration

log = logging.getLogger("robust_train")

_POLL_SECONDS = 0.4
# The states of a job in which its attempts take requests.
_TAKING_REQUESTS = ("running", "between attempts", "stopping")
_MOST_IDS = 50  # how many ids of earlier jobs in the folder are kept


class RunFolder:
    """Context manager that holds the folder's lock, writes its records and answers requests.

    If the disk fails, the job continues after one warning.

    Args:
        plan: the job's plan.
        signals: the signals of the launcher's process.
        on_event: called with each recorded event, and with the attempt that includes the event.

    Raises:
        ConfigError: a live job holds the folder. In this case nothing is written.
    """

    def __init__(
        self, plan: Plan, signals: SignalWatch, on_event: Callable[[Event, Attempt | None], None]
    ) -> None:
        # The mark of this launch's processes.
        self.token = os.urandom(3).hex()
        self._plan = plan
        self._config = plan.config
        self._run_dir = run_dir = plan.run_dir
        self._signals = signals
        self._sweep_folder = plan.surroundings.sweep_folder
        self._on_event = on_event
        now = time.time()
        self._lock = RunLock(run_dir, self.token)
        state = RunState(
            id=self.token,  # until `begin_job` has read which job the folder belongs to
            name=plan.name,
            run_dir=str(run_dir),
            pid=os.getpid(),
            host=socket.gethostname(),
            user=user_name(os.geteuid()),
            started=now,
            since=now,
            resume_command=plan.resume_command,
            working_directory=working_directory(),
        )
        before = read_state(run_dir)
        if before is not None:
            state = replace(
                state,
                id=before.id,
                earlier_ids=before.earlier_ids,
                job=before.job,
                longest_pause=before.longest_pause,
                earlier_seconds=round(before.seconds(before.updated), 3),
            )
        self._file = StateFile(run_dir, state, self._lock.check)
        self._journal = Journal(run_dir / "journal.jsonl")
        self._is_counted = False  # whether this launch counts towards `max_launches`
        self._was_asked_to_stop = False
        self.beginning: Beginning  # exists once the run folder is entered
        self.pruned = ""  # why a sweep stopped the job, empty if no sweep did
        self.wait_seconds = 0.0  # time waited for GPUs, in this launch
        self._next_poll = 0.0

    @property
    def hold(self) -> tuple[int, ...]:
        """The file descriptors that an attempt and all its children keep open."""
        return self._lock.hold

    @property
    def state(self) -> RunState:
        """The state of the job."""
        return self._file.state

    @property
    def attempt(self) -> Attempt:
        """The attempt with all its events so far."""
        attempt = self.state.attempt
        assert attempt is not None, "an attempt has started"
        return attempt

    def __enter__(self) -> RunFolder:
        try:
            self.beginning = begin_job(
                self._run_dir,
                resume=self._config.resume,
                max_launches=self._config.max_launches,
                sleep=self._signals.sleep,
            )
        except RunFolderUnavailableError:  # the disk refused all writes
            self._lock.release()
            raise
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        try:
            open_requests(self._run_dir)
        except OSError as error:
            log.warning(
                "%s cannot be used (%s); this run continues, but takes no requests",
                self._run_dir / REQUESTS,
                error.strerror,
            )
        self._take_id(shown_id(self.beginning.job))
        self._file.write_if_due()
        run_list.register(self._run_dir, self.token)
        return self

    def _take_id(self, job: str) -> None:
        """Set the job's id in the state. Commands still find the folder by its earlier ids."""
        before = self.state
        if before.id == job:
            return
        earlier = before.earlier_ids
        if before.id != self.token:
            earlier += (before.id,)
        self._change(id=job, earlier_ids=earlier[-_MOST_IDS:])

    def __exit__(self, kind: object, error: BaseException | None, frames: object) -> None:
        if not self.state.is_final:
            status = "failed"
            if isinstance(error, KeyboardInterrupt):
                status = "interrupted"
            reason = str(error) or type(error).__name__
            self.record_end(status, reason, getattr(error, "exit_code", None))
        if not isinstance(error, RunFolderLostError):
            self._refuse_requests()
        self._lock.release()

    def _refuse_requests(self) -> None:
        for suffix in (TAKEN, NEW):
            for request in find_requests(self._run_dir, suffix):
                request.answer({"error": "the run ended before it handled this request"})

    def tick(self) -> None:
        """Answer requests, and write the state if it is due. Any thread may call it, often.

        Raises:
            RunFolderLostError: another job has taken the folder.
        """
        now = time.monotonic()
        if now < self._next_poll:
            return
        self._next_poll = now + _POLL_SECONDS
        self._lock.check()
        self._change()
        self._file.write_if_due()
        for request in find_requests(self._run_dir):
            state = self.state.state
            if request.verb == LAUNCHERS_VERB:
                self._handle_stop(request)
            elif state not in _TAKING_REQUESTS and request.take():
                problem = f"no attempt can do this while the run is {state}; try later"
                request.answer({"error": problem})
        if not self._signals.received and self._sweep_is_stopped():
            log.info("the sweep is stopped")
            self._signals.deliver(signal.SIGTERM)

    @contextmanager
    def measure_wait(self) -> Iterator[None]:
        """Add the duration of the ``with`` block to ``wait_seconds``."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.wait_seconds += time.monotonic() - started

    def record_wait(self, status: WaitStatus) -> None:
        """Record the status of the job's wait for a GPU."""
        obstacles = self._plan.words.reword(status.obstacles)
        status = replace(status, obstacles=obstacles)
        waiting = {
            "position": status.position,
            "reason": status.sentence(),
            "seconds_left": finite(round(status.seconds_left, 1)),
        }
        self._change(state="waiting", waiting=waiting)
        self._on_event(status, self.state.attempt)

    def record_job_start(self) -> None:
        """Record that the job starts, and log the checkpoint from which it resumes."""
        plan = self._plan
        plan.resolvers.warn_of_earlier_values()
        plan.resolvers.save(plan.run_dir, self.beginning.job)
        self.record(
            JobStarted(
                run_dir=str(plan.run_dir),
                trainer=name_of(plan.trainer),
                job=self.beginning.job,
                about=about_job(plan.config, plan.name),
                schema=SCHEMA,
                keys=plan.config.theirs,
            )
        )
        if self.beginning.checkpoint is not None:
            log.info(
                "this run folder holds an unfinished job: resuming from %s",
                self.beginning.checkpoint,
            )

    def record_devices(self, gpus: Group) -> None:
        """Record the devices of the job, which now imports its trainer."""
        self._lock.check()
        self._change(state="starting", waiting=None)
        self.record(
            DeviceAcquired(
                device_name(gpus),
                gpu_uuids=tuple(gpu.uuid for gpu in gpus),
                gpu_names=tuple(gpu.name for gpu in gpus),
                wait_seconds=round(self.wait_seconds, 3),
            )
        )

    def find_newest_checkpoint(
        self, reported: Path | None = None, sleep: Callable[[float], None] = time.sleep
    ) -> Path | None:
        """Return the newest checkpoint of the job.

        Args:
            reported: the checkpoint that the trainer reported last.
            sleep: called with the seconds to wait while the disk is unreachable.
        """
        return resume_from(self._run_dir, self.beginning.job, reported, sleep=sleep)

    def find_best(self) -> Mapping[str, Any] | None:
        """Return the best checkpoint for ``summary.json``, None if no checkpoint has a metric."""
        return best_in(self._run_dir / "checkpoints")

    def record_attempt_start(self, attempt: Attempt) -> None:
        """Log and record the start of an attempt. The first attempt makes the launch count."""
        narration.log_start(attempt.number, attempt.spec)
        self._lock.check()
        if not self._is_counted:
            self._is_counted = True
            count_launch(self._run_dir, self.beginning.job, 1)
        self._change(state="running", waiting=None, reason=None, attempt=attempt)
        started = AttemptStarted(attempt.spec, attempt.resumed_from)
        self.record(started, attempt.number)

    def record(self, event: Event, attempt: int | None = None) -> None:
        """Record an event of the attempt with this number, or of the job if the number is None.

        Raises:
            RunFolderLostError: another job has taken the folder.
        """
        self._lock.check()
        if event.is_journaled:
            self._journal.write(event, attempt)
        self._update(lambda state: state.after(event))
        self._on_event(event, self.state.attempt)

    def record_decision(self, attempt: Attempt, decision: Decision | None) -> None:
        """Log and record an attempt's end and the decision, and refuse its unanswered requests."""
        narration.log_end(attempt, decision)
        self.record(AttemptEnded(attempt), attempt.number)
        reason = self.state.reason
        if decision is not None:
            reason = decision.reason
        self._change(state="between attempts", reason=reason, attempt=attempt)
        for request in find_requests(self._run_dir, TAKEN):
            request.answer({"error": f"the attempt ended first ({attempt.outcome})"})

    def record_end(
        self,
        status: str,
        reason: str | None,
        exit_code: int | None = None,
        wall_seconds: float | None = None,
    ) -> None:
        """Record the job's end, with the ``status`` and the ``reason`` of ``summary.json``.

        A launch that ended by a mistake in the config, a user's stop or a bug no longer counts
        towards ``max_launches``, because the next launch may well succeed.
        """
        if status == "completed":
            complete_job(self._run_dir, self.beginning.job)
        code = exit_code
        if code is None:
            code = EXIT_CODES.get(status)
        was_asked = self._is_users_stop(status)
        attempt = self.state.attempt
        is_bug = status == "failed" and attempt is not None and attempt.is_sure_bug
        if self._is_counted and (code == EXIT_BAD_CONFIG or was_asked or is_bug):
            self._is_counted = False
            count_launch(self._run_dir, self.beginning.job, -1)
        ended = time.time()
        if wall_seconds is not None:
            ended = self.state.started + wall_seconds
        self._change(
            state=status,
            reason=reason,
            exit_code=code,
            waiting=None,
            was_asked_to_end=was_asked,
            ended=ended,
        )

    def _is_users_stop(self, status: str) -> bool:
        """Return whether a person, and not a scheduler, seems to have ended the job."""
        by_user = self._signals.received in (0, signal.SIGINT, signal.SIGHUP)
        was_asked = by_user or self._was_asked_to_stop or self._sweep_is_stopped()
        return status == "interrupted" and was_asked

    def _sweep_is_stopped(self) -> bool:
        sweep = self._sweep_folder
        return sweep is not None and sweep_stop_requested(sweep)

    def _change(self, **changes: Any) -> None:
        self._update(lambda state: replace(state, **changes))

    def _update(self, change: Callable[[RunState], RunState]) -> None:
        """Change the state. After a signal an unfinished job is always "stopping"."""

        def change_and_mark_stop(state: RunState) -> RunState:
            state = change(state)
            if self._signals.received and not state.is_final:
                state = replace(state, state="stopping")
            return state

        self._file.update(change_and_mark_stop)

    def _handle_stop(self, request: Request) -> None:
        """Stop the job as SIGTERM does, or answer why that is impossible."""
        if not request.take():
            return
        signals = self._signals
        is_stopping = signals.received and not signals.is_pausing
        if not signals.watches(signal.SIGTERM):
            problem = (
                "this job takes no signals (it is under a scheduler, or not in its process's "
                "main thread); stop it where it was started"
            )
            request.answer({"error": problem})
            return
        if is_stopping and not request.options.get("now"):
            problem = "the run is stopping already; --now ends it without waiting for a checkpoint"
            request.answer({"error": problem})
            return
        answer = {
            "before": self.state.state,
            "after": "stopping",
            "signal": "SIGTERM",
            "exit_code": 143,
        }
        self._was_asked_to_stop = True
        self.pruned = str(request.options.get("pruned", self.pruned))
        self._change(state="stopping")
        request.answer({"answer": answer})
        signals.deliver(signal.SIGTERM)
