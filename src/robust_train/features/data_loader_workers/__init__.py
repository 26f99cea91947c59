"""Data-loader workers: counted while an attempt runs, and reduced if they fill the host's memory or
die."""

from robust_train.model.feature import Feature

FEATURE = Feature(
    "data_loader_workers",
    launcher=f"{__name__}.launcher:DataLoaderWorkers",
    watch=f"{__name__}.launcher:WorkersWatch",
    attempt=f"{__name__}.attempt:ReadsWorkers",
    parts=(
        f"{__name__}.record:WorkersKnob",
        f"{__name__}.record:WorkersNote",
        f"{__name__}.record:WorkersFinding",
    ),
)
