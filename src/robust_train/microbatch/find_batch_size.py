"""The largest batch that fits, for training loops of any kind."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from robust_train.batch.search import micro_batch_sizes
from robust_train.compat import autograd_sequence_number
from robust_train.errors import AttemptsExhausted
from robust_train.failures import classify_failure
from robust_train.memory.cleanup import clear_frames
from robust_train.microbatch import probing
from robust_train.microbatch.probing import device_of, meter_of
from robust_train.microbatch.rewind import Models, StepStart, Watch, cut_graphs

log = logging.getLogger("robust_train")


def find_batch_size(
    try_batch: Callable[[int], Any],
    at_most: int,
    *,
    min_batch_size: int = 1,
    model: Models = None,
    device: torch.device | str | None = None,
    effective_batch_size: int | None = None,
    reserve_bytes: int = 0,
    memory_fraction: float = 1.0,
) -> probing.FoundBatchSize:
    """Find the largest batch that fits, in at most four tries::

        def try_batch(size):
            x, y = next_batch(size)
            criterion(model(x), y).backward()

        found = find_batch_size(try_batch, at_most=512, model=model)
        loader = DataLoader(data, found.batch_size)

    After each try gradients, buffers and generators are as before it. It makes no optimizer step:
    that would change the weights.

    Args:
        try_batch: a forward and backward pass of that many samples.
        at_most: the largest size to consider.
        min_batch_size: the smallest.
        model: what gets gradients; None: all modules and optimizers of this process.
        device: whose memory it is about; None: that of the model, or where there is none yet the
            current GPU if CUDA has been started, else the CPU.
        effective_batch_size: samples in an optimizer step: prefer its divisors.
        reserve_bytes: needed later beside what a pass shows; an optimizer's state that is not made
            yet counts by itself where ``model`` is given.
        memory_fraction: of the GPU's memory, the most to count on.

    Raises:
        AttemptsExhausted: memory runs out at ``min_batch_size`` as well.
        ValueError: a size is below 1, or ``min_batch_size`` above ``at_most``.
    """
    if not 1 <= min_batch_size <= at_most:
        raise ValueError(f"min_batch_size={min_batch_size}: must be from 1 to at_most={at_most}")
    if effective_batch_size is not None and effective_batch_size < 1:
        raise ValueError(f"effective_batch_size={effective_batch_size}: must be 1 or more")
    sizes: tuple[int, ...] | range = range(min_batch_size, at_most + 1)
    if effective_batch_size is not None:
        wanted = micro_batch_sizes(effective_batch_size, min_batch_size)
        sizes = tuple(size for size in wanted if size <= at_most) or (at_most,)
    start = StepStart(Watch(), model)
    parameters = list(start.parameters())
    step_bytes = 0
    if model is not None:
        reserve_bytes += probing.optimizer_state_bytes(parameters)
        step_bytes = probing.optimizer_step_bytes(parameters)
    where = torch.device(device) if device is not None else device_of(parameters)
    prober = probing.Prober(sizes, meter_of(where, memory_fraction), reserve_bytes, step_bytes)
    try:
        start.make_gradients()
        while (size := prober.begin()) is not None:
            since = autograd_sequence_number(torch)
            prober.end(ran_out=not _goes_through(try_batch, size))
            cut_graphs(since)
            start.rewind()
            start.make_gradients()
    finally:
        start.rewind()
        start.end()
    found = prober.found()
    log.info("find_batch_size: %s", found)
    if found.batch_size is None:
        raise AttemptsExhausted(f"find_batch_size: {found}")
    return found


def _goes_through(try_batch: Callable[[int], Any], size: int) -> bool:
    try:
        try_batch(size)
    except Exception as error:
        if not classify_failure(error).kind.is_memory:
            raise
        clear_frames(error)
        return False
    return True
