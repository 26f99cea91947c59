"""What an attempt is given: which trainer, which config, where, with which environment."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig

from robust_train.batch.search import BatchSearch
from robust_train.config.attempt import attempt_config
from robust_train.config.schema import is_script
from robust_train.execution import flight_recorder
from robust_train.execution.environment import attempt_environment
from robust_train.execution.hydra_state import hydra_config
from robust_train.execution.trainer_ref import TrainerRef
from robust_train.runfolder.trackers import tracker_environment
from robust_train.settings import LauncherSettings
from robust_train.values import AttemptSpec


@dataclass(frozen=True)
class NodeSpan:
    """The nodes of an attempt, as one of them sees it."""

    node: int = 0  # this one; the ranks' store is on node 0
    nodes: int = 1
    host: str = "127.0.0.1"  # address of the store
    port: int = 0  # 0: any
    interface: str = "lo"  # the network interface that leads there


@dataclass(frozen=True)
class AttemptRequest:
    """One attempt, ready to be carried to another process."""

    trainer: TrainerRef
    # the composed config with this attempt's device, batch and workers, fully resolved
    cfg: DictConfig
    # Hydra's own config, so that `HydraConfig` and logging work in the trainer
    hydra_cfg: DictConfig | None
    attempt: int  # number of the attempt, counted from 1
    run_dir: Path
    resume_checkpoint: Path | None
    environ: dict[str, str]  # the whole environment of the attempt's process
    cwd: str
    # an attempt without progress for this long is ended; 0 for never, None for what is learned
    stall_timeout_seconds: float | None = 0.0
    longest_pause: float = 0.0  # between two reports in the job so far, seconds
    gpu_uuids: tuple[str, ...] = ()
    ranks: int = 1  # processes of this node that run the trainer together
    span: NodeSpan = NodeSpan()  # the nodes
    stop_grace_seconds: float = 20.0  # time for a last checkpoint
    batch_search: BatchSearch | None = None  # the micro-batch is to be found before training
    has_live_status: bool = False  # the launcher shows steps and loss on a terminal
    spec: AttemptSpec | None = None  # what it was made of
    job: str = ""  # identity of the job
    of_first_rank: tuple[str, ...] = ()  # variables in `environ` that the other ranks do without

    @property
    def runs_script(self) -> bool:
        """Whether the trainer is a program of the user's."""
        return is_script(self.cfg)

    @property
    def world_size(self) -> int:
        """Processes that run the trainer together, on all nodes."""
        return self.ranks * self.span.nodes

    @property
    def first_rank(self) -> int:
        """Rank of this node's first process."""
        return self.ranks * self.span.node

    @property
    def log_file(self) -> Path:
        """What the attempt prints on this node."""
        return self.run_dir / f"{self._stem}.log"

    @property
    def stacks_file(self) -> Path:
        """What the threads of the attempt's processes are doing when it stalls."""
        return self.run_dir / f"{self._stem}.stacks"

    @property
    def _stem(self) -> str:
        node = f".node{self.span.node}" if self.span.node else ""
        return f"attempt-{self.attempt}{node}"


def request_for(
    spec: AttemptSpec,  # what the attempt uses
    cfg: DictConfig,
    settings: LauncherSettings,
    *,
    trainer: TrainerRef,
    device: str,  # what `cfg.device` is for the trainer
    number: int,  # of the attempt
    run_dir: Path,
    job: str,  # its identity
    checkpoint: Path | None,  # what it resumes from
    search: BatchSearch | None,  # the search for its micro-batch, None where the size is known
    longest_pause: float,  # between two reports in the job so far, seconds
) -> AttemptRequest:
    """Return the request for an attempt of a job with config ``cfg``."""
    trackers = tracker_environment(os.environ, run_dir, job, is_script=settings.is_script)
    environ = attempt_environment(
        os.environ,
        spec.gpus,
        expandable_segments=spec.expandable_segments,
        by_index=settings.gpus_by_index,
    )
    if settings.stall_timeout_seconds != 0 and len(spec.gpus) > 1:
        environ |= flight_recorder.settings(environ, run_dir, number)
    return AttemptRequest(
        trainer=trainer,
        cfg=attempt_config(cfg, spec, device),
        hydra_cfg=hydra_config(),
        spec=spec,
        job=job,
        attempt=number,
        run_dir=run_dir,
        resume_checkpoint=checkpoint,
        environ={**environ, **trackers},
        of_first_rank=tuple(trackers),
        cwd=os.getcwd(),
        stall_timeout_seconds=settings.stall_timeout_seconds,
        longest_pause=longest_pause,
        gpu_uuids=tuple(gpu.uuid for gpu in spec.gpus),
        # a script starts its processes itself
        ranks=1 if settings.is_script else spec.ranks // settings.num_nodes,
        stop_grace_seconds=settings.stop_grace_seconds,
        batch_search=search,
        has_live_status=settings.owns_terminal,
    )
