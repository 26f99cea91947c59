"""The story of a job, top to bottom.

compose → acquire a device → run an attempt → classify → decide → record → summary
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tenacity
from omegaconf import DictConfig, OmegaConf

from robust_train import settings
from robust_train.batch.job_sizes import BatchSizes
from robust_train.batch.search import BatchSearch
from robust_train.config.batch import settle
from robust_train.config.schema import complete
from robust_train.errors import ConfigError, JobInterrupted, NoDevice, NoProgress
from robust_train.events import CheckpointSaved, Event
from robust_train.execution import decided_pause, sleep_with_ticks
from robust_train.execution.hydra_state import logged_to_screen
from robust_train.execution.inline import InlineExecutor
from robust_train.execution.library_imports import find_trainer
from robust_train.execution.process import ProcessExecutor
from robust_train.execution.request import request_for
from robust_train.execution.signals import SignalWatch
from robust_train.execution.trainer_ref import end_import_at_launch
from robust_train.failures.advice import with_fitting_advice
from robust_train.memory.stability import attempt_stability
from robust_train.nodes import follow, leader_of
from robust_train.policy.decide import concluded, decide, decide_on_request, first_attempt, on_gpus
from robust_train.policy.rules import with_gpu_at_fault
from robust_train.queue import devices
from robust_train.queue.waiting import NoGpu, WaitStatus
from robust_train.report import narration
from robust_train.report.html import write_report
from robust_train.report.sources import read_sources
from robust_train.report.status import LiveStatus
from robust_train.runfolder.command_line import how_to_go_on, resume_command
from robust_train.runfolder.folder import RunFolder
from robust_train.runfolder.identity import begin_job, complete_job, resume_from
from robust_train.runfolder.journal import AttemptEnded, DecidedAgain, JobEnded, JobStarted, Journal
from robust_train.runfolder.notifier import Notifier
from robust_train.runfolder.summary import AttemptRecord, Summary, evidence_of
from robust_train.values import Attempt, AttemptSpec, Decision, GiveUp, Group, Outcome, Retry

if TYPE_CHECKING:
    from robust_train.nodes.leader import Leader

log = logging.getLogger("robust_train")

Trainer = str | Callable[..., Any]


def launch(
    trainer: Trainer | None,
    cfg: Mapping[str, Any] | DictConfig | None = None,
    *,
    run_dir: str | Path | None = None,
) -> Summary:
    """Run ``trainer`` robustly: pick and wait for a GPU, and recover when memory runs out.

    Args:
        trainer: a callable, its dotted path, or None for ``cfg.trainer._target_``.
        cfg: any part of the keys of ``configs/robust.yaml``, and whatever the trainer needs.
        run_dir: the run folder; by default Hydra's for the job, or a new one under ``outputs/``.

    Returns:
        The summary of a completed job; ``summary.result`` is what the trainer returned.

    Raises:
        ConfigError: config, trainer or run folder cannot be used; NoProgress: see there.
        NoDevice: no device in time, and the CPU is not allowed.
        AttemptsExhausted: memory ran out on every device that may be used.
        TrainerFailed: the trainer failed otherwise; or its own exception.
        JobInterrupted: Ctrl-C or SIGTERM.
    """
    end_import_at_launch(trainer)
    with logged_to_screen():
        try:
            whole = complete(cfg or {})
            summary = follow(trainer, whole, run_dir) or Job(trainer, whole, run_dir).run()
        except (ConfigError, JobInterrupted) as error:
            raise error.with_traceback(None) from error.__cause__  # without our own frames
    summary.raise_unless_completed()
    return summary


class Job:
    """One launch, from a complete config to its summary.

    ``remedies``: it may be tried again; ``explain`` is called before the last lines.

    Raises:
        ConfigError: config or trainer cannot be used, or a live job holds the run folder.
    """

    def __init__(
        self,
        trainer: Trainer | None,
        cfg: DictConfig,
        run_dir: str | Path | None = None,
        *,
        remedies: bool = True,
        explain: Callable[[Summary], object] = lambda summary: None,
    ) -> None:
        self.cfg = cfg = cfg.copy()
        is_auto = settle(cfg)
        self.trainer = trainer or settings.target_of(cfg)
        self.settings = settings.launcher_settings(cfg)
        found = find_trainer(self.trainer, self.settings.runs_inline)
        self.trainer_ref, self.libraries, heeds = found
        self.policy = settings.policy_settings(cfg, finds_batch_size=is_auto, can_checkpoint=heeds)
        name = settings.job_name(cfg, self.trainer)
        self.run_dir = settings.run_folder(run_dir, name)
        self.signals = SignalWatch()
        self.wanted = settings.device_settings(cfg, name)
        self.live = LiveStatus(is_wanted=self.settings.owns_terminal)
        about = (self.run_dir, name, self.signals)
        resume = resume_command(self.run_dir) if self.settings.resume else None
        notifier = Notifier(settings.take_notify_settings(cfg), self.run_dir)
        self.folder = RunFolder(*about, settings.sweep_folder(), resume, self.live.show, notifier)
        self.journal = Journal(self.run_dir / "journal.jsonl")
        self.records: list[AttemptRecord] = []
        self.checkpoint: Path | None = None
        self.wait_seconds, self._started = 0.0, time.monotonic()
        self._has_remedies, self._explain = remedies, explain
        self.leader = leader_of(cfg, self.wanted, self.run_dir, self.signals, self.folder)

    def run(self) -> Summary:
        """Run the job to its end and write ``summary.json``.

        Raises:
            ConfigError: the trainer cannot be imported, or refuses the configuration.
            JobInterrupted: after the summary was written.
        """
        with self.live, self.leader or nullcontext(), self.signals, self.folder:
            try:
                if self.leader is not None:
                    self.leader.gather()
                self._begin()
                return self._train()
            except JobInterrupted as interruption:
                # however often somebody presses Ctrl-C: the end is recorded
                with self.signals.handed_to(lambda signum: None):
                    self._end("interrupted", str(interruption), exit_code=interruption.exit_code)
                self.signals.pass_on()
                raise
            except NoDevice as error:
                with self.signals.handed_to(lambda signum: None):
                    return self._end("no_device", str(error))
            except ConfigError as error:
                if not isinstance(error, NoProgress):  # what the last launch left stays
                    self._end("failed", str(error), exit_code=error.exit_code)
                raise
            except Exception as error:
                self._end("failed", f"error in the launcher: {type(error).__name__}: {error}")
                raise

    def _begin(self) -> None:
        """Find the unfinished job on the disk, or begin a new one."""
        resume, most = self.settings.resume, self.settings.max_launches
        self.beginning = begin_job(self.run_dir, resume=resume, max_launches=most)
        self.checkpoint, job = self.beginning.checkpoint, self.beginning.job
        about = settings.about_job(self.cfg, self.wanted.job_name)
        started = JobStarted(str(self.run_dir), settings.name_of(self.trainer), job, about)
        self.journal.write(started)
        self.folder.on_event(started)
        batch = settings.batch_settings(self.cfg, self.trainer)
        known = (self.beginning.found, self.journal.write, self.folder.state.requested_micro_batch)
        self.batch_sizes = BatchSizes(batch, self.policy, *known)
        if self.checkpoint is not None:
            log.info("this run folder holds an unfinished job: resuming from %s", self.checkpoint)

    def _train(self) -> Summary:
        self.executor = executor = self._executor()
        self.devices = devices.Devices(
            self.wanted, os.environ, self.run_dir, self.sleep, self._on_wait, self.folder.token
        )
        healthy = False
        try:
            group = self._acquire_device()
            executor.prepare(self.folder.tick)
            last = self._attempt_until_done(first_attempt(self.policy, group))
            healthy = True
            if self.leader is not None and last.decision is not None:
                self.leader.check()
        finally:
            # however often somebody presses Ctrl-C: the GPU is released
            with self.signals.handed_to(lambda signum: None):
                executor.close(keep_server=healthy)
                self.devices.release()
        if last.decision is None:
            return self._end("completed", None, last.attempt.outcome.result)
        self.signals.raise_if_received()
        return self._end("failed", last.decision.reason)

    def _executor(self) -> InlineExecutor | ProcessExecutor | Leader:
        """Return how attempts run. A separate process starts importing libraries right away."""
        if self.settings.runs_inline:
            function = self.trainer_ref.load() if isinstance(self.trainer, str) else self.trainer
            return InlineExecutor(lambda: function, self.signals, can_restart=self._has_remedies)
        cfg = self.cfg.copy()
        OmegaConf.resolve(cfg)
        own = ProcessExecutor(self.trainer_ref, self.libraries, cfg, self.run_dir, self.signals)
        return own if self.leader is None else self.leader.over(own)

    def _acquire_device(self) -> Group:
        started = time.monotonic()
        try:
            acquire = partial(self.devices.acquire, self.policy.fewer_ranks(self.policy.ranks))
            group = acquire() if self.leader is None else self.leader.acquire(acquire, self._tick)
        finally:
            self.wait_seconds = time.monotonic() - started
        self.folder.acquired(self.devices.job_id, group)
        self.journal.write(narration.acquired(group, self.wait_seconds))
        return group

    def _attempt_until_done(self, first: AttemptSpec) -> AttemptRecord:
        """Run attempts as long as the decision after each is to retry."""
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_result(lambda record: isinstance(record.decision, Retry)),
            wait=decided_pause,
            sleep=self.sleep,
            stop=tenacity.stop_never,
        )
        return retrying(self._next_attempt, first)

    def _next_attempt(self, first: AttemptSpec) -> AttemptRecord:
        """Run the first attempt, or what was decided after the last one if it can be had."""
        record = self._with_room(self.records[-1]) if self.records else None
        if record is None:
            return self._attempt(first)
        while isinstance(record.decision, Retry):
            spec = record.decision.spec
            if self.devices.take(spec.gpus):
                return self._attempt(spec)
            problem = f"{spec.device} went to another job meanwhile"
            decision = self._decide(record.attempt, tuple(one.attempt for one in self.records[:-1]))
            assert decision is not None
            record = self._decide_again(record, decision, "lost_race", problem)
        return record

    def _with_room(self, record: AttemptRecord) -> AttemptRecord:
        """Wait for the free memory that a retry needs, else take its alternative."""
        retry = record.decision
        if not isinstance(retry, Retry) or retry.room is None or retry.otherwise is None:
            return record
        started = time.monotonic()
        found = self.devices.wait_for_room(retry.room)
        self.wait_seconds += time.monotonic() - started
        if isinstance(found, NoGpu):
            again = self._decide_again(record, retry.otherwise, "waited_in_vain", found.reason)
            return self._with_room(again)
        if retry.room.gpu_uuids:
            return record
        spec = on_gpus(self.policy, retry.spec, found)
        return replace(record, decision=replace(retry, spec=spec))

    def _decide_again(
        self, record: AttemptRecord, decision: Decision, why: str, problem: str
    ) -> AttemptRecord:
        self.records[-1] = record = replace(record, decision=decision)
        again = DecidedAgain(why, problem, decision.action, decision.reason)
        self.journal.write(again, self._number - 1)
        log.warning("%s; %s", problem, decision.reason)
        return record

    def _attempt(self, spec: AttemptSpec) -> AttemptRecord:
        number, (spec, search) = self._number, self.batch_sizes.begin(spec)
        narration.announce(number, spec, is_searched=search is not None)
        self.checkpoint = resume_from(
            self.run_dir, self.beginning.job, self.checkpoint, sleep=self.sleep
        )
        started = narration.started(spec, self.checkpoint)
        self.journal.write(started, number)
        self.folder.attempt_starts(number, started)
        outcome = self._run_attempt(number, spec, search)
        attempt = Attempt(*self.batch_sizes.end(spec, outcome))
        decision = self._decide(attempt, tuple(record.attempt for record in self.records))
        attempt = concluded(attempt, decision)
        record = AttemptRecord(attempt, decision, attempt_stability(self.run_dir, number))
        self.records.append(record)
        evidence = evidence_of(attempt.outcome)
        self.journal.write(AttemptEnded(record.as_json(number), evidence), number)
        narration.log_outcome(number, attempt.outcome, decision)
        self.folder.decided(attempt, decision, self.checkpoint)
        return record

    def _run_attempt(self, number: int, spec: AttemptSpec, search: BatchSearch | None) -> Outcome:
        """Run one attempt; free memory of its GPUs before and after shows who took it."""
        free_before = devices.free_bytes(spec.gpus)
        own_process = not self.settings.runs_inline
        request = request_for(
            spec,
            self.cfg,
            self.settings,
            trainer=self.trainer_ref,
            device=devices.name_for_trainer(spec.gpus, os.environ, own_process=own_process),
            number=number,
            run_dir=self.run_dir,
            job=self.beginning.job,
            checkpoint=self.checkpoint,
            search=search,
            longest_pause=self.folder.state.longest_pause or 0.0,
        )
        hold = (*self.devices.hold, *self.folder.hold)
        tick = self._tick_attempt if own_process else self.folder.tick
        outcome = self.executor.run(request, self._on_event, hold=hold, tick=tick)
        if self._has_remedies and self.signals.received is None:
            earlier = tuple(record.attempt for record in self.records)
            outcome = with_gpu_at_fault(self.policy, earlier, Attempt(spec, outcome)).outcome
        # in this process its memory does not come back
        free_after = self.devices.ended(spec.gpus, outcome, free_before if own_process else ())
        trainer = (spec.num_workers, self.settings.is_script, self.policy.reports_start)
        outcome = with_fitting_advice(outcome, *trainer)
        return devices.with_free_bytes(outcome, free_before, free_after) if own_process else outcome

    def _decide(self, attempt: Attempt, earlier: tuple[Attempt, ...]) -> Decision | None:
        failure = attempt.outcome.failure
        if failure is None:
            return None
        if self.signals.received is not None:
            return GiveUp("interrupted", action="stopped")
        history = (*earlier, attempt)
        if attempt.outcome.stopped_for is not None:
            return decide_on_request(self.policy, history)
        if not self._has_remedies:
            hint = "; train_robust.py would go on" if failure.kind.is_memory else ""
            return GiveUp(failure.message + hint)
        if not attempt.spec.gpus:
            return decide(self.policy, history, ())
        gpus = self.devices.candidates()
        return decide(self.policy, history, gpus, self.devices.held_by_others(gpus))

    @property
    def _number(self) -> int:
        """Number of the attempt that runs or comes next, in all launches of this run folder."""
        return self.beginning.attempts + len(self.records) + 1

    def _on_event(self, event: Event) -> None:
        self.journal.write(event, self._number)
        self.devices.on_event(event)
        self.batch_sizes.on_event(event)
        self.folder.on_event(event)
        if isinstance(event, CheckpointSaved):
            self.checkpoint = Path(event.path)

    def sleep(self, seconds: float, wake: int | None = None) -> None:
        """Wait for a device or for time to pass; raise ConfigError if the trainer refuses."""
        sleep_with_ticks(seconds, wake, self._tick)

    def _tick_attempt(self) -> None:
        self.folder.tick()
        self.devices.tick()

    def _tick(self) -> None:
        self.folder.tick()
        self.executor.poll()

    def _on_wait(self, status: WaitStatus) -> None:
        self.folder.waits(status, self.devices.job_id)
        self.live.log_waiting(status)

    def _end(
        self, status: str, reason: str | None, result: Any = None, exit_code: int | None = None
    ) -> Summary:
        summary = Summary(
            status=status,
            reason=reason,
            result=result,
            run_dir=self.run_dir,
            wall_seconds=time.monotonic() - self._started,
            earlier_seconds=self.folder.state.earlier_seconds,
            wait_seconds=self.wait_seconds,
            attempts=tuple(self.records),
            checkpoint=self.checkpoint,
            environment=self.folder.environment,
            advice=narration.speed_advice(self.records),
            first_attempt=self._number - len(self.records) if self.records else 1,
        )
        self.journal.write(JobEnded(status, reason))
        summary.write()
        if status == "completed":
            complete_job(self.run_dir)
        self.folder.ended(status, reason, exit_code)
        write_report(found := read_sources(self.run_dir))
        if status != "failed" or exit_code is None:  # else the caller prints one line
            same = how_to_go_on(self.run_dir) if self.settings.resume else None
            narration.show_end(summary, found, self._explain, same)
        return summary
