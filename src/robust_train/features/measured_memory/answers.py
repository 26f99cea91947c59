"""``robust-train need``: how much GPU memory a job needs, and where it fits."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace

from robust_train.config.schema import RobustConfig
from robust_train.features.measured_memory.model import PEAK, largest_fitting, with_margin
from robust_train.features.measured_memory.recall import fingerprint_of_program
from robust_train.features.measured_memory.store import Need, read_needs
from robust_train.folder.run_list import KnownRun, choose_run
from robust_train.folder.state import read_summary
from robust_train.gpu.inventory import read_inventory
from robust_train.model.attempt import Attempt
from robust_train.model.errors import NotDoneError
from robust_train.model.gpu import GpuInfo
from robust_train.model.json import Json
from robust_train.readable import mib

Said = tuple[dict[str, Json], Sequence[str]]


def need(arguments: Namespace) -> Said:
    """Return what a run, or a program that has run before, needs: data and lines."""
    gpus = read_inventory(processes=False).gpus
    words = arguments.program
    # options of a program are its own, but a run has none
    if words[1:] == ["--json"] and not os.path.isfile(words[0]):
        arguments.json = True
        words = words[:1]
    is_run = len(words) < 2 and not any(os.path.isfile(word) for word in words)
    if not is_run:
        return _need_of_program(words, gpus)
    which = words[0] if words else None
    return _need_of_run(choose_run(which, dead_too=True, command="need"), gpus)


def _need_of_program(argv: Sequence[str], gpus: Sequence[GpuInfo]) -> Said:
    """Return what earlier runs of a program have shown."""
    config = RobustConfig()
    config = replace(config, trainer=replace(config.trainer, argv=tuple(argv)))
    need = read_needs().get(fingerprint_of_program(config), Need())
    peaks = need.on(None)
    if not peaks:
        words = " ".join(argv)
        raise NotDoneError(
            "this program was not measured yet: one run of ten steps and a checkpoint is needed, "
            f"robust-train run --min-gpu-memory-mb auto -- {words}"
        )
    peak = max(peaks.values())
    data: dict[str, Json] = {
        "peak_bytes": peak,
        "need_bytes": with_margin(peak),
        "peaks": {str(size): bytes_ for size, bytes_ in sorted(peaks.items())},
    }
    lines = [
        f"micro-batch {size}: {mib(bytes_)} at its peak, {mib(with_margin(bytes_))} to reserve"
        for size, bytes_ in sorted(peaks.items())
    ]
    return _with_gpus(data, lines, peak, peaks, gpus)


def _need_of_run(run: KnownRun, gpus: Sequence[GpuInfo]) -> Said:
    """Return what the attempts of a run have held."""
    summary = read_summary(run.run_dir)
    attempts = () if summary is None else summary.attempts
    measured = [attempt for attempt in attempts if PEAK in attempt.memory]
    if not measured:
        what = "has not ended yet: robust-train queue shows what it holds"
        if not run.alive:
            what = "was not measured: it ran on the CPU, or NVML said nothing of its processes"
        raise NotDoneError(f"run {run.id} {what}")
    last = measured[-1]
    peak = last.memory[PEAK]
    made_of = _made_of(last, peak)
    size = last.spec.batch_size
    data: dict[str, Json] = {
        "run": run.id,
        "peak_bytes": peak,
        "need_bytes": with_margin(peak),
        "micro_batch": size,
        "made_of": dict(made_of),
    }
    parts = ", ".join(f"{mib(bytes_)} {name}" for name, bytes_ in made_of.items())
    lines = [
        f"run {run.id} held {mib(peak)} at its peak, at micro-batch {size}: {parts}",
        f"to reserve: {mib(with_margin(peak))}",
    ]
    peaks: dict[int, int] = {}
    for attempt in measured:
        held = attempt.memory[PEAK]
        peaks[attempt.spec.batch_size] = max(held, peaks.get(attempt.spec.batch_size, 0))
    return _with_gpus(data, lines, peak, peaks, gpus)


def _made_of(attempt: Attempt, peak: int) -> Mapping[str, int]:
    """Return the parts of a peak, as far as torch reported them."""
    tensors = attempt.memory.get("max_allocated", 0)
    cache = max(attempt.memory.get("reserved", 0), tensors)
    if not 0 < cache <= peak:
        return {"unknown parts": peak}
    return {
        "tensors": tensors,
        "allocator cache": cache - tensors,
        "CUDA contexts and libraries": peak - cache,
    }


def _with_gpus(
    data: dict[str, Json],
    lines: list[str],
    peak: int,
    peaks: Mapping[int, int],
    gpus: Sequence[GpuInfo],
) -> Said:
    """Add the smallest GPU of this host that it fits, and the micro-batch that fits each."""
    fitting = sorted(
        (gpu for gpu in gpus if gpu.total_bytes >= with_margin(peak)),
        key=lambda gpu: (gpu.total_bytes, gpu.index),
    )
    smallest = fitting[0] if fitting else None
    data["smallest_gpu"] = None if smallest is None else smallest.uuid
    if smallest is not None:
        lines.append(f"the smallest GPU here that it fits: GPU {smallest.index} ({smallest.name})")
    elif gpus:
        lines.append("it fits no GPU here")
    sizes = {gpu.uuid: largest_fitting(peaks, gpu.total_bytes) for gpu in gpus}
    data["micro_batches"] = dict(sizes)
    for gpu in gpus:
        size = sizes[gpu.uuid]
        fits = "unknown, measure one more size" if size is None else str(size)
        lines.append(f"GPU {gpu.index}: largest micro-batch {fits}")
    return data, lines
