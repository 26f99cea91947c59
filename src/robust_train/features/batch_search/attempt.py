"""Searches for the micro-batch in the first step of an attempt (``training.batch_size=auto``).

The attempt's runner calls `BatchSearch.begin`. Then the splitter of batches, which knows the first
batch, calls `search_in_first_step` before it computes the first step.
"""

from __future__ import annotations

import logging
import math
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
    """Makes the first step search for the largest micro-batch that fits, if the launcher asks for
    it."""

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
    """Find the largest micro-batch that fits, and report it to the launcher.

    Args:
        plan: the limits of the search.
        send: sends the result to the launcher.
        samples: the number of samples in the batch.
        run: makes a forward and backward pass of the given number of samples.
        start: the state at the start of the step.

    Returns:
        The size, or None if a search is impossible: with several processes or devices, or if the
        batch is too small.
    """
    # These import torch, which some trainers do not use.
    from robust_train.step import ranks
    from robust_train.step.probing import Meter, device_of, optimizer_bytes, search_size

    parameters = start.parameters()
    devices = {tensor.device for tensor in parameters}
    if not devices:
        devices = {device_of(())}
    sizes = plan.sizes(samples)
    obstacle = None
    if ranks.here() is not None:
        obstacle = "several processes train together"
    elif len(devices) > 1:
        obstacle = "the model is on several devices"
    elif not sizes:
        obstacle = f"the first batch has only {samples} samples"
    if obstacle is not None:
        log.info(
            "training.batch_size=auto: no probes, because %s: the batch is halved when memory runs "
            "out",
            obstacle,
        )
        return None
    state_bytes, step_bytes = optimizer_bytes(parameters)
    meter = Meter(devices.pop(), plan.memory_share)
    result = search_size(run, start, sizes, meter, state_bytes, step_bytes)
    log.info("training.batch_size=auto: %s", result)
    effective = plan.effective_batch_size
    size = result.batch_size
    accumulation = None if size is None else math.ceil(effective / size)
    send(BatchSizeFound(size, accumulation, effective, result.as_json()))
    return result
