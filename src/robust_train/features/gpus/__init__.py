"""GPUs that fail, or that other jobs take: the evidence and the remedies."""

from robust_train.model.feature import Feature

FEATURE = Feature(
    "gpus", launcher=f"{__name__}.launcher:Gpus", parts=(f"{__name__}.record:GpusNote",)
)
