"""The micro-batch with which each attempt of a job begins, and what its attempts teach about it.

``training.batch_size=auto`` searches for a size once on each kind of device. Sizes that fitted, and
those that did not, are remembered for later jobs (:mod:`robust_train.batch.known`).
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from robust_train import events
from robust_train.batch.known import Fact, Known, KnownBatches, cache_directory, memory_key
from robust_train.batch.search import BatchSearch, exact_sizes
from robust_train.memory.host import read_host_memory
from robust_train.policy.remedies import NOTABLE_BYTES
from robust_train.policy.sizes import PolicySettings, with_accumulation
from robust_train.settings import BatchSettings
from robust_train.values import MEMORY_FAILURES, AttemptSpec, Clue, FailureKind, Outcome, Pace

log = logging.getLogger("robust_train")

_DAY = 86400
_MUCH_SLOWER = 0.8
_LEAST_SECONDS = 10.0


class BatchSizes:
    """The sizes of one job."""

    def __init__(
        self,
        batch: BatchSettings,  # the config's part about them
        policy: PolicySettings,  # what decisions depend on
        # sizes that earlier launches of this run folder found, by memory_key
        found: Mapping[str, int],
        record: Callable[[events.Event], None],  # writes an event to the journal
        requested: int | None = None,  # the size that was requested in an earlier launch
    ) -> None:
        self._batch = batch
        self._policy = policy
        self._found_before = dict(found)
        self._record = record
        self._requested = requested
        self._store = KnownBatches(cache_directory(os.environ))
        self._host_bytes = read_host_memory().total
        self._settings = policy  # for the ranks of the attempt
        self._sizes: tuple[int, ...] = ()
        self._begun: set[str] = set()
        self._earlier: dict[str, Known] = {}  # what was known when the job began
        self._key = ""
        self._found: events.BatchSizeFound | None = None
        self._ran_out: int | None = None

    def begin(self, spec: AttemptSpec) -> tuple[AttemptSpec, BatchSearch | None]:
        """Return what an attempt uses in place of ``spec``, and the search that it begins with.
        Only the first attempt on a kind of device is changed: the policy's own choices stand."""
        self._found, self._ran_out = None, None
        self._settings = self._policy.for_ranks(spec.ranks)
        self._sizes = exact_sizes(self._settings.share, self._settings.min_batch_size)
        batch = self._batch
        self._key = memory_key(batch.memory_settings, batch.trainer, spec.gpu, self._host_bytes)
        if self._key not in self._earlier:
            self._earlier[self._key] = self._store.read(self._key).at(time.time(), None)
        if self._key in self._begun:
            return spec, None
        self._begun.add(self._key)
        known = Known()
        if batch.reuse_known_batch:
            known = self._store.read(self._key).at(time.time(), _room(spec))
            requested, self._requested = self._requested or 0, None
            # the job may go on with other sizes than it was requested with
            size = max((size for size in self._sizes if size <= requested), default=None)
            if size is not None and size < spec.batch_size:
                asked = "as 'robust-train run halve-batch' requested of this job"
                why = f"micro-batch {size} instead of {spec.batch_size}, {asked}"
                return self._use_known(spec, size, why), None
        if not self._policy.finds_batch_size:
            return self._less_than_known_to_run_out(spec, known), None
        return self._to_be_found(spec, known)

    def on_event(self, event: events.Event) -> None:
        """Remember what an attempt's event teaches about sizes."""
        if isinstance(event, events.BatchSizeFound):
            self._found = event
        # a change that somebody asked for has no kind; validation's needs are its own
        elif (
            isinstance(event, (events.MicroBatchChanged, events.MicroBatchExhausted))
            and event.kind is not None
            and event.training
        ):
            self._ran_out = min(event.before, self._ran_out or event.before)

    def end(self, spec: AttemptSpec, outcome: Outcome) -> tuple[AttemptSpec, Outcome]:
        """Return the attempt with the size that it found, and remember what it teaches."""
        if self._found is not None:
            found = self._found.as_json()
            del found["event"], found["key"]
            outcome = replace(outcome, batch_search={**found.pop("search"), **found})
            if self._found.batch_size is not None:
                spec = self._at(spec, self._found.batch_size)
        elif outcome.failure is not None and not outcome.failure.kind.is_memory:
            self._begun.discard(self._key)  # it failed before it came to that
        fitted, too_large = self._facts(spec, outcome)
        pace = pace_of(spec, outcome)
        if spec.gradient_checkpointing != self._policy.gradient_checkpointing:
            fitted = too_large = pace = None  # these are of the job as it was asked for
        before = pace and self._earlier[self._key].fastest_with(spec.ranks)
        if pace and before and _is_slower(pace, before):
            outcome = replace(outcome, faster_before=before)
        if fitted is not None or too_large is not None:
            device = "cpu" if spec.gpu is None else spec.gpu.name
            known = self._store.read(self._key).at(time.time(), None).learn(fitted, too_large)
            known = known if pace is None else known.learn_pace(pace)
            self._store.write(self._key, known, {"trainer": self._batch.trainer, "device": device})
        return spec, outcome

    def _to_be_found(
        self, spec: AttemptSpec, known: Known
    ) -> tuple[AttemptSpec, BatchSearch | None]:
        earlier = self._found_before.get(self._key)
        if earlier in self._sizes:  # not where the ranks are others than then
            log.info("training.batch_size=auto: %d, as found earlier in this run folder", earlier)
            return self._at(spec, earlier), None
        size = self._largest_known(known)
        if size is not None and known.fitted is not None:
            seen = f"{size} is known to fit here (seen {_ago(known.fitted)})"
            return self._use_known(spec, size, f"training.batch_size=auto: {seen}"), None
        whole = self._at(spec, self._settings.share)
        if self._batch.is_script or spec.ranks > 1:
            log.info(
                "training.batch_size=auto: %s cannot be probed: training starts with %d and halves "
                "when memory runs out",
                "a script" if self._batch.is_script else "several processes",
                whole.batch_size,
            )
            return whole, None
        return whole, BatchSearch(
            effective_batch_size=self._settings.share,
            min_batch_size=self._settings.min_batch_size,
            memory_share=self._batch.memory_share,
            key=self._key,
        )

    def _largest_known(self, known: Known) -> int | None:
        """Return the largest size that fits, if it is known to be the largest."""
        if known.fitted is None or self._sizes[0] > known.fitted.batch_size:
            return None
        largest = max(size for size in self._sizes if size <= known.fitted.batch_size)
        next_larger = min((size for size in self._sizes if size > largest), default=None)
        if next_larger is None:
            return largest
        is_too_large = known.too_large and known.too_large.batch_size <= next_larger
        return largest if is_too_large else None

    def _less_than_known_to_run_out(self, spec: AttemptSpec, known: Known) -> AttemptSpec:
        fitted, too_large = known.fitted, known.too_large
        if fitted is None or too_large is None or too_large.predicted:
            return spec
        size = max((size for size in self._sizes if size <= fitted.batch_size), default=None)
        runs_out = spec.batch_size >= too_large.batch_size
        if size is None or not (runs_out and self._policy.preserve_effective_batch_size):
            return spec
        return self._use_known(
            spec,
            size,
            f"micro-batch {size} instead of {spec.batch_size} from the start, because "
            f"{too_large.batch_size} ran out of memory here {_ago(too_large)}",
        )

    def _use_known(self, spec: AttemptSpec, size: int, reason: str) -> AttemptSpec:
        log.info(
            "%s; the effective batch size stays %d (reuse_known_batch=false tries anew)",
            reason,
            self._policy.effective_batch_size,
        )
        self._record(events.KnownBatchUsed(size, reason))
        return self._at(spec, size)

    def _at(self, spec: AttemptSpec, size: int) -> AttemptSpec:
        batch_size, accumulation = with_accumulation(self._settings, size)
        return replace(spec, batch_size=batch_size, gradient_accumulation_steps=accumulation)

    def _facts(self, spec: AttemptSpec, outcome: Outcome) -> tuple[Fact | None, Fact | None]:
        """Return the size that completed steps, and one that did not fit."""
        used = outcome.micro_batch or spec.batch_size
        now, room = time.time(), _room(spec)
        kind = None if outcome.failure is None else outcome.failure.kind
        ran_out, predicted = self._ran_out, False
        if kind is FailureKind.DEVICE_OOM or (kind in MEMORY_FAILURES and spec.gpu is None):
            ran_out = min(used, ran_out or used)
        clue = None if outcome.failure is None else outcome.failure.evidence.clue
        if outcome.taken_by_others_bytes >= NOTABLE_BYTES or clue in (Clue.IMPORT, Clue.MODEL):
            ran_out = None
        if ran_out is None and self._found is not None and self._found.batch_size is not None:
            larger = [size for size in self._sizes if size > spec.batch_size]
            ran_out, predicted = (larger[0] if larger else None), True
        fitted = None
        has_trained = kind is None or (outcome.end_step or 0) > outcome.start_step
        if kind not in MEMORY_FAILURES and has_trained:
            fitted = Fact(used, now, room, outcome.peak_memory_bytes)
        too_large = None if ran_out is None else Fact(ran_out, now, room, predicted=predicted)
        return fitted, too_large


def pace_of(spec: AttemptSpec, outcome: Outcome) -> Pace | None:
    """Return how fast an attempt was on a GPU; None where too little is known to compare."""
    rates = [one.samples_per_second for one in outcome.speed]
    if spec.gpu is None or not spec.has_batch or len(rates) < spec.ranks or None in rates:
        return None
    if outcome.speed[0].steps * outcome.speed[0].seconds_per_step < _LEAST_SECONDS:
        return None
    used = outcome.micro_batch or spec.batch_size
    return Pace(sum(filter(None, rates)), time.time(), spec.ranks, used, spec.num_workers)


def _is_slower(pace: Pace, before: Pace) -> bool:
    """Return whether it is much slower, and not for a smaller micro-batch."""
    is_smaller = (pace.batch_size or 0) < (before.batch_size or 0)
    return not is_smaller and pace.samples_per_second < _MUCH_SLOWER * before.samples_per_second


def _room(spec: AttemptSpec) -> int | None:
    return min((gpu.free_bytes for gpu in spec.gpus), default=None)


def _ago(fact: Fact) -> str:
    days = int((time.time() - fact.when) / _DAY)
    if days < 1:
        return "less than a day ago"
    return "a day ago" if days == 1 else f"{days} days ago"
