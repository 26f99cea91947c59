"""Training that is slower than it could be: what costs the time, said once."""

from robust_train.model.feature import Feature

FEATURE = Feature(
    "slow", launcher=f"{__name__}.launcher:SlowTraining", parts=(f"{__name__}.record:SlowNote",)
)
