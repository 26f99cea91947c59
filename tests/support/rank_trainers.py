"""Trainers that run as several processes, each with one property that a test needs."""

import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from memory_limit import MIB, limit_growth
from robust_train.attempt.run import live_of
from trainers import saves, steps

WIDE = 1 << 18
"""Numbers of one sample's activation: 1 MiB."""


def splits_in_its_own_loop(cfg, run):
    """Trains at ease, then with memory for half a batch on rank 1, then with next to none there.

    The first rank takes its time to save what has come of it; the next attempt returns that.
    """
    if run.resume_checkpoint is not None:
        return json.loads(Path(run.resume_checkpoint).read_text())
    dist.init_process_group("gloo")
    run.started(0)
    told = {"at_ease": _train(cfg, run)}
    if run.rank == 1:
        # and what it takes to look for what is held
        limit_growth((cfg.training.batch_size + 10) * MIB)
    told |= {"short_of_memory": _train(cfg, run), "size": run.micro_batcher.size}
    if run.rank == 1:
        limit_growth(6 * MIB)
    try:
        _train(cfg, run)
    except (MemoryError, RuntimeError) as error:
        if run.is_main:
            time.sleep(1.5)  # longer than what is left to ranks after other failures
            saves(run, "told", 6, json.dumps({**told, "heard": str(error)}))
        raise
    raise AssertionError("memory sufficed")


def _train(cfg, run):
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 1))
    for step in range(1, 4):
        generator = torch.Generator().manual_seed(10 * step + run.rank)
        x = torch.randn(cfg.training.batch_size, 4, generator=generator)
        run.backward(lambda part: (model(part).repeat(1, WIDE) * 2).mean(), x, model)
        with torch.no_grad():  # an optimizer's import would be most of the test's time
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
        run.progress(step)
    return [p.item() for p in model.module.weight[0]]


def has_a_bug_on_rank_1(cfg, run):
    """The others never come back by themselves, like ranks that hang in a collective."""
    if run.rank == 1:
        return {}["a key that is not there"]
    while True:
        try:
            time.sleep(600)
        except BaseException:
            continue


def is_slow_on_rank_1(cfg, run):
    """Eight steps; the second rank takes longer for its part of each."""
    dist.init_process_group("gloo")
    model = DistributedDataParallel(nn.Linear(4, 1))

    def loss_of(part):
        time.sleep(0.1 * run.rank)
        return model(part).mean()

    for step in range(1, 9):
        run.backward(loss_of, torch.ones(4, 4), model)
        run.progress(step)
    dist.destroy_process_group()


def loses_a_gpu_of_four(cfg, run):
    """Saves after two steps; then the hardware of rank 2's GPU fails, which ends all four."""
    dist.init_process_group("gloo")
    for step in steps(run, 4, pause=0):
        if step == 3 and run.world_size == 4 and run.rank == 2:
            raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
        ranks = torch.ones(1)
        dist.all_reduce(ranks)
        if run.is_main and step == 2:
            saves(run, "2", 2)
    dist.destroy_process_group()
    visible = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
    return {
        "ranks": int(ranks),
        "start": live_of(run).reports.steps_before,
        "visible": len(visible),
    }
