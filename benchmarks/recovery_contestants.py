"""The contestants of ``recovery.py`` that need nothing but torch and robust-train.

Each does the whole job and returns the trained weights; the clock runs from its call to its return.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from recovery_job import METER, Job, Network, build, loader, train
from torch import Tensor

Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class Ending:
    """What a contestant leaves behind.

    Attributes:
        weights: after the last step.
        seconds_before: from its call until the first line of the training itself, where this has
            to start interpreters and import libraries first.
        figures: as :meth:`recovery_job.Meter.figures`, and ``cpu_seconds``, where other processes
            have done the work.
    """

    weights: Weights
    seconds_before: float = 0.0
    figures: dict[str, Any] | None = None


@dataclass(frozen=True)
class Contestant:
    """A way to do the job.

    Attributes:
        label: for the table.
        run: does the job; the folder is for its files.
        modules: imported before the clock starts; where one is missing there is no contest.
        is_limited: runs out of memory.
    """

    label: str
    run: Callable[[Job, Path], Ending]
    modules: tuple[str, ...] = ()
    is_limited: bool = True


def ideal(job: Job, folder: Path) -> Ending:
    """Half of the batch from the beginning, two of them to a step: somebody knew it."""
    return Ending(train(job, job.batch // 2, 2).state_dict())


def unlimited(job: Job, folder: Path) -> Ending:
    """The requested batch, and memory for it."""
    return Ending(train(job, job.batch, 1).state_dict())


def hand_made(job: Job, folder: Path) -> Ending:
    """From scratch at half of the batch, as many a training script does it."""
    batch_size = job.batch
    while True:
        try:
            return Ending(train(job, batch_size, 1).state_dict())
        except RuntimeError as error:
            if "memory" not in str(error) or batch_size == 1:
                raise
        # outside of the handler, whose exception would keep the activations alive
        gc.collect()
        batch_size //= 2


def in_step(job: Job, folder: Path) -> Ending:
    """The plain loop with the line that makes a step repeatable."""
    from robust_train import MicroBatcher

    batcher = MicroBatcher()
    network, optimizer = build(job)
    for batch in loader(job, job.batch):
        batcher.backward(lambda part: network(**part)["loss"], batch, network)
        optimizer.step()
        optimizer.zero_grad()
    return Ending(network.state_dict())


def inline(job: Job, folder: Path) -> Ending:
    """Attempts in this process, each from the last checkpoint."""
    return _launched(job, folder, "none")


def isolated(job: Job, folder: Path) -> Ending:
    """Attempts in processes of their own, each from the last checkpoint."""
    return _launched(job, folder, "process")


def _launched(job: Job, folder: Path, isolation: str) -> Ending:
    from robust_train import launch

    started = time.time()
    cfg = {
        "auto_device": False,
        "device": "cpu",
        "isolation": isolation,
        "min_batch_size": 1,
        "training": {"batch_size": job.batch, "num_workers": 0},
        "job": job.as_json(),
    }
    summary = launch(attempt, cfg, run_dir=folder)
    events = [json.loads(line) for line in (folder / "journal.jsonl").open()]
    recorded = [(e["event_name"], e["fields"]) for e in events if e["event"] == "user"]
    first_line = next(fields["at"] for name, fields in recorded if name == "first_line")
    weights = torch.load(str(summary.result), weights_only=True)
    ended = [fields["figures"] for name, fields in recorded if name == "figures"]
    if isolation == "none":
        return Ending(weights, first_line - started)
    figures = {
        "samples_begun": sum(figures["samples_begun"] for figures in ended),
        "step_samples": [count for figures in ended for count in figures["step_samples"]],
        "peak_bytes": max(figures["peak_bytes"] for figures in ended),
        "cpu_seconds": sum(figures["cpu_seconds"] for figures in ended),
    }
    return Ending(weights, first_line - started, figures)


def attempt(cfg: Any, run: Any) -> str:
    """A trainer that resumes from checkpoints, and leaves running out of memory to the launcher."""
    import torch._dynamo  # every optimizer does it when it is built

    run.record("first_line", {"at": time.time()})
    cpu_before = time.process_time()
    try:
        network = _train_from_checkpoint(Job.from_json(cfg.job), cfg.training, run)
    finally:
        cpu_seconds = time.process_time() - cpu_before
        run.record("figures", {"figures": {**METER.figures(), "cpu_seconds": cpu_seconds}})
    path = run.run_dir / "weights.pt"
    torch.save(network.state_dict(), path)
    return str(path)


def _train_from_checkpoint(job: Job, training: Any, run: Any) -> Network:
    from robust_train.attempt.read_checkpoint import read_newest
    from robust_train.attempt.run import live_of

    network, optimizer = build(job)
    folder = live_of(run).saves.folder(keep=2)
    step = 0
    found = None if run.resume_checkpoint is None else read_newest(run.resume_checkpoint)
    if found is not None:
        _, content = found
        network.load_state_dict(content["network"])
        optimizer.load_state_dict(content["optimizer"])
        step = content["step"]
    run.started(step)
    accumulation = training.gradient_accumulation_steps
    batches = loader(job, training.batch_size, first_step=step + 1)
    for number, batch in enumerate(batches, start=1):
        (network(**batch)["loss"] / accumulation).backward()
        if number % accumulation:
            continue
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        run.progress(step, total_steps=job.steps)
        if step % job.checkpoint_every_steps == 0:
            content = {
                "network": network.state_dict(),
                "optimizer": optimizer.state_dict(),
                "step": step,
            }
            folder.save(content, step)
    return network


OURS_AND_PLAIN = {
    "ideal": Contestant("ideal: knew the micro-batch", ideal),
    "unlimited": Contestant("memory without limit", unlimited, is_limited=False),
    "hand_made": Contestant("hand-made: from scratch at half the batch", hand_made),
    "in_step": Contestant("**robust-train, in the step**", in_step, ("robust_train.step.batcher",)),
    "inline": Contestant(
        "**robust-train, attempts inline**",
        inline,
        ("robust_train.entry", "robust_train.attempt.checkpoints"),
    ),
    "isolated": Contestant(
        "**robust-train, attempts in processes**", isolated, ("robust_train.entry",)
    ),
}
