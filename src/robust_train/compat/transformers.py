"""Private names of the trainers of transformers and TRL, for ``integrations.transformers``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def shifts_labels(trainer: Any) -> bool:
    """Return whether a transformers ``Trainer`` leaves out the first label of each sample when it
    counts labels."""
    return bool(getattr(trainer, "_loss_shifts_labels", True))


def prepare_inputs(trainer: Any, data: Any) -> Any:
    """Return a batch as a transformers ``Trainer`` passes it to its model."""
    return trainer._prepare_inputs(data)


def has_own_inputs(trainer: Any, base: Any) -> bool:
    """Return whether a subclass of ``base``, the transformers ``Trainer``, prepares batches in its
    own way."""
    return type(trainer)._prepare_inputs is not base._prepare_inputs


TOKENS_SEEN = "_total_train_tokens"
"""The attribute in which a TRL trainer counts the tokens that it has trained on."""


def figures_of_passes(trainer: Any) -> dict[str, dict[str, list[float]]]:
    """Return the figures that a TRL trainer has collected in each pass, by mode and name, empty for
    other trainers."""
    metrics: Any = getattr(trainer, "_metrics", None)
    modes = list(metrics.values()) if isinstance(metrics, dict) else [None]
    for mode in modes:
        if not isinstance(mode, dict):
            return {}
        if not all(isinstance(values, list) for values in mode.values()):
            return {}
    lists: dict[str, dict[str, list[float]]] = metrics
    return lists


def save_trainer(trainer: Any) -> None:
    """Let a transformers ``Trainer`` write a checkpoint now."""
    trainer._save_checkpoint(trainer.model, trial=None)


def load_best(trainer: Any) -> None:
    """Let a transformers ``Trainer`` load the weights of its best checkpoint, if it has one."""
    if trainer.state.best_model_checkpoint is not None:
        trainer._load_best_model()


def intercept_saves(trainer: Any, around: Callable[[Callable[[], None]], None]) -> None:
    """Let a transformers ``Trainer`` call ``around(save)`` for each save."""
    write = trainer._save_checkpoint

    def save_checkpoint(*arguments: Any, **options: Any) -> None:
        around(lambda: write(*arguments, **options))

    trainer._save_checkpoint = save_checkpoint
