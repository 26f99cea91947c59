"""What fills the memory, in files of the run folder: when it runs out, and at a user's request.

A ``.json`` names the largest tensors and the variables that hold them. If CUDA is in use, a
``.pickle`` is torch's memory snapshot, for the viewer at pytorch.org/memory_viz.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from robust_train import compat
from robust_train.files import replacing, write_json
from robust_train.memory.cuda import started_torch
from robust_train.memory.tensors import (
    HeldTensor,
    as_json,
    largest_of_failure,
    largest_tensors,
)
from robust_train.model.events import OutOfMemory
from robust_train.model.failure import Failure, FailureKind
from robust_train.readable import first_line

log = logging.getLogger("robust_train")

_LOGGED = 3
_WORTH_NAMING = 0.01
"""Share of what was asked for, or of the largest tensor, that one must hold to be named."""
# "several KB per entry" (torch's documentation): below 100 MiB of host memory
_ENTRIES_OF_A_RUN = 20_000
# a viewer is opened for the last of them
_ENTRIES_ON_REQUEST = 100_000


def record_history_after_an_oom(run_dir: Path) -> None:
    """Record where GPU memory is allocated from now on, if it has run out in this run folder. It
    costs 2 µs for each allocation and free (torch's documentation): too much for a run that may
    never need it. Recording begins when CUDA starts."""
    torch = sys.modules.get("torch")
    if torch is None or next(run_dir.glob("oom-attempt-*.json"), None) is None:
        return

    def record() -> None:
        with contextlib.suppress(Exception):
            compat.record_allocator_history(torch, _ENTRIES_OF_A_RUN)

    compat.when_cuda_starts(torch, record)


def write_out_of_memory(
    run_dir: Path,
    error: BaseException,
    failure: Failure,  # what ``error`` was classified as
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
        snapshot = _dump_snapshot(run_dir / f"oom-attempt-{attempt}.pickle")
        devices = {"cpu"} if failure.kind is FailureKind.HOST_OOM else None
        tensors = largest_of_failure(error, devices=devices)
        path = run_dir / f"oom-attempt-{attempt}.json"
        content = {
            "time": round(time.time(), 3),
            "attempt": attempt,
            "step": step,
            "kind": failure.kind.value,
            "message": failure.message,
            "requested_bytes": failure.evidence.requested_bytes,
            "snapshot": snapshot,
            "evidence": asdict(failure.evidence),
            "tensors": [as_json(tensor) for tensor in tensors],
        }
        file: str | None = path.name
        try:
            write_json(path, content, indent=2)
        except OSError as error:
            log.warning("cannot write %s: %s", path, error.strerror)
            file = None
        asked = failure.evidence.requested_bytes or 0
        named = [tensor for tensor in tensors if tensor.bytes >= _WORTH_NAMING * asked]
        if named:
            log.info("out of memory: %s", _describe(named, file))
        return OutOfMemory(
            failure.kind,
            failure.message,
            step=step,
            requested_bytes=failure.evidence.requested_bytes,
            tensors=file,
            snapshot=snapshot,
            seconds=round(time.monotonic() - started, 3),
        )
    except Exception as error:
        log.warning("cannot record what fills the memory: %s", first_line(error))
        return None


def write_snapshot(run_dir: Path) -> tuple[list[Path], str]:
    """Write the next ``memory-tensors-<n>.json`` and ``memory-snapshot-<n>.pickle``. The first
    snapshot of an attempt also starts recording the history. Returns the files, and a sentence for
    people. Raises OSError if a file cannot be written."""
    number = 1
    while (tensors_path := run_dir / f"memory-tensors-{number}.json").exists():
        number += 1
    tensors = largest_tensors()
    write_json(tensors_path, tensors, indent=2)
    sentence = f"the {len(tensors)} largest live tensors are in {tensors_path}"
    torch = started_torch()
    if torch is None:
        no_snapshot = (
            "no CUDA in this process, so there is no snapshot of its allocator"
        )
        return [tensors_path], f"{sentence}; {no_snapshot}"
    snapshot_path = run_dir / f"memory-snapshot-{number}.pickle"
    with replacing(snapshot_path) as path:
        compat.dump_allocator_snapshot(torch, str(path))
    sentence += (
        f"; torch's snapshot is in {snapshot_path}, for https://pytorch.org/memory_viz"
    )
    if not compat.allocator_history_is_recorded(torch):
        compat.record_allocator_history(torch, _ENTRIES_ON_REQUEST)
        sentence += (
            "; it shows what is allocated now; the history is recorded from now on, for the next "
            "snapshot"
        )
    return [tensors_path, snapshot_path], sentence


def _dump_snapshot(path: Path) -> str | None:
    """Write torch's snapshot; return the file's name, None without CUDA or if it fails."""
    torch = started_torch()
    if torch is None:
        return None
    try:
        compat.dump_allocator_snapshot(torch, str(path))
    except Exception as error:
        log.warning("no memory snapshot: %s", first_line(error))
        with contextlib.suppress(OSError):
            path.unlink()
        return None
    return path.name


def _describe(tensors: Sequence[HeldTensor], file: str | None) -> str:
    least = _WORTH_NAMING * tensors[0].bytes
    largest = "; ".join(
        str(tensor) for tensor in tensors[:_LOGGED] if tensor.bytes >= least
    )
    return f"the largest tensors are {largest}" + (f"; all in {file}" if file else "")
