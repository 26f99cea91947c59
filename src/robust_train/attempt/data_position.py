"""Where training is in its data, so that a later attempt resumes with the very next sample.

``run.batches`` iterates through :class:`Batches` in the process that trains, and each checkpoint
stores :attr:`Batches.position`. The position counts samples, because a later attempt may have
another batch size. For example, after 3 batches of 8 samples an attempt with batches of 4 skips 6
batches. If the order of samples may be different by then, a warning says which samples are seen
again or left out.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from robust_train.attempt.data_source import Source, cut_first_samples, examine_loader
from robust_train.folder.checkpoints import START, Position, read_manifests

log = logging.getLogger("robust_train")

_LARGEST_STATE = 100_000  # characters of a loader's state
_COUNTS_SAMPLES = '"samples_yielded"'
"""A field of torchdata's loader state, which shows that the state counts samples, not batches."""

_END = object()
"""Stands for the batch after the last batch of a pass."""


@dataclass(frozen=True)
class BatchFacts:
    """The facts about an attempt's batches that are known before the first batch."""

    batch_size: int = 0  # `training.batch_size`, 0 if there is none
    # Samples of a rank in an optimizer step, 0 if unknown.
    effective: int = 0
    reads_batch_size: bool = True  # False if the loader cannot depend on `training.batch_size`
    rank: int = 0
    ranks: int = 1


class Batches:
    """Counts the batches that a trainer gets, and the samples in them."""

    def __init__(self, resumed: Position = START) -> None:
        self._at = START
        self._resumed = resumed
        self._loader: Any = None

    @property
    def position(self) -> Position:
        """The current position, which includes the last batch that the trainer got."""
        # An attempt may save before it has taken its first batch.
        if self._resumed != START:
            return self._resumed
        return replace(self._at, loader=_state_of(self._loader))

    def resume(self, path: Path, step: int, skips_to: int) -> None:
        """Start the next pass at the position of the checkpoint ``path``, which was saved at
        ``step``. Training diverged with the data up to step ``skips_to``, which are skipped."""
        at = START
        for manifest in read_manifests(path.parent):
            if manifest.path == path.absolute():
                at = manifest.position
                break
        more_steps = skips_to - step
        if step and more_steps > 0:
            at = _skip_batches(at, round(more_steps * at.batches / step))
        self._resumed = at

    def iterate(self, loader: Any, facts: BatchFacts) -> Iterator[Any]:
        """Yield a pass over a loader. The first pass starts at the position of the checkpoint."""
        before = self._resumed
        self._resumed = START
        source = examine_loader(loader)
        # A loader's state is that of one rank. With several ranks the samples are counted instead.
        has_state = facts.ranks == 1 and hasattr(loader, "load_state_dict")
        self._loader = loader if has_state else None
        self._at = Position(
            max(before.batches, self._at.batches),
            samples=0,
            asked=source.size or facts.batch_size,
            workers=source.workers,
            ranks=facts.ranks,
            order=source.order,
        )
        for batch in self._rest_of_pass(loader, source, before, facts):
            self._count_batch(source.count(batch, self._at.samples))
            yield batch
        self._at = Position(self._at.batches)

    def _count_batch(self, size: int | None) -> None:
        """Count a batch of ``size`` samples, None if unknown, which the trainer gets next."""
        at = self._at
        samples = None
        largest = at.size
        if size is not None:
            largest = max(size, at.size or 0)
            if at.samples is not None:
                samples = at.samples + size
        self._at = replace(
            at, batches=at.batches + 1, in_pass=at.in_pass + 1, samples=samples, size=largest
        )

    def _rest_of_pass(
        self, loader: Any, source: Source, before: Position, facts: BatchFacts
    ) -> Iterator[Any]:
        """Return the batches of a pass that come after the position ``before``.

        The loader's own state is used if it has one, else batches are skipped if they are the same
        as before, else samples.
        """
        is_same = _draws_same_batches(before, self._at)
        state = before.loader if self._loader is not None else None
        counts_samples = source.total is not None and _COUNTS_SAMPLES in json.dumps(state)
        if state is not None and (is_same or counts_samples or before.samples is None):
            loader.load_state_dict(state)
            if not is_same and not counts_samples:
                _warn_of_counted_batches(before, self._at, facts)
            self._start_after(before, before.in_pass)
            return iter(loader)
        if before.in_pass:
            _warn_of_another_order(before, source, facts)
        if is_same or before.samples is None:
            if not is_same:
                _warn_of_counted_batches(before, self._at, facts)
            batches = before.in_pass
            # A torch loader has a length only if its data set has a length.
            with contextlib.suppress(TypeError):
                batches %= max(len(loader), 1)
            self._start_after(before, batches)
            return itertools.islice(loader, batches, None)
        before = replace(before, samples=_samples_seen(before, source))
        return self._after_samples(loader, source, before, facts)

    def _start_after(self, before: Position, batches: int) -> None:
        """Count from the position of an earlier attempt, after this many batches of a pass."""
        samples = before.samples
        if not batches:
            samples = 0
        elif batches != before.in_pass:
            samples = None
        self._at = replace(self._at, in_pass=batches, samples=samples, size=before.size)

    def _after_samples(
        self, loader: Any, source: Source, before: Position, facts: BatchFacts
    ) -> Iterator[Any]:
        """Return the samples after those that an earlier attempt has seen. If it has seen a part
        of a batch, the batch is cut."""
        wanted = before.samples or 0
        batches: Iterator[Any] = iter(loader)
        skipped = skip_samples(batches, wanted, source.count)
        if skipped.samples is None:
            _warn_of_counted_batches(before, self._at, facts)
            self._start_after(before, before.in_pass)
            more = max(before.in_pass - skipped.batches, 0)
            return itertools.islice(batches, more, None)
        batch = skipped.ends_in
        if batch is None:
            batch = next(batches, _END)
        after = replace(
            self._at, in_pass=skipped.batches, samples=skipped.samples, size=skipped.largest
        )
        if _has_same_counts(before, after) and source.size is None:
            # A batch for a whole optimizer step has the same size in all attempts. Any other batch
            # would have another size now, so the counted figure is not a number of samples.
            if facts.effective != after.size:
                _warn_of_counted_batches(before, after, facts)
        elif batch is not _END:
            _warn_of_samples(before, after, source, facts)
        if batch is _END:
            # The pass was complete. A loader that is its own iterator has no second pass.
            return iter(()) if batches is loader else iter(loader)
        self._at = after
        seen = wanted - skipped.samples
        if not seen:
            return itertools.chain([batch], batches)
        rest = _cut_batch(batch, seen, skipped.samples, source)
        if rest is None:
            _warn(
                facts,
                f"a batch ({type(batch).__name__}) cannot be cut, so its first {seen} samples are "
                "seen again",
            )
            rest = batch
        elif source.size is None:
            self._at = replace(self._at, samples=wanted)
        return itertools.chain([rest], batches)


def _state_of(loader: Any) -> Any:
    """Return a loader's state if it is plain and small. Otherwise return None, and the loader's
    batches are counted."""
    with contextlib.suppress(AttributeError, TypeError, ValueError):
        state = loader.state_dict()
        text = json.dumps(state)
        if len(text) < _LARGEST_STATE and json.loads(text) == state:
            return state
    return None


# --- to skip data ---


def _skip_batches(at: Position, batches: int) -> Position:
    """Return the position after this many more batches."""
    if not batches:
        return at
    log.info("training diverged here: passing over %d batches", batches)
    samples = at.samples
    if samples is not None and at.size is not None:
        samples += batches * at.size
    return replace(
        at, batches=at.batches + batches, in_pass=at.in_pass + batches, samples=samples, loader=None
    )


@dataclass(frozen=True)
class Skipped:
    """Batches that were skipped."""

    batches: int = 0
    samples: int | None = 0  # samples in them, None if those of the last batch cannot be counted
    largest: int | None = None  # samples in the largest batch
    ends_in: Any = None  # the batch in the middle of which the skipped samples end, if any


def skip_samples(
    batches: Iterator[Any], samples: int, count: Callable[[Any, int], int | None]
) -> Skipped:
    """Take ``samples`` samples from ``batches``, or all that exist. ``count`` is called with a
    batch and the number of samples before it."""
    largest: int | None = None
    number = 0
    done = 0
    while done < samples:
        batch = next(batches, _END)
        if batch is _END:
            break
        size = count(batch, done)
        if size is None:
            return Skipped(number + 1, None)
        largest = max(size, largest or 0)
        if done + size > samples:
            return Skipped(number, done, largest, batch)
        number += 1
        done += size
    return Skipped(number, done, largest)


def _samples_seen(before: Position, source: Source) -> int:
    """Return how many samples of an unfinished pass were seen, or 0 if the pass is finished."""
    samples = before.samples or 0
    if not source.total:
        return samples
    seen = samples % source.total
    is_done = source.total - seen < (before.size or 0)
    return 0 if source.drops_last and is_done else seen


def _cut_batch(batch: Any, seen: int, samples_before: int, source: Source) -> Any:
    """Return a batch without the ``seen`` samples at its start, or None if it cannot be cut."""
    most = source.count(batch, samples_before) or 0
    # The last batch may have fewer samples, and a stream does not show which batch is its last.
    least = most if source.total else 1
    return cut_first_samples(batch, seen, range(least, most + 1))


# --- to compare this attempt with the attempt that saved ---


def _draws_same_batches(before: Position, now: Position) -> bool:
    """Return whether batches of the same size are drawn in the same way as before."""
    return (
        before.asked in (0, now.asked)
        and before.workers == now.workers
        and before.ranks == now.ranks
    )


def _has_same_counts(before: Position, now: Position) -> bool:
    """Return whether as many batches and samples were skipped as were seen before."""
    return (before.in_pass, before.samples, before.size) == (now.in_pass, now.samples, now.size)


def _warn_of_another_order(before: Position, source: Source, facts: BatchFacts) -> None:
    """Warn if a sampler shuffles this pass in another way than the attempt that started it."""
    orders = {before.order, source.order}
    if len(orders) > 1 and None not in orders:
        _warn(
            facts,
            "the sampler shuffles this pass in another order than before, so some of its first "
            f"{before.samples} samples are seen again and as many left out; {source.remedy} the "
            "pass",
        )


def _warn_of_samples(before: Position, now: Position, source: Source, facts: BatchFacts) -> None:
    """Warn if the skipped samples may differ from the samples that were seen."""
    maker = source.unsure
    if maker is None and before.ranks != now.ranks:
        maker = "divided among the ranks"
    if maker is None and before.workers != now.workers:
        maker = "loaded by one worker"
    if maker is not None:
        _warn(
            facts,
            f"{_describe_change(before, now)}, so the first {before.samples} samples of this pass "
            f"are passed over; if the order of samples ({maker}) depends on that, up to "
            f"{before.samples} are seen again and as many left out",
        )


def _describe_change(before: Position, now: Position) -> str:
    """Return the difference in how samples are drawn."""
    figures = (
        ("samples in a batch", before.size, now.size),
        ("data-loader workers", before.workers, now.workers),
        ("ranks", before.ranks, now.ranks),
    )
    changes = [f"{new} {name} and {old} before" for name, old, new in figures if old != new]
    return ", ".join(changes) or "batches differ from before"


def _warn_of_counted_batches(before: Position, now: Position, facts: BatchFacts) -> None:
    """Warn that batches are skipped whose size may differ from before."""
    if not facts.reads_batch_size or not before.in_pass:
        return
    seen = before.in_pass * before.asked
    skipped = before.in_pass * now.asked
    first, last = sorted((seen, skipped))
    effect = "seen again" if skipped < seen else "left out"
    _warn(
        facts,
        f"cannot see how many samples a batch has, so {before.in_pass} batches are passed over; "
        f"if they have {now.asked} samples now and had {before.asked}, samples {first} to "
        f"{last - 1} of this pass (from 0) are {effect}; give the loader a batch_size",
    )


def _warn(facts: BatchFacts, problem: str) -> None:
    if facts.rank == 0:
        log.warning("run.batches: %s", problem)
