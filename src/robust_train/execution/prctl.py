"""What the kernel knows of a process's parent and children."""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

# found here and not at its call, which may be between fork and exec
_libc_prctl = getattr(ctypes.CDLL(None), "prctl", None)


def signal_at_parents_death(signum: int) -> None:
    """Be sent ``signum`` when the thread ends that forked this process; a fork forgets it."""
    _prctl(_PR_SET_PDEATHSIG, signum)


def become_subreaper() -> None:
    """Become the parent of descendants whose own parent ended, instead of process 1."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def children() -> list[int]:
    """Process ids of this process's direct children, orphans that a subreaper took in among them;
    empty where the kernel does not tell.
    """
    pid = os.getpid()
    try:
        return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _prctl(option: int, value: int) -> None:
    """Best effort: kernels and sandboxes without it lose a safety net, not the function."""
    with contextlib.suppress(OSError):
        if _libc_prctl is not None:
            _libc_prctl(option, value, 0, 0, 0)
