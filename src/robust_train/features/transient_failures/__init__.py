"""Failures that may not come again: of networks, disks and processes that someone killed."""

from robust_train.model.feature import Feature

FEATURE = Feature("transient_failures")
