"""How the attempts of a job run, and who chooses their devices.

:class:`.job.Job` calls its driver in the launcher's process and knows no other way to run an
attempt. There are three drivers: interpreters (:class:`ProcessDriver`), the launcher's process
(:class:`InlineDriver`), and the process that an engine such as torchrun started
(:class:`.guest.RankDriver`).
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from robust_train.config.attempt import AttemptRequest
from robust_train.folder.resume_command import resumed_by_hand
from robust_train.folder.state import RunState
from robust_train.host.signals import SignalWatch
from robust_train.launcher.plan import Plan
from robust_train.launcher.process import ProcessExecutor
from robust_train.model.attempt import Attempt
from robust_train.model.events import Event
from robust_train.model.exit import Exit
from robust_train.model.gpu import Group
from robust_train.model.spec import Decision, GiveUp, Retry
from robust_train.policy.context import Offers
from robust_train.policy.decide import decide, first_decision, place_on_gpus
from robust_train.policy.giving_up import describe_setup_failure
from robust_train.policy.settings import PolicySettings
from robust_train.queue.devices import Devices
from robust_train.queue.waiting import NoGpu, WaitStatus

if TYPE_CHECKING:
    from robust_train.folder.identity import Beginning
    from robust_train.launcher.inline import InlineExecutor


class Executor(Protocol):
    """Runs attempts for a driver."""

    def prepare(self, tick: Callable[[], None]) -> object:
        """Get ready for an attempt.

        Raises:
            ConfigError: the trainer refuses the config.
        """

    def poll(self) -> None:
        """Check on the interpreters that :meth:`prepare` started.

        Raises:
            ConfigError: the trainer refuses the config.
        """

    def close(self) -> None:
        """End everything that was started."""

    def run(
        self,
        request: AttemptRequest,
        on_event: Callable[[Event], None],
        signals: SignalWatch,
        *,
        hold: tuple[int, ...] = (),
        tick: Callable[[], None] = lambda: None,
    ) -> Exit:
        """Run an attempt to its end."""


class Driver(ABC):
    """The methods that a job calls."""

    executor: Executor
    devices: Devices
    # Whether another attempt may follow a failed attempt.
    has_remedies: bool
    # Whether the launcher chooses the devices. If it does, CUDA that cannot work refuses the job.
    chooses_devices: bool

    @abstractmethod
    def open(
        self,
        signals: SignalWatch,
        job_id: str,
        token: str,
        sleep: Callable[[float], None],
        on_wait: Callable[[WaitStatus], None],
    ) -> None:
        """Create the executor and the devices. The first interpreter starts right away.

        Args:
            signals: those of the launcher's process.
            job_id: the job's id, which the queue shows.
            token: the mark of this launch's processes.
            sleep: waits; an exception that it raises ends the wait.
            on_wait: called with each status of a wait for a GPU.
        """

    @abstractmethod
    def first(self, beginning: Beginning, policy: PolicySettings, gpus: Group) -> Retry:
        """Return the first attempt's decision for the GPUs that the job has."""

    @abstractmethod
    def wait_for_room(
        self, retry: Retry, policy: PolicySettings, history: tuple[Attempt, ...]
    ) -> Retry | str:
        """Wait for the GPUs that a retry needs.

        Returns:
            The retry with its GPUs, or the reason why they did not become free in time.
        """

    def run(
        self,
        request: AttemptRequest,
        on_event: Callable[[Event], None],
        signals: SignalWatch,
        hold: tuple[int, ...],
        tick: Callable[[], None],
    ) -> Exit:
        """Run an attempt to its end, and call ``tick`` at least twice a second. The attempt keeps
        the job's reservations ``hold`` open."""
        return self.executor.run(
            request, on_event, signals, hold=self.devices.queue.hold + hold, tick=tick
        )

    @abstractmethod
    def decide(self, policy: PolicySettings, history: tuple[Attempt, ...]) -> Decision:
        """Return the decision after a failed attempt."""

    @abstractmethod
    def how_to_resume(self, plan: Plan, state: RunState) -> str:
        """Return the command, or the action, that resumes a job that has not completed."""


class HostDriver(Driver):
    """Runs attempts on this host: the launcher chooses the devices and decides after each attempt.

    Args:
        plan: the job's plan.
        has_remedies: whether another attempt may follow a failed attempt.
    """

    chooses_devices = True

    def __init__(self, plan: Plan, *, has_remedies: bool = True) -> None:
        self.has_remedies = has_remedies
        self._plan = plan

    def open(
        self,
        signals: SignalWatch,
        job_id: str,
        token: str,
        sleep: Callable[[float], None],
        on_wait: Callable[[WaitStatus], None],
    ) -> None:
        """Create the executor and the devices."""
        plan = self._plan
        self.executor = self._executor(signals, token)
        try:
            self.devices = Devices(
                plan.config,
                plan.name,
                os.environ,
                plan.run_dir,
                sleep,
                on_wait,
                token,
                job_id=job_id,
                in_sweep=plan.surroundings.in_sweep,
            )
        except BaseException:
            self.executor.close()
            raise

    @abstractmethod
    def _executor(self, signals: SignalWatch, token: str) -> Executor:
        """Return the executor of this kind of driver."""

    def first(self, beginning: Beginning, policy: PolicySettings, gpus: Group) -> Retry:
        """Return the first attempt's decision for the GPUs that the job has."""
        return first_decision(policy, gpus)

    def wait_for_room(
        self, retry: Retry, policy: PolicySettings, history: tuple[Attempt, ...]
    ) -> Retry | str:
        """Wait for the GPUs that a retry needs, without a time limit if it has no alternative."""
        room = retry.room
        assert room is not None, "nothing is waited for"
        outcome = self.devices.wait_for_room(room, for_ever=retry.otherwise is None)
        if isinstance(outcome, NoGpu):
            return outcome.reason
        if room.gpu_uuids:
            return retry
        return place_on_gpus(policy, history, retry, outcome)

    def decide(self, policy: PolicySettings, history: tuple[Attempt, ...]) -> Decision:
        """Return the decision after a failed attempt, by the GPUs that are available now."""
        last = history[-1]
        failure = history[-1].failure
        assert failure is not None, "a completed attempt needs no decision"
        if self.has_remedies:
            offers = self.devices.offers() if last.spec.gpus else Offers()
            return decide(policy, self._plan.remedies, history, offers)
        if last.cuda_cannot_work:
            return GiveUp(describe_setup_failure(failure))
        hint = "; train_robust.py would continue" if failure.kind.is_memory else ""
        return GiveUp(failure.message + hint)

    def how_to_resume(self, plan: Plan, state: RunState) -> str:
        """Return the command that resumes a job that has not completed."""
        if state.resume_command is None:
            return resumed_by_hand(plan.run_dir)
        return f"robust-train resume {state.id}"


class ProcessDriver(HostDriver):
    """Runs each attempt in a new interpreter, or in one interpreter per rank."""

    def _executor(self, signals: SignalWatch, token: str) -> Executor:
        plan = self._plan
        config = plan.config
        return ProcessExecutor(
            plan.trainer_ref,
            plan.resolved_cfg,
            ranks=config.traits.interpreters(config.num_gpus),
            has_standby=not plan.surroundings.in_sweep,
            job=token,
        )

    def run(
        self,
        request: AttemptRequest,
        on_event: Callable[[Event], None],
        signals: SignalWatch,
        hold: tuple[int, ...],
        tick: Callable[[], None],
    ) -> Exit:
        """Run an attempt, whose processes keep the job's reservations open."""

        def tick_with_queue() -> None:
            signals.check()
            tick()
            self.devices.queue.tick()

        self.devices.begin(request.spec.gpus)
        return super().run(request, on_event, signals, hold, tick_with_queue)


class InlineDriver(HostDriver):
    """Calls the trainer in this process (``isolation=none``), where a debugger can see it."""

    def _executor(self, signals: SignalWatch, token: str) -> InlineExecutor:
        # This import is the only way from the launcher into ``attempt/``.
        from robust_train.launcher.inline import InlineExecutor, function_of

        # The user's imports may take any time, so a signal interrupts them.
        with signals.handed_to(lambda signum: signals.raise_if_received()):
            function = function_of(self._plan.trainer, self._plan.trainer_ref)
        return InlineExecutor(lambda: function)


def driver_of(plan: Plan, *, has_remedies: bool = True) -> Driver:
    """Return the driver for a job that no engine started."""
    if plan.config.runs_inline:
        return InlineDriver(plan, has_remedies=has_remedies)
    return ProcessDriver(plan, has_remedies=has_remedies)
