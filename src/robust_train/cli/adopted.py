"""A Hydra project's own ``main`` as the trainer of an attempt."""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Callable
from typing import Any

from robust_train.attempt.run import Run
from robust_train.config.projects import has_lightning, ours, without_ours

log = logging.getLogger("robust_train")


def call_task(
    task: Callable[..., Any],
    cfg: Any,
    run: Run,
) -> Any:
    """Return what a project's ``main`` returns in an attempt; Lightning's ``fit`` is ours then."""
    own, cfg = ours(cfg), without_ours(cfg)
    adopted: Any = contextlib.nullcontext()
    if has_lightning(cfg):
        from robust_train.integrations.lightning import adopted_fit

        adopted = adopted_fit(own, run)
    elif has_lightning(cfg, "pytorch_lightning"):
        log.warning(
            "this fit is pytorch_lightning's own, without checkpoints of ours and recovery in the "
            "step: with lightning.pytorch in place of pytorch_lightning it has both"
        )
    with adopted:
        if "run" in inspect.signature(task).parameters:
            return task(cfg, run=run)
        return task(cfg)
