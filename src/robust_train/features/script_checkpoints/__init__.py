"""Checkpoints that a script writes by itself, and that are found by a pattern."""

from robust_train.model.feature import Feature

FEATURE = Feature(
    "script_checkpoints",
    launcher=f"{__name__}.launcher:ScriptCheckpoints",
    parts=(f"{__name__}.record:ScriptCheckpointsNote",),
)
