"""NCCL's flight recorder: torch's record of each rank's last collectives, dumped on request.

A thread of torch's polls a pipe once a second and needs no GIL for that (``HeartbeatMonitor`` in
``ProcessGroupNCCL.cpp``). Recent versions record anyway; 2,000 is their size of the record.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

_PIPE, _FILE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"
_NEW_FILE = "TORCH_FR_DUMP_TEMP_FILE"
_RECORD = {"TORCH_NCCL_TRACE_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}


def settings(environ: Mapping[str, str], run_dir: Path, attempt: int) -> dict[str, str]:
    """Return variables with which each rank dumps to ``attempt-<n>.nccl-<rank>`` when asked to.

    torch dumps there at its own time-out as well. Nothing where the user has set any of it, or
    where the disk has no pipes, which would end the ranks.
    """
    if any(name in environ for name in (_PIPE, _FILE, _NEW_FILE)):
        return {}
    stem = str(run_dir.absolute() / f"attempt-{attempt}.nccl-")
    probe = f"{stem}.pipe"
    try:
        os.mkfifo(probe)
        os.unlink(probe)
    except OSError:
        return {}
    own = {name: value for name, value in _RECORD.items() if name not in environ}
    return own | {_PIPE: stem, _FILE: stem, _NEW_FILE: stem}


def request_dumps(run_dir: Path, attempt: int) -> int:
    """Ask every rank that uses NCCL for its dump; return how many there are."""
    asked = 0
    for pipe in run_dir.glob(f"attempt-{attempt}.nccl-*.pipe"):
        with contextlib.suppress(OSError):  # no one reads it
            descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
            with contextlib.closing(os.fdopen(descriptor, "wb", buffering=0)) as writer:
                asked += writer.write(b"1") or 0
    return asked


def remove_pipes(run_dir: Path) -> None:
    """Remove the pipes of the attempt that has ended, and of those whose launcher was killed."""
    for pipe in run_dir.glob("attempt-*.nccl-*.pipe"):
        with contextlib.suppress(OSError):
            pipe.unlink()
