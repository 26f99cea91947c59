"""Gradient checkpointing: activations are not kept but recomputed, if no smaller batch fits."""

from robust_train.model.feature import Feature

FEATURE = Feature("gradient_checkpointing", parts=(f"{__name__}.record:GradientsKnob",))
