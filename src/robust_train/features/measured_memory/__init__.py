"""Memory measured, not declared: what a job takes is remembered for the next one like it."""

from robust_train.model.feature import Feature

FEATURE = Feature(
    "measured_memory",
    launcher=f"{__name__}.launcher:MeasuredMemory",
    plans=f"{__name__}.recall:with_known_need",
    commands={"need": f"{__name__}.answers:need"},
)
