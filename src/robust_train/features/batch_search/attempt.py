"""Searches for the micro-batch in the first step of an attempt."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from robust_train.attempt.hooks import InAttempt
from robust_train.attempt.reports import Report
from robust_train.features.batch_search.model import SearchPlan
from robust_train.features.batch_search.record import SearchKnob
from robust_train.model.events import BatchSizeFound

if TYPE_CHECKING:
    from robust_train.step.probing import FoundBatchSize
    from robust_train.step.step_start import StepStart

log = logging.getLogger("robust_train")


class BatchSearch(InAttempt):
    """Lets the first step look for the largest micro-batch that fits, if the attempt searches."""

    def begin(self) -> None:
        """Pass the search to the splitter of batches, which calls it once."""
        spec = self.live.spec
        if spec is not None and spec.of(SearchKnob).searches:
            plan = SearchPlan.of(self.config, spec)
            send = self.live.reports.send
            self.live.parts.search_with(partial(search_in_first_step, plan, send))


def search_in_first_step(
    plan: SearchPlan, send: Report, samples: int, run: Callable[[int], object], start: StepStart
) -> FoundBatchSize | None:
    """Find the size in a step's first batch, and report it.

    Args:
        plan: the limits of the search.
        send: reports the size.
        samples: the samples in the batch.
        run: makes a forward and backward pass of that many samples.
        start: the state at the start of the step.

    Returns:
        The size, or None if it cannot be found: with several processes or devices, or in too small
        a batch.
    """
    # These import torch, which some trainers do not use.
    from robust_train.step import ranks
    from robust_train.step.probing import Meter, device_of, optimizer_bytes, search_size

    parameters = start.parameters()
    devices = {tensor.device for tensor in parameters}
    if not devices:
        devices = {device_of(())}
    sizes = plan.sizes(samples)
    why = None if sizes else f"the first batch has {samples} samples only"
    if ranks.here() is not None:
        why = "several processes train together"
    elif len(devices) > 1:
        why = "several devices share"
    if why is not None:
        log.info("training.batch_size=auto: no probes, since %s: sizes are halved instead", why)
        return None
    state_bytes, step_bytes = optimizer_bytes(parameters)
    meter = Meter(devices.pop(), plan.memory_share)
    result = search_size(run, start, sizes, meter, state_bytes, step_bytes)
    log.info("training.batch_size=auto: %s", result)
    effective = plan.effective_batch_size
    size = result.batch_size
    accumulation = None if size is None else -(-effective // size)
    send(BatchSizeFound(size, accumulation, effective, result.as_json()))
    return result
