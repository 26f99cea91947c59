"""Trainers for sweeps whose jobs are forks of one process; what the import did tells it apart."""

from __future__ import annotations

import colorsys  # noqa: F401  # a module that nothing else imports
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy
import torch

from trainers import openmp_settings

IMPORTED_BY = os.getpid()
PATIENCE_SECONDS = 60


def _place() -> Path:
    return Path(os.environ["SWEEP_PLACE"])


def where_it_came_from(cfg):
    weight = torch.ones(3, requires_grad=True)
    (weight * 2).sum().backward()
    server = os.getppid()
    return {
        "imported_by": IMPORTED_BY,
        "server": server,
        "session": os.getsid(server),
        "gradient": weight.grad.tolist(),
        "cwd": os.getcwd(),
        "openmp": openmp_settings(cfg),
        "own": os.environ.get("OF_THIS_JOB"),
    }


def waits(cfg):
    """At work until the test lets it go."""
    (_place() / f"working-{cfg.training.seed}").write_text(str(os.getpid()))
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (_place() / "go").exists():
        if time.monotonic() > deadline:
            raise TimeoutError("nobody lets it go")
        time.sleep(0.01)
    return IMPORTED_BY


def waits_until_told(cfg, run):
    """At work until it is told to stop; then it leaves a checkpoint."""
    from sweep_trainers import works_until_told

    return works_until_told(cfg, run)


def draws(cfg):
    return float(numpy.random.random())


def leaves_a_process_behind(cfg):
    """In a session of its own; the next job says whether it still runs."""
    mark = _place() / "left"
    if mark.exists():
        return Path(f"/proc/{mark.read_text()}").exists()
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    detached = os.fork()
    if detached == 0:
        os.setsid()
        signal.pause()
    mark.write_text(str(detached))
    return process.poll() is None
