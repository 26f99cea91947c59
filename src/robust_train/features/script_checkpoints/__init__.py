"""Checkpoints that a script writes itself, found by the pattern ``trainer.checkpoint_glob``.

The attempt finds them (`attempt.script.checkpoint_watch`). The launcher's half warns of a pattern
without a match and of unusable files.
"""

from robust_train.model.feature import Feature

FEATURE = Feature(
    "script_checkpoints",
    launcher=f"{__name__}.launcher:ScriptCheckpoints",
    parts=(f"{__name__}.record:ScriptCheckpointsNote",),
)
