"""Optional dependencies: imported when needed; a missing one is an error of one line."""

from __future__ import annotations

import importlib
from typing import Any

from robust_train.model.errors import ConfigError

_DISTRIBUTIONS = {"sklearn": "scikit-learn", "PIL": "pillow"}


def require(module: str, key: str, *, extra: str = "vision") -> Any:
    """Return ``module``, imported; ``key`` is the override that needs it, for the error. Raises
    ConfigError: it is not installed; names the ``extra`` of ours that brings it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = (error.name or module).partition(".")[0]
        raise ConfigError(
            f"{key}: needs {_DISTRIBUTIONS.get(package, package)}, which is not installed; "
            f'pip install "robust-train[{extra}]"'
        ) from error
