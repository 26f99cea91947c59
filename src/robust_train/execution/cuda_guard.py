"""Whether this process may still be forked: CUDA and threads do not survive a fork."""

from __future__ import annotations

import ctypes
import os
import sys
import threading

_CUDA_ERROR_NOT_INITIALIZED = 3


def why_not_fork() -> str | None:
    """Why a fork of this process could not train, or None if it could.

    A sentence's end, to be used after the name of the module whose import did it.
    """
    if cuda_is_started():
        return "starts CUDA when it is imported"
    if threading.active_count() > 1:
        return "starts a thread when it is imported"
    return None


def cuda_is_started() -> bool:
    """Whether anything in this process has initialised the CUDA driver, without initialising it.

    ``torch.cuda.is_initialized()`` knows only of torch. The driver itself answers
    ``CUDA_ERROR_NOT_INITIALIZED`` to every call before ``cuInit``, and a library that is not loaded
    cannot have been called.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return True
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return False
    count = ctypes.c_int()
    return bool(driver.cuDeviceGetCount(ctypes.byref(count)) != _CUDA_ERROR_NOT_INITIALIZED)
