"""A job's run folder as its launcher keeps it: lock, journal, ``state.json`` and ``requests/``."""

from __future__ import annotations

import errno
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from robust_train.children import detach
from robust_train.children.notifier import Notifier
from robust_train.config.schema import RobustConfig
from robust_train.folder import run_list
from robust_train.folder.checkpoints import is_read_only, pass_over_damaged
from robust_train.folder.identity import begin_job, count_launch
from robust_train.folder.journal import Journal
from robust_train.folder.lock import RunLock
from robust_train.folder.provenance import (
    Provenance,
    changed_files,
    read_environment,
)
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
from robust_train.folder.state import (
    EXIT_CODES,
    RunState,
    StateFile,
    read_state,
)
from robust_train.gpu.processes import user_name
from robust_train.host.linux import sleep_with_ticks
from robust_train.host.signals import SignalWatch
from robust_train.model.attempt import Attempt, AttemptEnded
from robust_train.model.errors import (
    EXIT_BAD_CONFIG,
    RunFolderLostError,
    RunFolderUnavailableError,
)
from robust_train.model.events import (
    AttemptStarted,
    DeviceAcquired,
    Event,
    Json,
)
from robust_train.model.failure import Clue, FailureKind
from robust_train.model.gpu import Group, device_name
from robust_train.model.json import finite
from robust_train.model.spec import Decision
from robust_train.queue.waiting import WaitStatus

log = logging.getLogger("robust_train")

_POLL_SECONDS = 0.4
_TAKING_REQUESTS = ("running", "between attempts", "stopping")


class RunFolder:
    """Holds the lock, keeps the state and takes the requests of one launch; a context manager.

    Whatever is wrong with the disk, the job goes on, after one warning. ``token`` is the part of
    the job's id that it has from the start; ``resumed_by`` is the command that resumes the job;
    ``show`` is given the state twice a second. Raises ConfigError: a live job holds the folder.
    Nothing in it was written.
    """

    def __init__(
        self,
        run_dir: Path,
        name: str,
        signals: SignalWatch,
        config: RobustConfig,
        *,
        sweep_folder: Path | None = None,
        resumed_by: str | None = None,
        show: Callable[[RunState], None] = lambda state: None,
    ) -> None:
        self.token = os.urandom(3).hex()
        self._run_dir = run_dir
        self._signals = signals
        self._sweep_folder = sweep_folder
        self._show = show
        self._notifier = Notifier(config.notify)
        self._provenance: Provenance | None = None
        self._config_files: Mapping[str, Json] = {}
        job_id, now = f"0-{self.token}", time.time()
        self._config = config
        self._lock = RunLock(run_dir, job_id)
        state = RunState(
            id=job_id,
            name=name,
            run_dir=str(run_dir),
            pid=os.getpid(),
            host=socket.gethostname(),
            user=user_name(os.geteuid()),
            started=now,
            since=now,
            resume_command=resumed_by,
        )
        if (before := read_state(run_dir)) is not None:
            state = replace(
                state,
                job=before.job,
                longest_pause=before.longest_pause,
                earlier_seconds=round(before.seconds(before.updated), 3),
            )
        self._file = StateFile(run_dir, state, self._lock.check)
        self._journal = Journal(run_dir / "journal.jsonl")
        self._is_counted = self._was_asked_to_stop = False
        self.pruned = ""  # why a sweep has stopped the job
        self._next_poll = 0.0

    @property
    def hold(self) -> tuple[int, ...]:
        """The descriptors that an attempt and all it starts keep open."""
        return self._lock.hold

    @property
    def state(self) -> RunState:
        """State of the job."""
        return self._file.state

    @property
    def attempt(self) -> Attempt:
        """The attempt with all its events so far."""
        attempt = self.state.attempt
        assert attempt is not None, "an attempt has started"
        return attempt

    @property
    def environment(self) -> dict[str, Json] | None:
        """What the job runs with, in short."""
        return None if self._provenance is None else self._provenance.short()

    def __enter__(self) -> RunFolder:
        try:
            self.beginning = begin_job(
                self._run_dir,
                resume=self._config.resume,
                max_launches=self._config.max_launches,
                sleep=partial(sleep_with_ticks, tick=self._signals.check),
            )
        except RunFolderUnavailableError:  # nothing could be written there
            self._lock.release()
            raise
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        try:
            open_requests(self._run_dir)
        except OSError as error:
            log.warning(
                "%s cannot be used (%s); this run goes on, but takes no requests",
                self._run_dir / REQUESTS,
                error.strerror,
            )
        self._file.write_if_due()
        run_list.register(self._run_dir, self.token)
        return self

    def __exit__(
        self,
        kind: object,
        error: BaseException | None,
        frames: object,
    ) -> None:
        if not self.state.is_final:
            is_stop = isinstance(error, KeyboardInterrupt)
            self.ended(
                "interrupted" if is_stop else "failed",
                str(error) or type(error).__name__,
                getattr(error, "exit_code", None),
            )
        if not isinstance(error, RunFolderLostError):
            self._refuse_requests()
        # the end is recorded: a signal cuts the last deliveries short, and changes nothing else
        with self._signals.handed_to(lambda signum: self._notifier.hurry()):
            self._lock.release()
            self._notifier.finish()

    def _refuse_requests(self) -> None:
        for suffix in (TAKEN, NEW):
            for request in find_requests(self._run_dir, suffix):
                request.answer(
                    {"error": "the run ended before it came to that"}
                )

    def tick(self) -> None:
        """Take requests and write what is due. To be called twice a second, by any thread. Raises
        RunFolderLostError: another job has the folder by now."""
        now = time.monotonic()
        if now < self._next_poll:
            return
        self._next_poll = now + _POLL_SECONDS
        self._lock.check()
        self._change()
        self._file.write_if_due()
        self._show(self.state)
        for request in find_requests(self._run_dir):
            state = self.state.state
            if request.verb == LAUNCHERS_VERB:
                self._stop(request)
            elif state not in _TAKING_REQUESTS and request.take():
                what = f"the run is {state}; try later"
                request.answer(
                    {"error": f"no attempt runs that could do that: {what}"}
                )
        if not self._signals.received and self._sweep_is_stopped():
            log.info("the sweep is stopped")
            self._signals.deliver(signal.SIGTERM)

    def queued(self, job_id: str) -> None:
        """Take over the job's id in the host's queue, empty if it has none."""
        state = self.state
        if job_id not in ("", state.id):
            self._change(
                id=job_id, earlier_ids=state.earlier_ids + (state.id,)
            )

    def waits(self, status: WaitStatus) -> None:
        """Record that the job waits for a GPU."""
        waiting = {
            "position": status.position,
            "reason": status.sentence(),
            "seconds_left": finite(round(status.seconds_left, 1)),
        }
        self._change(state="waiting", waiting=waiting)
        self._detach()

    def note_config(self, digests: Mapping[str, Json]) -> None:
        """Note the digests of the job's config files, and warn of those that have changed since the
        launch that this one resumes."""
        self._config_files = digests
        changed = changed_files(read_environment(self._run_dir), digests)
        if changed and self.beginning.checkpoint is not None:
            log.warning(
                "this launch runs today's config; changed since the last launch: %s",
                ", ".join(changed),
            )

    def acquired(
        self,
        gpus: Group,
        wait_seconds: float,
        command_variables: Mapping[str, Json],
    ) -> None:
        """Record that the job has a device, after a wait, and the trainer is being imported."""
        self._lock.check()
        self._provenance = Provenance(
            self._run_dir,
            gpus,
            {
                "job": self.beginning.job,
                "command_variables": dict(command_variables),
                "config_files": dict(self._config_files),
            },
        )
        self._change(state="starting", waiting=None)
        self.record(
            DeviceAcquired(
                device_name(gpus),
                gpu_uuids=tuple(gpu.uuid for gpu in gpus),
                gpu_names=tuple(gpu.name for gpu in gpus),
                wait_seconds=round(wait_seconds, 3),
            )
        )

    def attempt_starts(self, attempt: Attempt) -> None:
        """Record the start of an attempt; with the first one the launch counts."""
        self._lock.check()
        if not self._is_counted:
            self._is_counted = True
            count_launch(self._run_dir, self.beginning.job, 1)
        self.record(
            AttemptStarted(attempt.spec, attempt.resumed_from), attempt.number
        )
        self._change(
            state="running",
            waiting=None,
            reason=None,
            attempt=attempt,
        )
        self._detach()

    def record(
        self,
        event: Event,
        attempt: int | None = None,
    ) -> None:
        """Record an event of the job, or of its attempt with this number.

        Raises:
            RunFolderLostError: another job has the folder by now.
        """
        self._lock.check()
        if event.is_journaled:
            self._journal.write(event, attempt)
        self._update(lambda state: state.after(event))
        self._notifier.on_event(event, self.state)

    def decided(
        self,
        attempt: Attempt,
        decision: Decision | None,
    ) -> None:
        """Record an attempt's end and what comes next; refuse the requests it left open."""
        self.record(AttemptEnded(attempt), attempt.number)
        self._change(
            state="between attempts",
            reason=self.state.reason if decision is None else decision.reason,
            attempt=attempt,
        )
        for request in find_requests(self._run_dir, TAKEN):
            request.answer(
                {"error": f"the attempt ended first ({attempt.outcome})"}
            )

    def with_disk(self, attempt: Attempt) -> Attempt:
        """Return the attempt with what the disk says of its failure.

        One that could not write to a disk which is read-only since an error of its file system has
        failed because of the disk; elsewhere that is a mistake. From a checkpoint that its script
        could not read nothing resumes any more; whether another one comes before it is evidence.
        """
        failure, path = (
            attempt.failure,
            attempt.checkpoint or attempt.resumed_from,
        )
        if failure is None:
            return attempt
        lacks_file = f"No such file or directory: '{path}/" in failure.message
        is_damaged = lacks_file or failure.evidence.clue == Clue.DAMAGED
        has_begun = attempt.end_step is not None or attempt.saves > 1
        is_read = attempt.script is not None and not has_begun
        if os.strerror(errno.EROFS) in failure.message and is_read_only(
            self._run_dir
        ):
            failure = replace(failure, kind=FailureKind.DISK_FULL)
        elif path is not None and is_damaged and is_read:
            found = pass_over_damaged(
                self._run_dir / "checkpoints",
                self.beginning.job,
                Path(path),
                lacks_file=lacks_file,
            )
            evidence = replace(
                failure.evidence,
                has_checkpoint=found,
                clue=Clue.DAMAGED,
            )
            failure = replace(failure, evidence=evidence)
        return replace(attempt, failure=failure)

    def ended(
        self,
        status: str,
        reason: str | None,
        exit_code: int | None = None,
    ) -> None:
        """Record the job's end; ``status`` and ``reason`` as ``summary.json`` has them."""
        code = EXIT_CODES.get(status) if exit_code is None else exit_code
        was_asked = self._is_users_stop(status)
        if self._is_counted and (code == EXIT_BAD_CONFIG or was_asked):
            self._is_counted = False
            count_launch(self._run_dir, self.beginning.job, -1)
        self._change(
            state=status,
            reason=reason,
            exit_code=code,
            waiting=None,
            was_asked_to_end=was_asked,
        )

    def _is_users_stop(self, status: str) -> bool:
        """Return whether a person has ended the job, by all that is known, not a scheduler."""
        by_user = self._signals.received in (0, signal.SIGINT, signal.SIGHUP)
        was_asked = (
            by_user or self._was_asked_to_stop or self._sweep_is_stopped()
        )
        return status == "interrupted" and was_asked

    def _sweep_is_stopped(self) -> bool:
        sweep = self._sweep_folder
        return sweep is not None and sweep_stop_requested(sweep)

    def _detach(self) -> None:
        state, folder = self.state, self._run_dir
        detach.has_begun(folder, detach.job_text(state.id, state.name, folder))

    def _change(self, **changes: Any) -> None:
        self._update(lambda state: replace(state, **changes))

    def _update(self, change: Callable[[RunState], RunState]) -> None:
        def stopping(state: RunState) -> RunState:
            state = change(state)
            if self._signals.received and not state.is_final:
                state = replace(state, state="stopping")
            return state

        self._file.update(stopping)
        self._notifier.poll(self.state)

    def _stop(self, request: Request) -> None:
        """Stop the job as SIGTERM does."""
        if not request.take():
            return
        problem, signals = "", self._signals
        is_stopping = signals.received and not signals.is_pausing
        if not signals.watches(signal.SIGTERM):
            problem = (
                "this job takes no signals (it is under a scheduler, or not in its process's "
                "main thread); stop it where it was started"
            )
        elif is_stopping and not request.options.get("now"):
            problem = "it is stopping already; --now ends it without waiting for a checkpoint"
        if problem:
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
