"""The story of a job, top to bottom: before → take → request → run → evidence → decide → record.

``entry.launch`` creates the :class:`Job` and calls :meth:`Job.run` in the launcher's process. Its
driver (:mod:`.driver`) runs the attempts and finds their devices. Its run folder
(:mod:`.run_folder`) records everything. Features take part through :mod:`.hooks`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import tenacity

from robust_train.config.attempt import AttemptRequest
from robust_train.folder.identity import Beginning
from robust_train.folder.state import RunState, Summary
from robust_train.host.signals import SignalWatch
from robust_train.launcher.driver import Driver
from robust_train.launcher.ending import (
    add_advice,
    add_decision,
    add_ending,
    classify_launcher_error,
    load_error,
)
from robust_train.launcher.hooks import Hooks
from robust_train.launcher.plan import Plan
from robust_train.launcher.request import build_request
from robust_train.launcher.run_folder import RunFolder
from robust_train.launcher.script_output import find_doubt
from robust_train.model.attempt import Attempt
from robust_train.model.errors import ConfigError, JobInterrupted, NoDeviceError, RunFolderLostError
from robust_train.model.events import CheckpointSaved, DecidedAgain, Event, Failed, JobEnded
from robust_train.model.spec import AttemptSpec, Decision, GiveUp, Retry

log = logging.getLogger("robust_train")


class Job:
    """One launch, from its plan to its summary.

    Args:
        plan: everything that is known before the first effect.
        driver: runs the attempts.
        show_end: called with the summary and the command that resumes the job, or an empty string
            if no command does.
    """

    def __init__(
        self,
        plan: Plan,
        driver: Driver,
        *,
        show_end: Callable[[Summary, str], object] = lambda summary, how: None,
    ) -> None:
        self.plan = plan
        self.driver = driver
        self.policy = plan.policy
        self.signals = SignalWatch()
        self.hooks = Hooks.load(plan.features, self)
        self.folder = RunFolder(plan, self.signals, self.hooks.event)
        self.attempts: list[Attempt] = []
        self.decision: Decision | None = None
        self.checkpoint: Path | None = None
        self._started = time.monotonic()
        self._show_end = show_end

    @property
    def beginning(self) -> Beginning:
        """Where this launch began."""
        return self.folder.beginning

    @property
    def state(self) -> RunState:
        """The state of the job."""
        return self.folder.state

    def run(self) -> Summary:
        """Run the job to its end and write ``summary.json``.

        Raises:
            ConfigError: the trainer cannot be imported or refuses the configuration, or a live job
                holds the run folder.
            JobInterrupted: after the summary was written.
        """
        with self.signals, self.hooks.open(), self.folder:
            try:
                self.checkpoint = self.beginning.checkpoint
                self.folder.record_job_start()
                return self._train()
            except (Exception, JobInterrupted) as error:
                # The end is recorded already, or another job has taken the folder.
                if self.state.is_final or isinstance(error, RunFolderLostError):
                    raise
                return self._end_with(error)

    def _train(self) -> Summary:
        """Run attempts until an attempt completes or no remedy is left."""
        driver = self.driver
        folder = self.folder
        driver.open(self.signals, self.state.id, folder.token, self.sleep, folder.record_wait)
        try:
            with folder.measure_wait():
                fewer = self.policy.fewer_ranks(self.plan.config.num_gpus)
                gpus = driver.devices.acquire(fewer)
            folder.record_devices(gpus)
            driver.executor.prepare(self._tick)
            first = driver.decide_first(self.beginning, self.policy, gpus)
            self._attempt_until_done(first)
        finally:
            driver.executor.close()
            driver.devices.queue.release()
        last = self.attempts[-1]
        if self.decision is None:
            doubt = find_doubt(last)
            if doubt is not None:
                log.warning("%s", doubt)
            return self._end("completed", doubt)
        self.signals.raise_if_received()
        if last.cuda_cannot_work and driver.chooses_devices:
            raise ConfigError(self.decision.reason)
        return self._end("failed", self.decision.reason)

    def _attempt_until_done(self, first: Retry) -> None:
        """Run attempts as long as the decision after each attempt is to retry."""
        self.decision = first
        if first.reason:
            log.info("%s", first.reason)
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_result(lambda decision: isinstance(decision, Retry)),
            wait=lambda state: getattr(self.decision, "pause_seconds", 0.0),
            sleep=self.sleep,
            stop=tenacity.stop_never,
        )
        retrying(self._run_next_attempt)

    def _run_next_attempt(self) -> Decision | None:
        """Run the next attempt once its devices are available, and return the decision after it."""
        self.signals.check()
        self._wait_for_room()
        if not isinstance(self.decision, Retry):
            return self.decision
        self.hooks.before(self.decision)
        spec = self.decision.spec
        if not self.attempts or self.driver.devices.take(spec.gpus):
            self._run_attempt(spec)
        else:
            # The new decision takes effect at the next call, because it may start with a pause.
            problem = f"another job took {spec.device} in the meantime"
            self._decide_again(self._decide(tuple(self.attempts)), "lost_race", problem)
        return self.decision

    def _wait_for_room(self) -> None:
        """Wait for the GPUs that the next attempt needs. If they stay unavailable, decide again."""
        while isinstance(self.decision, Retry) and self.decision.room is not None:
            retry = self.decision
            with self.folder.measure_wait():
                outcome = self.driver.wait_for_room(retry, self.policy, tuple(self.attempts))
            if isinstance(outcome, Retry):
                self.decision = outcome
                return
            if retry.otherwise is None:
                raise NoDeviceError(outcome)
            self._decide_again(retry.otherwise, "waited_in_vain", outcome)

    def _decide_again(self, decision: Decision | None, why: str, problem: str) -> None:
        """Record another decision after the last attempt, because the first cannot be followed."""
        assert decision is not None, "the last attempt has failed"
        self.decision = decision
        problem = self.plan.words.reword(problem)
        self.attempts[-1] = last = add_decision(self.attempts[-1], decision)
        again = DecidedAgain(why, problem, last.action, decision.reason)
        self.folder.record(again, last.number)
        log.warning("%s; %s", problem, decision.reason)

    def _run_attempt(self, spec: AttemptSpec) -> None:
        """Run an attempt, and decide from the evidence of its end what comes next."""
        request = self._begin_attempt(spec)
        started = time.monotonic()
        process_exit = self.driver.run(
            request, self._on_event, self.signals, self.folder.hold, self._tick_attempt
        )
        seconds = time.monotonic() - started
        # From here on, a signal ends the job only after the attempt has been recorded.
        with self.signals.hand_signals_to(lambda signum: None):
            attempt = replace(self.folder.attempt, exit=process_exit)
            ending = attempt.ending
            if isinstance(ending, Failed) and ending.config_error:
                raise ConfigError(ending.config_error) from process_exit.error
            if self.attempts:
                attempt = attempt.infer_start_step(self.attempts[0])
            self._conclude(add_ending(attempt, request, seconds))

    def _begin_attempt(self, spec: AttemptSpec) -> AttemptRequest:
        """Record that an attempt starts from the newest checkpoint, and return its request."""
        number = self.beginning.attempts + 1 + len(self.attempts)
        if self.attempts:  # the first attempt's checkpoint was read at the start of the launch
            self.checkpoint = self.folder.find_newest_checkpoint(self.checkpoint, sleep=self.sleep)
        resumed_from = None
        start_step = 0
        if self.checkpoint is not None:
            resumed_from = str(self.checkpoint)
            saved_steps = {attempt.checkpoint: attempt.saved_step for attempt in self.attempts}
            start_step = saved_steps.get(resumed_from) or 0
        attempt = Attempt(number, spec, time.time(), resumed_from, start_step=start_step)
        self.folder.record_attempt_start(attempt)
        request = build_request(attempt, self.plan, self.policy.asked, is_first=not self.attempts)
        return self.hooks.request(request, attempt)

    def _conclude(self, attempt: Attempt) -> None:
        """Decide what comes after an attempt that has ended, and record both."""
        attempt = add_advice(self.hooks.evidence(attempt, self.attempts), self.plan)
        self.decision = self._decide((*self.attempts, attempt))
        attempt = add_decision(attempt, self.decision)
        if isinstance(self.decision, Retry):
            # The exception's frames would keep memory in use during the next attempt.
            attempt = replace(attempt, exit=replace(attempt.exit, error=None))
        self.attempts.append(attempt)
        self.folder.record_decision(attempt, self.decision)

    def _decide(self, history: tuple[Attempt, ...]) -> Decision | None:
        """Return the decision after the last attempt, None if it completed."""
        self.signals.end_pause()
        failure = history[-1].failure
        if failure is None:
            return None
        if self.signals.received:
            return GiveUp("interrupted", action="stopped")
        decision = self.hooks.overrule(history)
        if decision is None:
            decision = self.driver.decide(self.policy, history)
        return self.plan.words.reword_decision(decision, quoted=failure.message)

    def look_for_checkpoint(self) -> Path | None:
        """Return the newest checkpoint on disk, from which the next attempt resumes."""
        self.checkpoint = self.folder.find_newest_checkpoint()
        return self.checkpoint

    def was_stopped(self, attempt: Attempt) -> bool:
        """Return whether a signal or a pause ended the attempt, and not its own failure."""
        if not self.signals.is_pausing:
            return bool(self.signals.received)
        return not attempt.failed_by_itself

    def _on_event(self, event: Event) -> None:
        """Update the job with an event of the current attempt, and record the event."""
        self.policy = self.policy.after(event)
        if isinstance(event, CheckpointSaved) and event.is_useful:
            self.checkpoint = Path(event.path)
        self.driver.devices.on_event(event)
        self.record(event)

    def record(self, event: Event) -> None:
        """Record an event of the current attempt."""
        self.folder.record(event, self.folder.attempt.number)

    def sleep(self, seconds: float) -> None:
        """Wait, and do the job's periodic work in the meantime.

        Raises:
            ConfigError: the trainer refuses the config.
            JobInterrupted: a signal came.
        """
        self.signals.sleep(seconds, self._tick)

    def _tick_attempt(self) -> None:
        """Do periodic work during an attempt, twice a second and maybe in another thread."""
        self.folder.tick()
        pause = self.hooks.tick(self.folder.attempt)
        if pause is not None and not self.signals.received:
            log.info("%s", pause.why)
            self.signals.pause()

    def _tick(self) -> None:
        """Do periodic work between attempts."""
        self.signals.check()
        self.folder.tick()
        self.hooks.tick(None)
        self.driver.executor.poll()

    def _end_with(self, error: BaseException) -> Summary:
        """Record the end of a job that an error ended, and raise the exception for its caller."""
        end = classify_launcher_error(error, self.folder.pruned)
        code = getattr(end.error, "exit_code", None)
        summary = self._end(end.status, self.plan.words.reword(end.reason), code)
        if end.error is None:
            return summary
        if isinstance(end.error, JobInterrupted):
            self.signals.call_previous_handler()
        raise end.error

    def _end(self, status: str, reason: str | None, exit_code: int | None = None) -> Summary:
        """Record the job's end, write its summary, and show it."""
        summary = Summary(
            status=status,
            reason=reason,
            run_dir=self.plan.run_dir,
            wall_seconds=time.monotonic() - self._started,
            earlier_seconds=self.state.earlier_seconds,
            wait_seconds=self.folder.wait_seconds,
            attempts=tuple(self.attempts),
            checkpoint=self.checkpoint,
            best=self.folder.find_best(),
        )
        if self.attempts:
            last = self.attempts[-1]
            summary = replace(summary, result=last.result, error=load_error(last))
        self.folder.record(JobEnded(status, reason))
        # The summary is written first, because features take time to complete it and may fail.
        summary.write()
        self.folder.record_end(status, reason, exit_code, summary.wall_seconds)
        summary = self.hooks.end(summary, Summary.write)
        # A failure with an exit code has an exception, for which the caller prints one line.
        if status != "failed" or exit_code is None:
            how = ""
            if self.plan.may_resume:
                how = self.driver.how_to_resume(self.plan, self.state)
            self._show_end(summary, how)
        return summary
