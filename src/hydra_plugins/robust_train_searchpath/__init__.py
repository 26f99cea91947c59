"""Hydra finds this package by itself: it adds our configs where a program has asked for them.

Hydra asks it in every program of the environment, so it imports nothing of ours for those that have
not: they may have a module ``robust_train`` of their own.
"""

from __future__ import annotations

import importlib
import sys

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

_PROVIDER = "robust-train"
_PACKAGE = "robust_train.configs"
_OURS = f"pkg://{_PACKAGE}"


class RobustTrainSearchPath(SearchPathPlugin):
    """Adds nothing to the search path of a program that has not asked for our configs."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Extend Hydra's search path while it is built."""
        elements = search_path.get_path()
        asking = sys.modules.get("robust_train.config.search_path")
        asked_for = getattr(asking, "asked_for", ())
        if any(one.provider == "main" and one.path == _OURS for one in elements):
            # a command of ours: it takes model=lora, where a project has robust/model
            search_path.prepend(_PROVIDER, f"{_OURS}.robust", anchor="main")
            importlib.import_module(_PACKAGE)
        elif asked_for:
            for path in asked_for:
                search_path.append(_PROVIDER, path)
            importlib.import_module(_PACKAGE)
        # Hydra copies its ConfigStore before it reads files, and tests of programs empty it
        if _PACKAGE in sys.modules:
            sys.modules[_PACKAGE].register()


__all__ = ["RobustTrainSearchPath"]
