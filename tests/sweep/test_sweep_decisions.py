"""What a sweep decides, as pure functions."""

from __future__ import annotations

import dataclasses
import os
import signal
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest
from omegaconf import OmegaConf

from robust_train.config.schema import RobustConfig
from robust_train.files import set_aside
from robust_train.host.signals import SignalWatch, forwarded
from robust_train.sweep import session
from robust_train.sweep.gpu_queue import (
    LaunchedJob,
    count_gpus,
    jobs_at_once,
    table_lines,
)
from robust_train.sweep.job_process import start_job
from robust_train.sweep.record import (
    JobStart,
    SweepJob,
    decide,
    differing_overrides,
    ending_of_process,
    exit_code_of,
    read_record,
    row_of,
    tally,
)
from robust_train.sweep.session import OF_HYDRA
from simulated_nvml import Gpu
from world import wait_until

RECORD = SweepJob(0, ("training.lr=1e-3", "model=cnn"), "first")


@pytest.mark.parametrize(
    ("earlier", "completed", "overrides", "sweep", "resume", "entry"),
    [
        (None, False, ["a=1"], "second", True, JobStart.RUN),
        (None, False, ["a=1"], "second", False, JobStart.AFRESH),
        (RECORD, True, RECORD.overrides, "second", True, JobStart.REUSE),
        (RECORD, False, RECORD.overrides, "second", True, JobStart.RUN),
        (RECORD, True, RECORD.overrides, "second", False, JobStart.AFRESH),
        (RECORD, True, ["training.lr=1e-2", "model=cnn"], "second", True, JobStart.AFRESH),
        (RECORD, False, ["training.lr=1e-3"], "second", True, JobStart.AFRESH),
        # the order does not matter, nor what only says how to resume
        (
            RECORD,
            True,
            ["model=cnn", "sweep_resume=true", "training.lr=1e-3"],
            "second",
            True,
            JobStart.REUSE,
        ),
        # put back into the queue by a scheduler: goes on although a new launch would not
        (RECORD, False, RECORD.overrides, "first", False, JobStart.RUN),
    ],
)
def test_what_happens_to_a_job_follows_from_what_its_folder_holds(
    earlier, completed, overrides, sweep, resume, entry
):
    assert (
        decide(earlier, completed=completed, overrides=overrides, sweep=sweep, resume=resume)
        is entry
    )


@pytest.mark.parametrize(
    ("n_jobs", "jobs", "gpus", "per_gpu", "per_job", "cpus", "at_once"),
    [
        (3, 10, 8, 1, 1, 64, 3),
        (20, 10, 8, 1, 1, 64, 10),
        (None, 10, 8, 1, 1, 64, 8),
        (None, 10, 2, 3, 1, 64, 6),
        (None, 4, 8, 1, 1, 64, 4),
        (None, 10, 8, 1, 3, 64, 2),
        (None, 10, 8, 2, 4, 64, 4),
        (None, 10, 2, 1, 4, 64, 1),
        (None, 100, 0, 1, 1, 16, 8),
        (None, 100, 0, 1, 1, 1, 1),
    ],
)
def test_as_many_jobs_at_once_as_there_is_room_for(
    n_jobs, jobs, gpus, per_gpu, per_job, cpus, at_once
):
    found = jobs_at_once(
        n_jobs, jobs=jobs, gpus=gpus, jobs_per_gpu=per_gpu, gpus_per_job=per_job, cpus=cpus
    )
    assert found == at_once


def test_a_driver_that_hangs_does_not_hold_a_sweep_up(
    monkeypatch: pytest.MonkeyPatch, caplog, machine_with
):
    machine = machine_with(Gpu(), Gpu())
    for name, value in machine.environ.items():
        monkeypatch.setenv(name, value)
    assert count_gpus(RobustConfig()) == 2
    machine.hang("nvmlInit")
    before = set(psutil.Process().children())
    assert count_gpus(RobustConfig(), limit_seconds=1.0) == 0
    assert set(psutil.Process().children()) <= before, "it is not left behind"
    assert "hydra.launcher.n_jobs" in caplog.text


@pytest.mark.parametrize("first_forwarded", [False, True])
def test_a_signal_that_a_sweep_forwards_counts_once_for_a_job_that_received_it_too(
    first_forwarded: bool,
):
    received: list[int] = []
    signals = SignalWatch()
    with signals, signals.handed_to(received.append):
        for signum in sorted((signal.SIGTERM, forwarded(signal.SIGTERM)), reverse=first_forwarded):
            os.kill(os.getpid(), signum)
        assert received == [signal.SIGTERM]
        os.kill(os.getpid(), signal.SIGTERM)
        assert received == [signal.SIGTERM] * 2, "a second one of its own is impatience"


@pytest.mark.parametrize("ends_it", [None, signal.SIGTERM, forwarded(signal.SIGTERM)])
def test_a_paused_job_goes_on_unless_a_signal_ends_it_meanwhile(ends_it: int | None):
    received: list[int] = []
    signals = SignalWatch()
    with signals, signals.handed_to(received.append):
        signals.pause()
        assert received == [signal.SIGTERM]
        if ends_it is not None:
            os.kill(os.getpid(), ends_it)
        assert received == [signal.SIGTERM], "it is stopping already"
        assert signals.goes_on() is (ends_it is None)
        assert signals.received == (None if ends_it is None else signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert received == [signal.SIGTERM] * 2, "a later one counts"


@pytest.mark.parametrize("error", [RuntimeError("a bug"), PermissionError("a bug")])
def test_an_unexpected_error_before_the_first_job_ends_the_sweep(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Hydra makes a warning of an exception, and would run jobs that nothing records."""
    monkeypatch.setattr(session, "check_jobs", Mock(side_effect=error))
    config = OmegaConf.create({"hydra": {"runtime": {"choices": {}}}})
    with pytest.raises(SystemExit, match="1"):
        session.SweepCallback().on_multirun_start(config)
    assert f"{type(error).__name__}: a bug" in capsys.readouterr().err


def row(status: str, exit_code: int):
    record = dataclasses.replace(RECORD, status=status, exit_code=exit_code)
    return row_of(Path("0"), record, None)


def test_the_exit_code_is_that_of_the_first_job_that_failed_by_itself():
    assert exit_code_of([row("completed", 0)]) == 0
    assert exit_code_of([row("completed", 0), row("no_device", 75), row("failed", 1)]) == 75
    assert exit_code_of([row("interrupted", 143), row("failed", 1)]) == 1
    assert exit_code_of([row("completed", 0), row("interrupted", 143)]) == 143


@pytest.mark.parametrize(
    ("returncode", "status", "reason"),
    [(-15, "interrupted", "SIGTERM"), (-36, "died", "killed by signal 36"), (7, "died", "code 7")],
)
def test_a_job_of_which_only_the_process_is_known_has_an_end(
    returncode: int, status: str, reason: str
):
    ended = ending_of_process(RECORD, returncode)
    assert ended.status == status
    assert reason in str(ended.reason)


def test_a_jobs_exit_code_is_known_where_the_sweep_was_started_with_sigchld_ignored(
    tmp_path: Path,
):
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        job = start_job(lambda: 3, tmp_path / "output.log", lambda: None)
        wait_until(lambda: job.exitcode == 3, "its exit code")
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_a_job_without_a_summary_is_listed_as_such():
    died = row_of(Path("0"), RECORD, None)
    assert (died.status, died.exit_code) == ("died", 1)
    rows = [died, row("completed", 0), row("not_started", 0)]
    assert tally(rows) == "1 of 3 completed, 1 died, 1 not started"


def test_the_table_shows_only_in_what_the_jobs_differ():
    first, second = (SweepJob(n, ("model=cnn", f"lr={n}", "seed=1")) for n in (0, 1))
    assert differing_overrides([first, second]) == ["lr=0", "lr=1"]
    assert differing_overrides([first]) == ["model=cnn lr=0 seed=1"]


def test_a_table_too_long_for_the_terminal_keeps_what_runs_and_what_failed():
    statuses = {4: "failed", 7: "running"}
    rows = [LaunchedJob(n, (), "", statuses.get(n, "completed")) for n in range(10)]
    assert [line.split()[0] for line in table_lines(rows, 80, 6)[1:-1]] == ["0", "4", "7"]
    assert len(table_lines(rows, 80, -5)) == 3


def test_the_live_table_fits_its_terminal():
    rows = [LaunchedJob(n, (), f"training.lr=0.{n} " + "model.name=x " * 9) for n in range(9)]
    lines = table_lines(rows, 80, 9)
    assert max(map(len, lines)) <= 80
    assert len(lines) == 8, "and a line for the cursor"
    head = ["job", "overrides", "status", "attempt", "device", "micro-batch", "step", "value"]
    assert lines[0].split() == head
    assert lines[-1] == "9 jobs: 9 pending (3 not shown)"


def test_setting_aside_keeps_what_belongs_to_the_new_job(tmp_path: Path):
    for name in ("journal.jsonl", "attempt-1.log", "train_robust.log", "output.log"):
        (tmp_path / name).touch()
    for name in (".hydra", "checkpoints"):
        (tmp_path / name).mkdir()
    assert set_aside(tmp_path, OF_HYDRA) == tmp_path / "earlier-1"
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {".hydra", "train_robust.log", "output.log", "earlier-1"}
    assert set_aside(tmp_path, OF_HYDRA) is None


@pytest.mark.parametrize("text", ["", "{", "[]", "7", '{"sweep": 1}', '{"overrides": 7}'])
def test_a_record_that_cannot_be_read_is_none(tmp_path: Path, text: str):
    (tmp_path / "sweep_job.json").write_text(text)
    assert read_record(tmp_path) is None
