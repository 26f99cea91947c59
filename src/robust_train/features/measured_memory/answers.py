"""``robust-train need``: how much GPU memory a job needs, and which GPUs it fits."""

from __future__ import annotations

import os
import shlex
from argparse import Namespace
from collections.abc import Mapping, Sequence

from omegaconf import OmegaConf

from robust_train.config.checks import checked
from robust_train.config.placeholders import literal
from robust_train.config.refusals import composed
from robust_train.features.measured_memory.model import (
    PEAK,
    largest_fitting,
    peak_by_torch,
    with_margin,
)
from robust_train.features.measured_memory.probe import run_probe
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
    words = arguments.program
    # Options of a program belong to it, but a run has none.
    if words[1:] == ["--json"] and not os.path.isfile(words[0]):
        arguments.json = True
        words = words[:1]
    is_run = len(words) < 2 and not any(os.path.isfile(word) for word in words)
    if arguments.probe and (is_run or not words):
        raise NotDoneError("--probe runs a program: robust-train need --probe -- PROGRAM …")
    if not is_run:
        code = run_probe(words, arguments.batch_size) if arguments.probe else None
        return _need_of_program(words, code)
    which = words[0] if words else None
    return _need_of_run(choose_run(which, dead_too=True, command="need"))


def _need_of_program(argv: Sequence[str], code: int | None) -> Said:
    """Return the peaks of earlier runs of a program. ``code`` is the exit code of a probe run."""
    # These are the defaults of `robust-train run`, which differ from those of a function.
    cfg = composed(["trainer=command", "training.batch_size=1", "min_batch_size=1"])
    OmegaConf.update(cfg, "trainer.argv", [literal(word) for word in argv])
    digest = fingerprint_of_program(checked(cfg))
    measured = read_needs().get(digest, Need())
    if not measured.peaks:
        raise NotDoneError(_why_unknown(argv, code))
    gpus = read_inventory(processes=False).gpus
    peaks = measured.on({gpu.name for gpu in gpus})
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
    _add_gpus(data, lines, gpus, peak, measured)
    return data, lines


def _why_unknown(argv: Sequence[str], code: int | None) -> str:
    """Explain why a program is unknown. ``code`` is the exit code of its probe run, if any."""
    if code is not None:
        return (
            f"the probe run ended with exit code {code} before it was measured: its output is above"
        )
    return (
        "this program was not measured yet: a probe run is needed, which ends after ten steps: "
        f"robust-train need --probe -- {shlex.join(argv)}"
    )


def _need_of_run(run: KnownRun) -> Said:
    """Return what the attempts of a run have held."""
    summary = read_summary(run.run_dir)
    attempts = () if summary is None else summary.attempts
    held = {attempt.number: _held_by(attempt) for attempt in attempts}
    measured = [attempt for attempt in attempts if held[attempt.number]]
    if not measured:
        what = "has not ended yet: robust-train queue shows what it holds"
        if not run.alive:
            what = (
                "was not measured: it ran on the CPU, without min_gpu_memory_mb=auto, or NVML said "
                "nothing of its processes"
            )
        raise NotDoneError(f"run {run.id} {what}")
    last = measured[-1]
    peak = held[last.number]
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
        tried = attempt.spec.batch_size
        peaks[tried] = max(held[attempt.number], peaks.get(tried, 0))
    gpus = read_inventory(processes=False).gpus
    _add_gpus(data, lines, gpus, peak, Need(peaks={"": peaks}))
    return data, lines


def _held_by(attempt: Attempt) -> int:
    """Return the peak of an attempt in bytes, or 0 if unknown.

    Without a measurement torch's cache and the context that it measured are all that it held.
    """
    measured = attempt.memory.get(PEAK)
    return peak_by_torch(attempt.memory) if measured is None else measured


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


def _add_gpus(
    data: dict[str, Json], lines: list[str], gpus: Sequence[GpuInfo], peak: int, measured: Need
) -> None:
    """Add the smallest GPU of this host that fits the peak, and the micro-batch for each GPU."""
    smallest = _smallest_for(with_margin(peak), gpus)
    data["smallest_gpu"] = None if smallest is None else smallest.uuid
    if smallest is not None:
        lines.append(f"the smallest GPU here that it fits: GPU {smallest.index} ({smallest.name})")
    elif gpus:
        lines.append("it fits no GPU here")
    sizes = {gpu.uuid: largest_fitting(measured.on([gpu.name]), gpu.total_bytes) for gpu in gpus}
    data["micro_batches"] = dict(sizes)
    for gpu in gpus:
        size = sizes[gpu.uuid]
        fits = "unknown, measure one more size" if size is None else str(size)
        lines.append(f"GPU {gpu.index}: largest micro-batch {fits}")


def _smallest_for(need_bytes: int, gpus: Sequence[GpuInfo]) -> GpuInfo | None:
    """Return the smallest GPU with this much memory, or None if no GPU has it."""
    fitting = [gpu for gpu in gpus if gpu.total_bytes >= need_bytes]
    return min(fitting, key=lambda gpu: (gpu.total_bytes, gpu.index), default=None)
