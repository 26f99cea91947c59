"""Where training is in its data.

The attempt stores the position in its checkpoints. The position counts samples, so an attempt with
another batch size resumes with the very next sample. If that is uncertain, one line warns first.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from robust_train.folder.checkpoints import START, Position, read_manifests

log = logging.getLogger("robust_train")

_LARGEST_STATE = 100_000  # characters of a loader's state
_COUNTS_SAMPLES = '"samples_yielded"'
"""A field of torchdata's loader state. If a sampler draws from a data set, it counts by that."""

_ORDERLY = frozenset({"builtins", "robust_train", "torch", "torchdata"})
"""Packages whose samplers draw the same order for any batch size."""

_END = object()


@dataclass(frozen=True)
class Attempt:
    """The attempt's batches, as far as they are known before the first batch."""

    batch_size: int = 0  # `training.batch_size`, 0 if there is none
    # Samples of a rank in an optimizer step, 0 if unknown.
    effective: int = 0
    reads_batch_size: bool = True  # False if its loader cannot depend on it
    rank: int = 0
    ranks: int = 1


@dataclass(frozen=True)
class Source:
    """How a loader draws its samples, as far as its attributes show."""

    # Samples in each batch, None if the loader does not say.
    size: int | None = None
    total: int | None = None  # samples in a pass, None if unknown
    # Whether an incomplete last batch is dropped.
    drops_last: bool = False
    # The class that may draw another order of samples for another batch size, None if none does.
    unsure: str | None = None
    # Workers that deliver batches in turn, each with its own samples.
    workers: int = 1
    # A checksum of the state that a shuffled order depends on.
    order: int | None = None
    remedy: str = ""  # the change that makes the order the same in all attempts

    def count(self, batch: Any, samples: int | None) -> int | None:
        """Return the number of samples in a batch that comes after ``samples`` samples, None if
        unknown."""
        if self.size is None:
            return count_samples(batch)
        if self.total and samples is not None:
            # The last batch may have fewer samples; some loaders start again after it.
            return min(self.size, self.total - samples % self.total)
        return self.size


def examine(loader: Any) -> Source:
    """Return how ``loader`` draws its samples, without drawing samples or random numbers."""
    data = sys.modules.get("torch.utils.data")
    if data is None or not isinstance(loader, data.DataLoader):
        size = getattr(loader, "batch_size", None)
        return Source(
            size if isinstance(size, int) and size > 0 else None,
            unsure=f"made by a {type(loader).__name__}",
        )
    is_stream = isinstance(loader.dataset, data.IterableDataset)
    batches = loader.batch_sampler
    if batches is None and not is_stream:
        # A data set that takes the indices of a whole batch has a sampler of batches.
        batches = loader.sampler
    size = loader.batch_size
    if size is None and type(batches) is data.BatchSampler:
        size = batches.batch_size
    if size is None:
        maker = loader.dataset if loader.batch_sampler is None else batches
        return Source(unsure=f"made by a {type(maker).__name__}")
    if is_stream:
        workers = max(loader.num_workers, 1)
        return Source(
            size, workers=workers, unsure=f"loaded by {workers} in turn" if workers > 1 else None
        )
    is_by_batch_size = loader.batch_size is not None
    sampler = loader.sampler if is_by_batch_size else batches.sampler
    package = type(sampler).__module__.partition(".")[0]
    drops_last = getattr(batches, "drop_last", False)
    if package not in _ORDERLY:
        return Source(size, drops_last=drops_last, unsure=f"made by a {type(sampler).__name__}")
    order, remedy = _order_of(sampler)
    return Source(
        size,
        total=len(sampler) if hasattr(sampler, "__len__") else None,
        drops_last=drops_last,
        order=order,
        remedy=remedy,
    )


def _order_of(sampler: Any) -> tuple[int | None, str]:
    """Return a checksum of the state by which a torch sampler shuffles, and how to make it the
    same."""
    import torch

    if getattr(sampler, "shuffle", False):  # among ranks
        drawn = f"{sampler.seed} {sampler.epoch}".encode()
        return zlib.crc32(drawn), "call the sampler's set_epoch(epoch) before"
    if not hasattr(sampler, "generator"):
        return None, ""
    generator = sampler.generator or torch.default_generator
    state = generator.get_state().numpy().tobytes()
    remedy = "seed the loader's generator with the epoch before"
    return zlib.crc32(state), remedy


def count_samples(batch: Any) -> int | None:
    """Return the number of samples in a loaded batch, None if it cannot be counted."""
    # Graph batches and tensor dictionaries have the number as an attribute.
    for name in ("num_graphs", "batch_size"):
        size = getattr(batch, name, None)
        if isinstance(size, tuple) and size:
            size = size[0]
        if isinstance(size, int):
            return size
    # A program without torch is not made to import it.
    if "torch" not in sys.modules:
        return None
    from robust_train.step.splitting import length_of

    with contextlib.suppress(TypeError, ValueError):
        return length_of(batch)
    return None


def without_first(batch: Any, samples: int, sizes: range) -> Any:
    """Return a batch without its first samples.

    Returns:
        None if the batch cannot be cut, or has none of the ``sizes``: then it counts something
            else.
    """
    if "torch" not in sys.modules:
        return None
    from robust_train.step.splitting import length_of, part_of

    with contextlib.suppress(TypeError, ValueError):
        length = length_of(batch)
        rest = part_of(batch, samples, length)
        is_cut = length_of(rest) == length - samples
        if is_cut and length in sizes:
            return rest
    return None


@dataclass(frozen=True)
class Passed:
    """Batches that were skipped."""

    batches: int = 0
    samples: int | None = 0  # samples in them, None if those of the last batch cannot be counted
    largest: int | None = None  # samples in the largest batch
    ends_in: Any = None  # the next batch, if it begins with the last of the samples


def pass_over(
    batches: Iterator[Any], samples: int, count: Callable[[Any, int], int | None]
) -> Passed:
    """Take ``samples`` samples from ``batches``, or all that exist. ``count`` is called with a
    batch and the number of samples before it."""
    largest: int | None = None
    number = done = 0
    while done < samples:
        batch = next(batches, _END)
        if batch is _END:
            break
        size = count(batch, done)
        if size is None:
            return Passed(number + 1, None)
        largest = max(size, largest or 0)
        if done + size > samples:
            return Passed(number, done, largest, batch)
        number += 1
        done += size
    return Passed(number, done, largest)


class Batches:
    """Counts the batches that a trainer gets, and the samples in them."""

    def __init__(self, resumed: Position = START) -> None:
        self._at = START
        self._resumed = resumed
        self._loader: Any = None

    @property
    def position(self) -> Position:
        """The current position, which includes the last batch that was handed out."""
        # The attempt saves again before it has taken its first batch.
        if self._resumed != START:
            return self._resumed
        return replace(self._at, loader=_state_of(self._loader))

    def resume(self, path: Path, step: int, skips_to: int) -> None:
        """Start the next pass at the position of the checkpoint ``path`` of a step. The data up to
        step ``skips_to``, with which training diverged, are skipped."""
        positions = (
            manifest.position
            for manifest in read_manifests(path.parent)
            if manifest.path == path.absolute()
        )
        at = next(positions, START)
        more = skips_to - step
        if step and more > 0 and (batches := round(more * at.batches / step)):
            log.info("training diverged here: passing over %d batches", batches)
            samples = at.samples
            if samples is not None and at.size is not None:
                samples += batches * at.size
            at = replace(
                at,
                batches=at.batches + batches,
                in_pass=at.in_pass + batches,
                samples=samples,
                loader=None,
            )
        self._resumed = at

    def over(self, loader: Any, attempt: Attempt) -> Iterator[Any]:
        """Yield a pass over a loader, in the first pass only the rest of it. The state belongs to
        a rank's data, so with several ranks the samples are counted."""
        before = self._resumed
        self._resumed = START
        source = examine(loader)
        has_state = attempt.ranks == 1 and hasattr(loader, "load_state_dict")
        self._loader = loader if has_state else None
        self._at = Position(
            max(before.batches, self._at.batches),
            samples=0,
            asked=source.size or attempt.batch_size,
            workers=source.workers,
            ranks=attempt.ranks,
            order=source.order,
        )
        for batch in self._rest(loader, source, before, attempt):
            self._give(source.count(batch, self._at.samples))
            yield batch
        self._at = Position(self._at.batches)

    def _give(self, size: int | None) -> None:
        """Count a batch that is handed out now."""
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

    def _rest(
        self, loader: Any, source: Source, before: Position, attempt: Attempt
    ) -> Iterator[Any]:
        """Return the rest of an earlier attempt's pass, or a whole pass."""
        is_same = _draws_alike(before, self._at)
        state = before.loader if self._loader is not None else None
        counts_samples = source.total is not None and _COUNTS_SAMPLES in json.dumps(state)
        if state is not None and (is_same or counts_samples or before.samples is None):
            loader.load_state_dict(state)
            if not is_same and not counts_samples:
                _warn_of_counted_batches(before, self._at, attempt)
            self._begin_after(before, before.in_pass)
            return iter(loader)
        if before.in_pass:
            _warn_of_another_order(before, source, attempt)
        if is_same or before.samples is None:
            if not is_same:
                _warn_of_counted_batches(before, self._at, attempt)
            batches = before.in_pass
            # A torch loader has a length only if its data set has a length.
            with contextlib.suppress(TypeError):
                batches %= max(len(loader), 1)
            self._begin_after(before, batches)
            return itertools.islice(loader, batches, None)
        return self._after_samples(
            loader, source, replace(before, samples=_seen_of_pass(before, source)), attempt
        )

    def _begin_after(self, before: Position, batches: int) -> None:
        """Count from the position of an earlier attempt, after this many batches of a pass."""
        samples = before.samples
        if not batches:
            samples = 0
        elif batches != before.in_pass:
            samples = None
        self._at = replace(self._at, in_pass=batches, samples=samples, size=before.size)

    def _after_samples(
        self, loader: Any, source: Source, before: Position, attempt: Attempt
    ) -> Iterator[Any]:
        """Return the samples after those that an earlier attempt has seen. A batch that it saw in
        part is cut."""
        wanted = before.samples or 0
        batches: Iterator[Any] = iter(loader)
        passed = pass_over(batches, wanted, source.count)
        if passed.samples is None:
            _warn_of_counted_batches(before, self._at, attempt)
            self._begin_after(before, before.in_pass)
            more = max(before.in_pass - passed.batches, 0)
            return itertools.islice(batches, more, None)
        batch = passed.ends_in
        if batch is None:
            batch = next(batches, _END)
        after = replace(
            self._at, in_pass=passed.batches, samples=passed.samples, size=passed.largest
        )
        if _is_unchanged(before, after) and source.size is None:
            # Otherwise batches have the requested size, and they count something else.
            if attempt.effective != after.size:
                _warn_of_counted_batches(before, after, attempt)
        elif batch is not _END:
            _warn_of_samples(before, after, source, attempt)
        # The pass was done, and a loader that is its own iterator has no second pass.
        if batch is _END:
            return iter(()) if batches is loader else iter(loader)
        self._at = after
        seen = wanted - passed.samples
        if not seen:
            return itertools.chain([batch], batches)
        most = source.count(batch, passed.samples) or 0
        # A stream does not say that a batch is its last, which may have fewer samples.
        least = most if source.total else 1
        rest = without_first(batch, seen, range(least, most + 1))
        if rest is None:
            _warn(
                attempt,
                f"a batch ({type(batch).__name__}) cannot be cut, so its first {seen} samples are "
                "seen again",
            )
            rest = batch
        elif source.size is None:
            self._at = replace(self._at, samples=wanted)
        return itertools.chain([rest], batches)


def _draws_alike(before: Position, now: Position) -> bool:
    """Return whether batches of the same size are drawn in the same way as before."""
    return (
        before.asked in (0, now.asked)
        and before.workers == now.workers
        and before.ranks == now.ranks
    )


def _seen_of_pass(before: Position, source: Source) -> int:
    """Return the samples that were seen of an unfinished pass, 0 if the pass is finished."""
    samples = before.samples or 0
    if not source.total:
        return samples
    seen = samples % source.total
    is_done = source.total - seen < (before.size or 0)
    return 0 if source.drops_last and is_done else seen


def _warn_of_another_order(before: Position, source: Source, attempt: Attempt) -> None:
    """Warn if a sampler shuffles this pass in another way than the attempt that started it."""
    orders = {before.order, source.order}
    if len(orders) > 1 and None not in orders:
        _warn(
            attempt,
            "the sampler shuffles this pass in another order than before, so some of its first "
            f"{before.samples} samples are seen again and as many left out; {source.remedy} the "
            "pass",
        )


def _is_unchanged(before: Position, now: Position) -> bool:
    """Return whether the number of skipped batches and samples equals the number of those seen
    before."""
    return (before.in_pass, before.samples, before.size) == (now.in_pass, now.samples, now.size)


def _warn_of_samples(before: Position, now: Position, source: Source, attempt: Attempt) -> None:
    """Warn if the skipped samples may differ from the samples that were seen."""
    maker = source.unsure
    if maker is None and before.ranks != now.ranks:
        maker = "divided among the ranks"
    if maker is None and before.workers != now.workers:
        maker = "loaded by one worker"
    if maker is not None:
        _warn(
            attempt,
            f"{_changed(before, now)}, so the first {before.samples} samples of this pass are "
            f"passed over; if the order of samples ({maker}) depends on that, up to "
            f"{before.samples} are seen again and as many left out",
        )


def _changed(before: Position, now: Position) -> str:
    """Return the difference in how samples are drawn."""
    figures = (
        ("samples in a batch", before.size, now.size),
        ("data-loader workers", before.workers, now.workers),
        ("ranks", before.ranks, now.ranks),
    )
    changes = (f"{here} {name} and {then} before" for name, then, here in figures if then != here)
    return ", ".join(changes) or "batches are not those of before"


def _warn_of_counted_batches(before: Position, now: Position, attempt: Attempt) -> None:
    """Warn that batches are skipped whose size may differ from before."""
    if not attempt.reads_batch_size or not before.in_pass:
        return
    seen = before.in_pass * before.asked
    passed = before.in_pass * now.asked
    first, last = sorted((seen, passed))
    happens = "seen again" if passed < seen else "left out"
    _warn(
        attempt,
        f"cannot see how many samples a batch has, so {before.in_pass} batches are passed over; "
        f"if they have {now.asked} samples now and had {before.asked}, samples {first} to "
        f"{last - 1} of this pass (from 0) are {happens}; give the loader a batch_size",
    )


def _warn(attempt: Attempt, problem: str) -> None:
    if attempt.rank == 0:
        log.warning("run.batches: %s", problem)


def _state_of(loader: Any) -> Any:
    """Return a loader's state if it is plain and small, otherwise None, and its batches are
    counted."""
    with contextlib.suppress(AttributeError, TypeError, ValueError):
        state = loader.state_dict()
        text = json.dumps(state)
        if len(text) < _LARGEST_STATE and json.loads(text) == state:
            return state
    return None
