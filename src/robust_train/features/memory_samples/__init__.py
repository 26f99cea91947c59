"""Samples of an attempt's memory, which show whether it is stable, leaks or fragments."""

from robust_train.features.memory_samples.model import SamplesKeys
from robust_train.model.feature import Feature

FEATURE = Feature(
    "memory_samples",
    launcher=f"{__name__}.launcher:MemorySamples",
    attempt=f"{__name__}.attempt:TakesSamples",
    parts=(f"{__name__}.record:StabilityNote",),
    keys=(SamplesKeys,),
)
