"""Trainers that run as several processes, each with one property that a test needs."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist


def says_who_it_is(cfg, run):
    """The sum of all ranks' numbers, by a real collective."""
    dist.init_process_group("gloo")
    total = torch.tensor(float(run.rank))
    dist.all_reduce(total)
    given = {
        "rank": run.rank,
        "world_size": run.world_size,
        "num_gpus": cfg.num_gpus,
        "device": cfg.device,
        "batch_size": cfg.training.batch_size,
    }
    dist.destroy_process_group()
    return {**given, "sum": total.item()}


def has_a_bug_on_rank_1(cfg, run):
    """The others wait in a collective, as they would in a backward pass, and never give up."""
    if run.is_main:
        run.started(0)
        run.progress(1)
    if run.rank == 1:
        return {}["a key that is not there"]
    time.sleep(600)
    return None
