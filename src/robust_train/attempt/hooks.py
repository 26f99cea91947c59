"""Where a feature takes part in an attempt, each hook folded by one rule.

A feature is one object per rank. A hook that a feature does not override costs a step nothing. No
hook calls another one, and no feature sees another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from robust_train.model.failure import Failure
from robust_train.model.feature import load_named

if TYPE_CHECKING:
    from robust_train.attempt.live import LiveAttempt
    from robust_train.config.schema import RobustConfig


class InAttempt:
    """The attempt's half of a feature. Each hook does nothing unless it is overridden.

    Args:
        live: the attempt.
        config: its config, as this rank needs it.
    """

    def __init__(self, live: LiveAttempt, config: RobustConfig) -> None:
        self.live = live
        self.config = config

    def begin(self) -> None:
        """Begin before the trainer is called, which has been imported."""

    def boundary(self, what: str) -> None:
        """Do what is due between two steps; ``what`` the trainer does there: ``progress``,
        ``reported`` (progress that was passed on), ``backward``, ``forward``, ``should_stop``,
        ``should_save``."""

    def pause(self, why: str) -> None:
        """Do what is due where no step is measured: after a ``save`` or an ``epoch``."""

    def ran_out(self, error: BaseException, failure: Failure) -> None:
        """Note what filled the memory within a step, which is repeated in smaller parts."""

    def evidence(self, failure: Failure) -> Failure:
        """Return the failure that ended the attempt with what is known only here. Chained."""
        return failure

    def tick(self) -> None:
        """Do what is due twice a second, in a thread beside the trainer."""

    def end(self, error: BaseException | None) -> None:
        """End when the trainer has returned, or has raised ``error``."""

    def close(self, error: BaseException | None) -> None:
        """Clean up after the end was reported, in a process that goes on or after success."""


class AttemptHooks:
    """The features of one attempt, called together, in the order in which they are listed."""

    def __init__(self, features: Sequence[InAttempt] = ()) -> None:
        self._all = features
        self._at_boundary = [one.boundary for one in features if _overrides(one, "boundary")]

    def begin(self) -> None:
        """Begin with the trainer."""
        for feature in self._all:
            feature.begin()

    def boundary(self, what: str) -> None:
        """Let all do what is due between two steps."""
        for boundary in self._at_boundary:
            boundary(what)

    def pause(self, why: str) -> None:
        """Let all do what is due where no step is measured."""
        for feature in self._all:
            feature.pause(why)

    def ran_out(self, error: BaseException, failure: Failure) -> None:
        """Let all note what filled the memory."""
        for feature in self._all:
            feature.ran_out(error, failure)

    def evidence(self, failure: Failure) -> Failure:
        """Return the failure with all evidence."""
        for feature in self._all:
            failure = feature.evidence(failure)
        return failure

    def tick(self) -> None:
        """Let all do what is due twice a second."""
        for feature in self._all:
            feature.tick()

    def end(self, error: BaseException | None) -> None:
        """End with the trainer, the last feature first; each ends whatever the others raise."""
        with ExitStack() as ends:
            for feature in self._all:
                ends.callback(feature.end, error)

    def close(self, error: BaseException | None) -> None:
        """Let all clean up."""
        for feature in self._all:
            feature.close(error)


def load_hooks(names: Sequence[str], live: LiveAttempt, config: RobustConfig) -> AttemptHooks:
    """Return the hooks of features with these dotted names (``package.module:Class``)."""
    return AttemptHooks([load_named(name)(live, config) for name in names])


def _overrides(feature: InAttempt, hook: str) -> bool:
    return getattr(type(feature), hook) is not getattr(InAttempt, hook)
