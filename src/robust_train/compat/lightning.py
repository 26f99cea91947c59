"""Private names of Lightning and torchmetrics, for ``integrations.lightning``."""

from __future__ import annotations

from typing import Any

LATEST = "_forward_cache"
"""The attribute with the last value of a torchmetrics object, or of a value that Lightning logs."""


def values_logged_by(trainer: Any) -> Any:
    """Return the values that a Lightning ``Trainer`` has logged in this epoch, or None if it cannot
    log."""
    return trainer._results


def accumulates_now(trainer: Any) -> bool:
    """Return whether a Lightning ``Trainer`` accumulates gradients, without an optimizer step after
    this batch."""
    return bool(trainer.fit_loop._should_accumulate())


def keep_samplers(trainer: Any) -> None:
    """Keep the samplers of the loaders, which a Lightning ``Trainer`` may otherwise replace. The
    option ``use_distributed_sampler=False`` does the same."""
    trainer._accelerator_connector.use_distributed_sampler = False


def starts_ranks_itself(trainer: Any) -> bool:
    """Return whether a Lightning ``Trainer`` forks or spawns its ranks (``ddp_spawn`` …)."""
    start_method = getattr(trainer.strategy, "_start_method", "popen")
    return trainer.world_size > 1 and start_method != "popen"


def step_schedulers(trainer: Any) -> None:
    """Make a Lightning ``Trainer`` step ReduceLROnPlateau at the end of a resumed epoch too."""
    trainer.fit_loop._restarting = False


def belongs_to_tuner(trainer: Any) -> bool:
    """Return whether a Lightning ``Trainer`` belongs to a ``Tuner``, which leaves ``fit`` early."""
    return any(getattr(callback, "_early_exit", False) for callback in trainer.callbacks)
