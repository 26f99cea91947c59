"""What the launcher sends an interpreter: what to prepare, and the attempt to run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig

from robust_train.config.schema import RobustConfig
from robust_train.config.trainer_ref import TrainerRef
from robust_train.model.spec import AttemptSpec


@dataclass(frozen=True)
class AttemptRequest:
    """One attempt, ready to be carried to another process."""

    trainer: TrainerRef
    # the composed config with this attempt's device, batch and workers, fully resolved
    cfg: DictConfig
    # Hydra's own config, so that `HydraConfig` and logging work in the trainer
    hydra_cfg: DictConfig | None
    config: RobustConfig  # the same in the types of the code
    spec: AttemptSpec  # what it was made of
    attempt: int  # number of the attempt, counted from 1
    run_dir: Path
    resume_checkpoint: Path | None
    environ: dict[str, str]  # the whole environment of the attempt's process
    cwd: str
    longest_pause: float = 0.0  # between two reports in the job so far, seconds
    search_key: str = ""  # what memory depends on, for a search of the micro-batch
    has_live_status: bool = False  # the launcher shows steps and loss on a terminal
    # variables in `environ` that the other ranks do without
    of_first_rank: tuple[str, ...] = ()

    @property
    def ranks(self) -> int:
        """Processes that run the trainer together; a script starts its own."""
        return 1 if self.config.is_script else self.spec.ranks

    @property
    def runs_script(self) -> bool:
        """Whether the trainer is a program of the user's."""
        return self.config.is_script

    @property
    def log_file(self) -> Path:
        """What the attempt prints."""
        return self.run_dir / f"attempt-{self.attempt}.log"

    @property
    def stacks_file(self) -> Path:
        """What the threads of the attempt's processes are doing when it stalls."""
        return self.run_dir / f"attempt-{self.attempt}.stacks"


@dataclass(frozen=True)
class Preparation:
    """What an interpreter does before it is given an attempt."""

    path: tuple[str, ...]  # the launcher's `sys.path`
    argv: tuple[str, ...]  # the launcher's `sys.argv`: a trainer's module may parse it
    modules: tuple[str, ...] = ()  # to import; one that fails is left to the attempt
    # leave the processor to the attempt that trains: as much time between imports as in them
    is_standby: bool = False
    trainer: TrainerRef | None = None  # one of robust-train's own, which checks `cfg`
    cfg: DictConfig | None = None


@dataclass(frozen=True)
class Begin:
    """An attempt, as one interpreter is given it; descriptors come with it."""

    request: AttemptRequest
    rank: int = 0  # of the trainer's processes
    store_port: int = 0  # where the ranks find each other; 0 without
