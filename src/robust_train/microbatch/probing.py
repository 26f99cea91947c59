"""Trying micro-batches before training, and measuring what they need.

What to try is decided in :mod:`robust_train.batch.search`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from robust_train.batch.search import (
    BatchSearch,
    Limits,
    Probe,
    fits,
    largest_that_fits,
    next_size,
)
from robust_train.memory import host
from robust_train.memory.cleanup import return_memory
from robust_train.memory.holders import live_objects
from robust_train.microbatch.part import MicroBatch
from robust_train.microbatch.rewind import StepStart, cut_graphs
from robust_train.readable import memory as shown

log = logging.getLogger("robust_train")


@dataclass(frozen=True)
class FoundBatchSize:
    """What a search has found. Memory in bytes.

    Attributes:
        batch_size: the largest micro-batch that fits; None if not even the smallest does.
        probes: what was tried, in order.
        rest_bytes: what was in use before a pass.
        limit_bytes: what there was to use, without what the optimizer is going to take.
        measured_bytes: what it needed.
        seconds: all probes together.
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
        probes = f"{len(self.probes)} probe{'s' * (len(self.probes) != 1)} ({tried})"
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


class Prober:
    """One search, step by step: :meth:`begin`, a pass of that many samples, :meth:`end`."""

    def __init__(
        self,
        sizes: tuple[int, ...] | range,  # to choose from, the smallest first
        meter: Meter,  # of the device
        reserve_bytes: int = 0,  # that training will need beside what a pass shows
        # that the optimizer takes for the time of a step, when the pass's activations are gone: a
        # size fits if both the pass and the step do
        step_bytes: int = 0,
    ):
        self._sizes = sizes
        self._meter = meter
        self._reserve = reserve_bytes
        self._step_bytes = step_bytes
        self._probes: list[Probe] = []
        self._limits = Limits()
        self._size = 0
        self._started = time.monotonic()

    def begin(self) -> int | None:
        """Return the size to try now, None when the search is over."""
        size = next_size(self._sizes, self._probes, self._limits)
        if size is None:
            return None
        rest = self._meter.begin()
        limit = self._meter.limit() - self._reserve
        # threads and workspaces come with the first pass and stay
        limit = min(limit, self._limits.limit_bytes) if self._probes else limit
        self._limits = Limits(rest, limit)
        if rest + self._step_bytes > limit:
            log.warning(
                "no batch fits: the optimizer's step takes %s for a copy of all parameters; "
                "foreach=False or fused=True spares it",
                shown(self._step_bytes),
            )
            return None
        self._size = size
        return size

    def end(self, *, ran_out: bool) -> None:
        """Take note of how the pass went."""
        self._probes.append(Probe(self._size, None if ran_out else self._meter.peak()))
        if not ran_out:
            limit = min(self._limits.limit_bytes, self._meter.limit() - self._reserve)
            self._limits = replace(self._limits, limit_bytes=limit)

    def found(self) -> FoundBatchSize:
        """Return the result. The peak is counted anew from here on, as if nothing was tried."""
        self._meter.begin()
        best = largest_that_fits(self._probes, self._limits)
        return FoundBatchSize(
            batch_size=None if best is None else best.batch_size,
            probes=tuple(self._probes),
            rest_bytes=self._limits.rest_bytes,
            limit_bytes=self._limits.limit_bytes,
            measured_bytes=None if best is None else best.peak_bytes,
            seconds=time.monotonic() - self._started,
        )


class Splits(Protocol):
    """What :func:`probe_parts` calls of a step."""

    samples: int

    def probe(self, size: int) -> MicroBatch: ...
    def forget(self) -> None: ...


def probe_parts(
    search: BatchSearch, batches: Splits, start: StepStart
) -> Generator[MicroBatch, None, FoundBatchSize | None]:
    """Yield parts of a step's batch to measure; return what was found. Gradients, buffers and
    generators go back to the step's start after each, as they do when memory has run out. None
    where it cannot be found out (several processes or devices, too small a batch)."""
    prober = _prober_for(search, batches.samples, list(start.parameters()))
    if prober is None:
        return None
    while True:
        start.make_gradients()
        size = prober.begin()
        if size is None:
            break
        micro = batches.probe(size)
        try:
            yield micro
        except GeneratorExit:  # the loop was left
            if start.is_open:
                start.rewind()
            raise
        prober.end(ran_out=not micro.done)
        cut_graphs(micro.since)
        del micro
        start.rewind()
        batches.forget()
    start.rewind()
    return prober.found()


def _prober_for(search: BatchSearch, samples: int, parameters: list[Tensor]) -> Prober | None:
    devices = {tensor.device for tensor in parameters} or {device_of(())}
    sizes = search.sizes(samples)
    why = None if sizes else f"the first batch has {samples} samples only"
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        why = "several processes train together"
    elif len(devices) > 1:
        why = "several devices share"
    if why is not None:
        log.info("training.batch_size=auto: no probes, since %s: sizes are halved instead", why)
        return None
    meter = meter_of(devices.pop(), search.memory_share)
    state, step = optimizer_state_bytes(parameters), optimizer_step_bytes(parameters)
    return Prober(sizes, meter, state, step)


def optimizer_state_bytes(parameters: Iterable[Tensor]) -> int:
    """Return the bytes of optimizer state that the first step is going to make."""
    return sum(
        (2 if optimizer is None else _states_per_parameter(optimizer)) * parameter.nbytes
        for parameter, optimizer in _with_optimizers(parameters)
        if optimizer is None or parameter not in optimizer.state
    )


def optimizer_step_bytes(parameters: Iterable[Tensor]) -> int:
    """Return the bytes that a step takes beside the state, for its own time."""
    return sum(
        _copies_in_a_step(optimizer, parameter.device.type) * parameter.nbytes
        for parameter, optimizer in _with_optimizers(parameters)
    )


def _with_optimizers(parameters: Iterable[Tensor]) -> list[tuple[Tensor, Any]]:
    """Pair what is trained with its optimizer; None where one is made later, as Adam's kin."""
    missing = {id(p): p for p in parameters if p.requires_grad}
    found: list[tuple[Tensor, Any]] = []
    for optimizer in live_objects(torch.optim.Optimizer):
        held = (p for group in optimizer.param_groups for p in group["params"])
        found += [(p, optimizer) for p in held if missing.pop(id(p), None) is not None]
    return found + [(parameter, None) for parameter in missing.values()]


def _states_per_parameter(optimizer: torch.optim.Optimizer) -> int:
    """Return how many tensors of a parameter's size this kind of optimizer keeps."""
    settings = optimizer.defaults
    if "betas" in settings:  # Adam and its kin
        return 2 + bool(settings.get("amsgrad"))
    if "momentum" in settings:  # SGD, RMSprop (which has alpha)
        return bool(settings["momentum"]) + ("alpha" in settings) + bool(settings.get("centered"))
    return 2


def _copies_in_a_step(optimizer: torch.optim.Optimizer | None, device: str) -> int:
    """Return how many copies of all parameters a step holds at once.

    The ``foreach`` implementations, torch's choice on a GPU, compute on lists of whole tensors:
    Adam's kin and RMSprop make one of the denominators, SGD one of the gradients where weight decay
    is added to them (``_multi_tensor_*`` in torch/optim).
    """
    if optimizer is None:
        return int(device == "cuda")
    settings = optimizer.defaults
    uses_foreach = settings.get("foreach")
    if uses_foreach is None:
        uses_foreach = device == "cuda" and not settings.get("fused")
    copies = "betas" in settings or "alpha" in settings or bool(settings.get("weight_decay"))
    return int(bool(uses_foreach) and copies)


class GpuMeter:
    """What the caching allocator of this process holds in tensors."""

    def __init__(self, index: int, share: float) -> None:
        self.index = index
        self._share = share

    def begin(self) -> int:
        return_memory(thorough=False)
        torch.cuda.synchronize(self.index)
        torch.cuda.reset_peak_memory_stats(self.index)
        return torch.cuda.memory_allocated(self.index)

    def peak(self) -> int:
        torch.cuda.synchronize(self.index)
        return torch.cuda.max_memory_allocated(self.index)

    def limit(self) -> int:
        free, total = torch.cuda.mem_get_info(self.index)
        # the allocator's limit by memory.fraction; torch before 2.8 does not say
        known = getattr(torch.cuda, "get_per_process_memory_fraction", lambda index: 1.0)
        share = min(self._share, known(self.index))
        return min(int(share * total), free + torch.cuda.memory_reserved(self.index))


class HostMeter:
    """This process's anonymous memory: without the files that are mapped into it. Where the kernel
    does not let the peak be reset it is that of all that went before: too much at worst, since
    larger sizes are tried after smaller ones."""

    def begin(self) -> int:
        return_memory(thorough=False)
        host.reset_peak()
        return host.own_memory().get("RssAnon", 0)

    def peak(self) -> int:
        own = host.own_memory()
        # pages of libraries that were read meanwhile stay, so they are in the peak as well
        return own.get("VmHWM", 0) - own.get("RssFile", 0) - own.get("RssShmem", 0)

    def limit(self) -> int:
        return host.own_memory().get("RssAnon", 0) + host.room_left()


Meter = GpuMeter | HostMeter


def meter_of(device: torch.device, share: float) -> Meter:
    """Return what measures memory there."""
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return GpuMeter(index, share)
    return HostMeter()


def device_of(parameters: Iterable[torch.Tensor]) -> torch.device:
    """Return the GPU that the parameters are on, or the first of their devices. Without any: the
    current GPU where this process has started CUDA, else the CPU."""
    found = list(dict.fromkeys(parameter.device for parameter in parameters))
    is_on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    found.append(torch.device("cuda" if is_on_gpu else "cpu"))
    return next((device for device in found if device.type == "cuda"), found[0])
