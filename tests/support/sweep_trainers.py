"""Trainers for sweeps, without torch; what each does depends on ``seed``, its number."""

import os
import signal
import time
from pathlib import Path

import trainers
from trainers import saves, steps, stops_when_told

PATIENCE_SECONDS = 60


def _mark(name):
    """A file by which the jobs of a sweep know of each other, and the test of them."""
    return Path(os.environ["SWEEP_PLACE"]) / name


def _wait_for(name):
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not _mark(name).exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{name} never came")
        time.sleep(0.01)


def _here(number):
    """Let the other jobs know that this one is at work; return its number."""
    _mark(f"here-{number}").touch()
    return number


def _works(run, number, until=lambda: False):
    trainers.works_until_told(run, _mark(f"working-{number}"), until=until)


def objective(cfg):
    with _mark("ran").open("a") as file:
        file.write(f"{cfg.seed}\n")
    return cfg.seed * 1.5


def meets_the_other(cfg):
    """Two jobs, 1 and 2: each waits for what the other leaves."""
    number = _here(cfg.seed)
    _wait_for(f"here-{3 - number}")
    return number


def ends_in_reverse_order(cfg):
    """Each of the jobs 1, 2, 3 … ``SWEEP_JOBS`` ends after the next job."""
    number = cfg.seed
    if number < int(os.environ["SWEEP_JOBS"]):
        _wait_for(f"ended-{number + 1}")
    _mark(f"ended-{number}").touch()
    return float(number)


def fails_at_2(cfg):
    if cfg.seed == 2:
        raise ValueError("two is not for me")
    return float(cfg.seed)


def diverges_at_2(cfg):
    return float("nan") if cfg.seed == 2 else float(cfg.seed)


def fails_at_2_while_others_work(cfg, run):
    """2 fails once all are there; the others continue until they are told to stop."""
    number = _here(cfg.seed)
    if number == 2:
        _wait_for("here-1")
        raise ValueError("two is not for me")
    return works_until_told(cfg, run)


def works_until_told(cfg, run):
    """Resumed, it completes."""
    if run.resume_checkpoint is None:
        run.progress(1)
        _works(run, cfg.seed)
    return f"continued from {Path(run.resume_checkpoint).name}"


def completes_1_and_works_at_2(cfg, run):
    if cfg.seed == 1:
        return objective(cfg)
    return works_until_told(cfg, run)


def never_stops(cfg):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _mark(f"working-{cfg.seed}").write_text(str(os.getpid()))
    while True:
        time.sleep(0.01)


def first_waits_for_the_third(cfg, run):
    """Job 0 ends after job 2 has begun."""
    number = _here(int(run.run_dir.name))
    if number == 0:
        _wait_for("here-2")
    return float(number)


def works_until_told_in_every_third(cfg, run):
    """Job 2 works until it is told to stop, and completes when it is resumed."""
    number = int(run.run_dir.name)
    if number == 2 and run.resume_checkpoint is None:
        _works(run, number)
    return 100.0 + number if number == 2 else float(number)


def reports_its_rate(cfg, run):
    """40 steps; at each, the value is the step times the learning rate. Stops when told."""
    run.report(0.0, -1)  # of no step: untrained
    for step in steps(run, 40, pause=0.05, total_steps=40):
        value = step * float(cfg.training.lr)
        run.report(value)
        stops_when_told(run, step, f"step-{step}")
    return value


def saves_and_fails_at_2(cfg, run):
    if cfg.seed == 2:
        raise ValueError("two is not for me")
    saves(run, "last", 1)
    return float(cfg.training.lr) + cfg.seed - 1


def works_until_told_at_1(cfg, run):
    """Jobs 0 and 1 work until they may continue or are told to stop; one that resumes completes."""
    number = int(run.run_dir.name)
    if run.resume_checkpoint is not None:
        return 100.0 + number
    with _mark("ran").open("a") as file:
        file.write(f"{number}\n")
    if number < 2:
        _works(run, number, _mark("go-on").exists)
    return float(number)


def counts_to_20(cfg, run):
    """20 steps with a checkpoint at each; the value depends on the rate alone."""
    for step in steps(run, 20, pause=0.02):
        saves(run, "last", step)
    return -abs(float(cfg.training.lr) - 0.002)
