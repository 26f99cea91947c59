"""Attempts that hang: they are detected and ended, and their stacks are recorded
(``stall_timeout_minutes``)."""

from robust_train.features.stall.model import StallKeys
from robust_train.model.feature import Feature

FEATURE = Feature(
    "stall",
    launcher=f"{__name__}.launcher:Stall",
    watch=f"{__name__}.launcher:StallWatch",
    keys=(StallKeys,),
    parts=(f"{__name__}.record:StallNote",),
)
