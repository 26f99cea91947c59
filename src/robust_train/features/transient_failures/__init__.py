"""Failures that may not happen again: of networks, disks and killed processes."""

from robust_train.model.feature import Feature

FEATURE = Feature("transient_failures")
