"""Reserves the memory that earlier runs of the same job needed, before the job starts.

With ``min_gpu_memory_mb=auto``, :func:`.plan.plan_job` calls `reserve_known_need` in the launcher.
Jobs are the same if they have the same fingerprint: a digest of the trainer, the keys that may
change its memory, and the version of torch.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import logging
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import Any

from omegaconf import OmegaConf

from robust_train.config.keys import schema
from robust_train.config.projects import GROUP
from robust_train.config.schema import (
    ACCUMULATION,
    BATCH,
    RobustConfig,
    TrainerConfig,
    TrainingConfig,
)
from robust_train.features.measured_memory.model import (
    MOST_TOGETHER,
    add_margin,
    choose_reservation,
    estimate_peak,
)
from robust_train.features.measured_memory.same_jobs import drop_labels, fingerprint, locate_program
from robust_train.features.measured_memory.store import Need, read_needs
from robust_train.gpu.inventory import read_inventory
from robust_train.gpu.visible import visible_gpus
from robust_train.launcher.plan import Plan
from robust_train.model.errors import ConfigError
from robust_train.model.gpu import Group
from robust_train.queue.devices import select_usable_gpus
from robust_train.readable import MIB, mib

log = logging.getLogger("robust_train")

# The keys of the group `training` that may change memory, in addition to the batch.
_TRAINING_KEYS = ("num_workers", "prefetch_factor", "gradient_checkpointing")


def reserve_known_need(plan: Plan) -> Plan:
    """Return a plan that reserves the memory that earlier runs needed, if it is known."""
    config = plan.config
    is_on_cpu = config.device == "cpu" and not config.picks_gpu
    if not config.measures_memory or is_on_cpu:
        return plan
    if config.runs_inline:
        log.warning(
            "min_gpu_memory_mb=auto: attempts in this process (isolation=none, torchrun) are not "
            "measured: %d MiB are reserved",
            config.min_gpu_memory_mb,
        )
        return plan
    need = read_needs().get(fingerprint_job(plan), Need())
    gpus: Group = ()
    peak = None
    if need.peaks and not config.finds_batch_size:
        gpus = _find_gpus(plan)
        peak = estimate_peak(need.on({gpu.name for gpu in gpus}), config.training.batch_size)
    if not peak:
        log.info(
            "min_gpu_memory_mb=auto: not measured yet, so %d MiB are reserved until it is",
            config.min_gpu_memory_mb,
        )
        return plan
    capacity = _find_capacity(gpus, config.num_gpus)
    need_bytes = add_margin(peak) if capacity is None else choose_reservation(peak, capacity)
    reserved_mb = math.ceil(need_bytes / MIB)
    log.info(
        "min_gpu_memory_mb=auto: %d MiB, because earlier runs of this job held %s at their peak",
        reserved_mb,
        mib(peak),
    )
    most = MOST_TOGETHER if config.packs_gpus else config.gpu_jobs_per_device
    config = replace(config, min_gpu_memory_mb=reserved_mb, gpu_jobs_per_device=most)
    return replace(plan, config=config, policy=replace(plan.policy, config=config))


def _find_gpus(plan: Plan) -> Group:
    """Return the GPUs that a job may use, or no GPU if its ``device`` does not exist."""
    # Such a job is refused later, when it requests its GPUs.
    with contextlib.suppress(ConfigError):
        return select_usable_gpus(
            plan.config, visible_gpus(read_inventory(processes=False), plan.environ)
        )
    return ()


def _find_capacity(gpus: Group, count: int) -> int | None:
    """Return the smallest memory size among the ``count`` largest GPUs, or None if unknown."""
    sizes = sorted((gpu.capacity_bytes for gpu in gpus if gpu.capacity_bytes), reverse=True)
    return sizes[count - 1] if len(sizes) >= count else None


def fingerprint_job(plan: Plan) -> str:
    """Return a digest that is the same for all jobs that need the same memory."""
    if plan.config.trainer.argv is not None:
        return fingerprint_program(plan.config)
    ref = plan.trainer_ref
    # The path alone is ambiguous, because two projects may both have a `train.py`.
    script = _find_file(ref.parts()[0]) if ref.main is None else str(ref.main)
    return fingerprint(
        f"{ref.path} {script}", _select_keys(plan.config, _read_written_config(plan)), versions()
    )


def _find_file(module: str) -> str:
    """Return the file of a top-level module, or its folders. Empty if it cannot be found."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError, AttributeError):
        return ""
    if spec is None:
        return ""
    folders = spec.submodule_search_locations or ()
    return " ".join(folders) if spec.origin is None else spec.origin


def _read_written_config(plan: Plan) -> Any:
    """Return a job's config with only environment variables resolved.

    Most other interpolations refer to keys of the same config. The rest, such as ``${now:…}`` and
    Hydra's folders, have a different value in each run of the same job.
    """
    written = OmegaConf.to_container(plan.cfg, resolve=False)
    return _resolve_environment(written, OmegaConf.to_container(plan.resolved_cfg, resolve=False))


def _resolve_environment(written: Any, resolved: Any) -> Any:
    if isinstance(written, Mapping) and isinstance(resolved, Mapping):
        return {
            key: _resolve_environment(value, resolved.get(key)) for key, value in written.items()
        }
    return resolved if isinstance(written, str) and "${oc.env:" in written else written


def fingerprint_program(config: RobustConfig) -> str:
    """Return the fingerprint of a job that runs a program."""
    folder = config.trainer.cwd
    if folder is None:
        folder = os.getcwd()
    argv = locate_program(drop_labels(config.trainer.argv or ()), folder)
    return fingerprint(" ".join(argv), _select_keys(config, {}), versions())


def versions() -> tuple[str, ...]:
    """Return the versions on which memory depends, without importing anything."""
    try:
        return (importlib.metadata.version("torch"),)
    except importlib.metadata.PackageNotFoundError:
        return ()


def _select_keys(config: RobustConfig, content: Any) -> Mapping[str, Any]:
    """Return the keys that may change memory: the project's own keys, and a few of this package's.

    ``content`` is the config of the job.
    """
    training = asdict(config.training)
    return {
        "project": _project_keys(config, content),
        "num_gpus": config.num_gpus,
        "training": {name: training[name] for name in _TRAINING_KEYS},
        "memory": {
            "fraction": config.memory.fraction,
            "expandable_segments": config.chosen("expandable_segments"),
        },
    }


def _project_keys(config: RobustConfig, content: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a project's own keys, without its keys for the batch.

    The peak is stored for each batch size, so these keys must not change the fingerprint.
    """
    if config.theirs is not None:
        # This package's keys are in a group of their own.
        project = {key: value for key, value in content.items() if key not in (GROUP, "hydra")}
        for key in (BATCH, ACCUMULATION):
            project = _remove_key(project, config.theirs.get(key, "").split("."))
        return project
    # The project's keys are next to this package's keys.
    ours = {item.name for item in fields(RobustConfig) if item.metadata}
    for keys in schema().features:
        ours |= {keys.group} if keys.group else _list_names(keys)
    # These groups hold keys of the trainer in addition to ours.
    open_groups = {"model": set(), "dataset": set(), "trainer": _list_names(TrainerConfig)}
    open_groups["training"] = _list_names(TrainingConfig)
    project = {}
    for key, value in content.items():
        if key in open_groups and isinstance(value, Mapping):
            names = open_groups[key]
            project[key] = {name: item for name, item in value.items() if name not in names}
        elif key not in ours | {GROUP, "hydra"}:
            project[key] = value
    return project


def _list_names(group: type) -> set[str]:
    return {item.name for item in fields(group)}


def _remove_key(keys: Any, path: Sequence[str]) -> Any:
    """Return nested keys without the key at a path."""
    if not isinstance(keys, Mapping) or path[0] not in keys:
        return keys
    if len(path) == 1:
        return {key: value for key, value in keys.items() if key != path[0]}
    return {**keys, path[0]: _remove_key(keys[path[0]], path[1:])}
