"""Disks that are full, read-only or broken: evidence of them, and a wait for space."""

from robust_train.model.feature import Feature

FEATURE = Feature("disk", launcher=f"{__name__}.launcher:Disk")
