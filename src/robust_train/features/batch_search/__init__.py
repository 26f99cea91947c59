"""The search for the largest micro-batch that fits, by probes before training."""

from robust_train.model.feature import Feature

FEATURE = Feature(
    "batch_search",
    attempt=f"{__name__}.attempt:BatchSearch",
    parts=(f"{__name__}.record:SearchKnob", f"{__name__}.record:BatchSearchNote"),
)
