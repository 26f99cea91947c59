"""What robust-train is assembled from. Deleting a feature is deleting its folder and its line."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping

from robust_train.config.keys import Schema
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
    "features.script_checkpoints",
    "features.memory_upkeep",
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


def _schema(places: Mapping[str, str]) -> Schema:
    """Return the schema with the keys of all features, those with a place first."""
    after = {pkgutil.resolve_name(f"robust_train.{name}"): key for name, key in places.items()}
    others = [keys for feature in FEATURES for keys in feature.keys if keys not in after]
    return Schema((*after, *others), after)


SCHEMA = _schema({"features.memory_samples.model:SamplesKeys": "memory.clear_after"})
"""All keys. Features' keys stand on the page, and in YAML, behind these keys of the kernel, in this
order; keys that are not listed end their group.
"""
