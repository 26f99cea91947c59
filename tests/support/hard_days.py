"""Trainers for tests of what a job's processes live through."""

import atexit
import os
import signal
import time
from pathlib import Path

from trainers import is_ready, waits_for_the_go

LARGE_BYTES = 10_000_000


def saves_when_stopped(cfg, run):
    """Trains until it is stopped, then takes its time to save a checkpoint."""
    run.checkpoint_dir.mkdir(exist_ok=True)
    run.started(0)
    step = 0
    while not run.stop_requested:
        step += 1
        run.progress(step)
        if step == 3:
            is_ready()
        time.sleep(0.01)
    path = run.checkpoint_dir / f"step-{step}"
    with path.open("w") as file:
        for _ in range(20):  # a signal in the middle must not break this off
            file.write("x" * 1000)
            time.sleep(0.02)
    run.checkpoint_saved(path, step)
    raise KeyboardInterrupt


def goes_on_alone(cfg, run):
    """Counts its steps in a file, whoever listens."""
    steps = Path(os.environ["STEPS_FILE"])
    run.started(0)
    for step in range(1, 3001):
        run.progress(step)
        run.record("note", {"step": step, "text": "x" * 500})
        if step % 100 == 0:
            steps.write_text(str(step))
        if step == 1:
            is_ready()
            waits_for_the_go()
    run.record("large", {"text": "y" * LARGE_BYTES})
    return {"steps": step, "large": "z" * LARGE_BYTES}


def completes_but_does_not_end(cfg):
    atexit.register(time.sleep, 1000)
    return "done"


class StopsItsJob:
    """A result that sends SIGTERM while it is turned into a number, after the trainer returned."""

    ndim = 0

    def __init__(self, *pids: int) -> None:
        self.pids = pids

    def item(self) -> float:
        for pid in self.pids:
            os.kill(pid, signal.SIGTERM)
        return 0.5


def is_stopped_when_it_has_returned(cfg, run):
    launcher = os.getpid()
    if cfg.isolation == "process":
        launcher = os.getppid()
        assert not run.stop_requested  # the other one never reads it
    return StopsItsJob(launcher, os.getpid())


def returns_when_it_is_stopped(cfg, run):
    assert not run.stop_requested
    os.kill(os.getpid(), signal.SIGTERM)
    assert run.stop_requested
    return "what there is so far"


def fails_but_does_not_end(cfg):
    atexit.register(time.sleep, 1000)
    raise KeyError("why it failed")


def prints_a_lot(cfg, run):
    run.started(0)
    for step in range(1, 401):
        print("x" * 10_000)
        run.progress(step)
    print("the last line", flush=True)
    is_ready()
    while not run.stop_requested:
        time.sleep(0.01)
    raise KeyboardInterrupt


def returns_its_pid(cfg):
    return os.getpid()
