"""Lets a job leave its GPU after a time slice if another user waits (``gpu_slice_minutes``)."""

from robust_train.features.time_slices.model import TimeSliceKeys
from robust_train.model.feature import Feature

FEATURE = Feature("time_slices", launcher=f"{__name__}.launcher:TimeSlices", keys=(TimeSliceKeys,))
