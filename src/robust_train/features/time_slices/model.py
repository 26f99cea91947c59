"""Declares the key ``gpu_slice_minutes``, which the launcher's half of the feature reads."""

from __future__ import annotations

from dataclasses import dataclass

from robust_train.config.values import FROM_0, key
from robust_train.model.feature import FeatureKeys


@dataclass(frozen=True)
class TimeSliceKeys(FeatureKeys):
    """The only key of the feature."""

    gpu_slice_minutes: float | None = key(
        None,
        "after this long on its GPUs the job saves a checkpoint and queues again if a user with "
        "fewer GPUs waits",
        more="`null`: never ([queue](queue.md#time-slices))",
        unit="minutes",
        range=FROM_0,
    )
