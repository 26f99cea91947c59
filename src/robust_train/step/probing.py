"""Finds the largest micro-batch that fits, by running a few sizes and measuring their memory.

Users call :func:`find_batch_size` in any process. In the launcher's attempts, the first step of a
job calls :func:`search_size` in the process that trains. `policy/sizes.py` decides which size to
try next, from the memory that earlier sizes took.
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
        batch_size: the largest micro-batch that fits, or None if even the smallest does not fit.
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
        """Return the fields as they stand in the journal and in ``summary.json``."""
        return {**asdict(self), "seconds": round(self.seconds, 3)}


def _outcome(probe: Probe, limits: Limits) -> str:
    if probe.peak_bytes is None:
        return "out of memory"
    peak = shown(probe.peak_bytes)
    return peak if fits(probe, limits) else f"{peak}, too near the limit"


def search_size(
    run: Callable[[int], object],
    start: StepStart,
    sizes: Sequence[int],
    meter: Meter,
    reserve_bytes: int = 0,
    step_bytes: int = 0,
) -> FoundBatchSize:
    """Find the largest size for which ``run(size)`` fits into memory.

    Args:
        run: a pass of that number of samples.
        start: the state that is restored after each pass.
        sizes: the candidates, the smallest first.
        meter: measures the memory of the device.
        reserve_bytes: memory that training needs in addition to a pass.
        step_bytes: memory that the optimizer takes during its step. By then the activations of the
            pass are free, so a size fits if both the pass and the step fit.
    """
    started = time.monotonic()
    # Gradients of zeros take their place: they need as much memory.
    start.move_aside_to_host()
    probes: list[Probe] = []
    limits = Limits()
    while (size := next_size(sizes, probes, limits)) is not None:
        start.make_gradients()
        rest = meter.begin()
        limit = meter.limit() - reserve_bytes
        if probes:
            # Threads and workspaces of the first pass stay, and must not look like more room.
            limit = min(limit, limits.limit_bytes)
        limits = Limits(rest, limit)
        if rest + step_bytes > limit:
            log.warning(
                "no batch fits: the optimizer's step takes %s for a copy of all parameters; "
                "foreach=False or fused=True avoids the copy",
                shown(step_bytes),
            )
            break
        peak = None
        if _try_size(run, size):
            peak = meter.peak()
            limits = Limits(rest, min(limit, meter.limit() - reserve_bytes))
        probes.append(Probe(size, peak))
        start.rewind()
    start.rewind()
    meter.begin()  # The peak of the training that follows must not include the probes.
    best = largest_that_fits(probes, limits)
    batch_size = None
    measured_bytes = None
    if best is not None:
        batch_size = best.batch_size
        measured_bytes = best.peak_bytes
    return FoundBatchSize(
        batch_size=batch_size,
        probes=tuple(probes),
        rest_bytes=limits.rest_bytes,
        limit_bytes=limits.limit_bytes,
        measured_bytes=measured_bytes,
        seconds=time.monotonic() - started,
    )


def _try_size(run: Callable[[int], object], size: int) -> bool:
    """Run a pass, and return whether it fits. Any other error is raised."""
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
        try_batch: runs a forward and backward pass of the given number of samples.
        max_batch_size: the largest size to consider.
        min_batch_size: the smallest size to consider.
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
    step_bytes = 0
    if model is not None:
        state_bytes, step_bytes = optimizer_bytes(parameters)
        reserve_bytes += state_bytes
    measured_device = device_of(parameters) if device is None else torch.device(device)
    meter = Meter(measured_device, memory_fraction)
    try:
        search = search_size(try_batch, start, sizes, meter, reserve_bytes, step_bytes)
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
    """Estimate the memory of the optimizers of ``parameters``.

    A parameter without an optimizer is expected to get Adam later.

    Returns:
        The bytes of the state that the first step will allocate, and the bytes that each step
        allocates temporarily.
    """
    optimizers = {
        id(parameter): optimizer
        for optimizer in live_objects(torch.optim.Optimizer)
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    state_bytes = 0
    step_bytes = 0
    for parameter in parameters:
        optimizer = optimizers.get(id(parameter))
        settings = _ADAM if optimizer is None else optimizer.defaults
        if not parameter.requires_grad:
            continue
        if _copies_parameters(settings, parameter.device):
            step_bytes += parameter.nbytes
        if optimizer is None or parameter not in optimizer.state:
            state_bytes += parameter.nbytes * _states_per_parameter(settings)
    return state_bytes, step_bytes


_ADAM = {"betas": (0.9, 0.999)}


def _states_per_parameter(settings: Mapping[str, Any]) -> int:
    """Return how many tensors of a parameter's size an optimizer keeps as its state."""
    # SGD and RMSprop. Only RMSprop has alpha.
    if "betas" not in settings and "momentum" in settings:
        states = [settings["momentum"], "alpha" in settings, settings.get("centered")]
        return len([state for state in states if state])
    # Adam and its variants.
    return 3 if settings.get("amsgrad") else 2


def _copies_parameters(settings: Mapping[str, Any], device: torch.device) -> bool:
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
    """Measures the memory that a pass takes.

    On a GPU that is the memory of tensors, as torch's caching allocator counts it. On the host it
    is this process's anonymous memory, without mapped files. If the kernel does not allow a reset
    of the host's peak, the peak so far counts. It can only be too high.

    Args:
        device: the device to measure.
        share: the share of a GPU's memory to use at most.
    """

    def __init__(self, device: torch.device, share: float) -> None:
        self.index: int | None = None  # number of the GPU. None: the host
        if device.type == "cuda":
            is_current = device.index is None
            self.index = torch.cuda.current_device() if is_current else device.index
        self._share = share

    def begin(self) -> int:
        """Return the bytes in use, and reset the peak to them."""
        return_memory(thorough=False)
        if self.index is None:
            host.reset_peak()
            return host.read_own_memory().get("RssAnon", 0)
        torch.cuda.synchronize(self.index)
        torch.cuda.reset_peak_memory_stats(self.index)
        return torch.cuda.memory_allocated(self.index)

    def peak(self) -> int:
        """Return the largest number of bytes in use since `begin`."""
        if self.index is None:
            memory = host.read_own_memory()
            # Pages of libraries that were read in the meantime stay, and are part of the peak.
            return memory.get("VmHWM", 0) - memory.get("RssFile", 0) - memory.get("RssShmem", 0)
        torch.cuda.synchronize(self.index)
        return torch.cuda.max_memory_allocated(self.index)

    def limit(self) -> int:
        """Return the largest number of bytes that may be in use."""
        if self.index is None:
            return host.read_own_memory().get("RssAnon", 0) + host.read_available_bytes()
        free, total = torch.cuda.mem_get_info(self.index)
        share = self._share
        # The key memory.fraction limits the allocator. torch before 2.8 cannot return that limit.
        get_fraction = getattr(torch.cuda, "get_per_process_memory_fraction", None)
        if get_fraction is not None:
            share = min(share, get_fraction(self.index))
        return min(int(share * total), free + torch.cuda.memory_reserved(self.index))


def device_of(parameters: Iterable[torch.Tensor]) -> torch.device:
    """Return the first GPU that the parameters are on, or their first device.

    Without any GPU among them, return the current GPU if this process started CUDA. Without
    parameters and CUDA, return the CPU.
    """
    devices = [parameter.device for parameter in parameters]
    for device in devices:
        if device.type == "cuda":
            return device
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return torch.device("cuda")
    return devices[0] if devices else torch.device("cpu")
