"""Full, read-only or broken disks: the evidence for them, and a wait for free space."""

from robust_train.model.feature import Feature

FEATURE = Feature("disk", launcher=f"{__name__}.launcher:Disk")
