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
from robust_train.config.schema import RobustConfig
from robust_train.config.trainers import Trainer, name_of
from robust_train.host.memory import read_host_memory
from robust_train.memory.cuda import (
    exported_expandable_segments,
    is_wsl,
    use_expandable_segments,
)
from robust_train.model.spec import AttemptSpec
from robust_train.policy.sizes import PolicySettings
from robust_train.readable import GIB


def policy_settings(config: RobustConfig) -> PolicySettings:
    """Return what the decisions of a job depend on."""
    return PolicySettings.of(
        config,
        expandable_segments=use_expandable_segments(
            config.memory.expandable_segments,
            os.environ,
            is_script=config.is_script,
            gpus=config.num_gpus,
        ),
        may_use_expandable_segments=(
            exported_expandable_segments(os.environ) is None and not is_wsl()
        ),
    )


class BatchKnowledge:
    """Names what memory depends on beside the device, so that sizes that were found can be used."""

    def __init__(self, cfg: DictConfig, trainer: Trainer) -> None:
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
        return replace(policy, found_sizes=own, requested_size=requested or 0)

    def key_for(self, spec: AttemptSpec) -> str:
        """Return what names model, data and the device of an attempt."""
        return self._prefix + spec.device_kind


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
