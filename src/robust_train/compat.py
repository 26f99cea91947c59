"""Private symbols of CPython and torch that are needed, each with a test."""

from __future__ import annotations

import atexit
import sys
import threading
from collections.abc import Callable
from typing import Any


def watch_optimizer_steps(on_step: Callable[[], None]) -> Callable[[], None] | None:
    """Have ``on_step`` called after every step of every torch optimizer of this process.

    Returns:
        What ends that; None where torch is not loaded, or others have hooks there: adding to them
        while another thread goes through them would raise over there.
    """
    optimizer = sys.modules.get("torch.optim.optimizer")
    register = getattr(optimizer, "register_optimizer_step_post_hook", None)
    if register is None or getattr(optimizer, "_global_optimizer_post_hooks", True):
        return None

    def step_is_done(optimizer: object, args: object, kwargs: object) -> None:
        on_step()

    remove: Callable[[], None] = register(step_is_done).remove
    return remove


def run_exit_handlers() -> None:
    """Do what an interpreter's normal exit does, for a process that ends by ``os._exit``.

    It waits for threads that are no daemons, then calls what ``atexit`` has registered.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()


def when_cuda_starts(torch: Any, action: Callable[[], None]) -> None:
    """Have ``action`` called when CUDA is initialised in this process, or now if it is."""
    torch.cuda._lazy_call(action)
