"""The examples' trainers under a real limit of memory."""

import importlib
import os
import threading
from pathlib import Path

from memory_limit import data_bytes, lift_limit, limit_growth


def preload_modules(cfg):
    return ["torch._dynamo", os.environ["EXAMPLE"].rpartition(".")[0]]


def example(cfg, run):
    """The example that the environment names, as it is."""
    module, _, name = os.environ["EXAMPLE"].rpartition(".")
    return getattr(importlib.import_module(module), name)(cfg, run)


def limited(cfg, run):
    """Limit the memory from a given step on to 7/10 of the need of the first attempt's steps.

    Each attempt gets this limit; with several ranks, rank 1 gets it. The need of a step is what it
    holds above its start. Memory that is taken once and stays (the stack of a thread that starts
    during a step) counts in that step only, so the smallest need is the measure.
    """
    if run.world_size > 1 and run.rank != 1:
        return example(cfg, run)
    growth = Path(os.environ["GROWTH_FILE"])
    most, start, done = 0, None, threading.Event()
    needs = []

    def watch():
        nonlocal most
        while not done.wait(0.0005):
            if start is not None:
                most = max(most, data_bytes() - start)

    def next_step():
        nonlocal start, most
        if start is not None:
            needs.append(most)
        start, most = data_bytes(), 0

    def limit():
        next_step()
        done.set()
        if not growth.exists():
            growth.write_text(str(min(needs)))
        limit_growth(int(growth.read_text()) * 7 // 10)

    at_step = int(os.environ["AT_STEP"])
    after_step(run, at_step, limit)
    for earlier in range(2, at_step):
        after_step(run, earlier, next_step)
    threading.Thread(target=watch, daemon=True).start()
    try:
        return example(cfg, run)
    finally:
        done.set()
        lift_limit()


def out_of_memory_between_steps(cfg, run):
    """After a step of the first attempt, torch is asked for more than there can be; of several
    ranks by the second."""
    import torch

    if run.resume_checkpoint is None and run.rank == run.world_size - 1:
        after_step(run, int(os.environ["AT_STEP"]), lambda: torch.empty(2**46))
    return example(cfg, run)


def after_step(run, at_step, action):
    """Have ``action`` done once, when a step or a later one is over."""
    progress, done = run.progress, []

    def then(step, **scalars):
        is_passed_on = progress(step, **scalars)
        if step >= at_step and not done:
            done.append(step)
            action()
        return is_passed_on

    run.progress = then
