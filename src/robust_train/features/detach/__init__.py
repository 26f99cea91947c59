"""Jobs in the background that continue after a logout (``detach=true``)."""

from robust_train.features.detach.model import DetachKeys
from robust_train.model.feature import Feature

FEATURE = Feature("detach", launcher=f"{__name__}.launcher:Detach", keys=(DetachKeys,))
