"""What a job ran with: environment, command, config files, and what has changed since."""

from robust_train.model.feature import Feature

FEATURE = Feature("provenance", launcher=f"{__name__}.launcher:RecordsProvenance")
