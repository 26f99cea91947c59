"""A Hydra project's own ``main`` as the trainer of an attempt."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from typing import Any

from robust_train.attempt.loading import call_with_run
from robust_train.attempt.run import Run
from robust_train.config.projects import lightning_of, ours, without_ours


def call_task(task: Callable[..., Any], cfg: Any, run: Run) -> Any:
    """Return the result of a project's ``main`` in an attempt, with Lightning's ``fit`` replaced by
    ours."""
    config = ours(cfg)
    cfg = without_ours(cfg)
    adopted: Any = contextlib.nullcontext()
    name = lightning_of(cfg)
    if name:
        importlib.import_module(name)  # the name under which our `fit` will use it
        from robust_train.integrations.lightning import adopt_fit

        adopted = adopt_fit(config, run)
    with adopted:
        return call_with_run(task, cfg, run)
