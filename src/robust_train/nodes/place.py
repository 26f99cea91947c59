"""Which of a job's nodes this process is on, and what a job on several nodes cannot be. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from robust_train.errors import ConfigError

_BY_HAND = "ROBUST_TRAIN_NODE_RANK", "ROBUST_TRAIN_NUM_NODES"
_VARIABLES = (
    _BY_HAND,
    ("PET_NODE_RANK", "PET_NNODES"),  # Kubeflow's trainer, as torchrun reads them
    ("SLURM_NODEID", "SLURM_STEP_NUM_NODES"),
    ("JOB_COMPLETION_INDEX", None),  # an indexed Job of Kubernetes
)
"""The number of this node, and of how many it is one; the first that is set counts. PyTorchJob's
``RANK`` and ``WORLD_SIZE`` count pods: never these."""

_DIFFERS = re.compile(r"\$\{(now|robust_pid)\b|\$\{hydra[.:]job\.(id|num)\b")


@dataclass(frozen=True)
class Place:
    """This node, counted from 0, and how many there are."""

    node: int
    nodes: int

    @property
    def leads(self) -> bool:
        """Whether this node's launcher decides for all."""
        return self.node == 0


def place_of(cfg: DictConfig, environ: Mapping[str, str]) -> Place | None:
    """Return which node this is; None for a job on one node.

    Raises:
        ConfigError: that is not known, numbers do not agree, or such a job cannot span nodes.
    """
    nodes = int(cfg.num_nodes)
    if nodes <= 1:
        meant = environ.get(_BY_HAND[1], "1")
        if nodes == 1 and meant != "1":
            raise ConfigError(f"num_nodes=1, but {_BY_HAND[1]}={meant}: give num_nodes={meant}")
        return None
    _refuse(cfg, nodes)
    for name, of in _VARIABLES:
        if name not in environ:
            continue
        node, count = _number(name, environ), nodes if of is None else _number(of, environ, nodes)
        if count != nodes:
            raise ConfigError(f"num_nodes={nodes}, but {of}={count}: they must agree")
        if not 0 <= node < nodes:
            raise ConfigError(f"{name}={node}: num_nodes={nodes} has nodes 0 to {nodes - 1}")
        if name == "SLURM_NODEID" and environ.get("SLURM_STEP_NUM_TASKS", str(nodes)) != str(nodes):
            tasks = environ["SLURM_STEP_NUM_TASKS"]
            raise ConfigError(
                f"num_nodes={nodes} with {tasks} Slurm tasks: one launcher a node starts the ranks "
                "itself, so use srun --ntasks-per-node=1"
            )
        return Place(node, nodes)
    raise ConfigError(
        f"num_nodes={nodes}: which of them is this? Set {_BY_HAND[0]} to 0 … {nodes - 1}, another "
        "number on each, or start the command with srun (docs/several-machines.md)"
    )


def node_in(environ: Mapping[str, str], arguments: Sequence[str]) -> int:
    """Return the number of this node where a command line has ``num_nodes``, else 0.

    For what comes before there is a config; what is wrong is refused later.
    """
    given = [one.partition("=")[2] for one in arguments if one.startswith("num_nodes=")]
    if not given or given[-1] == "1":
        return 0
    for name, _ in _VARIABLES:
        if name in environ:
            return int(environ[name]) if environ[name].isdigit() else 0
    return 0


def _number(name: str, environ: Mapping[str, str], default: int | None = None) -> int:
    text = environ.get(name, "" if default is None else str(default))
    if not text.isdigit():
        raise ConfigError(f"{name}={text}: accepted is an integer")
    return int(text)


def _refuse(cfg: DictConfig, nodes: int) -> None:
    key = f"num_nodes={nodes}"
    if cfg.isolation == "none":
        raise ConfigError(f"isolation=none: not with {key}, whose ranks are processes")
    if OmegaConf.select(cfg, "trainer.argv") is not None:
        raise ConfigError(f"{key}: not for scripts; start torchrun on each node instead")
    if cfg.min_num_gpus is not None:
        raise ConfigError(f"min_num_gpus={cfg.min_num_gpus}: not with {key}")
    if cfg.detach:
        raise ConfigError(f"detach=true: not with {key}; use sbatch, or nohup on each node")
    if not cfg.auto_device and cfg.device != "cpu":
        raise ConfigError(f"device={cfg.device}: not with {key}; accepted is cpu, or auto_device")
    if not HydraConfig.initialized():
        return
    hydra = HydraConfig.get()
    if hydra.mode == RunMode.MULTIRUN:
        raise ConfigError(f"{key}: not in a sweep (-m), whose jobs have one node each")
    config: Any = HydraConfig.instance().cfg
    raw = OmegaConf.to_container(config.hydra.run, resolve=False)
    if isinstance(raw, dict) and _DIFFERS.search(str(raw.get("dir"))):
        raise ConfigError(
            f"{key}: every node needs the same run folder, on a disk that all of them see: give "
            "hydra.run.dir=FOLDER"
        )
