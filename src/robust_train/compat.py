"""Private symbols of CPython and torch that are needed, each with a test."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from typing import Any


def run_exit_handlers() -> None:
    """Do what an interpreter's normal exit does, for a process that ends by ``os._exit``.

    It waits for threads that are no daemons, then calls what ``atexit`` has registered.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()


def when_cuda_starts(torch: Any, action: Callable[[], None]) -> None:
    """Have ``action`` called when CUDA is initialised in this process, or now if it is."""
    torch.cuda._lazy_call(action)
