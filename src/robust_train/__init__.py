"""robust-train: one command trains on whatever GPU memory a shared machine has.

Importing this package imports neither torch nor Hydra; each name loads what it needs when used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from robust_train.config import ConfigError
    from robust_train.devices import NoDevice
    from robust_train.execution.signals import JobInterrupted
    from robust_train.failures import classify_exit, classify_failure
    from robust_train.gpu.best import find_best_device
    from robust_train.launcher import TrainerFailed, launch
    from robust_train.policy import AttemptsExhausted
    from robust_train.recovery import OOMHandler, adaptive_batch_training, retry_on_oom
    from robust_train.report.summary import Summary
    from robust_train.run import Interrupted, Run, UserError
    from robust_train.training.micro_batch import MicroBatcher
    from robust_train.types import Evidence, Failure, FailureKind

__all__ = [
    "AttemptsExhausted",
    "ConfigError",
    "Evidence",
    "Failure",
    "FailureKind",
    "Interrupted",
    "JobInterrupted",
    "MicroBatcher",
    "NoDevice",
    "OOMHandler",
    "Run",
    "Summary",
    "TrainerFailed",
    "UserError",
    "adaptive_batch_training",
    "classify_exit",
    "classify_failure",
    "find_best_device",
    "launch",
    "retry_on_oom",
]

_HOMES = {
    "AttemptsExhausted": "policy",
    "ConfigError": "config",
    "Evidence": "types",
    "Failure": "types",
    "FailureKind": "types",
    "Interrupted": "run",
    "JobInterrupted": "execution.signals",
    "MicroBatcher": "training.micro_batch",
    "NoDevice": "devices",
    "OOMHandler": "recovery",
    "Run": "run",
    "Summary": "report.summary",
    "TrainerFailed": "launcher",
    "UserError": "run",
    "adaptive_batch_training": "recovery",
    "classify_exit": "failures",
    "classify_failure": "failures",
    "find_best_device": "gpu.best",
    "launch": "launcher",
    "retry_on_oom": "recovery",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'robust_train' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"robust_train.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
