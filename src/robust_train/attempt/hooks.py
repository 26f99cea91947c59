"""The hooks by which features take part in an attempt.

A feature takes part through a subclass of :class:`InAttempt`, which each rank instantiates once. In
the process that trains, :class:`.live.LiveAttempt` calls the hooks through :class:`AttemptHooks`.
No hook calls another hook, and features do not know about each other.
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
        """Start after the trainer was imported, and before it is called."""

    def boundary(self, what: str) -> None:
        """Do work that is due between two steps.

        ``what`` names the trainer's call: ``progress``, ``reported`` (progress that was sent to the
        launcher), ``backward``, ``forward``, ``should_stop`` or ``should_save``.
        """

    def pause(self, why: str) -> None:
        """Do work that is due while no step is measured: after a ``save`` or an ``epoch``."""

    def ran_out(self, error: BaseException, failure: Failure) -> None:
        """Record that memory ran out within a step, before it is repeated in smaller parts."""

    def evidence(self, failure: Failure) -> Failure:
        """Add evidence to the failure that ended the attempt, and pass it to the next feature."""
        return failure

    def tick(self) -> None:
        """Do periodic work, twice a second, in a thread other than the trainer's."""

    def end(self, error: BaseException | None) -> None:
        """End after the trainer returned or raised ``error``."""

    def close(self, error: BaseException | None) -> None:
        """Clean up after the end was reported.

        This is skipped if the attempt failed and its process is about to exit.
        """


class AttemptHooks:
    """Calls the hooks of all features of an attempt, in the order in which they are given."""

    def __init__(self, features: Sequence[InAttempt] = ()) -> None:
        self._features = features
        # This hook runs several times per step, so features that do not override it are skipped.
        self._at_boundary = [
            feature.boundary for feature in features if _overrides(feature, "boundary")
        ]

    def begin(self) -> None:
        """Start all features."""
        for feature in self._features:
            feature.begin()

    def boundary(self, what: str) -> None:
        """Let all features do their work between two steps."""
        for boundary in self._at_boundary:
            boundary(what)

    def pause(self, why: str) -> None:
        """Let all features do their work while no step is measured."""
        for feature in self._features:
            feature.pause(why)

    def ran_out(self, error: BaseException, failure: Failure) -> None:
        """Let all features record that memory ran out within a step."""
        for feature in self._features:
            feature.ran_out(error, failure)

    def evidence(self, failure: Failure) -> Failure:
        """Return the failure with the evidence of all features."""
        for feature in self._features:
            failure = feature.evidence(failure)
        return failure

    def tick(self) -> None:
        """Let all features do their periodic work."""
        for feature in self._features:
            feature.tick()

    def end(self, error: BaseException | None) -> None:
        """End all features in reverse order, even if some of them raise."""
        with ExitStack() as ends:
            for feature in self._features:
                ends.callback(feature.end, error)

    def close(self, error: BaseException | None) -> None:
        """Let all features clean up."""
        for feature in self._features:
            feature.close(error)


def load_hooks(names: Sequence[str], live: LiveAttempt, config: RobustConfig) -> AttemptHooks:
    """Create the hooks of the features with these dotted names (``package.module:Class``)."""
    return AttemptHooks([load_named(name)(live, config) for name in names])


def _overrides(feature: InAttempt, hook: str) -> bool:
    return getattr(type(feature), hook) is not getattr(InAttempt, hook)
