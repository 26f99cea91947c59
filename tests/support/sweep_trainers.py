"""Trainers for sweeps, without torch; what each does depends on ``training.seed``, its number."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from robust_train.model.errors import Interrupted

PATIENCE_SECONDS = 60


def _place(cfg) -> Path:
    return Path(os.environ["SWEEP_PLACE"])


def _wait_for(path: Path) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path.name} never came")
        time.sleep(0.01)


def _save(run, name, step=1) -> None:
    run.checkpoint_dir.mkdir(exist_ok=True)
    path = run.checkpoint_dir / name
    path.touch()
    run.checkpoint_saved(path, step)


def objective(cfg):
    with (_place(cfg) / "ran").open("a") as file:
        file.write(f"{cfg.training.seed}\n")
    return cfg.training.seed * 1.5


def meets_the_other(cfg):
    """Two jobs, 1 and 2: each waits for what the other leaves."""
    number = cfg.training.seed
    (_place(cfg) / f"here-{number}").touch()
    _wait_for(_place(cfg) / f"here-{3 - number}")
    return number


def ends_in_reverse_order(cfg):
    """Of jobs 1, 2, 3 … ``SWEEP_JOBS``, each ends after the one behind it."""
    number = cfg.training.seed
    if number < int(os.environ["SWEEP_JOBS"]):
        _wait_for(_place(cfg) / f"ended-{number + 1}")
    (_place(cfg) / f"ended-{number}").touch()
    return float(number)


def fails_at_2(cfg):
    if cfg.training.seed == 2:
        raise ValueError("two is not for me")
    return float(cfg.training.seed)


def is_killed_at_2(cfg):
    if cfg.training.seed == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return float(cfg.training.seed)


def fails_at_2_while_others_work(cfg, run):
    """2 fails once all are there; the others go on until they are told to stop."""
    number = cfg.training.seed
    (_place(cfg) / f"here-{number}").touch()
    if number == 2:
        _wait_for(_place(cfg) / "here-1")
        raise ValueError("two is not for me")
    return works_until_told(cfg, run)


def works_until_told(cfg, run):
    """Says that it is there; saves a checkpoint when told to stop. Resumed, it completes."""
    number = cfg.training.seed
    if run.resume_checkpoint is not None:
        return f"went on from {Path(run.resume_checkpoint).name}"
    run.progress(1)
    assert not run.stop_requested  # who has looked once is asked to stop, not interrupted
    (_place(cfg) / f"working-{number}").write_text(str(os.getpid()))
    while not run.stop_requested:
        time.sleep(0.01)
    _save(run, "when-told")
    raise Interrupted


def completes_1_and_works_at_2(cfg, run):
    if cfg.training.seed == 1:
        return objective(cfg)
    return works_until_told(cfg, run)


def never_stops(cfg):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    (_place(cfg) / f"working-{cfg.training.seed}").write_text(str(os.getpid()))
    while True:
        time.sleep(0.01)


def first_waits_for_the_third(cfg, run):
    """Of jobs 0, 1 and 2, 0 ends after 2."""
    number = int(run.run_dir.name)
    (_place(cfg) / f"here-{number}").touch()
    if number == 0:
        _wait_for(_place(cfg) / "here-2")
    return float(number)


def works_until_told_in_every_third(cfg, run):
    """Job 2 works until it is told to stop, and completes when it is resumed."""
    number = int(run.run_dir.name)
    if number != 2:
        return float(number)
    if run.resume_checkpoint is not None:
        return 100.0 + number
    _save(run, "when-told")
    (_place(cfg) / f"working-{number}").touch()
    while not run.stop_requested:
        time.sleep(0.01)
    raise Interrupted


def waits_for_two_at_work(cfg, run):
    """Jobs 0 and 1 wait for each other."""
    number = int(run.run_dir.name)
    (_place(cfg) / f"here-{number}").touch()
    with (_place(cfg) / "ran").open("a") as file:
        file.write(f"{number}\n")
    if number < 2:
        _wait_for(_place(cfg) / f"here-{1 - number}")
    return float(number)


def reports_its_rate(cfg, run):
    """40 steps; at each, the value is the step times the learning rate. Stops when told. With a
    rate of 2 the second seed fails."""
    if (float(cfg.training.lr), cfg.training.seed) == (2.0, 2):
        raise ValueError("two is not for me")
    for step in range(1, 41):
        value = step * float(cfg.training.lr)
        run.progress(step, total_steps=40)
        run.report(value)
        if run.stop_requested:
            _save(run, f"step-{step}", step)
            raise Interrupted
        time.sleep(0.05)
    return value


def saves_and_fails_at_2(cfg, run):
    if cfg.training.seed == 2:
        raise ValueError("two is not for me")
    _save(run, "last")
    return float(cfg.training.lr) + cfg.training.seed - 1


def works_until_told_at_1(cfg, run):
    """Jobs 0 and 1 work until they may go on or are told to stop; one that resumes completes."""
    number = int(run.run_dir.name)
    if run.resume_checkpoint is not None:
        return 100.0 + number
    _save(run, "when-told")
    (_place(cfg) / f"working-{number}").touch()
    while number < 2 and not (_place(cfg) / "go-on").exists():
        if run.stop_requested:
            raise Interrupted
        time.sleep(0.01)
    return float(number)


def counts_to_20(cfg, run):
    """20 steps with a checkpoint at each; the value depends on the rate alone."""
    path = run.checkpoint_dir / "last"
    first = int(path.read_text()) if run.resume_checkpoint is not None else 0
    run.checkpoint_dir.mkdir(exist_ok=True)
    for step in range(first + 1, 21):
        time.sleep(0.02)
        path.write_text(str(step))
        run.checkpoint_saved(path, step)
        run.progress(step)
    return -abs(float(cfg.training.lr) - 0.002)
