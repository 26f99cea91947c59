"""``robust-train need``: how much GPU memory a job needs, and which GPUs it fits."""

from __future__ import annotations

import os
import shlex
import shutil
from argparse import Namespace
from collections.abc import Mapping, Sequence

from omegaconf import OmegaConf

from robust_train.config.checks import checked
from robust_train.config.placeholders import literal
from robust_train.config.refusals import composed
from robust_train.features.measured_memory.model import (
    PEAK,
    add_margin,
    compute_torch_peak,
    find_largest_fitting,
)
from robust_train.features.measured_memory.probe import run_probe
from robust_train.features.measured_memory.recall import fingerprint_program
from robust_train.features.measured_memory.store import Need, read_needs
from robust_train.folder.run_list import KnownRun, choose_run
from robust_train.folder.state import read_summary
from robust_train.gpu.inventory import read_inventory
from robust_train.model.attempt import Attempt
from robust_train.model.errors import NotDoneError
from robust_train.model.failure import FailureKind
from robust_train.model.gpu import GpuInfo
from robust_train.model.json import Json
from robust_train.readable import mib

Said = tuple[dict[str, Json], Sequence[str]]


def need(arguments: Namespace) -> Said:
    """Return the memory that a run, or a program that has run before, needs, as data and lines."""
    words = arguments.program
    # Options of a program belong to it, but a run has none.
    if words[1:] == ["--json"] and not os.path.isfile(words[0]):
        arguments.json = True
        words = words[:1]
    if arguments.probe and not words:
        raise NotDoneError("--probe runs a program: robust-train need --probe -- PROGRAM …")
    if arguments.probe or len(words) > 1 or any(map(os.path.isfile, words)):
        return _need_of_program(words, arguments)
    which = words[0] if words else None
    try:
        run = choose_run(which, dead_too=True, command="need")
    except NotDoneError:
        # A single word may also be a command, but users more often mean a run of that name.
        if which is None or shutil.which(which) is None:
            raise
        return _need_of_program(words, arguments)
    return _need_of_run(run)


def _need_of_program(argv: Sequence[str], arguments: Namespace) -> Said:
    """Return the peaks of earlier runs of a program, or of a probe run now."""
    needs = read_needs()
    count = 1
    digest = _fingerprint(argv, count)
    need = needs.get(digest, Need())
    code: int | None = None
    if arguments.probe:
        before = need
        code = run_probe(argv, arguments.batch_size)
        need = read_needs().get(digest, Need())
        # A figure from an earlier run is not an answer, because the program may have changed.
        if need == before:
            need = Need()
    gpus = read_inventory(processes=False).gpus
    if not need.peaks and not arguments.probe:
        for count in range(2, len(gpus) + 1):
            need = needs.get(_fingerprint(argv, count), Need())
            if need.peaks:
                break
    if not need.peaks:
        raise NotDoneError(_why_unknown(argv, code))
    peaks = need.on({gpu.name for gpu in gpus})
    peak = max(peaks.values())
    data: dict[str, Json] = {
        "peak_bytes": peak,
        "need_bytes": add_margin(peak),
        "peaks": {str(size): bytes_ for size, bytes_ in sorted(peaks.items())},
    }
    lines = [
        f"micro-batch {size}: {mib(bytes_)} at its peak, {mib(add_margin(bytes_))} to reserve"
        for size, bytes_ in sorted(peaks.items())
    ]
    if count > 1:
        data["num_gpus"] = count
        lines.insert(0, f"on each GPU, with num_gpus={count}:")
    _add_gpus(data, lines, gpus, peak, need)
    return data, lines


def _fingerprint(argv: Sequence[str], num_gpus: int) -> str:
    """Return the fingerprint of a program that ``robust-train run`` runs on this many GPUs."""
    # These are the defaults of `robust-train run`, which differ from those of a function.
    keys = ["trainer=command", "training.batch_size=1", "min_batch_size=1"]
    cfg = composed([*keys, f"num_gpus={num_gpus}"])
    OmegaConf.update(cfg, "trainer.argv", [literal(word) for word in argv])
    return fingerprint_program(checked(cfg))


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
    """Return the memory that the attempts of a run have held."""
    summary = read_summary(run.run_dir)
    attempts = () if summary is None else summary.attempts
    held = {attempt.number: _find_held(attempt) for attempt in attempts}
    measured = [attempt for attempt in attempts if held[attempt.number]]
    if not measured:
        what = "has not ended yet: robust-train queue shows what it holds"
        if not run.alive:
            what = (
                "was not measured: it ran on the CPU, without min_gpu_memory_mb=auto, took most of "
                "a GPU whatever it needs, or NVML said nothing of its processes"
            )
        raise NotDoneError(f"run {run.id} {what}")
    last = measured[-1]
    peak = held[last.number]
    made_of = _made_of(last, peak)
    size = last.spec.batch_size
    data: dict[str, Json] = {
        "run": run.id,
        "peak_bytes": peak,
        "need_bytes": add_margin(peak),
        "micro_batch": size,
        "made_of": dict(made_of),
    }
    parts = ", ".join(f"{mib(bytes_)} {name}" for name, bytes_ in made_of.items())
    lines = [
        f"run {run.id} held {mib(peak)} at its peak, at micro-batch {size}: {parts}",
        f"to reserve: {mib(add_margin(peak))}",
    ]
    need = Need()
    for attempt in measured:
        for name in {gpu.name for gpu in attempt.spec.gpus if _ran_whole(attempt)}:
            tried = attempt.spec.batch_size
            need = need.with_peak(name, tried, held[attempt.number], 0.0, is_whole=False)
    _add_gpus(data, lines, read_inventory(processes=False).gpus, peak, need)
    return data, lines


def _ran_whole(attempt: Attempt) -> bool:
    """Return whether the attempt had enough memory for its whole micro-batch."""
    is_split = attempt.micro_batch not in (None, attempt.spec.batch_size)
    return attempt.kind is not FailureKind.DEVICE_OOM and not is_split


def _find_held(attempt: Attempt) -> int:
    """Return the peak of an attempt in bytes, or 0 if unknown.

    Without a measurement, the peak is the sum of torch's cache and its context, as torch saw them.
    """
    measured = attempt.memory.get(PEAK)
    return compute_torch_peak(attempt.memory) if measured is None else measured


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
    data: dict[str, Json], lines: list[str], gpus: Sequence[GpuInfo], peak: int, need: Need
) -> None:
    """Add the smallest GPU of this host that fits the peak, and the micro-batch for each GPU."""
    fitting = [
        gpu
        for gpu in gpus
        if add_margin(peak) <= gpu.total_bytes or peak in need.peaks.get(gpu.name, {}).values()
    ]
    smallest = min(fitting, key=lambda gpu: (gpu.total_bytes, gpu.index), default=None)
    data["smallest_gpu"] = None if smallest is None else smallest.uuid
    if smallest is not None:
        lines.append(f"the smallest GPU here that it fits: GPU {smallest.index} ({smallest.name})")
    elif gpus:
        lines.append("it fits no GPU here")
    sizes = {gpu.uuid: _find_largest_size(gpu, need) for gpu in gpus}
    data["micro_batches"] = dict(sizes)
    for gpu in gpus:
        size = sizes[gpu.uuid]
        fits = "unknown, measure one more size" if size is None else str(size)
        lines.append(f"GPU {gpu.index}: largest micro-batch {fits}")


def _find_largest_size(gpu: GpuInfo, need: Need) -> int | None:
    """Return the largest micro-batch with a margin, or a larger one that this model has run."""
    size = find_largest_fitting(need.on([gpu.name]), gpu.total_bytes)
    sizes = list(need.peaks.get(gpu.name, {}))
    if size is not None:
        sizes.append(size)
    return max(sizes, default=None)
