"""What robust-train is assembled from. Deleting a feature is deleting its folder and its line."""

from __future__ import annotations

import importlib

from robust_train.model.feature import Feature


def _load(*names: str) -> tuple[Feature, ...]:
    """Return the features in these modules of the package."""
    modules = (
        importlib.import_module(f"robust_train.{name}") for name in names
    )
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
"""The order is the order of evidence:

- A lack of memory first: it may be found in a failure that nobody could name, and whatever comes
  after looks at the kind of the failure.
- Disks before the user's rules, which see the failure as it is in the end.
- The user's rules before GPUs: a rule may make a failure one of the GPU, which is then excluded.
- The others do not change a failure, so their order does not matter. The page of a job comes after
  its provenance, which it shows.
"""
