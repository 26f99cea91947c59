"""The examples' trainers under a real limit of memory, and stopped."""

from __future__ import annotations

import importlib
import os
import resource
import signal
import threading
from pathlib import Path


def _data_bytes():
    """Private writable memory of this process, which is what RLIMIT_DATA limits."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData"))


def preload_modules(cfg):
    """All examples, since all of them are run by the same function here."""
    names = ("accelerate_digits", "lightning_digits", "transformers_sonnets")
    return ["torch._dynamo", *(f"examples.{name}.train" for name in names)]


def as_told(cfg, run):
    """The example in the way that the environment names: one trainer, which is imported once."""
    return globals()[os.environ["HOW"]](cfg, run)


def example(cfg, run):
    """The example that the environment names, as it is."""
    module, _, name = os.environ["EXAMPLE"].rpartition(".")
    return getattr(importlib.import_module(module), name)(cfg, run)


def measured(cfg, run):
    """Tells by how much the memory of a step exceeds that between two steps."""
    most, done, start = 0, threading.Event(), None

    def watch():
        nonlocal most
        while not done.wait(0.0005):
            if start is not None:
                most = max(most, _data_bytes() - start)

    def at_limit_step():
        nonlocal start
        start = _data_bytes()

    _after_step(run, at_limit_step)
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        return example(cfg, run)
    finally:
        done.set()
        watcher.join()
        Path(os.environ["GROWTH_FILE"]).write_text(str(most))


def limited(cfg, run):
    """From a given step on there is so much memory and no more, in each attempt anew."""

    def limit():
        most = _data_bytes() + int(os.environ["LIMIT_BYTES"])
        resource.setrlimit(resource.RLIMIT_DATA, (most, resource.RLIM_INFINITY))

    _after_step(run, limit)
    try:
        return example(cfg, run)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY,) * 2)


def stopped(cfg, run):
    """At a given step of the first attempt the launcher gets SIGTERM."""
    if run.resume_checkpoint is None:
        launcher = int(Path(os.environ["LAUNCHER_FILE"]).read_text())
        _after_step(run, lambda: os.kill(launcher, signal.SIGTERM))
    return example(cfg, run)


def _after_step(run, action):
    """Have ``action`` done once, when the step in the environment or a later one is over."""
    progress, done = run.progress, []

    def then(step, **scalars):
        is_passed_on = progress(step, **scalars)
        if step >= int(os.environ["AT_STEP"]) and not done:
            done.append(step)
            action()
        return is_passed_on

    run.progress = then


def out_of_memory_between_steps(cfg, run):
    """After a given step of the first attempt, torch is asked for more than there can be."""
    import torch

    if run.resume_checkpoint is None:
        _after_step(run, lambda: torch.empty(2**46))
    return example(cfg, run)
