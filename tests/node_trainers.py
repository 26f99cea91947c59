"""Trainers of jobs on several nodes, each with one property that a test needs."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist

from rank_trainers import WIDE, limit_memory
from robust_train.errors import Interrupted


def _start(run):
    dist.init_process_group("gloo")
    start = 0 if run.resume_checkpoint is None else int(Path(run.resume_checkpoint).read_text())
    run.started(start)
    return start


def _save(run, step):
    if run.is_main:
        run.checkpoint_dir.mkdir(exist_ok=True)
        path = run.checkpoint_dir / str(step)
        path.write_text(str(step))
        run.checkpoint_saved(path, step)


def four_steps(cfg, run):
    """Four steps, each with a checkpoint; the last rank may need room for its batch in step 3."""
    start = _start(run)
    about = torch.tensor([start, cfg.training.batch_size])
    dist.all_reduce(about)
    if cfg.get("runs_out") and run.rank == run.world_size - 1:
        limit_memory(24)
    for step in range(start + 1, 5):
        batch = torch.ones(cfg.training.batch_size if step >= 3 else 1, WIDE)
        total = batch[:, 0].sum()
        del batch
        dist.all_reduce(total)
        run.progress(step)
        _save(run, step)
    dist.destroy_process_group()
    return {"ranks": run.world_size, "about": about.tolist(), "total": total.item()}


def until_stopped(cfg, run):
    """Trains until it is asked to stop; each rank writes down at which step that was."""
    step = _start(run)
    while True:
        if run.stop_requested:
            (run.run_dir / f"rank-{run.rank}-stopped").write_text(str(step))
            _save(run, step)
            raise Interrupted(f"stopped after step {step}")
        step += 1
        dist.all_reduce(torch.ones(1))
        time.sleep(0.003 * run.rank)
        run.progress(step)
        if step == 3:
            (run.run_dir / f"rank-{run.rank}-trains").touch()


def goes_on_once_stopped(cfg, run):
    """Trains until it is asked to stop; resumed, all ranks tell the step that they go on from."""
    if run.resume_checkpoint is None:
        until_stopped(cfg, run)
    steps = [None] * run.world_size
    start = _start(run)
    dist.all_gather_object(steps, start)
    dist.destroy_process_group()
    return steps


def is_killed_once(cfg, run):
    """In the first attempt a rank of node 1 is killed after three steps."""
    start = _start(run)
    (run.run_dir / f"rank-{run.rank}-trains").touch()
    for step in range(start + 1, 6):
        dist.all_reduce(torch.ones(1))
        _save(run, step)
        run.progress(step)
        dist.barrier()
        if run.rank == 1 and run.attempt == 1 and step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
    dist.destroy_process_group()


def has_a_bug_on_node_1(cfg, run):
    """Rank 1 asks for a key that is not there; rank 0 waits for it."""
    _start(run)
    if run.rank == 1:
        print({}["a key that is not there"])
    dist.all_reduce(torch.ones(1))


def runs_out_of_gpu_memory_on_node_1(cfg, run):
    """Returns what each rank sees of GPUs; at the first batch size rank 1 has not enough memory."""
    _start(run)
    run.progress(1)
    seen = [None] * run.world_size
    dist.all_gather_object(seen, os.environ["CUDA_VISIBLE_DEVICES"])
    assert cfg.device == "cuda:0"
    if cfg.training.batch_size == 16 and run.rank == 1:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    dist.barrier()
    return seen


def hangs_on_node_1(cfg, run):
    """The last rank waits for ever in the first attempt, and rank 0 for it."""
    start = _start(run)
    for step in range(start + 1, 5):
        if step == 3 and run.rank == 1 and not start:
            _waits_for_ever()
        dist.all_reduce(torch.ones(1))
        run.progress(step)
        _save(run, step)
    return run.resume_checkpoint is not None


def _waits_for_ever():
    while True:
        time.sleep(1)
