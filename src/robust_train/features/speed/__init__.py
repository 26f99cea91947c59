"""The speed of training and the cost of checkpoints, which each rank measures."""

from robust_train.model.feature import Feature

FEATURE = Feature("speed", parts=(f"{__name__}.record:SavingNote", f"{__name__}.record:SpeedNote"))
