"""Which micro-batch each attempt of a job begins with, and what its attempts tell about that.

``training.batch_size=auto`` has a size searched for once on each kind of device. What has fitted,
and what has not, is remembered for later jobs (:mod:`robust_train.batch.known`).
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from omegaconf import DictConfig, OmegaConf

from robust_train.batch.known import Fact, Known, KnownBatches, cache_directory, memory_key
from robust_train.batch.search import BatchSearch, micro_batch_sizes
from robust_train.events import (
    BatchSizeFound,
    Event,
    KnownBatchUsed,
    MicroBatchChanged,
    MicroBatchExhausted,
)
from robust_train.memory.host import read_host_memory
from robust_train.policy.remedies import NOTABLE_BYTES
from robust_train.policy.sizes import PolicySettings, at_micro_batch
from robust_train.settings import name_of
from robust_train.values import MEMORY_FAILURES, AttemptSpec, FailureKind, Outcome

log = logging.getLogger("robust_train")

_DAY = 86400


class BatchSizes:
    """The sizes of one job.

    Args:
        cfg: its config, with numbers (see :func:`robust_train.config.batch.settle_batch_size`).
        settings: what its policy goes by.
        trainer: the callable or its dotted path.
        found: by keys of :func:`.known_batches.memory_key`, what earlier launches of this run
            folder have found.
        record: writes an event to the journal.
    """

    def __init__(
        self,
        cfg: DictConfig,
        settings: PolicySettings,
        trainer: str | Callable[..., Any],
        found: Mapping[str, int],
        record: Callable[[Event], None],
    ) -> None:
        self._cfg = cfg
        self._settings = settings
        self._trainer = name_of(trainer)
        self._found_before = dict(found)
        self._record = record
        self._store = KnownBatches(cache_directory(os.environ))
        self._share = 0  # of each rank in the effective batch
        self._sizes: tuple[int, ...] = ()
        self._host_bytes = read_host_memory().total
        self._begun: set[str] = set()
        self._key = ""
        self._found: Mapping[str, Any] | None = None
        self._ran_out: int | None = None

    def begin(self, spec: AttemptSpec) -> tuple[AttemptSpec, BatchSearch | None]:
        """What an attempt is to use in place of ``spec``, and what it is to find out, if anything.

        Only the first attempt on a kind of device is changed: the policy's own choices stand.
        """
        self._found, self._ran_out = None, None
        settings = self._settings.for_ranks(spec.ranks)
        self._share = settings.batch_size * settings.gradient_accumulation_steps
        self._sizes = micro_batch_sizes(self._share, settings.min_batch_size)
        self._key = memory_key(self._cfg, self._trainer, spec.gpu, self._host_bytes)
        if self._key in self._begun:
            return spec, None
        self._begun.add(self._key)
        known = Known()
        if self._cfg.reuse_known_batch:
            known = self._store.read(self._key).at(time.time(), _room(spec))
        if not self._settings.finds_batch_size:
            return self._less_than_known_to_run_out(spec, known), None
        return self._to_be_found(spec, known)

    def on_event(self, event: Event) -> None:
        """Remember what an attempt's event teaches about sizes."""
        if isinstance(event, BatchSizeFound):
            self._found = {
                **event.search,
                "batch_size": event.batch_size,
                "gradient_accumulation_steps": event.gradient_accumulation_steps,
                "effective_batch_size": event.effective_batch_size,
            }
        # a change that somebody asked for has no kind; validation's needs are its own
        elif (
            isinstance(event, (MicroBatchChanged, MicroBatchExhausted))
            and event.kind is not None
            and event.training
        ):
            self._ran_out = min(event.before, self._ran_out or event.before)

    def end(self, spec: AttemptSpec, outcome: Outcome) -> tuple[AttemptSpec, Outcome]:
        """The attempt with the size that it has found; what it tells is remembered."""
        if self._found is not None:
            outcome = replace(outcome, batch_search=dict(self._found))
            if self._found["batch_size"] is not None:
                spec = self._at(spec, self._found["batch_size"])
        elif outcome.failure is not None and outcome.failure.kind not in MEMORY_FAILURES:
            self._begun.discard(self._key)  # it failed before it came to that
        fitted, too_large = self._facts(spec, outcome)
        if fitted is not None or too_large is not None:
            about = {"trainer": self._trainer, "device": _name(spec)}
            known = self._store.read(self._key).at(time.time(), None).learn(fitted, too_large)
            self._store.write(self._key, known, about)
        return spec, outcome

    def _to_be_found(
        self, spec: AttemptSpec, known: Known
    ) -> tuple[AttemptSpec, BatchSearch | None]:
        whole = self._at(spec, self._share)
        earlier = self._found_before.get(self._key)
        if earlier is not None:
            log.info("training.batch_size=auto: %d, as found earlier in this run folder", earlier)
            return self._at(spec, earlier), None
        size = self._largest_known(known)
        if size is not None and known.fitted is not None:
            self._say(
                f"training.batch_size=auto: {size} is known to fit here (seen "
                f"{_ago(known.fitted)})",
                size,
            )
            return self._at(spec, size), None
        is_script = OmegaConf.select(self._cfg, "trainer.argv") is not None
        if is_script or spec.ranks > 1:
            log.info(
                "training.batch_size=auto: %s cannot be probed: training starts with %d and halves "
                "when memory runs out",
                "a script" if is_script else "several processes",
                whole.batch_size,
            )
            return whole, None
        search = BatchSearch(
            effective_batch_size=self._share,
            min_batch_size=self._settings.min_batch_size,
            memory_share=self._cfg.memory.fraction / self._cfg.gpu_jobs_per_device,
            key=self._key,
        )
        return whole, search

    def _largest_known(self, known: Known) -> int | None:
        """The largest size that fits, if what is known tells that it is the largest."""
        if known.fitted is None:
            return None
        fitting = [size for size in self._sizes if size <= known.fitted.batch_size]
        if not fitting:
            return None
        next_larger = next((size for size in self._sizes if size > fitting[-1]), None)
        if next_larger is None:
            return fitting[-1]
        is_too_large = known.too_large and known.too_large.batch_size <= next_larger
        return fitting[-1] if is_too_large else None

    def _less_than_known_to_run_out(self, spec: AttemptSpec, known: Known) -> AttemptSpec:
        fitted, too_large = known.fitted, known.too_large
        if fitted is None or too_large is None or too_large.predicted:
            return spec
        if spec.batch_size < too_large.batch_size:
            return spec
        if not self._settings.preserve_effective_batch_size:
            return spec
        size = max((size for size in self._sizes if size <= fitted.batch_size), default=None)
        if size is None:
            return spec
        self._say(
            f"micro-batch {size} instead of {spec.batch_size} from the start, for "
            f"{too_large.batch_size} ran out of memory here {_ago(too_large)}",
            size,
        )
        return self._at(spec, size)

    def _say(self, sentence: str, size: int) -> None:
        effective = self._settings.effective_batch_size
        log.info(
            "%s; the effective batch size stays %d (reuse_known_batch=false tries anew)",
            sentence,
            effective,
        )
        self._record(KnownBatchUsed(size, sentence))

    def _at(self, spec: AttemptSpec, size: int) -> AttemptSpec:
        settings = self._settings.for_ranks(spec.ranks)
        batch_size, accumulation = at_micro_batch(settings, size)
        return replace(spec, batch_size=batch_size, gradient_accumulation_steps=accumulation)

    def _facts(self, spec: AttemptSpec, outcome: Outcome) -> tuple[Fact | None, Fact | None]:
        """What an attempt tells: the size that completed steps, and one that did not fit."""
        used = outcome.micro_batch or spec.batch_size
        now, room = time.time(), _room(spec)
        kind = None if outcome.failure is None else outcome.failure.kind
        ran_out, predicted = self._ran_out, False
        is_about_the_batch = kind is FailureKind.DEVICE_OOM or spec.gpu is None
        if kind in MEMORY_FAILURES and is_about_the_batch:
            ran_out = min(used, ran_out or used)
        if ran_out is not None and outcome.taken_by_others_bytes >= NOTABLE_BYTES:
            ran_out = None
        if ran_out is None and self._found is not None and self._found["batch_size"] is not None:
            larger = [size for size in self._sizes if size > spec.batch_size]
            ran_out, predicted = (larger[0] if larger else None), True
        fitted = None
        has_trained = kind is None or (outcome.end_step or 0) > outcome.start_step
        if kind not in MEMORY_FAILURES and has_trained:
            fitted = Fact(used, now, room, outcome.peak_memory_bytes)
        too_large = None if ran_out is None else Fact(ran_out, now, room, predicted=predicted)
        return fitted, too_large


def _room(spec: AttemptSpec) -> int | None:
    return min((gpu.free_bytes for gpu in spec.gpus), default=None)


def _name(spec: AttemptSpec) -> str:
    return "cpu" if spec.gpu is None else spec.gpu.name


def _ago(fact: Fact) -> str:
    days = int((time.time() - fact.when) / _DAY)
    if days < 1:
        return "less than a day ago"
    return "a day ago" if days == 1 else f"{days} days ago"
