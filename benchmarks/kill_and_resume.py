"""Attempts killed by SIGKILL at random moments, each resumed from its last checkpoint: are the
final weights, bit for bit, those of a run that nobody killed?

Run: python benchmarks/kill_and_resume.py [--kills 50] [--epochs 16] [--seed 1] [--workers 0]
Goal: equal, after 50 kills.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_module

from robust_train.config.attempt import AttemptRequest
from robust_train.config.checks import checked
from robust_train.config.trainers import TrainerRef
from robust_train.host.signals import SignalWatch
from robust_train.launcher.process import ProcessExecutor
from robust_train.model.attempt import Attempt
from robust_train.model.events import CheckpointSaved, Event, Finished, TrainingStarted, UserEvent
from robust_train.model.spec import AttemptSpec
from robust_train.vision.trainer import train

# checkpoints to wait for, and then seconds: from before the first step to within a save
MOST_CHECKPOINTS = 3
MOST_SECONDS = 0.05


def tells_its_process(cfg: Any, run: Any) -> Any:
    """The built-in trainer."""
    run.record("process", {"pid": os.getpid()})
    return train(cfg, run)


class Killer:
    """Listens to an attempt and kills its process at a moment that ``rng`` chooses."""

    def __init__(self, rng: random.Random | None) -> None:
        self.checkpoint: Path | None = None
        self._checkpoints = 0
        self._rng = rng
        self._pid = 0
        self._wait_for = 0 if rng is None else rng.randint(0, MOST_CHECKPOINTS)
        self._timer: threading.Timer | None = None

    def __call__(self, event: Event) -> None:
        if isinstance(event, UserEvent) and event.event_name == "process":
            self._pid = event.fields["pid"]
        elif isinstance(event, CheckpointSaved):
            self.checkpoint = Path(event.path)
            self._checkpoints += 1
        begins = isinstance(event, (TrainingStarted, CheckpointSaved))
        if begins and self._checkpoints == self._wait_for:
            self._kill_soon()

    def _kill_soon(self) -> None:
        if self._rng is None or self._timer is not None:
            return
        seconds = self._rng.uniform(0, MOST_SECONDS)
        self._timer = threading.Timer(seconds, self._kill)
        self._timer.start()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # it had ended by itself
            os.kill(self._pid, signal.SIGKILL)

    def end(self) -> None:
        """The attempt is over: its number may soon be another process's."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()


def job(run_dir: Path, epochs: int, workers: int, kills: int, seed: int) -> dict[str, Any]:
    """Run to the end with so many kills; the trainer's result, and what was survived."""
    with initialize_config_module("robust_train.configs", version_base="1.3"):
        cfg = compose(
            "robust",
            overrides=[
                "device=cpu",
                "model.width=8",
                f"training.epochs={epochs}",
                f"training.num_workers={workers}",
                "training.checkpoint_every_steps=1",
            ],
        )
    run_dir.mkdir(parents=True)
    rng = random.Random(seed)
    trainer = TrainerRef("kill_and_resume.tells_its_process")
    executor = ProcessExecutor(trainer, cfg, has_standby=True, job="0-killed")
    executor.prepare(lambda: None)
    checkpoint: Path | None = None
    killed = number = 0
    while True:
        number += 1
        attempt = Attempt(number, AttemptSpec((), cfg.training.batch_size, 1))
        killer = Killer(rng if killed < kills else None)

        def take(event: Event, killer: Killer = killer) -> None:
            nonlocal attempt
            attempt = attempt.after(event)
            killer(event)

        process_exit = executor.run(
            AttemptRequest(
                trainer=trainer,
                cfg=cfg,
                hydra_cfg=None,
                config=checked(cfg),
                spec=attempt.spec,
                attempt=number,
                run_dir=run_dir,
                resume_checkpoint=checkpoint,
                environ=dict(os.environ),
                cwd=os.getcwd(),
            ),
            take,
            SignalWatch(),
        )
        killer.end()
        checkpoint = killer.checkpoint or checkpoint
        if isinstance(attempt.ending, Finished):
            break
        if process_exit.returncode != -signal.SIGKILL:
            raise RuntimeError(f"{attempt.ending}\n{process_exit.output}")
        killed += 1
    executor.close()
    return {**attempt.result, "kills": killed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--epochs", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=0)
    chosen = parser.parse_args()
    # for interpreters that have begun too: other threads add in another order
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory() as folder:
        whole = job(Path(folder) / "whole", chosen.epochs, chosen.workers, 0, chosen.seed)
        killed = job(
            Path(folder) / "killed", chosen.epochs, chosen.workers, chosen.kills, chosen.seed
        )
        one, other = (
            torch.load(result["checkpoint"], weights_only=True)["model"]
            for result in (whole, killed)
        )
    same = one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    print(
        json.dumps(
            {
                "kills": killed["kills"],
                "steps": killed["steps"],
                "bitwise_equal": same,
                "same_accuracy": whole["test_accuracy"] == killed["test_accuracy"],
            }
        )
    )
    sys.exit(0 if same and killed["kills"] == chosen.kills else 1)


if __name__ == "__main__":
    main()
