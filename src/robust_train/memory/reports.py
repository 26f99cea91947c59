"""Records which tensors fill the memory when it runs out, and carries out users' memory requests.

An attempt's process does the first right after an out-of-memory error, and the second between two
steps (``robust-train memory info --run RUN``). The files are written to the run folder: a ``.json``
file lists the largest tensors and, if CUDA is in use, a ``.pickle`` file has torch's memory
snapshot for the viewer at pytorch.org/memory_viz.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from robust_train import compat
from robust_train.files import replacing, write_json
from robust_train.memory.clearing import clear_gpu_memory
from robust_train.memory.cuda import started_torch
from robust_train.memory.limits import set_memory_fraction
from robust_train.memory.peaks import reset_peak_memory_stats
from robust_train.memory.stats import get_gpu_memory_stats
from robust_train.memory.tensors import LiveTensor, largest_alive, largest_tensors
from robust_train.model.events import OutOfMemory
from robust_train.model.failure import Failure, FailureKind
from robust_train.model.json import fields_as_json
from robust_train.readable import first_line, mib

log = logging.getLogger("robust_train")

_TOP = 20  # number of tensors in a file
_LOGGED = 3  # number of tensors in the log line
_LEAST_LOGGED_SHARE = 0.01
"""A tensor is logged if it holds at least this share of the failed request and of the largest
tensor."""
# Number of entries in the allocator's history, which takes "several KB per entry" of host memory
# (torch's documentation). A recording that lasts for a whole run keeps fewer entries.
_ENTRIES_OF_A_RUN = 20_000
_ENTRIES_ON_REQUEST = 100_000


def record_history_after_an_oom(run_dir: Path) -> Callable[[], None] | None:
    """Record where GPU memory is allocated, if memory has already run out in this run folder.

    Recording costs 2 µs for each allocation and free (torch's documentation), which is too much for
    a run that may never need it. It starts when CUDA starts.

    Returns:
        A function that ends the recording, or None if nothing is recorded.
    """
    torch = sys.modules.get("torch")
    has_run_out = any(run_dir.glob("oom-attempt-*.json"))
    if torch is None or not has_run_out:
        return None

    def record() -> None:
        with contextlib.suppress(Exception):
            compat.record_allocator_history(torch, _ENTRIES_OF_A_RUN)

    def end() -> None:
        with contextlib.suppress(Exception):
            compat.end_allocator_history(torch)

    compat.when_cuda_starts(torch, record)
    return end


def write_out_of_memory(
    run_dir: Path, failure: Failure, *, attempt: int, step: int | None
) -> OutOfMemory | None:
    """Write ``oom-attempt-<n>.json`` and ``.pickle``, and log the three largest tensors.

    This never raises, because another error must not hide the out-of-memory error.

    Args:
        failure: the out-of-memory error.
        attempt: the number of the attempt.
        step: the last step that was reported.

    Returns:
        The event for the journal, or None if nothing could be written.
    """
    try:
        started = time.monotonic()
        path = run_dir / f"oom-attempt-{attempt}.json"
        requested = failure.evidence.requested_bytes
        event = OutOfMemory(
            failure.kind,
            failure.message,
            step=step,
            requested_bytes=requested,
            tensors=path.name,
            snapshot=_dump_snapshot(path.with_suffix(".pickle")),
        )
        devices = ["cpu"] if failure.kind is FailureKind.HOST_OOM else None
        tensors = largest_alive(_TOP, devices)
        content = {
            "time": round(time.time(), 3),
            "attempt": attempt,
            **fields_as_json(event),
            "evidence": asdict(failure.evidence),
            "tensors": [tensor.as_json() for tensor in tensors],
        }
        try:
            write_json(path, content, indent=2)
        except OSError as problem:
            log.warning("cannot write %s: %s", path, problem.strerror)
            event = replace(event, tensors=None)
        _log_largest(tensors, requested or 0, event.tensors)
        return replace(event, seconds=round(time.monotonic() - started, 3))
    except Exception as problem:
        log.warning("cannot record which tensors fill the memory: %s", first_line(problem))
        return None


def _log_largest(tensors: Sequence[LiveTensor], requested: int, filename: str | None) -> None:
    """Log the largest tensors that are worth mentioning, and the file that lists them all."""
    largest_bytes = tensors[0].bytes if tensors else 0
    least_bytes = _LEAST_LOGGED_SHARE * max(requested, largest_bytes)
    logged = [str(tensor) for tensor in tensors[:_LOGGED] if tensor.bytes >= least_bytes]
    if logged:
        where = f"; all in {filename}" if filename else ""
        log.info("out of memory: the largest tensors are %s%s", "; ".join(logged), where)


def _dump_snapshot(path: Path) -> str | None:
    """Write torch's snapshot. Return the file's name, or None without CUDA or on failure."""
    torch = started_torch()
    if torch is None:
        return None
    try:
        compat.dump_allocator_snapshot(torch, str(path))
    except Exception as error:
        log.warning("no memory snapshot: %s", first_line(error))
        path.unlink(missing_ok=True)
        return None
    return path.name


# --- requests ---

_OPTION_OF_REQUEST = {
    "memory_info": None,
    "memory_clear": "force",
    "memory_reset": None,
    "memory_fraction": "fraction",
    "memory_snapshot": None,
}
"""The only option of each request, or None if the request has no options."""


def perform(verb: str, options: Mapping[str, object], run_dir: Path) -> dict[str, object]:
    """Carry out a request in this process.

    Args:
        verb: the name of the request, for example ``memory_clear``.
        options: the options of the request, with values in JSON's types.
        run_dir: the run folder, for the files of a snapshot.

    Returns:
        ``before`` and ``after`` (the fields of `MemoryStats`), ``sentence`` for people, and further
        results of the request, all in JSON's types.

    Raises:
        ValueError: an unknown request or option, or an invalid value. The message is one line for
            the user.
        OSError: the snapshot cannot be written.
    """
    _refuse_unknown(verb, options)
    before = get_gpu_memory_stats()
    answer: dict[str, object] = {}
    if verb == "memory_clear":
        force = options.get("force", False)
        if not isinstance(force, bool):
            raise ValueError(f"force={force!r}: accepted is true or false")
        cleared = clear_gpu_memory(force)
        answer = {
            "sentence": cleared.description,
            "freed": cleared.freed,
            "held": [str(tensor) for tensor in cleared.held],
        }
    elif verb == "memory_reset":
        now = reset_peak_memory_stats().description
        answer = {"sentence": f"reset the peak, which was {mib(before.peak, 1)}; {now}"}
    elif verb == "memory_fraction":
        if "fraction" not in options:
            raise ValueError("the option fraction is missing: e.g. fraction=0.8")
        limit = set_memory_fraction(options["fraction"])  # type: ignore[arg-type]
        answer = {"sentence": limit.description, "limit": limit.bytes}
    elif verb == "memory_snapshot":
        answer = _write_snapshot(run_dir)
    after = get_gpu_memory_stats()
    return {
        "before": before.as_dict(),
        "after": after.as_dict(),
        "sentence": after.description,
        **answer,
    }


def _refuse_unknown(verb: str, options: Mapping[str, object]) -> None:
    """Raise ValueError for a request or an option that does not exist."""
    if verb not in _OPTION_OF_REQUEST:
        accepted_verbs = ", ".join(_OPTION_OF_REQUEST)
        raise ValueError(f"no such request: {verb}; accepted are {accepted_verbs}")
    accepted = _OPTION_OF_REQUEST[verb]
    for name in options:
        if name != accepted:
            accepted_options = f"accepted is {accepted}" if accepted else "it has none"
            raise ValueError(f"{verb} has no option {name}: {accepted_options}")


def _write_snapshot(run_dir: Path) -> dict[str, object]:
    """Write the next ``memory-tensors-<n>.json`` and ``memory-snapshot-<n>.pickle``.

    The first snapshot of an attempt also starts recording the allocator's history.

    Returns:
        The sentence for people, and the files that were written.
    """
    number = 1
    while (tensors_path := run_dir / f"memory-tensors-{number}.json").exists():
        number += 1
    tensors = largest_tensors()
    write_json(tensors_path, tensors, indent=2)
    parts = [f"the {len(tensors)} largest live tensors are in {tensors_path}"]
    written = [str(tensors_path)]
    torch = started_torch()
    if torch is None:
        parts.append("no CUDA in this process, so there is no snapshot of its allocator")
    else:
        snapshot_path = run_dir / f"memory-snapshot-{number}.pickle"
        with replacing(snapshot_path) as path:
            compat.dump_allocator_snapshot(torch, str(path))
        written.append(str(snapshot_path))
        viewer = "https://pytorch.org/memory_viz"
        parts.append(f"torch's snapshot is in {snapshot_path}, for {viewer}")
        if not compat.allocator_history_is_recorded(torch):
            compat.record_allocator_history(torch, _ENTRIES_ON_REQUEST)
            parts.append(
                "it shows what is allocated now; the history is recorded from now on, for the "
                "next snapshot"
            )
    return {"sentence": "; ".join(parts), "written": written}
