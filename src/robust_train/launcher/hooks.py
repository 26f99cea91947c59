"""Where a feature takes part in a job: eight hooks in the launcher, each folded by one rule.

A feature is one object per job. The job calls its hooks in the order of ``assembly.FEATURES``. No
hook calls another hook, and no feature sees another one: what they share is the attempt.
:meth:`InLauncher.begin` has a counterpart, ``close``, that comes last whatever happens.
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
    from robust_train.policy.sizes import PolicySettings

log = logging.getLogger("robust_train")

T = TypeVar("T")

History = Sequence[Attempt]
"""The attempts of this launch that have ended, the first one first."""


@dataclass(frozen=True)
class Pause:
    """Answer of :meth:`InLauncher.tick`: end the attempt at its next checkpoint; the feature that
    asked for it decides by :meth:`InLauncher.overrule` what comes next."""

    why: str


@dataclass(frozen=True)
class End:
    """Answer of :meth:`Watch.poll`: end the attempt, because nothing happens in it any more."""

    kill_in_seconds: float  # its processes need this long to write what they do


class Watch:
    """What a feature looks for in the processes of an attempt; one object an attempt.

    The ranks of an engine's job, each with a launcher of its own, are watched too.
    """

    def __init__(
        self,
        request: AttemptRequest,
        pids: Sequence[int],  # of its interpreters
        send: Callable[[Event], None],  # records an event of the attempt
    ) -> None:
        pass

    def event(self, event: Event) -> None:
        """Take an event of any of its ranks."""

    def output(self) -> None:
        """Note that it has printed something."""

    def poll(self, living: Mapping[int, Interpreter]) -> End | None:
        """Look at its interpreters that live, by their ranks, at least twice a second. The first
        answer counts."""
        return None

    def explain(self, stacks: str) -> Failure:
        """Record that this watch has ended the attempt, and return why it has failed then.

        Args:
            stacks: what its threads were doing; empty if unknown.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Clean up when its processes are gone."""


class JobView(Protocol):
    """A job as its features see it."""

    @property
    def plan(self) -> Plan:
        """What was known when the launch began."""

    @property
    def policy(self) -> PolicySettings:
        """What the job's decisions depend on."""

    @property
    def beginning(self) -> Beginning:
        """Where this launch began. There is none before the run folder is locked."""

    @property
    def state(self) -> RunState:
        """The state of the job, as ``state.json`` has it."""

    @property
    def signals(self) -> SignalWatch:
        """The signals of the launcher's process."""

    @property
    def driver(self) -> Driver:
        """How attempts run, and the devices that they run on."""

    @property
    def checkpoint(self) -> Path | None:
        """The checkpoint from which the next attempt would resume, as far as is known."""

    def look_for_checkpoint(self) -> Path | None:
        """Return the checkpoint that the disk has now, after a feature has ruled some out; the
        next attempt resumes from it, whatever its trainer has reported."""

    def record(self, event: Event) -> None:
        """Record an event of the attempt that runs."""

    def sleep(self, seconds: float) -> None:
        """Let time pass; raises JobInterrupted if a signal comes."""

    def was_stopped(self, attempt: Attempt) -> bool:
        """Return whether a signal or a pause has ended an attempt, and no failure of its own."""


class InLauncher:
    """The launcher's half of a feature. Each hook does nothing unless it is overridden.

    While an attempt runs in the launcher's own process (``isolation=none``), another thread calls
    :meth:`tick`.
    """

    def __init__(self, job: JobView) -> None:
        self.job = job

    def begin(self) -> None:
        """Begin with the job, before its run folder is locked; the last hook is :meth:`close`."""

    def close(self) -> None:
        """End with the job, however it has ended: its end is recorded, its folder is free."""

    def request(self, request: AttemptRequest, attempt: Attempt) -> AttemptRequest:
        """Return the request for an attempt that begins, changed for this feature. Chained."""
        return request

    def event(self, event: Event, attempt: Attempt | None) -> None:
        """Take an event of the job or its attempt, or the status of a wait for a GPU.

        Args:
            event: what happened.
            attempt: the last attempt, with all its events; None before the first one.
        """

    def tick(self, attempt: Attempt | None) -> Pause | None:
        """Look after what takes time, at least twice a second; None between attempts. The first
        answer counts."""
        return None

    def evidence(self, attempt: Attempt, history: History) -> Attempt:
        """Return an attempt that has ended with what is known only now. Chained: the order of
        ``FEATURES`` is the order of evidence."""
        return attempt

    def overrule(self, history: History) -> Decision | None:
        """Return what comes after the last attempt, before any remedy is tried; None to leave that
        to the others. The first decision counts."""
        return None

    def before(self, retry: Retry) -> None:
        """Wait for what the next attempt needs. All are called, in order."""

    def end(self, summary: Summary) -> Summary:
        """Return the summary of a job that has ended, completed by this feature. Chained: what a
        feature raises costs a warning and its own share."""
        return summary


class Hooks:
    """The features of one job, called together.

    Args:
        features: by what a warning calls them, in the order of evidence.
    """

    def __init__(self, features: Mapping[str, InLauncher]) -> None:
        self._named = features
        self._all = tuple(features.values())

    @classmethod
    def load(cls, features: Sequence[Feature], job: JobView) -> Hooks:
        """Return the features' halves in the launcher, which see this much of a job."""
        named = {
            feature.name.replace("_", " "): load_named(feature.launcher)(job)
            for feature in features
            if feature.launcher
        }
        return cls(named)

    @contextmanager
    def taking_part(self) -> Iterator[None]:
        """Call ``begin`` of all features, and ``close`` in reverse order in the end."""
        with ExitStack() as ends:
            for feature in self._all:
                ends.callback(feature.close)
                feature.begin()
            yield

    def request(self, request: AttemptRequest, attempt: Attempt) -> AttemptRequest:
        """Return the request as all features want it, each changing what the last one returned."""
        for feature in self._all:
            request = feature.request(request, attempt)
        return request

    def event(self, event: Event, attempt: Attempt | None) -> None:
        """Give all features an event."""
        for feature in self._all:
            feature.event(event, attempt)

    def tick(self, attempt: Attempt | None) -> Pause | None:
        """Let all features look after their things; return the first answer."""
        answers = [feature.tick(attempt) for feature in self._all]
        return next((answer for answer in answers if answer is not None), None)

    def evidence(self, attempt: Attempt, history: History) -> Attempt:
        """Return the attempt with all evidence, in order."""
        for feature in self._all:
            attempt = feature.evidence(attempt, history)
        return attempt

    def overrule(self, history: History) -> Decision | None:
        """Return the first decision of a feature."""
        for feature in self._all:
            decision = feature.overrule(history)
            if decision is not None:
                return decision
        return None

    def before(self, retry: Retry) -> None:
        """Let all features wait for what the next attempt needs, one after the other."""
        for feature in self._all:
            feature.before(retry)

    def end(self, summary: Summary, write: Callable[[Summary], object]) -> Summary:
        """Return the summary as all features complete it.

        It is written after each of them, since the next one may take its time.
        """
        for name, feature in self._named.items():
            completed = computed(f"the {name}", partial(feature.end, summary)) or summary
            if completed is not summary:
                summary = completed
                write(summary)
        return summary


def computed(what: str, compute: Callable[[], T]) -> T | None:
    """Return what is computed about a job; None after a warning if that fails.

    A job that has trained for days does not fail because of a figure about it.
    """
    try:
        return compute()
    except Exception as error:
        log.warning("%s cannot be computed: %s", what, named_line(error))
    return None
