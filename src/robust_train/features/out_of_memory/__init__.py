"""Out of memory: the evidence that a failure leaves, and the remedies."""

from robust_train.model.feature import Feature

FEATURE = Feature(
    "out_of_memory",
    launcher=f"{__name__}.launcher:OutOfMemory",
    attempt=f"{__name__}.attempt:Accumulation",
    parts=(f"{__name__}.record:SplitLossKnob", f"{__name__}.record:SplitNote"),
)
