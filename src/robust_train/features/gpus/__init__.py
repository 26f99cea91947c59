"""Has the evidence and the remedies for GPUs that fail or that other jobs take."""

from robust_train.model.feature import Feature

FEATURE = Feature(
    "gpus", launcher=f"{__name__}.launcher:Gpus", parts=(f"{__name__}.record:GpusNote",)
)
