"""Failures that may not happen again: of networks and disks, kills and rare crashes."""

from robust_train.model.feature import Feature

FEATURE = Feature("transient_failures")
