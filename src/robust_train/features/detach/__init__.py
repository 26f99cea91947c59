"""Jobs in the background, which a logout does not end (``detach=true``)."""

from robust_train.features.detach.model import DetachKeys
from robust_train.model.feature import Feature

FEATURE = Feature("detach", launcher=f"{__name__}.launcher:Detach", keys=(DetachKeys,))
