"""Lists the features, their config keys, and the remedies for each kind of failure.

Only this file knows all features. To delete a feature, delete its folder and its lines here. Every
process that runs a job or reads its config imports it.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from typing import TYPE_CHECKING

from robust_train.config.keys import Schema
from robust_train.model.failure import FailureKind
from robust_train.model.feature import Feature

if TYPE_CHECKING:
    from robust_train.policy.decide import Remedies, Rule


def _load(*names: str) -> tuple[Feature, ...]:
    """Return the features that these modules of the package define."""
    modules = [importlib.import_module(f"robust_train.{name}") for name in names]
    return tuple(module.FEATURE for module in modules)


FEATURES = _load(
    "features.gradient_checkpointing",
    "features.batch_search",
    "features.data_loader_workers",
    "features.out_of_memory",
    "features.disk",
    "features.divergence",
    "features.retry_rules",
    "features.gpus",
    "features.memory_samples",
    "features.measured_memory",
    "features.time_slices",
    "features.stall",
    "features.trackers",
    "features.slow",
    "features.script_checkpoints",
    "features.memory_upkeep",
    "features.speed",
    "features.requests",
    "features.provenance",
    "features.report_page",
    "features.detach",
    "features.live_screen",
    "features.notifications",
    "features.expandable_segments",
    "features.fewer_gpus",
    "features.cpu_fallback",
    "features.transient_failures",
)
"""After an attempt, the features add their evidence in this order. Some features need the evidence
of others:

- features.data_loader_workers before features.out_of_memory: it knows the library of the message.
- features.data_loader_workers before features.retry_rules: a rule may find that a GPU failed.
- features.out_of_memory before features.disk: of two failures, a read-only disk is the cause.
- features.out_of_memory before features.retry_rules: rules need the final failure.
- features.disk before features.retry_rules: rules need the final failure.
- features.disk before features.gpus: a failure of the disk excludes no GPU.
- features.divergence before features.retry_rules: rules count tries without progress.
- features.retry_rules before features.gpus: a rule may find that a GPU failed, and exclude it.
- features.provenance before features.report_page: the page shows the provenance.

The order of all other pairs does not matter. A test finds the pairs whose order matters by swapping
each pair, and compares them with this list. Written records (``model/parts.py``) have the figures
of features in this order too.
"""


def _make_schema(places: Mapping[str, str]) -> Schema:
    """Return the schema with the keys of all features. Keys with a place come first."""
    after = {pkgutil.resolve_name(f"robust_train.{name}"): key for name, key in places.items()}
    others = [keys for feature in FEATURES for keys in feature.keys if keys not in after]
    return Schema((*after, *others), after)


SCHEMA = _make_schema(
    {
        "features.expandable_segments.model:SegmentsKeys": "memory.fraction",
        "features.memory_upkeep.model:CacheKeys": "memory.fraction",
        "features.memory_upkeep.model:ClearKeys": "memory.fraction",
        "features.memory_samples.model:SamplesKeys": "memory.fraction",
        "features.memory_upkeep.model:SnapshotKeys": "memory.fraction",
        "features.fewer_gpus.model:FewerGpusKeys": "num_gpus",
        "features.time_slices.model:TimeSliceKeys": "queue_priority",
        "features.detach.model:DetachKeys": "allow_cpu_fallback",
        "features.retry_rules.model:RetryKeys": "preserve_effective_batch_size",
        "features.divergence.model:DivergenceKeys": "preserve_effective_batch_size",
        "features.stall.model:StallKeys": "stop_grace_seconds",
    }
)
"""All keys. On the page of keys and in YAML files, the keys of these features follow the given keys
of the kernel, in this order. Keys of other features are at the end of their group.
"""


def load_remedies() -> Remedies:
    """Return the rules for each kind of failure, in the order in which they are tried. The first
    rule with a remedy decides. Commands that only read a run folder do not import the rules."""
    return {
        FailureKind.DEVICE_OOM: _rules(
            "features.out_of_memory.model:find_room_elsewhere",
            "features.expandable_segments.model:turn_on_expandable_segments",
            "features.out_of_memory.model:halve_batch",
            "features.gradient_checkpointing.model:checkpoint_gradients",
            "features.out_of_memory.model:switch_gpu",
            "features.out_of_memory.model:confirm_on_another_gpu",
            "features.out_of_memory.model:repeat_after_progress",
            "features.out_of_memory.model:split_despite_changed_loss",
            "features.out_of_memory.model:try_remaining_sizes",
            "features.cpu_fallback.model:fall_back_to_cpu",
        ),
        FailureKind.HOST_OOM: _rules(
            "features.data_loader_workers.model:reduce_workers",
            "features.out_of_memory.model:halve_batch",
            "features.gradient_checkpointing.model:checkpoint_gradients",
            "features.out_of_memory.model:repeat_after_progress",
            "features.out_of_memory.model:split_despite_changed_loss",
            "features.out_of_memory.model:try_remaining_sizes",
        ),
        FailureKind.WORKER_DEATH: _rules(
            "features.data_loader_workers.model:reduce_workers",
            "features.transient_failures.model:retry_after_kill",
            "features.out_of_memory.model:halve_batch_for_workers",
            "features.out_of_memory.model:repeat_after_progress",
        ),
        FailureKind.DEVICE_FAULT: _rules(
            "features.gpus.model:give_up_on_repeated_fault",
            "features.expandable_segments.model:turn_off_expandable_segments",
            "features.out_of_memory.model:halve_after_internal_errors",
            "features.gpus.model:retry_on_same_gpu",
            "features.gpus.model:retry_fault_without_gpu",
            "features.gpus.model:retry_on_other_gpu",
            "features.gpus.model:wait_for_other_gpu",
            "features.fewer_gpus.model:continue_on_fewer_gpus",
            "features.cpu_fallback.model:fall_back_to_cpu",
        ),
        FailureKind.DEVICE_UNAVAILABLE: _rules(
            "features.gpus.model:retry_on_busy_gpu",
            "features.gpus.model:retry_on_other_gpu",
            "features.gpus.model:wait_for_turn",
            "features.fewer_gpus.model:continue_on_fewer_gpus",
            "features.cpu_fallback.model:fall_back_to_cpu",
        ),
        FailureKind.DISK_FULL: _rules("features.transient_failures.model:retry_unchanged"),
        FailureKind.COMM: _rules("features.transient_failures.model:retry_unchanged"),
        FailureKind.DIVERGED: _rules(
            "features.divergence.model:return_to_good_checkpoint",
            "features.divergence.model:lower_learning_rate",
        ),
        FailureKind.INTERRUPTED: _rules("features.transient_failures.model:retry_after_kill"),
        FailureKind.BUG: _rules(
            "features.data_loader_workers.model:restore_one_worker",
            "features.transient_failures.model:retry_after_crash",
            "features.transient_failures.model:retry_unknown_failure",
            "features.script_checkpoints.model:resume_from_earlier_checkpoint",
        ),
    }


def _rules(*names: str) -> tuple[Rule, ...]:
    """Return the rules with these names in the package."""
    return tuple(pkgutil.resolve_name(f"robust_train.{name}") for name in names)
