"""What the policy of a job is given: the config, what the machine allows, what was found before.

A size that was found holds for the same model, data, precision, device and torch.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import resource
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from omegaconf import DictConfig

from robust_train.config.checks import what_fills_memory
from robust_train.config.names import Trainer, name_of
from robust_train.config.placeholders import placeholders_in
from robust_train.config.schema import RobustConfig
from robust_train.host.memory import read_host_memory
from robust_train.memory.allocator import (
    exported_expandable_segments,
    is_wsl,
    use_expandable_segments,
)
from robust_train.model.spec import AttemptSpec
from robust_train.policy.batch_search import BatchSearch
from robust_train.policy.sizes import PolicySettings
from robust_train.readable import GIB


def policy_settings(
    config: RobustConfig, *, can_checkpoint: bool = False
) -> PolicySettings:
    """Return the part of the config that decisions depend on.

    ``can_checkpoint``: the trainer supports ``training.gradient_checkpointing``.
    """
    training = config.training
    placeholders = placeholders_in(" ".join(config.trainer.argv or ()))
    can_checkpoint |= config.is_built_in or "gradient_checkpointing" in placeholders
    # 1 is also what scripts without a batch size have
    is_one = training.batch_size == training.gradient_accumulation_steps == 1
    return PolicySettings(
        batch_size=training.batch_size,
        gradient_accumulation_steps=training.gradient_accumulation_steps,
        ranks=config.num_gpus,
        min_ranks=config.min_num_gpus,
        cpu_ranks=1
        if config.auto_device or config.device != "cpu"
        else config.num_gpus,
        num_workers=training.num_workers,
        min_batch_size=config.min_batch_size,
        max_retries=config.max_retries,
        may_switch_gpu=config.auto_device,
        allow_cpu_fallback=config.allow_cpu_fallback,
        preserve_effective_batch_size=config.preserve_effective_batch_size,
        min_gpu_memory_bytes=config.min_gpu_memory_bytes,
        prefetch_factor=training.prefetch_factor,
        expandable_segments=use_expandable_segments(
            config.memory.expandable_segments,
            os.environ,
            is_script=config.is_script,
            gpus=config.num_gpus,
        ),
        may_use_expandable_segments=(
            exported_expandable_segments(os.environ) is None and not is_wsl()
        ),
        may_wait=config.wait_for_gpu,
        retry_pause_seconds=config.retry_pause_seconds,
        finds_batch_size=config.finds_batch_size,
        reports_start=config.is_built_in,
        has_batch=not config.is_script or not is_one or "batch_size" in placeholders,
        gradient_checkpointing=training.gradient_checkpointing,
        may_checkpoint_gradients=config.allow_gradient_checkpointing and can_checkpoint,
        rules=config.retry.rules,
    )


class BatchKnowledge:
    """Names what memory depends on beside the device, so that sizes that were found can be used."""

    def __init__(self, cfg: DictConfig, config: RobustConfig, trainer: Trainer) -> None:
        kinds = (resource.RLIMIT_DATA, resource.RLIMIT_AS)
        whole = {
            "config": what_fills_memory(cfg),
            "trainer": _identity_of(trainer),
            # the kernel's own share of it differs a little from boot to boot
            "host": round(read_host_memory().total / GIB),
            "limits": [resource.getrlimit(kind)[0] for kind in kinds],
            "versions": {name: _version(name) for name in ("torch", "robust-train")},
        }
        text = json.dumps(whole, sort_keys=True, default=repr)
        self._prefix = hashlib.sha256(text.encode()).hexdigest()[:32] + " "
        self._config = config

    def informed(
        self, policy: PolicySettings, found: Mapping[str, int], requested: int | None
    ) -> PolicySettings:
        """Return the settings with what earlier launches of this run folder left.

        Args:
            policy: what the user asked for.
            found: sizes that probes have found, by the search's key.
            requested: the size that ``robust-train run halve-batch`` led to.
        """
        own = {
            key.removeprefix(self._prefix): size
            for key, size in found.items()
            if key.startswith(self._prefix)
        }
        return replace(
            policy,
            can_probe=not self._config.is_script,
            found_sizes=own,
            requested_size=requested,
        )

    def search_for(
        self, spec: AttemptSpec, policy: PolicySettings
    ) -> BatchSearch | None:
        """Return the search that an attempt begins with, None if its size is known."""
        if not spec.searches:
            return None
        return BatchSearch(
            effective_batch_size=spec.batch_size * spec.gradient_accumulation_steps,
            min_batch_size=policy.min_batch_size,
            memory_share=self._config.memory.fraction
            / self._config.gpu_jobs_per_device,
            key=self._prefix + spec.device_kind,
        )


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _identity_of(trainer: Trainer) -> str:
    """Return a name that no other script's or notebook's function shares."""
    name = name_of(trainer)
    if not name.startswith("__main__."):
        return name
    where = getattr(sys.modules["__main__"], "__file__", None)
    return f"{Path(where).resolve() if where else Path.cwd()}:{name}"
