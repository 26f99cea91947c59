"""The settings of decisions, the sizes of a job's micro-batch, and the search for the first.

The launcher's policy and the attempt's step use it, as does any program with
``training.batch_size=auto``. The search relies on memory being near-affine in the micro-batch: a
first small probe bounds the memory of a sample, which leads to a size that certainly fits. The line
through both leads to the largest size, which is measured too. Sizes are samples, memory is bytes.
Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from robust_train.config.placeholders import placeholders_in
from robust_train.config.schema import CHECKPOINTING, RobustConfig
from robust_train.model.attempt import Attempt
from robust_train.model.events import BatchTaken, Event, TrainerSupports
from robust_train.model.parts import parts_like
from robust_train.model.spec import AttemptSpec, Knob
from robust_train.readable import MIB


@dataclass(frozen=True)
class PolicySettings:
    """The user's settings, and what is known about the trainer and its environment."""

    config: RobustConfig
    # The requested batch, workers and so on of each rank. Its GPUs are left open.
    asked: AttemptSpec
    # False if the user's environment, or WSL, decides it.
    may_use_expandable_segments: bool = True
    # Whether the trainer supports `training.gradient_checkpointing`.
    can_checkpoint: bool = False

    @classmethod
    def of(
        cls,
        config: RobustConfig,
        *,
        environ: Mapping[str, str] = MappingProxyType({}),
        used: Collection[str] | None = None,
        **more: Any,
    ) -> PolicySettings:
        """Return the settings of a job.

        Args:
            config: the job's config.
            environ: the job's environment.
            used: the values of an attempt that reach its script, or None for its placeholders.
            more: fields in addition to the config.
        """
        training = config.training
        traits = config.traits
        if used is None:
            used = placeholders_in(" ".join(config.trainer.argv or ()))
        requested = AttemptSpec(
            gpus=(),
            batch_size=training.batch_size,
            gradient_accumulation_steps=training.gradient_accumulation_steps,
            ranks=config.num_gpus,
            has_batch=traits.has_batch,
            accumulates=traits.accumulates,
        )
        requested = requested.having(*(kind.asked(config, environ) for kind in parts_like(Knob)))
        more.setdefault(
            "can_checkpoint", config.is_built_in or CHECKPOINTING in (config.theirs or ())
        )
        settings = cls(config, requested, **more)
        return settings.supporting(used) if traits.is_program else settings

    def after(self, event: Event) -> PolicySettings:
        """Take in an event: the values that an attempt's trainer supports, or the batch that it
        asked for."""
        match event:
            case TrainerSupports():
                return self.supporting(event.features)
            case BatchTaken():
                return replace(self, asked=self.asked.with_batch(event.asked, None))
        return self

    def supporting(self, features: Collection[str]) -> PolicySettings:
        """Return the settings for a trainer that reads these values of an attempt."""
        return replace(
            self,
            asked=self.asked.supporting(features),
            can_checkpoint=self.can_checkpoint or "gradient_checkpointing" in features,
        )

    @property
    def min_batch_size(self) -> int:
        """The smallest micro-batch that any attempt uses."""
        return self.config.min_batch_size

    @property
    def accumulates(self) -> bool:
        """Whether accumulation makes up for a smaller micro-batch."""
        is_off = self.config.preserve_effective_batch_size is False
        return self.asked.accumulates and not is_off

    def refuses(self, spec: AttemptSpec) -> bool:
        """Return whether the user rules out attempts with this effective batch or loss."""
        is_strict = self.config.preserve_effective_batch_size is True
        same = spec.effective_batch_size == self.asked.effective_batch_size
        return is_strict and (not same or spec.noted("splits_loss", False))

    @property
    def share(self) -> int:
        """Samples of each rank per optimizer step."""
        return self.asked.batch_size * self.asked.gradient_accumulation_steps

    @property
    def cpu_ranks(self) -> int:
        """Number of processes on the CPU: several only if the user asked for the CPU."""
        is_asked = self.config.device == "cpu" and not self.config.picks_gpu
        return self.config.num_gpus if is_asked else 1

    def for_ranks(self, ranks: int) -> PolicySettings:
        """Share the same effective batch among a different number of processes."""
        requested = self.asked
        if ranks == requested.ranks or not self.accumulates:
            return replace(self, asked=replace(requested, ranks=ranks))
        total = requested.effective_batch_size
        exact = (
            size
            for size in range(requested.batch_size, self.min_batch_size - 1, -1)
            if total % (size * ranks) == 0
        )
        size = next(exact, requested.batch_size)
        requested = requested.with_batch(size, -(-total // (size * ranks)))
        return replace(self, asked=replace(requested, ranks=ranks))

    def resized(self, spec: AttemptSpec, batch_size: int) -> AttemptSpec:
        """Return ``spec`` with another micro-batch, and the accumulation that keeps the effective
        batch."""
        accumulation = self.asked.gradient_accumulation_steps
        if self.accumulates:
            accumulation = -(-self.share // batch_size)
        return spec.with_batch(batch_size, accumulation)

    def exact_size(self, at_most: int) -> int:
        """Return the largest micro-batch up to ``at_most`` that divides a rank's samples;
        ``at_most`` if none does.

        Inside a step, parts need not divide the samples; across attempts, they do.
        """
        candidates = range(at_most, self.min_batch_size - 1, -1)
        exact = (size for size in candidates if self.share % size == 0)
        return next(exact, at_most)

    def next_smaller(self, batch_size: int) -> int:
        """Return the next smaller micro-batch of a rank."""
        share = self.share if self.accumulates else 0
        return next_smaller(batch_size, self.min_batch_size, share)

    def fewer_ranks(self, ranks: int) -> tuple[int, ...]:
        """Return the allowed numbers of GPUs below ``ranks``, largest first.

        Each divides the effective batch size, if that is to be preserved.
        """
        total = self.asked.effective_batch_size
        least = self.config.chosen("min_num_gpus") or ranks
        may_change = not self.accumulates and self.config.preserve_effective_batch_size is not True
        return tuple(
            fewer
            for fewer in range(ranks - 1, least - 1, -1)
            if may_change or self.for_ranks(fewer).asked.effective_batch_size == total
        )


def next_smaller(batch_size: int, least: int, share: int = 0) -> int:
    """Return the next smaller micro-batch.

    It is at most half of ``batch_size`` and not below ``least``. If ``share``, a rank's samples of
    the effective batch, is to be preserved, it is the largest divisor of that in this range.
    Without such a divisor the accumulation is rounded up, and the effective batch is not exact.
    """
    at_most = max(batch_size // 2, least)
    exact = (size for size in range(at_most, least - 1, -1) if share % size == 0)
    return next(exact, at_most)


def sizes(settings: PolicySettings) -> Iterator[int]:
    """Yield each micro-batch from the requested size to ``min_batch_size``."""
    size = settings.asked.batch_size
    yield size
    while settings.asked.has_batch and size > settings.min_batch_size:
        size = settings.next_smaller(size)
        yield size


def largest_up_to(settings: PolicySettings, at_most: float) -> int:
    """Return the largest size up to ``at_most``, or the smallest size if all are larger."""
    every = list(sizes(settings))
    return next((size for size in every if size <= at_most), every[-1])


MOST_PROBES = 4  # probes of one search
MARGIN = 0.05
"""The share of the room for a pass that a prediction leaves free. A measured size may use half of
it."""

_FIRST = 4
# The furthest extrapolation from a single probe, in multiples of its samples.
_FARTHEST = 64
# Small allocations of libraries, which hide the activations of a sample.
_NOISE_BYTES = 4 * MIB
_STEP_DOWN = 1.5  # the step down after memory ran out, with one probe left
# A size that ran out of memory is assumed to need this multiple of the room.
_BEYOND = 1.05


@dataclass(frozen=True)
class Probe:
    """A size that was tried, and its peak in bytes, None if memory ran out."""

    batch_size: int
    peak_bytes: int | None


def exact_sizes(effective_batch_size: int, min_batch_size: int) -> tuple[int, ...]:
    """Return the divisors of the effective batch from ``min_batch_size`` on, smallest first. Only
    with these does accumulation keep the effective batch exactly."""
    least = min(min_batch_size, effective_batch_size)
    return tuple(n for n in range(least, effective_batch_size + 1) if effective_batch_size % n == 0)


def micro_batch_sizes(effective_batch_size: int, min_batch_size: int) -> tuple[int, ...]:
    """Return :func:`exact_sizes` and the sizes that the policy would halve to: a loop that splits
    its own batches needs them if the divisors are far apart."""
    size = effective_batch_size
    least = min(min_batch_size, effective_batch_size)
    sizes_to_try = {size}.union(exact_sizes(effective_batch_size, least))
    while size > least:
        size = next_smaller(size, least, effective_batch_size)
        sizes_to_try.add(size)
    return tuple(sorted(sizes_to_try))


def size_to_begin_with(
    settings: PolicySettings, history: Sequence[Attempt], spec: AttemptSpec
) -> tuple[AttemptSpec, str]:
    """Return ``spec`` with the batch that an attempt starts with, and why; the reason is "" if the
    batch is unchanged.

    This applies only until an attempt on this kind of device has settled on its batch. After that
    the policy's choices stand.
    """
    spec = spec.with_batch(None, None)
    alike = [earlier for earlier in history if earlier.spec.device_kind == spec.device_kind]
    if any(
        earlier.kind is None
        or earlier.kind.is_memory
        or earlier.has_begun
        or earlier.noted("batch_size_found", None) is not None
        for earlier in alike
    ):
        return spec, ""  # that attempt came far enough to show which size fits
    if not settings.config.finds_batch_size:
        return spec, ""
    ranks = settings.for_ranks(spec.ranks)
    whole = ranks.resized(spec, ranks.share)
    config = settings.config
    knobs = (whole.of(kind) for kind in parts_like(Knob))
    searching = whole.having(*(knob.for_unknown_size(config, whole) for knob in knobs))
    if searching != whole:
        return searching, ""
    what = "several processes" if config.traits.can_be_probed else "a script"
    return whole, (
        f"training.batch_size=auto: {what} cannot be probed: training starts with "
        f"{whole.batch_size} and halves when memory runs out"
    )


@dataclass(frozen=True)
class Limits:
    """The room for a pass: bytes in use before it, and the most that may be in use."""

    rest_bytes: int = 0
    limit_bytes: int = 0

    def but_for(self, margin: float) -> float:
        """Return the peak that leaves this share of the room free."""
        return self.limit_bytes - margin * max(self.limit_bytes - self.rest_bytes, 0)


def next_size(sizes: Sequence[int], probes: Sequence[Probe], limits: Limits) -> int | None:
    """Return the size to try next, None if another probe would gain nothing.

    Args:
        sizes: the sizes to choose from, smallest first.
        probes: the probes so far, in order.
        limits: the room for each of them.
    """
    if not probes:
        return next((size for size in sizes if size >= _FIRST), sizes[-1])
    best = largest_that_fits(probes, limits)
    failed = [p for p in probes if not fits(p, limits)]
    low = 0 if best is None else best.batch_size
    high = min((p.batch_size for p in failed), default=sizes[-1] + 1)
    between = [size for size in sizes if low < size < high]
    if len(probes) >= MOST_PROBES or not between:
        return None
    if best is None:
        return between[0]
    peak_of = _line(probes, best, limits)
    expected = [size for size in between if peak_of(size) <= limits.but_for(MARGIN)]
    largest = expected[-1] if expected else low
    if not failed and _is_vague(_before(probes, best, limits), best):
        # Workspaces and noise may hide a sample's share, so grow by a bounded step.
        doubled = next((size for size in between if size >= 2 * low), between[-1])
        bounded = [size for size in expected if size <= _FARTHEST * low]
        return max([doubled] + bounded)
    if len(probes) == MOST_PROBES - 1 and probes[-1].peak_bytes is None:
        # The line was wrong by an unknown amount, and the last probe must succeed.
        safe = [size for size in between if size <= high / _STEP_DOWN]
        largest = min(largest, safe[-1]) if safe else largest
    # A gain of a few percent is not worth a probe.
    return largest if largest > low * (1 + MARGIN) else None


def fits(probe: Probe, limits: Limits) -> bool:
    """Return whether a probe succeeded and left half the margin free."""
    return probe.peak_bytes is not None and probe.peak_bytes <= limits.but_for(MARGIN / 2)


def largest_that_fits(probes: Sequence[Probe], limits: Limits) -> Probe | None:
    """Return the result of a search: only sizes that were tried and succeeded count."""
    good = [probe for probe in probes if fits(probe, limits)]
    return max(good, key=lambda probe: probe.batch_size, default=None)


def _line(probes: Sequence[Probe], best: Probe, limits: Limits) -> Callable[[int], float]:
    """Return the line between a size that fitted and a size that did not, else through those that
    fitted."""
    size = best.batch_size
    peak = float(best.peak_bytes or 0)
    above = [p for p in probes if p.batch_size > size]
    if above:
        nearest = min(above, key=lambda p: p.batch_size)
        beyond: float = nearest.peak_bytes or 0
        if not beyond:
            beyond = limits.but_for(1 - _BEYOND)
        return line((nearest.batch_size, beyond), (size, peak))
    before = _before(probes, best, limits)
    # Attribute all growth up to this size to its samples, which never underestimates their share.
    noise = _NOISE_BYTES if _is_vague(before, best) else 0
    risen = max(peak - (before.peak_bytes or 0), 0) + noise
    return line((before.batch_size, peak - risen), (size, peak))


def line(first: tuple[int, float], second: tuple[int, float]) -> Callable[[int], float]:
    """Return the straight line through two points, each a size and its peak in bytes."""
    slope = (second[1] - first[1]) / (second[0] - first[0])
    return lambda samples: second[1] + slope * (samples - second[0])


def _before(probes: Sequence[Probe], best: Probe, limits: Limits) -> Probe:
    """Return the next smaller measured size, else a probe of size 0 with the memory in use
    before."""
    smaller = [p for p in probes if p.batch_size < best.batch_size and p.peak_bytes is not None]
    nothing = Probe(0, limits.rest_bytes)
    return max(smaller, key=lambda p: p.batch_size, default=nothing)


def _is_vague(before: Probe, best: Probe) -> bool:
    """Return whether the measurements differ only by noise, or are of one size alone."""
    risen = (best.peak_bytes or 0) - (before.peak_bytes or 0)
    return not before.batch_size or risen < 4 * _NOISE_BYTES
