"""Finds out whether this process is a rank of a job of torchrun, srun, PyTorchJob or Ray.

``launch`` and the commands that train call `guest_rank` before they plan a job. A rank does not
become an ordinary launcher, but a guest of its engine. All facts come from environment variables.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from robust_train.model.errors import ConfigError

TORCHRUN = "torchrun"
OURS = "robust_train"
"""``TORCHELASTIC_RUN_ID`` of the ranks that robust-train itself starts."""

# All tasks of a Slurm job derive the same port for their rendezvous from the job's number.
_FIRST_PORT = 15_000
_PORTS = 10_000


@dataclass(frozen=True)
class GuestRank:
    """This process as a rank of an engine's job."""

    engine: str  # the engine's name, as messages show it
    rank: int
    world_size: int
    local_rank: int
    # The job's name, the same for all ranks and restarts. None if the engine gives it no name.
    job: str | None
    restarts: int  # number of times that the engine restarted the ranks
    # Variables that torch's `env://` and the frameworks need, and that the engine does not set.
    environ: Mapping[str, str] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """The run folder, named after the engine's job.

        Raises:
            ConfigError: the engine gives the job no name.
        """
        if self.job is None:
            raise ConfigError(
                "the run folder must be the same for all ranks and restarts: give "
                "hydra.run.dir=… (launch(run_dir=…)), or torchrun --rdzv-id=NAME"
            )
        return Path("outputs") / self.job


def guest_rank(environ: Mapping[str, str]) -> GuestRank | None:
    """Return this process's rank in an engine's job, or None if it is an ordinary launcher.

    Raises:
        ConfigError: the engine's variables contradict each other.
    """
    if environ.get("TORCHELASTIC_RUN_ID") == OURS:
        return None
    if "RANK" in environ and _read_number(environ, "WORLD_SIZE", "1") > 1:
        return _read_torch_rank(environ)
    if _read_number(environ, "SLURM_STEP_NUM_TASKS", "1") > 1 and "SLURM_PROCID" in environ:
        return _read_slurm_task(environ)
    return None


def _read_torch_rank(environ: Mapping[str, str]) -> GuestRank:
    """Read the rank from the variables of torchrun, which other engines set too."""
    rank = _read_number(environ, "RANK")
    world_size = _read_number(environ, "WORLD_SIZE")
    if rank >= world_size:
        raise ConfigError(f"RANK={rank}: must be below WORLD_SIZE={world_size}")
    run_id = environ.get("TORCHELASTIC_RUN_ID")
    engine = "the engine that started this rank" if run_id is None else TORCHRUN
    job: str | None = None
    # "none" is torchrun's default, which many jobs share.
    if run_id is not None and run_id != "none":
        job = "torchrun-" + re.sub(r"[^\w.-]", "_", run_id)
    elif "SLURM_JOB_ID" in environ:
        job = f"slurm-{environ['SLURM_JOB_ID']}"
    restarts_by_torchrun = _read_number(environ, "TORCHELASTIC_RESTART_COUNT", "0")
    restarts_by_slurm = _read_number(environ, "SLURM_RESTART_COUNT", "0")
    defaults = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    missing = {name: value for name, value in defaults.items() if name not in environ}
    return GuestRank(
        engine=engine,
        rank=rank,
        world_size=world_size,
        local_rank=_read_number(environ, "LOCAL_RANK", "0"),
        job=job,
        restarts=restarts_by_torchrun + restarts_by_slurm,
        environ=missing,
    )


def _read_slurm_task(environ: Mapping[str, str]) -> GuestRank:
    """Read the rank from the variables of srun, and derive those of torch, such as LOCAL_RANK."""
    job = environ.get("SLURM_JOB_ID", "0")
    rank = _read_number(environ, "SLURM_PROCID")
    tasks = _read_number(environ, "SLURM_STEP_NUM_TASKS")
    local_rank = _read_number(environ, "SLURM_LOCALID", "0")
    node = environ.get("SLURM_NODEID", "0")
    host = first_host(environ.get("SLURM_STEP_NODELIST", "127.0.0.1"))
    digits = re.sub(r"\D", "", job)
    port = _FIRST_PORT + int(digits or 0) % _PORTS
    derived = {
        "RANK": str(rank),
        "WORLD_SIZE": str(tasks),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(_count_tasks_on_node(environ, int(node), tasks)),
        "GROUP_RANK": node,
        "GROUP_WORLD_SIZE": environ.get("SLURM_STEP_NUM_NODES", "1"),
        "MASTER_ADDR": environ.get("MASTER_ADDR", host),
        "MASTER_PORT": environ.get("MASTER_PORT", str(port)),
    }
    return GuestRank(
        engine="srun",
        rank=rank,
        world_size=tasks,
        local_rank=local_rank,
        job=f"slurm-{job}",
        restarts=_read_number(environ, "SLURM_RESTART_COUNT", "0"),
        environ=derived,
    )


def first_host(hosts: str) -> str:
    """Return the first host of a Slurm list: ``gpu07`` of ``gpu[07-09,12],login``."""
    match = re.match(r"([^,\[]+)(?:\[(\w+)[^\]]*\](\S*?))?(?:,|$)", hosts)
    if match is None:
        return hosts
    return "".join(part for part in match.groups() if part is not None)


def _count_tasks_on_node(environ: Mapping[str, str], node: int, tasks: int) -> int:
    """Return the number of the step's tasks on this node, or ``tasks`` if Slurm does not say.

    ``SLURM_STEP_TASKS_PER_NODE=2(x3),1`` means 2 tasks on each of nodes 0 to 2 and 1 on node 3.
    """
    counts: list[int] = []
    for entry in environ.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", entry)
        if match:
            counts += [int(match[1])] * int(match[2] or 1)
    return counts[node] if node < len(counts) else tasks


def _read_number(environ: Mapping[str, str], name: str, default: str = "") -> int:
    text = environ.get(name, default)
    if not text.isdigit():
        raise ConfigError(f"{name}={text}: accepted is a number of 0 or more")
    return int(text)
