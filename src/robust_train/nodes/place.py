"""Which of a job's nodes this process is on, and what a job on several nodes cannot be. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from robust_train.config.schema import is_script
from robust_train.errors import ConfigError
from robust_train.settings import EarlySettings, early_settings
from robust_train.values import UNDER_SUBMITIT

_BY_HAND = "ROBUST_TRAIN_NODE_RANK", "ROBUST_TRAIN_NUM_NODES"
_VARIABLES = {
    _BY_HAND[0]: _BY_HAND[1],
    "PET_NODE_RANK": "PET_NNODES",  # Kubeflow's trainer, as torchrun reads them
    "SLURM_NODEID": "SLURM_STEP_NUM_NODES",
    "JOB_COMPLETION_INDEX": "",  # an indexed Job of Kubernetes
}
"""The number of this node, and of how many it is one; the first that is set counts. PyTorchJob's
``RANK`` and ``WORLD_SIZE`` count pods: never these."""

_DIFFERS = re.compile(r"\$\{(now|robust_pid)\b|\$\{hydra[.:]job\.(id|num)\b")


@dataclass(frozen=True)
class Place:
    """This node, counted from 0, and how many there are; node 0 leads."""

    node: int
    nodes: int


def place_of(cfg: DictConfig, environ: Mapping[str, str]) -> Place | None:
    """Return which node this is; None for a job on one node. Raises ConfigError: that is not known,
    numbers do not agree, or such a job cannot span nodes."""
    wanted = early_settings(cfg)
    nodes, name = wanted.num_nodes or 1, next(filter(environ.__contains__, _VARIABLES), "")
    in_sweep = HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN
    on_slurm = in_sweep and environ.get(UNDER_SUBMITIT) == "slurm"
    if nodes <= 1:
        of = "SLURM_STEP_NUM_TASKS" if on_slurm else _BY_HAND[1]
        if nodes == 1 and (count := environ.get(of, "1")) != "1":
            raise ConfigError(f"num_nodes=1, but {of}={count}: give num_nodes={count}")
        return None
    if problem := _why_one_node(wanted, is_script(cfg), in_sweep, on_slurm):
        raise ConfigError(f"num_nodes={nodes}: {problem}")
    if not name:
        raise ConfigError(
            f"num_nodes={nodes}: which of them is this? Set {_BY_HAND[0]} to 0 … {nodes - 1}, "
            "another number on each, or start the command with srun (docs/several-machines.md)"
        )
    node, counts = environ[name], {_VARIABLES[name]: ""}
    if name == "SLURM_NODEID":
        hint = f" (srun --ntasks-per-node=1; in a sweep hydra.launcher.nodes={nodes})"
        counts = dict.fromkeys((*counts, "SLURM_STEP_NUM_TASKS"), hint)
    for of, hint in counts.items():
        if environ.get(of, str(nodes)) != str(nodes):
            raise ConfigError(f"num_nodes={nodes}, but {of}={environ[of]}: must agree{hint}")
    if not node.isdigit() or int(node) >= nodes:
        raise ConfigError(f"{name}={node}: num_nodes={nodes} has nodes 0 to {nodes - 1}")
    return Place(int(node), nodes)


def node_in(environ: Mapping[str, str], nodes: object) -> int:
    """Return the number of this node, 0 if there is one alone. What is wrong is refused later."""
    node = next((environ[name] for name in _VARIABLES if name in environ), "0")
    return int(node) if str(nodes) != "1" and node.isdigit() else 0


def _why_one_node(
    wanted: EarlySettings, is_script: bool, in_sweep: bool, on_slurm: bool
) -> str | None:
    """Return why this job cannot span nodes."""
    is_one_gpu = not wanted.auto_device and wanted.device != "cpu"
    refused = {
        "isolation=none is one process": wanted.isolation == "none",
        "a script starts its own: torchrun on each": is_script,
        f"not with min_num_gpus={wanted.min_num_gpus}": wanted.min_num_gpus is not None,
        "not with detach=true: use sbatch, or nohup on each node": wanted.detach,
        f"not with device={wanted.device}: accepted is cpu, or auto_device=true": is_one_gpu,
    }
    if HydraConfig.initialized():
        config: Any = HydraConfig.instance().cfg
        raw: Any = OmegaConf.to_container(config.hydra.run, resolve=False)
        refused["a sweep needs hydra/launcher=robust_slurm"] = in_sweep and not on_slurm
        shared = "give hydra.run.dir=FOLDER, the same on all nodes, on a disk that all of them see"
        refused[shared] = not in_sweep and bool(_DIFFERS.search(str(raw["dir"])))
    return next((problem for problem, applies in refused.items() if applies), None)
