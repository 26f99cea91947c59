"""What the kernel does for a process when its parent dies, or that of its descendants."""

from __future__ import annotations

import contextlib
import ctypes

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def signal_at_parents_death(signum: int) -> None:
    """Be sent ``signum`` when the thread ends that forked this process; a fork forgets it."""
    _prctl(_PR_SET_PDEATHSIG, signum)


def become_subreaper() -> None:
    """Become the parent of descendants whose own parent ended, instead of process 1."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    """Best effort: kernels and sandboxes without it lose a safety net, not the function."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
