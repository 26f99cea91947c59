"""Activations that are recomputed instead of kept, when nothing smaller fits."""

from robust_train.model.feature import Feature

FEATURE = Feature("gradient_checkpointing", parts=(f"{__name__}.record:GradientsKnob",))
