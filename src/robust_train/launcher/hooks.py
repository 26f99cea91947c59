"""Where a feature takes part in a job: eight hooks in the launcher, each combined by one rule.

A feature is one object per job. The job calls its hooks in the order of ``assembly.FEATURES``. No
hook calls another hook, and features do not see each other: they share only the attempt.
:meth:`InLauncher.begin` has a counterpart, ``close``, which is always called last.
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
    """Answer of :meth:`InLauncher.tick`: end the attempt at its next checkpoint. The feature that
    returns it also decides what comes next, in :meth:`InLauncher.overrule`."""

    why: str


@dataclass(frozen=True)
class End:
    """Answer of :meth:`Watch.poll`: end the attempt, because nothing happens in it any longer."""

    kill_in_seconds: float  # time for its processes to write their stacks


class Watch:
    """Watches the processes of an attempt for a feature.

    Only attempts in processes of their own are watched: not those of ``isolation=none``, and not an
    engine's ranks.
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
        """Check its living interpreters, by rank, at least twice a second. The first answer
        counts."""
        return None

    def explain(self, stacks: str) -> Failure:
        """Record that this watch has ended the attempt, and return why it has failed then.

        Args:
            stacks: what its threads were doing; empty if unknown.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Clean up after its processes have ended."""


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
        """Where this launch began. It exists once the run folder was read."""

    @property
    def state(self) -> RunState:
        """The state of the job, as ``state.json`` has it."""

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
        """Return the newest checkpoint on disk, after a feature ruled some out. The next attempt
        resumes from it, whatever its trainer reported."""

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
    """The launcher's half of a feature. Each hook does nothing unless it is overridden.

    While an attempt runs in the launcher's process (``isolation=none``), another thread calls
    :meth:`tick`.
    """

    def __init__(self, job: JobView) -> None:
        self.job = job

    def begin(self) -> None:
        """Start with the job, before its run folder is read. The last hook is :meth:`close`."""

    def close(self) -> None:
        """End with the job, after its end was recorded and its folder released."""

    def request(self, request: AttemptRequest, attempt: Attempt) -> AttemptRequest:
        """Return the request for the next attempt, changed for this feature. Chained."""
        return request

    def event(self, event: Event, attempt: Attempt | None) -> None:
        """Receive an event of the job or its attempt, or the status of a wait for a GPU.

        Args:
            event: what happened.
            attempt: the last attempt, with all its events, or None before the first attempt.
        """

    def tick(self, attempt: Attempt | None) -> Pause | None:
        """Do periodic work, at least twice a second; the attempt is None between attempts. The
        first answer counts."""
        return None

    def evidence(self, attempt: Attempt, history: History) -> Attempt:
        """Add evidence to an attempt that has ended. Chained: the order of ``FEATURES`` is the
        order of evidence."""
        return attempt

    def overrule(self, history: History) -> Decision | None:
        """Decide what comes after the last attempt, before any remedy is tried. None leaves the
        decision to the others, and the first decision counts."""
        return None

    def before(self, retry: Retry) -> None:
        """Wait until the next attempt can start. All features are called, in order."""

    def end(self, summary: Summary) -> Summary:
        """Complete the summary of a job that has ended. Chained: after an exception there is a
        warning, and this feature's share is missing."""
        return summary


class Hooks:
    """Calls the hooks of all features of one job.

    Args:
        features: the features' halves in the launcher, by the names that warnings use, in the order
            of evidence.
    """

    def __init__(self, features: Mapping[str, InLauncher]) -> None:
        self._named = features
        self._all = tuple(features.values())

    @classmethod
    def load(cls, features: Sequence[Feature], job: JobView) -> Hooks:
        """Create the features' halves in the launcher, with their view of the job."""
        named = {
            feature.name.replace("_", " "): load_named(feature.launcher)(job)
            for feature in features
            if feature.launcher
        }
        return cls(named)

    @contextmanager
    def taking_part(self) -> Iterator[None]:
        """Call ``begin`` of all features, and at the end ``close`` in reverse order."""
        with ExitStack() as ends:
            for feature in self._all:
                ends.callback(feature.close)
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
        return next((answer for answer in answers if answer is not None), None)

    def evidence(self, attempt: Attempt, history: History) -> Attempt:
        """Pass the attempt through all features, each of which may add evidence."""
        for feature in self._all:
            attempt = feature.evidence(attempt, history)
        return attempt

    def overrule(self, history: History) -> Decision | None:
        """Return the first decision of a feature, None if none decides."""
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
        """Pass the summary through all features.

        It is written after each of them, since the next feature may take long.
        """
        for name, feature in self._named.items():
            completed = computed(f"the {name}", partial(feature.end, summary)) or summary
            if completed is not summary:
                summary = completed
                write(summary)
        return summary


def computed(what: str, compute: Callable[[], T]) -> T | None:
    """Compute a value about a job, or return None, after a warning, if that fails.

    A job that has trained for days must not fail because of a figure about it.
    """
    try:
        return compute()
    except Exception as error:
        log.warning("%s cannot be computed: %s", what, named_line(error))
    return None
