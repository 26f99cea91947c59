"""Expandable segments: the CUDA allocator's setting against fragmentation."""

from robust_train.features.expandable_segments.model import SegmentsKeys
from robust_train.model.feature import Feature

FEATURE = Feature(
    "expandable_segments", parts=(f"{__name__}.record:SegmentsKnob",), keys=(SegmentsKeys,)
)
