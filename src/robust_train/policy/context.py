"""What a decision looks at, and the GPUs of an attempt as a group. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from robust_train.policy.sizes import PolicySettings, at_micro_batch
from robust_train.values import (
    Attempt,
    AttemptSpec,
    Evidence,
    Failure,
    FailureKind,
    GpuInfo,
    Group,
    gpus_of,
)


@dataclass(frozen=True)
class Case:
    """All that a rule may look at: settings, every attempt so far, and the GPUs now, best first."""

    settings: PolicySettings
    history: tuple[Attempt, ...]
    gpus: tuple[GpuInfo, ...]

    @property
    def last(self) -> AttemptSpec:
        """What the attempt that just failed was using when it failed.

        A trainer that splits its batches further by itself tells; then the next attempt need not
        find that size out again.
        """
        attempt = self.history[-1]
        reached = attempt.outcome.micro_batch
        if reached is None or reached >= attempt.spec.batch_size:
            return attempt.spec
        batch_size, accumulation = at_micro_batch(self.sizes, reached)
        return replace(
            attempt.spec, batch_size=batch_size, gradient_accumulation_steps=accumulation
        )

    @property
    def sizes(self) -> PolicySettings:
        """The settings as they are for the ranks of the attempt that failed."""
        return self.settings.for_ranks(self.history[-1].spec.ranks)

    @property
    def failed_gpus(self) -> Group:
        """The GPU on which it failed; all of the attempt's where that is not known."""
        return failed_gpus(self.history[-1])

    def new_in(self, group: Group) -> Group:
        """The GPUs of ``group`` that the attempt did not have."""
        return tuple(gpu for gpu in group if gpu not in self.last.gpus)

    @property
    def failure(self) -> Failure:
        """Why it failed."""
        failure = self.history[-1].outcome.failure
        assert failure is not None, "a completed attempt needs no decision"
        return failure

    @property
    def evidence(self) -> Evidence:
        """The figures of the failure."""
        return self.failure.evidence

    @property
    def tried_devices(self) -> frozenset[str]:
        """UUIDs of the GPUs that have had an attempt, and ``cpu`` if it has."""
        used = (attempt.spec.gpus for attempt in self.history)
        return frozenset(gpu.uuid for group in used for gpu in group) | {
            attempt.spec.device_key for attempt in self.history if not attempt.spec.gpus
        }

    @property
    def smaller_batches_tried_here(self) -> int:
        """How often a failure reduced the micro-batch on the device that failed last."""
        sizes = {
            a.spec.batch_size
            for a in self.history
            if a.spec.device_key == self.last.device_key and a.outcome.stopped_for is None
        }
        return len(sizes) - 1

    def failures_of(self, kind: FailureKind) -> int:
        """How many attempts failed in this way."""
        outcomes = (attempt.outcome for attempt in self.history)
        return sum(o.failure is not None and o.failure.kind is kind for o in outcomes)


def failed_gpus(attempt: Attempt) -> Group:
    """The GPU on which an attempt failed; all of them where that is not known."""
    failure = attempt.outcome.failure
    return gpus_of(attempt.spec.gpus, None if failure is None else failure.rank)


def exchanged(group: Group, leaving: Group, offers: Sequence[GpuInfo]) -> Group | None:
    """``group`` with the best of ``offers`` in the places of those that leave; None if too few."""
    if len(offers) < len(leaving):
        return None
    best = iter(offers)
    return tuple(next(best) if gpu in leaving else gpu for gpu in group)


def uuids(gpus: Group) -> tuple[str, ...]:
    """The identities of ``gpus``."""
    return tuple(gpu.uuid for gpu in gpus)
