"""Private symbols of the libraries below us, each behind one function with a test."""

from __future__ import annotations

import sys
from collections.abc import Callable


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
