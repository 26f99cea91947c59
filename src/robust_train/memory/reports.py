"""Records of the tensors that fill this process's memory, when it runs out and on request.

A ``.json`` names the largest tensors. If CUDA is in use, a ``.pickle`` is torch's memory snapshot,
for the viewer at pytorch.org/memory_viz. Requests reach a live run, which carries them out between
two steps.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path

from robust_train import compat
from robust_train.files import replacing, write_json
from robust_train.memory.clearing import clear_gpu_memory
from robust_train.memory.cuda import set_memory_fraction, started_torch
from robust_train.memory.stats import get_gpu_memory_stats, reset_peak_memory_stats
from robust_train.memory.tensors import largest_alive, largest_tensors
from robust_train.model.events import OutOfMemory
from robust_train.model.failure import Failure, FailureKind
from robust_train.model.json import fields_as_json
from robust_train.readable import first_line, mib

log = logging.getLogger("robust_train")

_TOP = 20
_LOGGED = 3
_WORTH_NAMING = 0.01
"""A tensor is named if it holds this share of the request, and of the largest tensor."""
# "several KB per entry" (torch's documentation): below 100 MiB of host memory
_ENTRIES_OF_A_RUN = 20_000
# a viewer is opened for the last of them
_ENTRIES_ON_REQUEST = 100_000


def record_history_after_an_oom(run_dir: Path) -> Callable[[], None] | None:
    """Record where GPU memory is allocated from now on, if it has run out in this run folder. It
    costs 2 µs for each allocation and free (torch's documentation), too much for a run that may
    never need it. Recording starts when CUDA starts. Returns a function that ends it, or None if
    nothing is recorded."""
    torch = sys.modules.get("torch")
    if torch is None or next(run_dir.glob("oom-attempt-*.json"), None) is None:
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
    run_dir: Path,
    failure: Failure,
    *,
    attempt: int,
    step: int | None,  # the last one that was reported
) -> OutOfMemory | None:
    """Write ``oom-attempt-<n>.json`` and ``.pickle``, and log the three largest tensors.

    Returns the event for the journal, None if nothing could be written. Never raises: what happens
    here must not hide why it is called.
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
        largest_bytes = tensors[0].bytes if tensors else 0
        least = _WORTH_NAMING * max(requested or 0, largest_bytes)
        named = [str(tensor) for tensor in tensors[:_LOGGED] if tensor.bytes >= least]
        if named:
            where = f"; all in {event.tensors}" if event.tensors else ""
            largest = "; ".join(named)
            log.info("out of memory: the largest tensors are %s%s", largest, where)
        return replace(event, seconds=round(time.monotonic() - started, 3))
    except Exception as problem:
        log.warning("cannot record what fills the memory: %s", first_line(problem))
        return None


def _dump_snapshot(path: Path) -> str | None:
    """Write torch's snapshot, and return the file's name, None without CUDA or if it fails."""
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

_OPTIONS = {
    "memory_info": "",
    "memory_clear": "force",
    "memory_reset": "",
    "memory_fraction": "fraction",
    "memory_snapshot": "",
}
"""The option of each request that has an option."""


def perform(verb: str, options: Mapping[str, object], run_dir: Path) -> dict[str, object]:
    """Carry out a request in this process.

    Returns:
        ``before`` and ``after`` (the fields of `MemoryStats`), ``sentence`` for people, and
        further results of the verb, all in JSON's types.

    Raises:
        ValueError: an unknown verb or option, or an invalid value. The message is one line for the
            user.
        OSError: the snapshot cannot be written.
    """
    if verb not in _OPTIONS:
        raise ValueError(f"no such request: {verb}; accepted are {', '.join(_OPTIONS)}")
    accepted = _OPTIONS[verb]
    unknown = next((name for name in options if name != accepted), None)
    if unknown:
        accepted_options = f"accepted is {accepted}" if accepted else "it has none"
        raise ValueError(f"{verb} has no option {unknown}: {accepted_options}")
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


def _write_snapshot(run_dir: Path) -> dict[str, object]:
    """Write the next ``memory-tensors-<n>.json`` and ``memory-snapshot-<n>.pickle``. The first
    snapshot of an attempt also starts recording the history."""
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
