"""The story of a job, top to bottom.

compose → acquire a device → run an attempt → classify → decide → record → summary
"""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import tenacity
from omegaconf import DictConfig

from robust_train.children import detach
from robust_train.children.notifier import notifications
from robust_train.compat import torch_cuda_version
from robust_train.config.attempt import AttemptRequest
from robust_train.config.checks import checked, hide_urls
from robust_train.config.composition import complete
from robust_train.config.projects import (
    as_typed,
    errors_as_typed,
    ours,
    resolved,
    their_keys,
)
from robust_train.config.trainers import (
    Trainer,
    TrainerRef,
    end_import_at_launch,
    job_name_of,
    name_of,
    target_of,
)
from robust_train.failures.advice import with_advice
from robust_train.failures.shortage import with_shortage
from robust_train.folder.checkpoints import spoil, why_full
from robust_train.folder.hydra_state import (
    about_job,
    chosen_folder,
    composed_files,
    owns_terminal,
    run_folder,
    sweep_folder,
)
from robust_train.folder.identity import (
    complete_job,
    refuse_other_version,
    resume_from,
)
from robust_train.folder.memory_samples import attempt_stability
from robust_train.folder.provenance import (
    changed_variables,
    command,
    config_digests,
    read_environment,
    resume_command,
    resumed_by_hand,
    variables_named,
)
from robust_train.folder.resolvers import resolvers_of
from robust_train.folder.state import Summary, summary_of_earlier_launch
from robust_train.gpu.inventory import read_inventory
from robust_train.gpu.processes import user_name
from robust_train.gpu.visible import numbers_gpus
from robust_train.host.engine import guest_rank
from robust_train.host.job_logging import logged_to_screen, shorten_lines
from robust_train.host.linux import sleep_with_ticks
from robust_train.host.loggers import change_words, lines_shown
from robust_train.host.signals import (
    SignalWatch,
    end_without_traceback_if_uncaught,
)
from robust_train.launcher.ending import doubt_of, ended, error_of
from robust_train.launcher.inputs import (
    policy_settings,
    request_for,
    values_used,
)
from robust_train.launcher.process import ProcessExecutor
from robust_train.launcher.run_folder import RunFolder
from robust_train.launcher.slow_watch import SlowWatch
from robust_train.model.attempt import Attempt
from robust_train.model.errors import (
    ConfigError,
    JobInterrupted,
    NoDeviceError,
    RunFolderLostError,
    limit_reached,
)
from robust_train.model.events import (
    SCHEMA,
    BatchTaken,
    CheckpointSaved,
    CheckpointUnused,
    DecidedAgain,
    Event,
    Failed,
    JobEnded,
    JobStarted,
    Json,
    ScriptStarted,
    Slow,
    TrainerSupports,
)
from robust_train.model.failure import FailureKind
from robust_train.model.gpu import Group
from robust_train.model.json import as_json
from robust_train.model.spec import AttemptSpec, Decision, GiveUp, Retry
from robust_train.policy.context import Offers
from robust_train.policy.decide import (
    cannot_work,
    concluded,
    decide,
    first_decision,
    on_gpus,
    with_rule,
)
from robust_train.queue.devices import Devices
from robust_train.queue.waiting import NoGpu, WaitStatus
from robust_train.readable import named_line
from robust_train.report import narration, wording
from robust_train.report.html import write_report
from robust_train.report.sources import read_sources
from robust_train.report.status import LiveStatus
from robust_train.report.story import goodput_in

if TYPE_CHECKING:
    from robust_train.launcher.guest import Rank
    from robust_train.launcher.inline import InlineExecutor

log = logging.getLogger("robust_train")

T = TypeVar("T")

_DISK_POLL_SECONDS = 5.0
_DISK_LINE_SECONDS = 60.0


def launch(
    trainer: Trainer | None,
    cfg: Mapping[str, Any] | DictConfig | None = None,
    *,
    run_dir: str | Path | None = None,
) -> Summary:
    """Run ``trainer`` robustly: pick and wait for a GPU, and recover when memory runs out.

    Args:
        trainer: a callable, its dotted path, or None: ``cfg.trainer._target_``.
        cfg: any part of the keys of ``configs/robust.yaml``, and whatever the trainer needs.
        run_dir: the run folder; by default Hydra's for the job, or a new one under ``outputs/``.

    Returns:
        The summary of a completed job; ``summary.result`` is what the trainer returned. Of a job
        that its sweep has pruned, ``summary.status`` is ``pruned``, and there may be no result.

    Raises:
        ConfigError: config, trainer or run folder cannot be used; NoProgressError: see there.
        NoDeviceError: no device in time, and the CPU is not allowed.
        AttemptsExhaustedError: memory ran out on every device that may be used.
        TrainerFailedError: the trainer failed otherwise; or its own exception.
        JobInterrupted: Ctrl-C or SIGTERM; uncaught, it ends a script with its exit code.
    """
    end_import_at_launch(trainer)
    with logged_to_screen():
        try:
            summary = summary_of_earlier_launch()
            if summary is None or run_dir is not None:
                summary = run_job(trainer, complete(cfg or {}), run_dir)
        except (ConfigError, KeyboardInterrupt) as error:
            end_without_traceback_if_uncaught()
            # without our own frames
            raise error.with_traceback(None) from error.__cause__
    summary.raise_unless_completed()
    return summary


def run_job(
    trainer: Trainer | None,
    cfg: DictConfig,
    run_dir: str | Path | None = None,
    *,
    remedies: bool = True,
    explain: Callable[[Summary], object] = lambda summary: None,
) -> Summary:
    """Run a job, as a launcher or as one rank of an engine's job; for the arguments see `Job`."""
    theirs = their_keys(cfg)
    shorten_lines()
    # None also ends what an earlier job of this process has set
    change_words(None if theirs is None else partial(as_typed, theirs=theirs))
    with lines_shown(), errors_as_typed(theirs):
        guest = guest_rank(os.environ) if remedies else None
        if guest is None:
            return Job(
                trainer,
                cfg,
                run_dir,
                remedies=remedies,
                explain=explain,
            ).run()
        from robust_train.launcher.guest import Rank

        rank = Rank(guest, trainer, cfg, run_dir)

        def run_first() -> Summary:
            return Job(
                trainer,
                rank.cfg,
                rank.run_dir,
                explain=explain,
                engine=rank,
            ).run()

        return rank.run(run_first, explain)


class Job:
    """One launch, from a complete config to its summary.

    ``remedies``: it may be tried again; ``explain`` is called before the last lines; ``engine``:
    this process as rank 0 of the job of an engine, which starts it again.

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
        engine: Rank | None = None,
    ) -> None:
        self.cfg = cfg = cfg.copy()
        # for this job alone: a program may call launch() again
        environ = dict(os.environ)
        hide_urls(cfg, environ)
        is_resumed = ours(cfg).get("resume") is not False
        folder = chosen_folder(run_dir) if is_resumed else None
        self.resolvers = resolvers_of(folder)
        with self.resolvers.kept():
            self.config = config = checked(cfg)
            self.resolved_cfg = resolved(cfg)
        if engine is not None:
            self.config = config = replace(config, isolation="none")
        if detach.is_due(config) and sweep_folder() is None:
            raise ConfigError(
                "detach=true: only a command goes on in the background, not a call of launch(); "
                "start the program with nohup, or use robust-train run --detach -- PROGRAM"
            )
        self.trainer = trainer or target_of(config)
        self.trainer_ref = TrainerRef.of(
            self.trainer, inline=config.runs_inline
        )
        self.numbers_gpus = numbers_gpus(environ, is_script=config.is_script)
        self.values_used = values_used(cfg, config)
        self.policy = policy_settings(config, self.values_used)
        self.name = job_name_of(config, self.trainer)
        self.run_dir = run_folder(run_dir, self.name)
        refuse_other_version(self.run_dir, resume=config.resume)
        self.signals = SignalWatch()
        self.live = LiveStatus(is_wanted=owns_terminal(config))
        notify = notifications(config.notify, environ)
        self.folder = RunFolder(
            self.run_dir,
            self.name,
            self.signals,
            replace(config, notify=notify),
            sweep_folder=sweep_folder(),
            resumed_by=resume_command(
                self.run_dir, is_named=run_dir is not None
            )
            if config.resume and engine is None
            else None,
            show=self.live.show,
        )
        self.attempts: list[Attempt] = []
        self.decision: Decision | None = None
        self.checkpoint: Path | None = None
        # why the newest file of a script's checkpoints cannot be used
        self._unused = ""
        # what it reads from the environment by name
        self._command_variables: dict[str, Json] = {}
        self.wait_seconds = 0.0
        self._started = time.monotonic()
        self._engine, self._explain = engine, explain
        self._has_remedies = remedies and engine is None
        self._has_warned_of_pattern = False

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
            except (Exception, JobInterrupted) as error:
                # nothing that comes after the end changes how the job has ended
                if self.folder.state.is_final:
                    raise
                # nor is it recorded in the folder of another job
                if isinstance(error, RunFolderLostError):
                    raise
                return self._end_with(limit_reached(error) or error)

    def _end_with(self, error: BaseException) -> Summary:
        """Record the end of a job without a last decision; raise what its caller has to know."""
        is_stop = isinstance(error, JobInterrupted)
        reason = as_typed(str(error), self.config.theirs)
        if is_stop and self.folder.pruned:
            return self._end("pruned", self.folder.pruned)
        if isinstance(error, NoDeviceError):
            return self._end("no_device", reason)
        if not isinstance(error, JobInterrupted | ConfigError):
            reason = f"error in the launcher: {type(error).__name__}: {reason}"
        code = getattr(error, "exit_code", None)
        self._end("interrupted" if is_stop else "failed", reason, code)
        if is_stop:
            self.signals.pass_on()
        raise error

    def _begin(self) -> None:
        """Record that the unfinished job goes on, or a new one begins."""
        self.beginning = beginning = self.folder.beginning
        self.resolvers.warn_of_earlier_values()
        self.resolvers.save(self.run_dir, beginning.job)
        self.checkpoint = beginning.checkpoint
        self.folder.record(
            JobStarted(
                run_dir=str(self.run_dir),
                trainer=name_of(self.trainer),
                job=beginning.job,
                about=about_job(self.config, self.name),
                schema=SCHEMA,
                keys=self.config.theirs,
            )
        )
        trainer = self.config.trainer
        self._command_variables = variables_named(
            [*command(), *(trainer.argv or ()), *trainer.resume_argv],
            trainer.cwd or ".",
            os.environ,
        )
        changed = changed_variables(
            read_environment(self.run_dir),
            beginning.job,
            self._command_variables,
        )
        if changed:
            log.warning(
                "the command reads variables that have changed since the last launch: %s",
                changed,
            )
        if self.checkpoint is not None:
            log.info(
                "this run folder holds an unfinished job: resuming from %s",
                self.checkpoint,
            )
        words = self.config.trainer.argv or sys.argv[1:]
        self.folder.note_config(config_digests(composed_files(), words))

    def _train(self) -> Summary:
        engine = self._engine
        if engine is None:
            self.executor = self._find_executor()
            try:
                self.devices = Devices(
                    self.config,
                    self.name,
                    os.environ,
                    self.run_dir,
                    self.sleep,
                    self._on_wait,
                    self.folder.token,
                    in_sweep=sweep_folder() is not None,
                )
            except BaseException:
                self.executor.close()
                raise
        else:
            self.executor, self.devices = engine.executor, engine.devices
        try:
            group = self._acquire_device()
            self.executor.prepare(self._tick)
            if engine is None:
                first = first_decision(self.policy, group)
            else:
                first = engine.first(self.beginning, self.policy, group)
            self._attempt_until_done(first)
        finally:
            self.executor.close()
            self.devices.queue.release()
        if self.decision is None:
            if doubt := doubt_of(self.attempts[-1]):
                log.warning("%s", doubt)
            return self._end("completed", doubt or None)
        self.signals.raise_if_received()
        if self.attempts[-1].cuda_cannot_work and engine is None:
            raise ConfigError(self.decision.reason)
        return self._end("failed", self.decision.reason)

    def _find_executor(self) -> InlineExecutor | ProcessExecutor:
        """Return how attempts run. The first separate interpreter starts right away."""
        if self.config.runs_inline:
            from robust_train.launcher.inline import (
                InlineExecutor,
                function_of,
            )

            # imports of the user's take as long as they like
            with self.signals.handed_to(
                lambda _: self.signals.raise_if_received()
            ):
                function = function_of(self.trainer, self.trainer_ref)
            return InlineExecutor(lambda: function)
        return ProcessExecutor(
            self.trainer_ref,
            self.resolved_cfg,
            ranks=1 if self.config.is_script else self.config.num_gpus,
            has_standby=sweep_folder() is None,
            job=self.folder.token,
        )

    def _acquire_device(self) -> Group:
        started = time.monotonic()
        fewer = self.policy.fewer_ranks(self.config.num_gpus)
        try:
            group = self.devices.acquire(fewer)
        finally:
            self.wait_seconds = time.monotonic() - started
        self.folder.queued(self.devices.queue.job_id)
        self.folder.acquired(group, self.wait_seconds, self._command_variables)
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
            wait=lambda state: getattr(self.decision, "pause_seconds", 0.0),
            sleep=self.sleep,
            stop=tenacity.stop_never,
        )
        retrying(self._next_attempt)

    def _next_attempt(self) -> Decision | None:
        """Run what was decided, once it can be had; return what is decided after it."""
        while True:
            self.signals.check()
            self._wait_for_room()
            if not isinstance(self.decision, Retry):
                return self.decision
            self._wait_for_disk()
            spec = self.decision.spec
            if not self.attempts or self.devices.take(spec.gpus):
                self._attempt(spec)
                return self.decision
            problem = f"{spec.device} went to another job meanwhile"
            self._decide_again(
                self._decide(self.attempts), "lost_race", problem
            )

    def _wait_for_room(self) -> None:
        """Wait for the free memory that a retry needs, else take its alternative."""
        while (
            isinstance(self.decision, Retry) and self.decision.room is not None
        ):
            retry, room = self.decision, self.decision.room
            started = time.monotonic()
            # one that has left its GPUs waits as long as it takes
            found = self.devices.wait_for_room(
                room, for_ever=retry.otherwise is None
            )
            self.wait_seconds += time.monotonic() - started
            if not isinstance(found, NoGpu):
                if not room.gpu_uuids:
                    known = tuple(self.attempts)
                    self.decision = on_gpus(self.policy, known, retry, found)
                return
            if retry.otherwise is None:
                raise NoDeviceError(found.reason)
            self._decide_again(
                retry.otherwise,
                "waited_in_vain",
                found.reason,
            )

    def _wait_for_disk(self) -> None:
        """Wait for space after an attempt that a full disk has ended."""
        failure = self.attempts[-1].failure if self.attempts else None
        if failure is None or failure.kind is not FailureKind.DISK_FULL:
            return
        next_line = 0.0
        while problem := why_full(self.run_dir, failure.message):
            if time.monotonic() >= next_line:
                next_line = time.monotonic() + _DISK_LINE_SECONDS
                log.warning(
                    "%s: waiting for space, then training goes on", problem
                )
            self.sleep(_DISK_POLL_SECONDS)

    def _decide_again(
        self,
        decision: Decision | None,
        why: str,
        problem: str,
    ) -> None:
        assert decision is not None
        self.decision = decision
        self.attempts[-1] = last = concluded(self.attempts[-1], decision)
        self.folder.record(
            DecidedAgain(
                why,
                problem,
                last.action,
                decision.reason,
            ),
            last.number,
        )
        log.warning("%s; %s", problem, decision.reason)

    def _attempt(self, spec: AttemptSpec) -> None:
        """Run one attempt, gather the evidence of its end, and decide what comes next."""
        # in this process its memory does not come back
        if not self.config.runs_inline:
            self.devices.begin(spec.gpus)
        request = self._begin_attempt(spec)
        self.slow = SlowWatch(spec.gpus, self._on_event)
        started = time.monotonic()
        process_exit = self.executor.run(
            request,
            self._on_event,
            self.signals,
            hold=self.devices.queue.hold + self.folder.hold,
            tick=self._tick_beside
            if self.config.runs_inline
            else self._tick_attempt,
        )
        seconds = time.monotonic() - started
        # a signal that comes now ends the job once the attempt is recorded
        with self.signals.handed_to(lambda signum: None):
            attempt = replace(self.folder.attempt, exit=process_exit)
            ending = attempt.ending
            if isinstance(ending, Failed) and ending.config_error:
                raise ConfigError(ending.config_error) from process_exit.error
            first = self.attempts[0] if self.attempts else attempt
            attempt = attempt.resumed_like(first)
            self._conclude(ended(attempt, request, seconds))

    def _begin_attempt(self, spec: AttemptSpec) -> AttemptRequest:
        """Record that an attempt begins, from the newest checkpoint; return its request."""
        number = self.beginning.attempts + 1 + len(self.attempts)
        narration.announce(number, spec)
        job = self.beginning.job
        if self.attempts:  # the first one's was read when the launch began
            self.checkpoint = resume_from(
                self.run_dir,
                job,
                self.checkpoint,
                sleep=self.sleep,
            )
        resumed_from = (
            None if self.checkpoint is None else str(self.checkpoint)
        )
        steps = {one.checkpoint: one.saved_step for one in self.attempts}
        attempt = Attempt(
            number,
            spec,
            time.time(),
            resumed_from,
            start_step=steps.get(resumed_from) or 0,  # 0 if unknown
        )
        self.folder.attempt_starts(attempt)
        with self.resolvers.kept():
            return request_for(
                attempt,
                self.cfg,
                self.config,
                self.trainer_ref,
                self.run_dir,
                self.policy.asked,
                job=job,
                longest_pause=self.folder.state.longest_pause or 0.0,
                is_first=not self.attempts,
                numbers_gpus=self.numbers_gpus,
            )

    def _conclude(self, attempt: Attempt) -> None:
        """Decide what comes after an attempt that has ended, and record both."""
        attempt = self._with_evidence(attempt)
        found = attempt.evidence
        if found.bad_step is not None and found.good_step is not None:
            # another rank may have recorded a checkpoint after the one that diverged had looked
            with contextlib.suppress(OSError):
                spoil(
                    self.run_dir / "checkpoints",
                    self.beginning.job,
                    found.good_step,
                )
        if found.bad_step is not None or found.has_checkpoint:
            self.checkpoint = resume_from(self.run_dir, self.beginning.job)
            attempt = attempt.with_checkpoint(
                is_there=self.checkpoint is not None
            )
        self.decision = self._decide(self.attempts + [attempt])
        attempt = concluded(attempt, self.decision)
        if isinstance(self.decision, Retry):
            # its frames would hold memory through the next attempt in this process
            attempt = replace(attempt, exit=replace(attempt.exit, error=None))
        self.attempts.append(attempt)
        narration.log_end(attempt, self.decision)
        if len(self.attempts) == 1 and isinstance(self.decision, Retry):
            self._log_unmatched()
        self.folder.decided(attempt, self.decision)

    def _log_unmatched(self) -> None:
        """Log that the pattern for a script's checkpoints leads to none."""
        trainer = self.config.trainer
        if self._unused or self.checkpoint is not None:
            return
        if (
            trainer.checkpoint_glob is not None
            and not self._has_warned_of_pattern
        ):
            self._has_warned_of_pattern = True
            log.warning(
                "no new file matches the pattern for checkpoints %s (in %s): without one an "
                "attempt starts from the beginning",
                trainer.checkpoint_glob,
                Path(trainer.cwd or ".").absolute(),
            )

    def _with_evidence(self, attempt: Attempt) -> Attempt:
        """Return an attempt with what is known only after its end: rules, memory, advice."""
        attempt = self.folder.with_disk(with_shortage(attempt, self.attempts))
        if self._has_remedies and not self._is_stopped(attempt):
            attempt = with_rule(
                self.policy,
                tuple(self.attempts),
                attempt,
            )
        cuda_versions = ""
        if attempt.cuda_cannot_work:  # a script's torch may be another one
            torchs = None if self.config.is_script else torch_cuda_version()
            cuda_versions = read_inventory(processes=False).cuda_versions(
                torchs
            )
        attempt = with_advice(
            self.devices.ended(attempt),
            self.config,
            cuda_versions,
        )
        stability = _try(
            "the stability of memory",
            lambda: attempt_stability(self.run_dir, attempt.number),
        )
        return replace(attempt, memory_stability=as_json(stability))

    def _is_stopped(self, attempt: Attempt) -> bool:
        """Return whether a signal has ended the job, or its time slice the attempt."""
        failure = attempt.failure
        if not self.signals.is_pausing:
            return bool(self.signals.received)
        return failure is None or failure.kind is FailureKind.INTERRUPTED

    def _decide(self, history: Sequence[Attempt]) -> Decision | None:
        """Return what comes after the last attempt, None if it completed."""
        last, failure = history[-1], history[-1].failure
        was_paused = self.signals.goes_on()
        if failure is None:
            return None
        if was_paused and failure.kind is FailureKind.INTERRUPTED:
            return Retry(
                last.spec,
                "queue_again",
                as_typed(
                    "its time slice is over and another user waits (gpu_slice_minutes)",
                    self.config.theirs,
                ),
                room=self.devices.leave(len(last.spec.gpus)),
            )
        if self.signals.received:
            return GiveUp("interrupted", action="stopped")
        if self._engine is not None:
            hint = "the next start in this run folder decides how to go on"
            return GiveUp(f"{failure.message}; {hint}")
        if not self._has_remedies:
            if last.cuda_cannot_work:
                return GiveUp(cannot_work(failure))
            hint = (
                "; train_robust.py would go on"
                if failure.kind.is_memory
                else ""
            )
            return GiveUp(failure.message + hint)
        offers = self.devices.offers() if last.spec.gpus else Offers()
        return decide(self.policy, tuple(history), offers)

    def _on_event(self, event: Event) -> None:
        """Record an event of the attempt."""
        match event:
            case TrainerSupports():
                self.policy = self.policy.supporting(event.features)
            case BatchTaken():
                asked = self.policy.asked.with_batch(event.asked, None)
                self.policy = replace(self.policy, asked=asked)
            case CheckpointSaved() if event.loss != "diverged":
                self.checkpoint = Path(event.path)
            case CheckpointUnused(text=text):
                if text != self._unused:
                    log.warning("%s", text)
                self._unused = text
            case ScriptStarted():
                # logged here, because what the attempt prints is evidence
                log.info("running %s", shlex.join(event.argv))
            case Slow(text=text) if text:
                log.warning("%s, for ten minutes by now", text)
            case Slow():
                log.info("training is no longer slowed down")
        self.slow.on_event(event)
        self.devices.on_event(event)
        self.folder.record(event, self.folder.attempt.number)

    def sleep(self, seconds: float) -> None:
        """Wait for a device or for time to pass; raise ConfigError if the trainer refuses, and
        JobInterrupted if a signal came."""
        sleep_with_ticks(seconds, self._tick)

    def _tick_attempt(self) -> None:
        self.slow.poll()
        self.signals.check()
        self.folder.tick()
        self.devices.queue.tick()
        # an attempt that saves nothing would begin at the same step each time
        if self.folder.attempt.saves and not self.signals.received:
            other = self.devices.who_waits()
            if other is not None:
                whose = f"{other.id} of {user_name(other.owner)}, who holds fewer GPUs"
                log.info("the time slice is over, and job %s, waits", whose)
                self.signals.pause()

    def _tick_beside(self) -> None:
        """Do the same beside a trainer in this process, which only a signal stops."""
        try:
            self.folder.tick()
        except RunFolderLostError:
            if not self.signals.received:
                self.signals.deliver(signal.SIGTERM)

    def _tick(self) -> None:
        self.signals.check()
        self.folder.tick()
        self.executor.poll()

    def _on_wait(self, status: WaitStatus) -> None:
        self.folder.queued(self.devices.queue.job_id)
        self.folder.waits(status)
        self.live.log_waiting(status)

    def _end(
        self,
        status: str,
        reason: str | None,
        exit_code: int | None = None,
    ) -> Summary:
        last = self.attempts[-1] if self.attempts else None
        summary = Summary(
            status=status,
            reason=reason,
            result=None if last is None else last.result,
            run_dir=self.run_dir,
            wall_seconds=time.monotonic() - self._started,
            earlier_seconds=self.folder.state.earlier_seconds,
            wait_seconds=self.wait_seconds,
            attempts=tuple(self.attempts),
            checkpoint=self.checkpoint,
            environment=self.folder.environment,
            error=None if last is None else error_of(last),
        )
        if last is not None:
            self._log_unmatched()
        self.folder.record(JobEnded(status, reason))
        # first, because what is computed from the record takes time and may fail
        summary.write()
        if status == "completed":
            complete_job(self.run_dir, self.beginning.job)
        self.folder.ended(status, reason, exit_code)
        summary = self._evaluated(summary)
        found = _try("the record", lambda: read_sources(self.run_dir))
        if found is not None:
            write_report(found)
        # else the caller prints one line
        if status != "failed" or exit_code is None:
            narration.show_end(
                summary,
                () if found is None else found.entries,
                self._explain,
                self._how_to_go_on(),
            )
        return summary

    def _evaluated(self, summary: Summary) -> Summary:
        """Return the summary with the figures that the job's record shows, and write it again."""
        goodput = _try("goodput", lambda: goodput_in(self.run_dir))
        advice = _try(
            "advice",
            lambda: tuple(
                wording.speed_advice(self.attempts, self.config.theirs)
            ),
        )
        if goodput is None and not advice:
            return summary
        summary = replace(summary, goodput=goodput, advice=advice or ())
        summary.write()
        return summary

    def _how_to_go_on(self) -> str:
        """Return what resumes the job; empty if nothing does, or its sweep does."""
        if not self.config.resume or sweep_folder() is not None:
            return ""
        if self._engine is not None:
            return "start all ranks again, with the same run folder"
        if self.folder.state.resume_command is None:
            return resumed_by_hand(self.run_dir)
        return f"robust-train resume {self.folder.state.id}"


def _try(what: str, compute: Callable[[], T]) -> T | None:
    """Return what is computed about a job; None after a warning if that fails.

    A job that has trained for days does not fail because of a figure about it.
    """
    try:
        return compute()
    except Exception as error:
        log.warning("%s cannot be computed: %s", what, named_line(error))
    return None
