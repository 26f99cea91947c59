"""Whether a process may still be forked: CUDA and native threads do not survive a fork."""

from __future__ import annotations

import os
import sys

from robust_train.gpu.cuda_order import started_driver


def threads() -> int:
    """Return how many threads this process has; the kernel counts native ones too (OpenMP's pool),
    which ``threading`` does not see."""
    return len(os.listdir("/proc/self/task"))


def why_not_fork(threads_before: int) -> str | None:
    """Return what the last import did that forbids a fork, as a sentence's end, or None.

    OpenBLAS ends its threads before a fork and starts them again at need, so those that outlast one
    count.
    """
    if cuda_is_started():
        return "starts CUDA when it is imported"
    if threads() > threads_before and _threads_after_a_fork() > threads_before:
        return "starts a thread when it is imported"
    return None


def _threads_after_a_fork() -> int:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return threads()


def cuda_is_started() -> bool:
    """Return whether anything here has initialised CUDA, by torch or the driver alone."""
    torch = sys.modules.get("torch")
    return (torch is not None and torch.cuda.is_initialized()) or started_driver() is not None
