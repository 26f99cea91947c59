"""The story of a job, top to bottom.

compose → acquire a device → run an attempt → classify → decide → report
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import tenacity
from omegaconf import DictConfig, OmegaConf

from robust_train.batch.search import BatchSearch
from robust_train.batch.sizes import BatchSizes
from robust_train.config.batch import settle_batch_size
from robust_train.config.schema import complete, validate
from robust_train.errors import (
    EXIT_BAD_CONFIG,
    AttemptsExhausted,
    ConfigError,
    JobInterrupted,
    NoDevice,
    TrainerFailed,
)
from robust_train.events import (
    AttemptEnded,
    CheckpointSaved,
    DecidedAgain,
    DeviceAcquired,
    Event,
    JobEnded,
    JobStarted,
)
from robust_train.execution import Executor
from robust_train.execution.environment import attempt_environment
from robust_train.execution.inline import InlineExecutor
from robust_train.execution.process import ProcessExecutor
from robust_train.execution.request import AttemptRequest, TrainerRef
from robust_train.execution.signals import SignalWatch
from robust_train.memory.stability import attempt_stability
from robust_train.policy.decide import decide, decide_as_asked, first_attempt
from robust_train.queue import devices
from robust_train.queue.wait import NoGpu, WaitStatus
from robust_train.report import narration
from robust_train.report.html import write_report
from robust_train.runfolder.folder import RunFolder
from robust_train.runfolder.identity import begin_job, complete_job, resume_from
from robust_train.runfolder.journal import Journal
from robust_train.runfolder.summary import (
    AttemptRecord,
    Summary,
    attempts_table,
    evidence_of,
    gpu_memory_summary,
)
from robust_train.settings import (
    attempt_config,
    hydra_config,
    name_of,
    policy_settings,
    run_folder,
    sweep_folder,
    target_of,
)
from robust_train.values import (
    MEMORY_FAILURES,
    Attempt,
    AttemptSpec,
    Decision,
    FailureKind,
    GiveUp,
    Group,
    Retry,
    device_name,
)

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
        trainer: a callable ``trainer(cfg)`` or ``trainer(cfg, run)``, its dotted path, or None for
            ``cfg.trainer._target_``.
        cfg: any part of the keys of ``configs/robust.yaml``, and whatever the trainer needs.
        run_dir: where journal, summary and checkpoints go; by default Hydra's folder for the job,
            or a new one under ``outputs/``.

    Returns:
        The summary of a completed job; ``summary.result`` is what the trainer returned.

    Raises:
        ConfigError: the configuration or the trainer's path cannot be used; nothing was started.
        NoDevice: no device in time, and the CPU is not allowed.
        AttemptsExhausted: memory ran out on every device that may be used.
        TrainerFailed: the trainer failed otherwise; or its own exception, where that could be
            carried over from the attempt's process.
        JobInterrupted: Ctrl-C or SIGTERM.
    """
    job = Job(trainer, complete(cfg or {}), run_dir)
    summary = job.run()
    if summary.status == "completed":
        return summary
    if summary.status == "no_device":
        raise NoDevice(str(summary.reason))
    last = summary.attempts[-1].attempt.outcome
    if last.failure is not None and last.failure.kind in MEMORY_FAILURES:
        raise AttemptsExhausted(str(summary.reason))
    text = str(summary.reason)
    if last.traceback is not None:  # a crash's stack does not say which signal ended the process
        text = last.traceback if text in last.traceback else f"{text}\n{last.traceback}"
    raise TrainerFailed(text) if last.error is None else last.error from TrainerFailed(text)


class Job:
    """One launch, from a composed config to its summary.

    Args:
        trainer: as for :func:`launch`.
        cfg: a complete config.
        run_dir: as for :func:`launch`.

    Raises:
        ConfigError: the configuration cannot be used.
    """

    def __init__(
        self, trainer: Trainer | None, cfg: DictConfig, run_dir: str | Path | None = None
    ) -> None:
        self.cfg = cfg = cfg.copy()
        is_auto = settle_batch_size(cfg)
        validate(cfg)
        self.trainer = trainer or target_of(cfg)
        self.settings = policy_settings(cfg, finds_batch_size=is_auto)
        self.run_dir = run_folder(run_dir)
        self.signals = SignalWatch()
        name = devices.job_name(cfg, self.run_dir)
        self.folder = RunFolder(self.run_dir, name, self.signals, sweep_folder())
        with contextlib.ExitStack() as undo:
            undo.push(self.folder)  # releases the lock if this launch ends here
            self.earlier = begin_job(self.run_dir, resume=cfg.resume)
            undo.pop_all()
        self.journal = Journal(self.run_dir / "journal.jsonl")
        self.batch_sizes = BatchSizes(
            cfg, self.settings, self.trainer, self.earlier.found, self.journal.write
        )
        self.records: list[AttemptRecord] = []
        self.checkpoint: Path | None = self.earlier.checkpoint
        self.wait_seconds = 0.0
        self._started = time.monotonic()

    def run(self) -> Summary:
        """Run the job to its end, write ``summary.json``, show the table.

        Raises:
            ConfigError: the trainer cannot be imported, or refuses the configuration.
            JobInterrupted: after the summary was written.
        """
        with self.folder:
            self.journal.write(
                JobStarted(str(self.run_dir), name_of(self.trainer), self.earlier.job)
            )
            if self.checkpoint is not None:
                log.info(
                    "this run folder holds an unfinished job: going on from %s", self.checkpoint
                )
            try:
                with self.signals:
                    summary = self._train()
            except JobInterrupted as interruption:
                summary = self._summary("interrupted", str(interruption))
                self._report(summary, interruption.exit_code)
                self.signals.pass_on()
                raise
            except ConfigError as error:
                self._report(self._summary("failed", str(error)), EXIT_BAD_CONFIG)
                raise
            except Exception as error:
                reason = f"error in the launcher: {type(error).__name__}: {error}"
                self._report(self._summary("failed", reason))
                raise
            self._report(summary)
        return summary

    def _train(self) -> Summary:
        executor = self._executor()
        self.devices = devices.Devices(
            self.cfg,
            os.environ,
            self.run_dir,
            self.folder.ticking(executor.sleep),
            self._on_wait,
            self.folder.token,
        )
        healthy = False
        try:
            try:
                group = self._acquire_device()
            except NoDevice as error:
                return self._summary("no_device", str(error))
            executor.prepare()
            spec = first_attempt(self.settings, group)
            last = self._attempt_until_done(executor, spec)
            healthy = True
        finally:
            executor.close(keep_server=healthy)
            self.devices.release()
        self.signals.raise_if_received()
        outcome = last.attempt.outcome
        if outcome.failure is None:
            return self._summary("completed", None, outcome.result)
        assert last.decision is not None
        return self._summary("failed", last.decision.reason)

    def _executor(self) -> Executor:
        """How attempts run. A separate process starts importing the trainer right away."""
        if self.cfg.isolation == "none":
            trainer = self.trainer
            function = TrainerRef(trainer).load()[1] if isinstance(trainer, str) else trainer
            return InlineExecutor(function, self.signals)
        cfg = self.cfg.copy()
        OmegaConf.resolve(cfg)
        return ProcessExecutor(
            TrainerRef.of(self.trainer),
            cfg,
            self.run_dir,
            self.signals,
            self.cfg.stop_grace_seconds,
        )

    def _acquire_device(self) -> Group:
        started = time.monotonic()
        try:
            group = self.devices.acquire()
        finally:
            self.wait_seconds = time.monotonic() - started
        self.folder.queued(self.devices.job_id)
        self.folder.acquired()
        self.journal.write(
            DeviceAcquired(
                device=device_name(group),
                gpu_uuids=tuple(gpu.uuid for gpu in group),
                gpu_names=tuple(gpu.name for gpu in group),
                wait_seconds=round(self.wait_seconds, 3),
            )
        )
        return group

    def _attempt_until_done(self, executor: Executor, spec: AttemptSpec) -> AttemptRecord:
        """The retry loop: it goes on as long as the policy's decision is a Retry."""
        next_spec = spec

        def attempt_and_decide() -> AttemptRecord:
            nonlocal next_spec
            record = self._attempt(executor, next_spec)
            if isinstance(record.decision, Retry):
                record = self._when_ready(record, record.decision, executor)
            while isinstance(record.decision, Retry):
                next_spec = record.decision.spec
                if self.devices.take(next_spec.gpus):
                    break
                record = self._decide_again(record, record.decision)
            return record

        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_result(lambda record: isinstance(record.decision, Retry)),
            stop=tenacity.stop_never,
            wait=tenacity.wait_none(),
        )
        return retrying(attempt_and_decide)

    def _when_ready(self, record: AttemptRecord, retry: Retry, executor: Executor) -> AttemptRecord:
        """Let pass what the retry asks for; its alternative where there was no room in time."""
        if retry.pause_seconds > 0:
            self.folder.ticking(executor.sleep)(retry.pause_seconds)
        if retry.room is None or retry.otherwise is None:
            return record
        started = time.monotonic()
        found = self.devices.wait_for_room(retry.room)
        self.wait_seconds += time.monotonic() - started
        if isinstance(found, NoGpu):
            problem = found.reason
            return self._decided_otherwise(record, retry.otherwise, "waited_in_vain", problem)
        if not retry.room.gpu_uuids:
            record = replace(record, decision=replace(retry, spec=replace(retry.spec, gpus=found)))
            self.records[-1] = record
        return record

    def _decide_again(self, record: AttemptRecord, retry: Retry) -> AttemptRecord:
        """Another job was faster: the same decision on the GPUs as they are now."""
        self.records.pop()
        decision = self._decide(record.attempt)
        self.records.append(record)
        assert decision is not None
        problem = f"{retry.spec.device} went to another job meanwhile"
        return self._decided_otherwise(record, decision, "lost_race", problem)

    def _decided_otherwise(
        self, record: AttemptRecord, decision: Decision, why: str, problem: str
    ) -> AttemptRecord:
        record = replace(record, decision=decision)
        self.records[-1] = record
        action, reason = decision.action, decision.reason
        again = DecidedAgain(why, problem, action, reason)
        self.journal.write(again, self._number() - 1)
        log.warning("%s; %s", problem, reason)
        return record

    def _attempt(self, executor: Executor, spec: AttemptSpec) -> AttemptRecord:
        number = self._number()
        spec, search = self.batch_sizes.begin(spec)
        narration.announce(number, spec, is_searched=search is not None)
        sleep = self.folder.ticking(executor.sleep)
        self.checkpoint = resume_from(self.run_dir, self.earlier.job, self.checkpoint, sleep=sleep)
        started = narration.started(spec, self.checkpoint)
        self.journal.write(started, number)
        free_before = devices.free_bytes(spec.gpus)
        self.folder.attempt_starts(number, started)
        reservation = () if self.devices.hold is None else (self.devices.hold,)
        outcome = executor.run(
            self._request(number, spec, search),
            self._on_event,
            hold=(*reservation, *self.folder.hold),
            tick=self.folder.tick,
        )
        # in this process its memory does not come back
        expected = () if self.cfg.isolation == "none" else free_before
        free_after = self.devices.ended(spec.gpus, outcome, expected)
        if outcome.failure is not None and spec.gpus and self.cfg.isolation != "none":
            where = outcome.failure.rank or 0
            outcome = replace(
                outcome,
                gpu_free_before_bytes=free_before[where],
                gpu_free_after_bytes=free_after[where],
            )
        attempt = Attempt(*self.batch_sizes.end(spec, outcome))
        decision = self._decide(attempt)
        record = AttemptRecord(attempt, decision, attempt_stability(self.run_dir, number))
        self.records.append(record)
        told = record.as_json(len(self.records) - 1)
        self.journal.write(AttemptEnded(told, evidence_of(outcome)), number)
        narration.say(number, outcome, decision)
        self.folder.decided(attempt, decision, self.checkpoint)
        return record

    def _decide(self, attempt: Attempt) -> Decision | None:
        failure = attempt.outcome.failure
        if failure is None:
            return None
        history = (*(record.attempt for record in self.records), attempt)
        if attempt.outcome.stopped_for is not None and self.signals.received is None:
            return decide_as_asked(self.settings, history)
        if failure.kind is FailureKind.INTERRUPTED or self.signals.received is not None:
            return GiveUp("interrupted")
        gpus = self.devices.candidates() if attempt.spec.gpus else ()
        decision = decide(self.settings, history, gpus)
        if isinstance(decision, GiveUp) and failure.kind is FailureKind.BUG:
            where = "" if failure.rank is None else f" (rank {failure.rank})"
            return replace(decision, reason=failure.message + where)
        return decision

    def _request(
        self, number: int, spec: AttemptSpec, search: BatchSearch | None
    ) -> AttemptRequest:
        inline = self.cfg.isolation == "none"
        device = devices.name_for_trainer(spec.gpus, os.environ, own_process=not inline)
        cfg = attempt_config(self.cfg, spec, device)
        return AttemptRequest(
            trainer=TrainerRef("inline.trainer") if inline else TrainerRef.of(self.trainer),
            cfg=cfg,
            hydra_cfg=hydra_config(),
            attempt=number,
            run_dir=self.run_dir,
            resume_checkpoint=self.checkpoint,
            environ=attempt_environment(
                os.environ, spec.gpus, expandable_segments=spec.expandable_segments
            ),
            cwd=os.getcwd(),
            stall_timeout_seconds=60 * self.cfg.stall_timeout_minutes,
            # a script starts its processes itself
            ranks=1 if OmegaConf.select(cfg, "trainer.argv") else spec.ranks,
            stop_grace_seconds=self.cfg.stop_grace_seconds,
            batch_search=search,
        )

    def _number(self) -> int:
        """Of the attempt that runs or comes next, in all launches of this run folder."""
        return self.earlier.attempts + len(self.records) + 1

    def _on_event(self, event: Event) -> None:
        self.journal.write(event, self._number())
        self.devices.on_event(event)
        self.batch_sizes.on_event(event)
        self.folder.on_event(event)
        if isinstance(event, CheckpointSaved):
            self.checkpoint = Path(event.path)

    def _on_wait(self, status: WaitStatus) -> None:
        self.folder.queued(self.devices.job_id)
        self.folder.waits(status)

    def _summary(self, status: str, reason: str | None, result: Any = None) -> Summary:
        return Summary(
            status=status,
            reason=reason,
            result=result,
            run_dir=self.run_dir,
            wall_seconds=time.monotonic() - self._started,
            wait_seconds=self.wait_seconds,
            attempts=tuple(self.records),
            checkpoint=self.checkpoint,
        )

    def _report(self, summary: Summary, exit_code: int | None = None) -> None:
        self.journal.write(JobEnded(summary.status, summary.reason))
        summary.write()
        if summary.status == "completed":
            complete_job(self.run_dir)
        self.folder.ended(summary.status, summary.reason, exit_code)
        if self.records:
            log.info("attempts:\n%s", attempts_table(self.records))
            memory = gpu_memory_summary(self.records[-1])
            if memory is not None:
                log.info("%s", memory)
        write_report(self.run_dir)
        ending = f"{summary.status} after {summary.wall_seconds:.1f} s"
        log.info("%s; run folder: %s", ending, self.run_dir)
