"""Memory measured, not declared. The peak of a job is remembered for later jobs like it."""

from robust_train.model.feature import Feature

FEATURE = Feature(
    "measured_memory",
    launcher=f"{__name__}.launcher:MeasuredMemory",
    plans=f"{__name__}.recall:reserve_known_need",
    commands={"need": f"{__name__}.answers:need"},
)
