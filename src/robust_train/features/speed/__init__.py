"""The speed of training, as each rank measures it: in the record, on the screen, in advice."""

from robust_train.model.feature import Feature

FEATURE = Feature("speed", parts=(f"{__name__}.record:SavingNote", f"{__name__}.record:SpeedNote"))
