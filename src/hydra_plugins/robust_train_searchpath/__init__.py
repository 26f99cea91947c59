"""Hydra finds this package by itself: it makes ``defaults: [robust]`` work in any project."""

from __future__ import annotations

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin


class RobustTrainSearchPath(SearchPathPlugin):
    """Adds the configs that come with robust-train behind the project's own."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Extend Hydra's search path while it is built."""
        from robust_train.config import composition
        from robust_train.vision import keys

        composition.register()
        keys.register()
        search_path.append(
            provider="robust-train", path="pkg://robust_train.configs"
        )


__all__ = ["RobustTrainSearchPath"]
