"""Drivers: each runs the attempts of a job in its own way, and finds their devices.

:class:`.job.Job` calls its driver in the launcher's process. There are three drivers:

- :class:`ProcessDriver` runs each attempt in new interpreters.
- :class:`InlineDriver` calls the trainer in the launcher's process.
- :class:`.guest.RankDriver` calls it in a process that an engine such as torchrun started.
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
        """Prepare for an attempt: start its interpreters, or import the trainer.

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
    """Runs a job's attempts and finds their devices."""

    executor: Executor
    devices: Devices
    # Whether another attempt may follow a failed attempt.
    has_remedies: bool
    # Whether the launcher chooses the devices. If it does, a job whose CUDA cannot work ends with a
    # ConfigError.
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
            signals: the signals of the launcher's process.
            job_id: the job's id, which the queue shows.
            token: the mark of this launch's processes.
            sleep: waits for some seconds. An exception that it raises ends the wait.
            on_wait: called with each status of a wait for a GPU.
        """

    @abstractmethod
    def decide_first(self, beginning: Beginning, policy: PolicySettings, gpus: Group) -> Retry:
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
        """Run an attempt to its end, and call ``tick`` at least twice a second.

        The attempt keeps the file descriptors ``hold`` and those of the job's reservations open.
        """
        descriptors = self.devices.queue.hold + hold
        return self.executor.run(request, on_event, signals, hold=descriptors, tick=tick)

    @abstractmethod
    def decide(self, policy: PolicySettings, history: tuple[Attempt, ...]) -> Decision:
        """Return the decision after a failed attempt."""

    @abstractmethod
    def how_to_resume(self, plan: Plan, state: RunState) -> str:
        """Return the command, or the advice, by which people resume an unfinished job."""


class HostDriver(Driver):
    """Runs attempts on this host. The launcher chooses the devices and decides after each attempt.

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
        self.executor = self._make_executor(signals, token)
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
    def _make_executor(self, signals: SignalWatch, token: str) -> Executor:
        """Create the executor of this kind of driver."""

    def decide_first(self, beginning: Beginning, policy: PolicySettings, gpus: Group) -> Retry:
        """Return the first attempt's decision for the GPUs that the job has."""
        return first_decision(policy, gpus)

    def wait_for_room(
        self, retry: Retry, policy: PolicySettings, history: tuple[Attempt, ...]
    ) -> Retry | str:
        """Wait for the GPUs that a retry needs, without a time limit if it has no alternative."""
        room = retry.room
        assert room is not None, "this retry waits for no GPU"
        outcome = self.devices.wait_for_room(room, for_ever=retry.otherwise is None)
        if isinstance(outcome, NoGpu):
            return outcome.reason
        if room.gpu_uuids:
            return retry
        return place_on_gpus(policy, history, retry, outcome)

    def decide(self, policy: PolicySettings, history: tuple[Attempt, ...]) -> Decision:
        """Return the decision after a failed attempt, given the GPUs that are available now."""
        last = history[-1]
        failure = last.failure
        assert failure is not None, "a completed attempt needs no decision"
        if self.has_remedies:
            offers = self.devices.offers() if last.spec.gpus else Offers()
            return decide(policy, self._plan.remedies, history, offers)
        if last.cuda_cannot_work:
            return GiveUp(describe_setup_failure(failure))
        hint = "; train_robust.py would continue" if failure.kind.is_memory else ""
        return GiveUp(failure.message + hint)

    def how_to_resume(self, plan: Plan, state: RunState) -> str:
        """Return the command that resumes an unfinished job."""
        if state.resume_command is None:
            return resumed_by_hand(plan.run_dir)
        return f"robust-train resume {state.id}"


class ProcessDriver(HostDriver):
    """Runs each attempt in a new interpreter, or in one interpreter per rank."""

    def _make_executor(self, signals: SignalWatch, token: str) -> Executor:
        plan = self._plan
        config = plan.config
        return ProcessExecutor(
            plan.trainer_ref,
            plan.resolved_cfg,
            ranks=config.traits.count_interpreters(config.num_gpus),
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
        """Run an attempt to its end, and keep the job's place in the queue up to date."""

        def tick_with_queue() -> None:
            signals.check()
            tick()
            self.devices.queue.tick()

        self.devices.note_free_memory(request.spec.gpus)
        return super().run(request, on_event, signals, hold, tick_with_queue)


class InlineDriver(HostDriver):
    """Calls the trainer in this process (``isolation=none``), where a debugger can see it."""

    def _make_executor(self, signals: SignalWatch, token: str) -> InlineExecutor:
        # Imported here, because this module imports ``attempt/``.
        from robust_train.launcher.inline import InlineExecutor, load_trainer

        def interrupt(signum: int) -> None:
            signals.raise_if_received()

        # The user's imports may take any time, so a signal interrupts them.
        with signals.hand_signals_to(interrupt):
            function = load_trainer(self._plan.trainer, self._plan.trainer_ref)
        return InlineExecutor(lambda: function)


def make_driver(plan: Plan, *, has_remedies: bool = True) -> Driver:
    """Create the driver of a job that was started without an engine such as torchrun."""
    if plan.config.runs_inline:
        return InlineDriver(plan, has_remedies=has_remedies)
    return ProcessDriver(plan, has_remedies=has_remedies)
