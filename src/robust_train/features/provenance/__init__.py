"""The environment, command and config files of a job, and their changes since the last launch."""

from robust_train.model.feature import Feature

FEATURE = Feature("provenance", launcher=f"{__name__}.launcher:RecordsProvenance")
