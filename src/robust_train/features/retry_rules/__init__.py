"""The user's own rules for how to react to failures (``retry.rules``)."""

from robust_train.features.retry_rules.model import RetryKeys
from robust_train.model.feature import Feature

FEATURE = Feature(
    "retry_rules",
    launcher=f"{__name__}.launcher:RetryRules",
    parts=(f"{__name__}.record:RuleNote",),
    keys=(RetryKeys,),
)
