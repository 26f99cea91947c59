"""Access to private names of accelerate, for ``integrations.accelerate``."""

from __future__ import annotations

from typing import Any


def schedulers_of(accelerator: Any) -> list[Any]:
    """Return the learning-rate schedulers that ``Accelerator.prepare`` wrapped."""
    return list(accelerator._schedulers)
