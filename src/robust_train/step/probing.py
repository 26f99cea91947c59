"""The largest micro-batch that fits, found by trying some and measuring what they need.

:mod:`robust_train.policy.search` decides which sizes to try.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from robust_train.failures import classify_failure
from robust_train.host import memory as host
from robust_train.memory.clearing import clear_frames, return_memory
from robust_train.memory.tensors import live_objects
from robust_train.model.errors import AttemptsExhaustedError
from robust_train.policy.search import Limits, Probe, fits, largest_that_fits, next_size
from robust_train.policy.sizes import micro_batch_sizes
from robust_train.readable import counted
from robust_train.readable import memory as shown
from robust_train.step.reachable import Models, models_of
from robust_train.step.step_start import StepStart, Watch

log = logging.getLogger("robust_train")


@dataclass(frozen=True)
class FoundBatchSize:
    """The result of a search. Memory is in bytes.

    Attributes:
        batch_size: the largest micro-batch that fits, or None if not even the smallest does.
        probes: the tries, in order.
        rest_bytes: memory in use before a pass.
        limit_bytes: memory available to a pass, without the optimizer's future share.
        measured_bytes: memory that ``batch_size`` needed.
        seconds: duration of all probes.
    """

    batch_size: int | None
    probes: tuple[Probe, ...]
    rest_bytes: int
    limit_bytes: int
    measured_bytes: int | None
    seconds: float

    def __str__(self) -> str:
        limits = Limits(self.rest_bytes, self.limit_bytes)
        tried = ", ".join(f"{probe.batch_size}: {_outcome(probe, limits)}" for probe in self.probes)
        probes = f"{counted(len(self.probes), 'probe')} ({tried})"
        if self.batch_size is None or self.measured_bytes is None:
            return f"{probes}: none fits into {shown(self.limit_bytes)}"
        return (
            f"{probes} → {self.batch_size}, measured {shown(self.measured_bytes)} of "
            f"{shown(self.limit_bytes)}, {self.seconds:.1f} s"
        )

    def as_json(self) -> dict[str, Any]:
        """Return it as the journal and ``summary.json`` have it."""
        return {**asdict(self), "seconds": round(self.seconds, 3)}


def _outcome(probe: Probe, limits: Limits) -> str:
    if probe.peak_bytes is None:
        return "out of memory"
    return shown(probe.peak_bytes) + ("" if fits(probe, limits) else ", too near the limit")


def search_size(
    run: Callable[[int], object],
    start: StepStart,
    sizes: Sequence[int],  # the candidates, the smallest first
    meter: Meter,  # measures the device
    reserve_bytes: int = 0,  # memory that training needs in addition to a pass
    # that the optimizer takes for the time of a step, when the pass's activations are gone: a
    # size fits if both the pass and the step do
    step_bytes: int = 0,
) -> FoundBatchSize:
    """Call ``run(size)``, a pass of that many samples, until the largest that fits is found.

    Gradients, buffers and generators go back to their ``start`` after each pass.
    """
    started = time.monotonic()
    # gradients of zeros stand for them: a step that adds to them needs no more
    start.move_aside_to_host()
    probes: list[Probe] = []
    limits = Limits()
    while (size := next_size(sizes, probes, limits)) is not None:
        start.make_gradients()
        rest = meter.begin()
        limit = meter.limit() - reserve_bytes
        # threads and workspaces come with the first pass and stay
        limit = min(limit, limits.limit_bytes) if probes else limit
        limits = Limits(rest, limit)
        if rest + step_bytes > limit:
            log.warning(
                "no batch fits: the optimizer's step takes %s for a copy of all parameters; "
                "foreach=False or fused=True spares it",
                shown(step_bytes),
            )
            break
        peak = None
        if _goes_through(run, size):
            peak = meter.peak()
            limits = Limits(rest, min(limit, meter.limit() - reserve_bytes))
        probes.append(Probe(size, peak))
        start.rewind()
    start.rewind()
    meter.begin()  # the peak counts from here on, as if nothing was tried
    best = largest_that_fits(probes, limits)
    return FoundBatchSize(
        batch_size=None if best is None else best.batch_size,
        probes=tuple(probes),
        rest_bytes=limits.rest_bytes,
        limit_bytes=limits.limit_bytes,
        measured_bytes=None if best is None else best.peak_bytes,
        seconds=time.monotonic() - started,
    )


def _goes_through(run: Callable[[int], object], size: int) -> bool:
    try:
        run(size)
    except Exception as error:
        if not classify_failure(error).kind.is_memory:
            raise
        clear_frames(error)
        return False
    return True


def find_batch_size(
    try_batch: Callable[[int], Any],
    max_batch_size: int,
    *,
    min_batch_size: int = 1,
    model: Models = None,
    device: torch.device | str | None = None,
    effective_batch_size: int | None = None,
    reserve_bytes: int = 0,
    memory_fraction: float = 1.0,
) -> FoundBatchSize:
    """Find the largest batch that fits, in at most four tries::

        def try_batch(size):
            x, y = next_batch(size)
            criterion(model(x), y).backward()

        found = find_batch_size(try_batch, max_batch_size=512, model=model)
        loader = DataLoader(data, found.batch_size)

    Each try restores gradients, buffers and generators. It makes no optimizer step, which would
    change the weights.

    Args:
        try_batch: a forward and backward pass of that many samples.
        max_batch_size: the largest size to consider.
        min_batch_size: the smallest.
        model: the module that gets gradients, or several. None: the modules that ``try_batch``
            closes over.
        device: the device whose memory counts. None: the model's device. If the model has no
            parameters yet, the current GPU if CUDA was started, else the CPU.
        effective_batch_size: samples in an optimizer step. Its divisors are preferred.
        reserve_bytes: memory that training needs in addition to a pass. If you pass ``model``, the
            optimizer's future state is added automatically.
        memory_fraction: the share of the GPU's memory to use at most.

    Returns:
        The size, in samples, and the measurements that led to it.

    Raises:
        AttemptsExhaustedError: memory runs out even at ``min_batch_size``.
        ValueError: a size is below 1, or ``min_batch_size`` above ``max_batch_size``.
    """
    if not 1 <= min_batch_size <= max_batch_size:
        raise ValueError(
            f"min_batch_size={min_batch_size}: must be from 1 to max_batch_size={max_batch_size}"
        )
    if effective_batch_size is not None and effective_batch_size < 1:
        raise ValueError(f"effective_batch_size={effective_batch_size}: must be 1 or more")
    sizes: tuple[int, ...] | range = range(min_batch_size, max_batch_size + 1)
    if effective_batch_size is not None:
        wanted = micro_batch_sizes(effective_batch_size, min_batch_size)
        sizes = tuple(size for size in wanted if size <= max_batch_size) or (max_batch_size,)
    models = models_of(model, try_batch)
    start = StepStart(Watch(), models, try_batch)
    parameters = start.parameters()
    state_bytes, step_bytes = (0, 0) if model is None else optimizer_bytes(parameters)
    where = device_of(parameters) if device is None else torch.device(device)
    try:
        search = search_size(
            try_batch,
            start,
            sizes,
            Meter(where, memory_fraction),
            reserve_bytes + state_bytes,
            step_bytes,
        )
    except BaseException:
        start.rewind()
        raise
    finally:
        start.end()
    log.info("find_batch_size: %s", search)
    if search.batch_size is None:
        raise AttemptsExhaustedError(f"find_batch_size: {search}")
    return search


def optimizer_bytes(parameters: Iterable[Tensor]) -> tuple[int, int]:
    """Return the bytes of optimizer state that the first step is going to make, and those that a
    step takes beside the state, for its own time.

    An optimizer that is made later is taken to be Adam.
    """
    optimizers = {
        id(parameter): optimizer
        for optimizer in live_objects(torch.optim.Optimizer)
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    state = step = 0
    for parameter in parameters:
        optimizer = optimizers.get(id(parameter))
        settings = _ADAM if optimizer is None else optimizer.defaults
        if parameter.requires_grad:
            step += parameter.nbytes * _copies_in_a_step(settings, parameter.device)
            if optimizer is None or parameter not in optimizer.state:
                state += parameter.nbytes * _states_per_parameter(settings)
    return state, step


_ADAM = {"betas": (0.9, 0.999)}


def _states_per_parameter(settings: Mapping[str, Any]) -> int:
    """Return how many tensors of a parameter's size an optimizer keeps."""
    # SGD, RMSprop (with alpha)
    if "betas" not in settings and "momentum" in settings:
        kept = [settings["momentum"], "alpha" in settings, settings.get("centered")]
        return sum(map(bool, kept))
    return 2 + bool(settings.get("amsgrad"))  # Adam and its variants


def _copies_in_a_step(settings: Mapping[str, Any], device: torch.device) -> bool:
    """Return whether a step holds a copy of all parameters at once.

    The ``foreach`` implementations, torch's choice on a GPU, compute on lists of whole tensors:
    Adam's variants and RMSprop copy the denominators, SGD copies the gradients if weight decay is
    added to them (``_multi_tensor_*`` in torch/optim).
    """
    uses_foreach = settings.get("foreach")
    if uses_foreach is None:
        uses_foreach = device.type == "cuda" and not settings.get("fused")
    if not uses_foreach:
        return False
    return "betas" in settings or "alpha" in settings or bool(settings.get("weight_decay"))


class Meter:
    """The memory that a pass takes. On the GPU with this number, it is the tensors of the caching
    allocator. On the host (None), it is this process's anonymous memory, without mapped files. If
    the kernel does not allow a reset of the host's peak, it is the peak so far, which can only be
    too high, since larger sizes are tried after smaller sizes."""

    def __init__(self, device: torch.device, share: float) -> None:
        self.index: int | None = None
        if device.type == "cuda":
            is_current = device.index is None
            self.index = torch.cuda.current_device() if is_current else device.index
        self._share = share

    def begin(self) -> int:
        """Return the bytes in use, and restart the peak."""
        return_memory(thorough=False)
        if self.index is None:
            host.reset_peak()
            return host.own_memory().get("RssAnon", 0)
        torch.cuda.synchronize(self.index)
        torch.cuda.reset_peak_memory_stats(self.index)
        return torch.cuda.memory_allocated(self.index)

    def peak(self) -> int:
        """Return the most that was in use."""
        if self.index is None:
            memory = host.own_memory()
            # pages of libraries that were read meanwhile stay, so they are in the peak as well
            return memory.get("VmHWM", 0) - memory.get("RssFile", 0) - memory.get("RssShmem", 0)
        torch.cuda.synchronize(self.index)
        return torch.cuda.max_memory_allocated(self.index)

    def limit(self) -> int:
        """Return the most that may be in use."""
        if self.index is None:
            return host.own_memory().get("RssAnon", 0) + host.room_left()
        free, total = torch.cuda.mem_get_info(self.index)
        # the allocator's limit by memory.fraction; torch before 2.8 does not say
        get_fraction = getattr(torch.cuda, "get_per_process_memory_fraction", lambda index: 1.0)
        share = min(self._share, get_fraction(self.index))
        return min(int(share * total), free + torch.cuda.memory_reserved(self.index))


def device_of(parameters: Iterable[torch.Tensor]) -> torch.device:
    """Return the GPU that the parameters are on, or the first of their devices. Without parameters,
    return the current GPU if this process started CUDA, else the CPU."""
    devices = list(dict.fromkeys(parameter.device for parameter in parameters))
    is_on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    devices.append(torch.device("cuda" if is_on_gpu else "cpu"))
    return next((device for device in devices if device.type == "cuda"), devices[0])
