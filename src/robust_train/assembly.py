"""Which features there are. Deleting one is deleting its folder and its line here."""

from __future__ import annotations

from robust_train.model.feature import Feature

_FOLDER = "robust_train.features"

FEATURES = (
    Feature("out_of_memory", f"{_FOLDER}.out_of_memory.launcher:OutOfMemory"),
    Feature("disk", f"{_FOLDER}.disk.launcher:Disk"),
    Feature("retry_rules", f"{_FOLDER}.retry_rules.launcher:RetryRules"),
    Feature("gpus", f"{_FOLDER}.gpus.launcher:Gpus"),
    Feature("divergence", f"{_FOLDER}.divergence.launcher:Divergence"),
    Feature(
        "memory_samples", f"{_FOLDER}.memory_samples.launcher:MemorySamples"
    ),
    Feature("time_slices", f"{_FOLDER}.time_slices.launcher:TimeSlices"),
    Feature("trackers", f"{_FOLDER}.trackers.launcher:Trackers"),
    Feature("slow", f"{_FOLDER}.slow.launcher:SlowTraining"),
    Feature(
        "script_checkpoints",
        f"{_FOLDER}.script_checkpoints.launcher:ScriptCheckpoints",
    ),
    Feature("provenance", f"{_FOLDER}.provenance.launcher:RecordsProvenance"),
    Feature("report_page", f"{_FOLDER}.report_page.launcher:ReportPage"),
    Feature("detach", f"{_FOLDER}.detach.launcher:Detach"),
    Feature("live_screen", f"{_FOLDER}.live_screen.launcher:LiveScreen"),
    Feature(
        "notifications", f"{_FOLDER}.notifications.launcher:Notifications"
    ),
)
"""The order is the order of evidence:

- ``out_of_memory`` first: it may turn a failure that nobody could name into a lack of memory, and
  everything after looks at the kind.
- ``disk`` before the user's rules, which see the failure as it is in the end.
- ``retry_rules`` before ``gpus``: the rule ``exclude_gpu`` makes a failure one of the GPU, which is
  then excluded.
- The others do not change a failure, so their order does not matter.
"""
