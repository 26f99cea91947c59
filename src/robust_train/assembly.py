"""What robust-train is assembled from. Deleting a feature is deleting its folder and its line."""

from __future__ import annotations

import importlib

from robust_train.model.feature import Feature


def _load(*names: str) -> tuple[Feature, ...]:
    """Return the features in these modules of the package."""
    modules = (importlib.import_module(f"robust_train.{name}") for name in names)
    return tuple(module.FEATURE for module in modules)


FEATURES = _load(
    "features.out_of_memory",
    "features.disk",
    "features.retry_rules",
    "features.gpus",
    "features.divergence",
    "features.memory_samples",
    "features.time_slices",
    "features.trackers",
    "features.slow",
    "features.batch_search",
    "features.script_checkpoints",
    "features.memory_upkeep",
    "features.speed",
    "features.requests",
    "features.provenance",
    "features.report_page",
    "features.detach",
    "features.live_screen",
    "features.notifications",
)
"""The order is the order of evidence. Some features need what others have found:

- features.out_of_memory before features.disk: a read-only disk is the cause if it is one of two.
- features.out_of_memory before features.retry_rules: rules look at the failure as it is in the end.
- features.disk before features.retry_rules: likewise.
- features.disk before features.gpus: a failure of the disk excludes no GPU.
- features.retry_rules before features.gpus: a rule may find that a GPU failed, and exclude it.
- features.provenance before features.report_page: the page shows the provenance.

All other pairs may change places. A test finds these pairs by swapping each, and compares them with
this list.
"""
