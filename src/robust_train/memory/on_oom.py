"""What is written down when memory runs out, before anything of the failed try is let go of.

``oom-attempt-<n>.json`` names the largest live tensors and who holds them. Where CUDA is in use,
``oom-attempt-<n>.pickle`` is torch's memory snapshot, for the viewer at pytorch.org/memory_viz.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from robust_train.compat import (
    dump_allocator_snapshot,
    record_allocator_history,
    when_cuda_starts,
)
from robust_train.events import OutOfMemory
from robust_train.memory.holders import started_torch
from robust_train.memory.tensors import largest_tensors
from robust_train.readable import first_line
from robust_train.values import MIB, Failure, FailureKind

log = logging.getLogger("robust_train")

_TOLD = 3
_WORTH_TELLING = 0.01
# "several KB per entry", says torch's documentation: below 100 MiB of host memory
_HISTORY_ENTRIES = 20_000


def record_history_after_an_oom(run_dir: Path) -> bool:
    """Record where GPU memory is allocated from now on, if it has run out in this run folder.

    It costs 2 µs for each allocation and free, says torch's documentation: too much for a run that
    may never need it. Returns whether it is recorded, or will be as soon as CUDA starts.
    """
    torch = sys.modules.get("torch")
    if torch is None or next(run_dir.glob("oom-attempt-*.json"), None) is None:
        return False

    def record() -> None:
        with contextlib.suppress(Exception):
            record_allocator_history(torch, _HISTORY_ENTRIES)

    when_cuda_starts(torch, record)
    return True


def write_down(
    run_dir: Path, *, attempt: int, step: int | None, failure: Failure
) -> OutOfMemory | None:
    """Write the files, and the three largest tensors to the log.

    Never raises: what happens here must not hide why it is called.

    Args:
        run_dir: where the files belong.
        attempt: number of the attempt, for their names.
        step: last optimizer step that was reported.
        failure: what it was classified as.

    Returns:
        The event for the journal; None where nothing could be written.
    """
    try:
        return _write_down(run_dir, attempt, step, failure)
    except Exception as error:
        log.warning("cannot write down what fills the memory: %s", first_line(error))
        return None


def _write_down(run_dir: Path, attempt: int, step: int | None, failure: Failure) -> OutOfMemory:
    started = time.monotonic()
    snapshot = _dump_snapshot(run_dir / f"oom-attempt-{attempt}.pickle")
    is_hosts = failure.kind is FailureKind.HOST_OOM
    tensors = largest_tensors(devices={"cpu"} if is_hosts else None)
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
        "tensors": tensors,
    }
    file: str | None = path.name
    try:
        path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        log.warning("cannot write %s: %s", path, error.strerror)
        file = None
    log.info("out of memory: %s", _told(tensors, file))
    return OutOfMemory(
        failure.kind,
        failure.message,
        step=step,
        requested_bytes=failure.evidence.requested_bytes,
        tensors=file,
        snapshot=snapshot,
        seconds=round(time.monotonic() - started, 3),
    )


def _dump_snapshot(path: Path) -> str | None:
    """Torch's memory snapshot; the file's name, None where there is no CUDA or it cannot be had."""
    torch = started_torch()
    if torch is None:
        return None
    try:
        dump_allocator_snapshot(torch, str(path))
    except Exception as error:
        log.warning("no memory snapshot: %s", first_line(error))
        with contextlib.suppress(OSError):
            path.unlink()
        return None
    return path.name


def _told(tensors: Sequence[Mapping[str, Any]], file: str | None) -> str:
    if not tensors:
        return "Python knows no tensor that holds any"
    largest = "; ".join(
        f"{tensor['bytes'] / MIB:.1f} MiB {tensor['dtype']} {tuple(tensor['shape'])} on "
        f"{tensor['device']}, held by {tensor['owner']}"
        for tensor in tensors[:_TOLD]
        if tensor["bytes"] >= _WORTH_TELLING * tensors[0]["bytes"]
    )
    return f"the largest tensors are {largest}" + (f"; all in {file}" if file else "")
