"""The story of a job, top to bottom.

compose → acquire a device → run an attempt → classify → decide → record → summary
"""

from __future__ import annotations

import logging
import os
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tenacity
from omegaconf import DictConfig, OmegaConf

from robust_train.config.checks import checked, hide_urls
from robust_train.config.trainers import TrainerRef, job_name_of, name_of, target_of
from robust_train.failures.advice import with_advice
from robust_train.files import as_json
from robust_train.folder.identity import (
    begin_job,
    complete_job,
    refuse_other_version,
    resume_from,
)
from robust_train.folder.journal import Journal
from robust_train.folder.provenance import how_to_go_on, resume_command
from robust_train.folder.state import Summary
from robust_train.host.signals import SignalWatch
from robust_train.host.waiting import sleep_with_ticks
from robust_train.launcher import detach
from robust_train.launcher.ending import ended, error_of
from robust_train.launcher.hydra_state import (
    about_job,
    owns_terminal,
    run_folder,
    sweep_folder,
)
from robust_train.launcher.notifier import Notifier, notifications
from robust_train.launcher.policy_inputs import BatchKnowledge, policy_settings
from robust_train.launcher.process import ProcessExecutor
from robust_train.launcher.request import request_for
from robust_train.launcher.run_folder import RunFolder
from robust_train.memory.samples import attempt_stability
from robust_train.model.attempt import Attempt, AttemptEnded
from robust_train.model.errors import ConfigError, JobInterrupted, NoDevice, NoProgress
from robust_train.model.events import (
    SCHEMA,
    AttemptStarted,
    CheckpointSaved,
    DecidedAgain,
    Event,
    Failed,
    Finished,
    JobEnded,
    JobStarted,
    ScriptStarted,
    TrainerSupports,
)
from robust_train.model.gpu import Group
from robust_train.model.spec import AttemptSpec, Decision, GiveUp, Retry
from robust_train.policy.decide import (
    Offers,
    concluded,
    decide,
    first_decision,
    on_gpus,
    with_rule,
)
from robust_train.queue import devices
from robust_train.queue.waiting import NoGpu, WaitStatus
from robust_train.report import narration, wording
from robust_train.report.html import write_report
from robust_train.report.sources import read_sources
from robust_train.report.status import LiveStatus

if TYPE_CHECKING:
    from robust_train.launcher.inline import InlineExecutor

log = logging.getLogger("robust_train")

Trainer = str | Callable[..., Any]


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
        runs_inline: bool = False,
    ) -> None:
        self.cfg = cfg = cfg.copy()
        environ = dict(
            os.environ
        )  # for this job alone: a program may call launch() again
        hide_urls(cfg, environ)
        config = checked(cfg)
        self.config = config = (
            replace(config, isolation="none") if runs_inline else config
        )
        if detach.is_due(config) and sweep_folder() is None:
            raise ConfigError(
                "detach=true: only a command goes on in the background, not a call of launch(); "
                "start the program with nohup, or use robust-train run --detach -- PROGRAM"
            )
        self.trainer = trainer or target_of(config)
        self.trainer_ref = TrainerRef.of(self.trainer, inline=config.runs_inline)
        self.policy = policy_settings(config)
        self.batch = BatchKnowledge(cfg, self.trainer)
        self.name = job_name_of(config, self.trainer)
        self.run_dir = run_folder(run_dir, self.name)
        refuse_other_version(self.run_dir, resume=config.resume)
        self.signals = SignalWatch()
        self.live = LiveStatus(is_wanted=owns_terminal(config))
        self.folder = RunFolder(
            self.run_dir,
            self.name,
            self.signals,
            sweep_folder=sweep_folder(),
            resume_command=resume_command(self.run_dir) if config.resume else None,
            show=self.live.show,
            notifier=Notifier(notifications(config.notify, environ), self.run_dir),
        )
        self.journal = Journal(self.run_dir / "journal.jsonl")
        self.attempts: list[Attempt] = []
        self.decision: Decision | None = None
        self.checkpoint: Path | None = None
        self.wait_seconds, self._started = 0.0, time.monotonic()
        self._has_remedies, self._explain = remedies, explain

    def run(self) -> Summary:
        """Run the job to its end and write ``summary.json``.

        Raises:
            ConfigError: the trainer cannot be imported, or refuses the configuration.
            JobInterrupted: after the summary was written.
        """
        with self.live, self.signals, self.folder:
            try:
                self._begin()
                return self._train()
            except JobInterrupted as interruption:
                # however often Ctrl-C is pressed: the end is recorded
                with self.signals.handed_to(lambda signum: None):
                    self._end(
                        "interrupted",
                        str(interruption),
                        exit_code=interruption.exit_code,
                    )
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
                self._end(
                    "failed", f"error in the launcher: {type(error).__name__}: {error}"
                )
                raise

    def _begin(self) -> None:
        """Find the unfinished job on the disk, or begin a new one."""
        resume, most = self.config.resume, self.config.max_launches
        self.beginning = begin_job(self.run_dir, resume=resume, max_launches=most)
        self.checkpoint = self.beginning.checkpoint
        started = JobStarted(
            run_dir=str(self.run_dir),
            trainer=name_of(self.trainer),
            job=self.beginning.job,
            about=about_job(self.config, self.name),
            schema=SCHEMA,
        )
        self.journal.write(started)
        self.folder.on_event(started)
        requested = self.folder.state.requested_micro_batch
        self.policy = self.batch.informed(self.policy, self.beginning.found, requested)
        if self.checkpoint is not None:
            log.info(
                "this run folder holds an unfinished job: resuming from %s",
                self.checkpoint,
            )

    def _train(self) -> Summary:
        self.executor = executor = self._find_executor()
        self.devices = devices.Devices(
            self.config,
            self.name,
            os.environ,
            self.run_dir,
            self.sleep,
            self._on_wait,
            self.folder.token,
        )
        try:
            group = self._acquire_device()
            executor.prepare(self.folder.tick)
            self._attempt_until_done(self._first(group))
        finally:
            # however often Ctrl-C is pressed: the GPU is released
            with self.signals.handed_to(lambda signum: None):
                executor.close()
                self.devices.release()
        if self.decision is None:
            return self._end("completed", None)
        self.signals.raise_if_received()
        return self._end("failed", self.decision.reason)

    def _find_executor(self) -> InlineExecutor | ProcessExecutor:
        """Return how attempts run. The first separate interpreter starts right away."""
        if self.config.runs_inline:
            from robust_train.launcher.inline import InlineExecutor, function_of

            function = function_of(self.trainer, self.trainer_ref)
            return InlineExecutor(lambda: function, can_restart=self._has_remedies)
        cfg = self.cfg.copy()
        OmegaConf.resolve(cfg)
        return ProcessExecutor(
            self.trainer_ref,
            cfg,
            ranks=1 if self.config.is_script else self.config.num_gpus,
            has_standby=sweep_folder() is None,
        )

    def _first(self, group: Group) -> Retry:
        """Return what this launch begins with."""
        return first_decision(self.policy, group)

    def _find_devices(self) -> Group:
        return self.devices.acquire(self.policy.fewer_ranks(self.config.num_gpus))

    def _acquire_device(self) -> Group:
        started = time.monotonic()
        try:
            group = self._find_devices()
        finally:
            self.wait_seconds = time.monotonic() - started
        self.folder.acquired(self.devices.job_id, group)
        self.journal.write(narration.acquired(group, self.wait_seconds))
        return group

    def _attempt_until_done(self, first: Retry) -> None:
        """Run attempts as long as the decision after each is to retry."""
        self.decision = first
        if first.reason:
            log.info("%s", first.reason)
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_result(
                lambda decision: isinstance(decision, Retry)
            ),
            wait=_decided_pause,
            sleep=self.sleep,
            stop=tenacity.stop_never,
        )
        retrying(self._next_attempt)

    def _next_attempt(self) -> Decision | None:
        """Run what was decided, once it can be had; return what is decided after it."""
        while True:
            self._wait_for_room()
            if not isinstance(self.decision, Retry):
                return self.decision
            spec = self.decision.spec
            if not self.attempts or self.devices.take(spec.gpus):
                self._attempt(spec)
                return self.decision
            problem = f"{spec.device} went to another job meanwhile"
            self._decide_again(self._decide(self.attempts), "lost_race", problem)

    def _wait_for_room(self) -> None:
        """Wait for the free memory that a retry needs, else take its alternative."""
        while isinstance(self.decision, Retry) and self.decision.room is not None:
            retry, room = self.decision, self.decision.room
            started = time.monotonic()
            found = self.devices.wait_for_room(room)
            self.wait_seconds += time.monotonic() - started
            if not isinstance(found, NoGpu):
                if not room.gpu_uuids:
                    self.decision = on_gpus(
                        self.policy, tuple(self.attempts), retry, found
                    )
                return
            self._decide_again(retry.otherwise, "waited_in_vain", found.reason)

    def _decide_again(self, decision: Decision | None, why: str, problem: str) -> None:
        assert decision is not None
        self.decision = decision
        self.attempts[-1] = last = concluded(self.attempts[-1], decision)
        self.journal.write(
            DecidedAgain(why, problem, last.action, decision.reason), last.number
        )
        log.warning("%s; %s", problem, decision.reason)

    def _attempt(self, spec: AttemptSpec) -> None:
        """Run one attempt, gather the evidence of its end, and decide what comes next."""
        attempt = self._with_evidence(self._run_attempt(spec))
        self.decision = self._decide([*self.attempts, attempt])
        attempt = concluded(attempt, self.decision)
        self.attempts.append(attempt)
        self.journal.write(AttemptEnded(attempt), attempt.number)
        narration.log_end(attempt, self.decision)
        self.folder.decided(attempt, self.decision, self.checkpoint)

    def _run_attempt(self, spec: AttemptSpec) -> Attempt:
        """Run one attempt; return it with its events, its exit and free memory before it."""
        number = self._first_number + len(self.attempts)
        narration.announce(number, spec)
        job = self.beginning.job
        self.checkpoint = resume_from(
            self.run_dir, job, self.checkpoint, sleep=self.sleep
        )
        resumed_from = None if self.checkpoint is None else str(self.checkpoint)
        attempt = Attempt(number, spec, time.time(), resumed_from)
        self.journal.write(AttemptStarted(spec, resumed_from), number)
        self.folder.attempt_starts(attempt)
        own_process = not self.config.runs_inline
        self._free_before = devices.free_bytes(spec.gpus)
        request = request_for(
            spec,
            self.cfg,
            self.config,
            trainer=self.trainer_ref,
            device=devices.name_for_trainer(
                spec.gpus, os.environ, own_process=own_process
            ),
            number=number,
            run_dir=self.run_dir,
            job=job,
            checkpoint=self.checkpoint,
            search_key=self.batch.key_for(spec),
            longest_pause=self.folder.state.longest_pause or 0.0,
            has_live_status=owns_terminal(self.config),
        )
        started = time.monotonic()
        process_exit = self.executor.run(
            request,
            self._on_event,
            self.signals,
            hold=(*self.devices.hold, *self.folder.hold),
            tick=self._tick_attempt if own_process else self.folder.tick,
        )
        seconds = time.monotonic() - started
        attempt = replace(self.folder.attempt, exit=process_exit)
        if isinstance(attempt.ending, Failed) and attempt.ending.config_error:
            raise ConfigError(attempt.ending.config_error) from process_exit.error
        return ended(attempt, seconds, log=request.log_file, stacks=request.stacks_file)

    def _with_evidence(self, attempt: Attempt) -> Attempt:
        """Return an attempt with what is known only after its end: rules, memory, advice."""
        if self._has_remedies and self.signals.received is None:
            attempt = with_rule(self.policy, tuple(self.attempts), attempt)
        # in this process its memory does not come back
        before = () if self.config.runs_inline else self._free_before
        after = self.devices.ended(attempt, before)
        attempt = devices.with_free_bytes(attempt, before, after)
        attempt = with_advice(
            attempt,
            is_script=self.config.is_script,
            is_built_in=self.config.is_built_in,
        )
        stability = attempt_stability(self.run_dir, attempt.number)
        return replace(attempt, memory_stability=as_json(stability))

    def _decide(self, history: Sequence[Attempt]) -> Decision | None:
        """Return what comes after the last attempt, None if it completed."""
        failure = history[-1].failure
        if failure is None:
            return None
        if self.signals.received is not None:
            return GiveUp("interrupted", action="stopped")
        if not self._has_remedies and history[-1].stopped_for is None:
            hint = "; train_robust.py would go on" if failure.kind.is_memory else ""
            return GiveUp(failure.message + hint)
        offers = Offers()
        if history[-1].spec.gpus:
            gpus = self.devices.candidates()
            offers = Offers(gpus, self.devices.held_by_others(gpus))
        return decide(self.policy, tuple(history), offers)

    @property
    def _first_number(self) -> int:
        """Number of this launch's first attempt, in all launches of the run folder."""
        return self.beginning.attempts + 1

    def _on_event(self, event: Event) -> None:
        """Record an event of the attempt."""
        match event:
            case TrainerSupports():
                self.policy = replace(self.policy, can_checkpoint=True)
                return
            case CheckpointSaved():
                self.checkpoint = Path(event.path)
            case ScriptStarted():
                # logged here, because what the attempt prints is evidence
                log.info("running %s", shlex.join(event.argv))
            case Finished() | Failed():
                self.signals.is_over = isinstance(event, Finished)
        if event.is_journaled:
            self.journal.write(event, self._first_number + len(self.attempts))
        self.devices.on_event(event)
        self.folder.on_event(event)

    def sleep(self, seconds: float) -> None:
        """Wait for a device or for time to pass; raise ConfigError if the trainer refuses."""
        sleep_with_ticks(seconds, self._tick)

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
        self, status: str, reason: str | None, exit_code: int | None = None
    ) -> Summary:
        last = self.attempts[-1] if self.attempts else None
        summary = Summary(
            status=status,
            reason=reason,
            result=last.result if last is not None and status == "completed" else None,
            run_dir=self.run_dir,
            wall_seconds=time.monotonic() - self._started,
            earlier_seconds=self.folder.state.earlier_seconds,
            wait_seconds=self.wait_seconds,
            attempts=tuple(self.attempts),
            checkpoint=self.checkpoint,
            environment=self.folder.environment,
            advice=wording.speed_advice(self.attempts),
            error=None if last is None else error_of(last),
        )
        self.journal.write(JobEnded(status, reason))
        summary.write()
        if status == "completed":
            complete_job(self.run_dir)
        self.folder.ended(status, reason, exit_code)
        write_report(found := read_sources(self.run_dir))
        if status != "failed" or exit_code is None:  # else the caller prints one line
            same = how_to_go_on(self.run_dir) if self.config.resume else None
            narration.show_end(summary, found, self._explain, same)
        return summary


def _decided_pause(state: tenacity.RetryCallState) -> float:
    """Return the seconds that the last decision asks to let pass."""
    return float(state.outcome.result().pause_seconds) if state.outcome else 0.0
