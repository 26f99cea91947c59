"""The hooks by which features take part in a job, in the launcher's process.

A feature's ``launcher.py`` subclasses :class:`InLauncher`, and each job creates one such object per
feature. :class:`.job.Job` calls them all through :class:`Hooks`, in the order of
``assembly.FEATURES``. For example, ``evidence`` of the first feature completes the attempt that the
second feature receives. A hook calls no other hook, and features share nothing but the attempt.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from robust_train.model.attempt import Attempt
from robust_train.model.events import Event
from robust_train.model.failure import Failure
from robust_train.model.feature import Feature, load_named
from robust_train.model.spec import Decision, Retry
from robust_train.readable import named_line

if TYPE_CHECKING:
    from robust_train.children.interpreters import Interpreter
    from robust_train.config.attempt import AttemptRequest
    from robust_train.folder.identity import Beginning
    from robust_train.folder.state import RunState, Summary
    from robust_train.host.signals import SignalWatch
    from robust_train.launcher.driver import Driver
    from robust_train.launcher.plan import Plan
    from robust_train.policy.settings import PolicySettings

log = logging.getLogger("robust_train")

T = TypeVar("T")

History = Sequence[Attempt]
"""The attempts of this launch that have ended, oldest first."""


@dataclass(frozen=True)
class Pause:
    """Answer of :meth:`InLauncher.tick`: end the attempt at its next checkpoint.

    The feature that returns it also decides what follows, in :meth:`InLauncher.overrule`.
    """

    why: str


@dataclass(frozen=True)
class End:
    """Answer of :meth:`Watch.poll`: end the attempt, because it no longer makes progress."""

    kill_in_seconds: float  # time for its processes to write their stacks


class Watch:
    """Watches the processes of one attempt for a feature. Each method does nothing by default.

    :class:`.running_attempt.RunningAttempt` creates it. So attempts in the launcher's process
    (``isolation=none``) and ranks of an engine have no watch.
    """

    def __init__(
        self,
        request: AttemptRequest,
        pids: Sequence[int],  # process ids of its interpreters
        send: Callable[[Event], None],  # records an event of the attempt
    ) -> None:
        pass

    def event(self, event: Event) -> None:
        """Receive an event of any of its ranks."""

    def output(self) -> None:
        """Note that the attempt printed something."""

    def poll(self, living: Mapping[int, Interpreter]) -> End | None:
        """Check the attempt, at least twice a second. The first answer of any watch counts.

        Args:
            living: the interpreters that still run, by rank.
        """
        return None

    def explain(self, stacks: str) -> Failure:
        """Return the failure of an attempt that this watch has ended.

        Args:
            stacks: the stacks of its threads, empty if unknown.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Clean up after the attempt's processes have ended."""


class JobView(Protocol):
    """A job as its features see it."""

    @property
    def plan(self) -> Plan:
        """The launch as it was planned."""

    @property
    def policy(self) -> PolicySettings:
        """The settings that the job's decisions depend on."""

    @property
    def beginning(self) -> Beginning:
        """The job's id, and where this launch resumes. It exists once the run folder was read."""

    @property
    def state(self) -> RunState:
        """The state of the job, which ``state.json`` holds."""

    @property
    def signals(self) -> SignalWatch:
        """The signals of the launcher's process."""

    @property
    def driver(self) -> Driver:
        """The driver, which runs attempts and knows their devices."""

    @property
    def checkpoint(self) -> Path | None:
        """The checkpoint from which the next attempt would resume, None if none is recorded."""

    def look_for_checkpoint(self) -> Path | None:
        """Return the newest checkpoint on disk, after a feature has ruled out some checkpoints.

        The next attempt resumes from it, whatever the trainer reported.
        """

    def record(self, event: Event) -> None:
        """Record an event of the current attempt."""

    def sleep(self, seconds: float) -> None:
        """Wait.

        Raises:
            JobInterrupted: a signal came.
        """

    def was_stopped(self, attempt: Attempt) -> bool:
        """Return whether a signal or a pause ended the attempt, and not its own failure."""


class InLauncher:
    """A feature's half in the launcher. Each hook does nothing unless it is overridden.

    While an attempt runs in the launcher's process (``isolation=none``), another thread calls
    :meth:`tick`.
    """

    def __init__(self, job: JobView) -> None:
        self.job = job

    def begin(self) -> None:
        """Start with the job, before its run folder is read."""

    def close(self) -> None:
        """End with the job, after its end was recorded and its folder released.

        This hook is always called, even if :meth:`begin` failed.
        """

    def request(self, request: AttemptRequest, attempt: Attempt) -> AttemptRequest:
        """Change the request for the next attempt. The next feature receives the result."""
        return request

    def event(self, event: Event, attempt: Attempt | None) -> None:
        """Receive an event of the job or its attempt, or the status of a wait for a GPU.

        Args:
            event: what happened.
            attempt: the last attempt, with all its events, or None before the first attempt.
        """

    def tick(self, attempt: Attempt | None) -> Pause | None:
        """Do periodic work, at least twice a second. The first answer of any feature counts.

        Args:
            attempt: the running attempt, None between attempts.
        """
        return None

    def evidence(self, attempt: Attempt, history: History) -> Attempt:
        """Add evidence to an attempt that has ended. The next feature receives the result."""
        return attempt

    def overrule(self, history: History) -> Decision | None:
        """Decide what follows the last attempt, before any remedy is tried.

        The first decision of any feature counts. None leaves the decision to the other features
        and the remedies.
        """
        return None

    def before(self, retry: Retry) -> None:
        """Wait until the next attempt can start. All features are called, in order."""

    def end(self, summary: Summary) -> Summary:
        """Complete the summary of a job that has ended. The next feature receives the result.

        If this hook raises an exception, the summary stays as it was, after a warning.
        """
        return summary


class Hooks:
    """Calls the hooks of all features of one job.

    Args:
        features: the features' halves in the launcher, in the order of evidence, by the names that
            warnings use.
    """

    def __init__(self, features: Mapping[str, InLauncher]) -> None:
        self._named = features
        self._all = tuple(features.values())

    @classmethod
    def load(cls, features: Sequence[Feature], job: JobView) -> Hooks:
        """Create the features' halves in the launcher, with their view of the job."""
        named: dict[str, InLauncher] = {}
        for feature in features:
            if feature.launcher:
                make_half = load_named(feature.launcher)
                named[feature.name.replace("_", " ")] = make_half(job)
        return cls(named)

    @contextmanager
    def open(self) -> Iterator[None]:
        """Call ``begin`` of all features, and at the end ``close`` in reverse order."""
        with ExitStack() as stack:
            for feature in self._all:
                stack.callback(feature.close)
                feature.begin()
            yield

    def request(self, request: AttemptRequest, attempt: Attempt) -> AttemptRequest:
        """Pass the request through all features, each of which may change it."""
        for feature in self._all:
            request = feature.request(request, attempt)
        return request

    def event(self, event: Event, attempt: Attempt | None) -> None:
        """Pass an event to all features."""
        for feature in self._all:
            feature.event(event, attempt)

    def tick(self, attempt: Attempt | None) -> Pause | None:
        """Let all features do their periodic work, and return the first answer."""
        answers = [feature.tick(attempt) for feature in self._all]
        for answer in answers:
            if answer is not None:
                return answer
        return None

    def evidence(self, attempt: Attempt, history: History) -> Attempt:
        """Pass the attempt through all features, each of which may add evidence."""
        for feature in self._all:
            attempt = feature.evidence(attempt, history)
        return attempt

    def overrule(self, history: History) -> Decision | None:
        """Return the first decision of a feature, None if no feature decides."""
        for feature in self._all:
            decision = feature.overrule(history)
            if decision is not None:
                return decision
        return None

    def before(self, retry: Retry) -> None:
        """Let all features wait for the next attempt, in turn."""
        for feature in self._all:
            feature.before(retry)

    def end(self, summary: Summary, write: Callable[[Summary], object]) -> Summary:
        """Pass the summary through all features, each of which may complete it.

        The summary is written after each feature, since the next feature may take a long time.
        """
        for name, feature in self._named.items():
            completed = compute_or_warn(f"the {name}", partial(feature.end, summary))
            if completed is not None and completed is not summary:
                summary = completed
                write(summary)
        return summary


def compute_or_warn(what: str, compute: Callable[[], T]) -> T | None:
    """Compute a value about a job. If that fails, log a warning and return None.

    A job that has trained for days must not fail because of a figure in its report.
    """
    try:
        return compute()
    except Exception as error:
        log.warning("%s cannot be computed: %s", what, named_line(error))
    return None
