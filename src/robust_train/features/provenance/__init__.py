"""Provenance: a record of a job's environment, command and config, and their changes since its
last launch."""

from robust_train.model.feature import Feature

FEATURE = Feature("provenance", launcher=f"{__name__}.launcher:RecordsProvenance")
