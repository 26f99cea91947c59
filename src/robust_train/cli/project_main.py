"""Runs a Hydra project's own ``main`` as the trainer, in an attempt.

`hydra_main` decorates the project's ``main``. An attempt calls the decorated function with its
``run``, and that calls `call_task`.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from typing import Any

from robust_train.attempt.loading import call_with_run
from robust_train.attempt.run import Run
from robust_train.config.projects import lightning_of, ours, without_ours


def call_task(task: Callable[..., Any], cfg: Any, run: Run) -> Any:
    """Call a project's ``main`` and return its result. If the project uses Lightning, its ``fit``
    is replaced by ours during the call."""
    config = ours(cfg)
    cfg = without_ours(cfg)
    replaced_fit: Any = contextlib.nullcontext()
    name = lightning_of(cfg)
    if name:
        # Lightning has two package names. Our `fit` uses the name that is imported first.
        importlib.import_module(name)
        from robust_train.integrations.lightning import adopt_fit

        replaced_fit = adopt_fit(config, run)
    with replaced_fit:
        return call_with_run(task, cfg, run)
