"""Detection of a process that is a rank of a job of torchrun, srun, PyTorchJob or Ray.

Pure: everything is read from the environment's variables.
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

_FIRST_PORT = 15_000
_PORTS = 10_000


@dataclass(frozen=True)
class GuestRank:
    """This process as a rank of an engine's job."""

    engine: str  # its name for people
    rank: int
    world_size: int
    local_rank: int
    # the job's name, the same for all ranks and restarts; empty if the engine has none
    job: str
    restarts: int  # how often the engine itself has started the ranks again
    # what torch's `env://` and the frameworks read, where the engine does not set it
    environ: Mapping[str, str] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """A run folder named by the engine's job.

        Raises:
            ConfigError: the job has no name of its own.
        """
        if not self.job:
            raise ConfigError(
                "the run folder has to be the same for all ranks and restarts: give "
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
    if "RANK" in environ and _number(environ, "WORLD_SIZE", "1") > 1:
        return _of_torch(environ)
    if _number(environ, "SLURM_STEP_NUM_TASKS", "1") > 1 and "SLURM_PROCID" in environ:
        return _of_slurm(environ)
    return None


def _of_torch(environ: Mapping[str, str]) -> GuestRank:
    """Return a rank of torchrun, or of another engine that sets the same variables."""
    rank = _number(environ, "RANK")
    world_size = _number(environ, "WORLD_SIZE")
    if rank >= world_size:
        raise ConfigError(f"RANK={rank}: must be below WORLD_SIZE={world_size}")
    job = ""
    engine = "the engine that started this rank"
    run_id = environ.get("TORCHELASTIC_RUN_ID")
    if run_id is not None:
        engine = TORCHRUN
    if run_id not in (None, "none"):  # torchrun's default, which every job has
        job = "torchrun-" + re.sub(r"[^\w.-]", "_", run_id or "")
    elif "SLURM_JOB_ID" in environ:
        job = f"slurm-{environ['SLURM_JOB_ID']}"
    restarts = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
    return GuestRank(
        engine=engine,
        rank=rank,
        world_size=world_size,
        local_rank=_number(environ, "LOCAL_RANK", "0"),
        job=job,
        restarts=sum(_number(environ, name, "0") for name in restarts),
        environ={
            name: value
            for name, value in (("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1"))
            if name not in environ
        },
    )


def _of_slurm(environ: Mapping[str, str]) -> GuestRank:
    """Return a task of srun, which sets neither LOCAL_RANK nor MASTER_ADDR."""
    job = environ.get("SLURM_JOB_ID", "0")
    rank = _number(environ, "SLURM_PROCID")
    tasks = _number(environ, "SLURM_STEP_NUM_TASKS")
    local_rank = _number(environ, "SLURM_LOCALID", "0")
    node = environ.get("SLURM_NODEID", "0")
    host = first_host(environ.get("SLURM_STEP_NODELIST", "127.0.0.1"))
    # one that all tasks find from the job's number
    port = _FIRST_PORT + int(re.sub(r"\D", "", job) or 0) % _PORTS
    derived = {
        "RANK": str(rank),
        "WORLD_SIZE": str(tasks),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(_tasks_here(environ, int(node), tasks)),
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
        restarts=_number(environ, "SLURM_RESTART_COUNT", "0"),
        environ=derived,
    )


def first_host(hosts: str) -> str:
    """Return the first host of a list as Slurm writes it: ``gpu[07-09,12],login``."""
    match = re.match(r"([^,\[]+)(?:\[(\w+)[^\]]*\](\S*?))?(?:,|$)", hosts)
    if match is None:
        return hosts
    return "".join(part for part in match.groups() if part is not None)


def _tasks_here(environ: Mapping[str, str], node: int, tasks: int) -> int:
    """Return how many tasks of the step this node has: ``SLURM_STEP_TASKS_PER_NODE=2(x3),1``."""
    counts: list[int] = []
    for entry in environ.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", entry)
        if match:
            counts += [int(match[1])] * int(match[2] or 1)
    return counts[node] if node < len(counts) else tasks


def _number(environ: Mapping[str, str], name: str, default: str = "") -> int:
    text = environ.get(name, default)
    if not text.isdigit():
        raise ConfigError(f"{name}={text}: accepted is a number of 0 or more")
    return int(text)
