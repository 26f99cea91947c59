"""Measures the peak memory of jobs, and reserves it for later jobs of the same kind."""

from robust_train.model.feature import Feature

FEATURE = Feature(
    "measured_memory",
    launcher=f"{__name__}.launcher:MeasuredMemory",
    plans=f"{__name__}.recall:reserve_known_need",
    commands={"need": f"{__name__}.answers:need"},
)
