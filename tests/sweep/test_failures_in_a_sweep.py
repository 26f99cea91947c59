"""One job's failure: the others go on, or are ended, as the user wishes."""

from __future__ import annotations

import csv
import json

import pytest

from sweep_world import RECORDING, SweepWorld

LAUNCHERS = pytest.mark.parametrize(
    "launcher", [pytest.param("basic", marks=pytest.mark.slow), "gpu_queue"]
)


@LAUNCHERS
def test_a_failed_job_is_nan_for_the_sweeper_and_a_row_in_every_table(
    sweeps: SweepWorld, launcher: str
):
    ended = sweeps.sweep(
        "fails_at_2", "training.seed=1,2,3", RECORDING, f"hydra/launcher={launcher}"
    )
    assert ended.returncode == 1, ended.output
    assert sweeps.returned() == ["1.0", "nan", "3.0"]
    assert sweeps.column("status") == ["completed", "failed", "completed"]
    assert sweeps.column("result") == [1.0, None, 3.0]
    assert sweeps.column("exit_code") == [0, 1, 0]
    assert sweeps.table["exit_code"] == 1
    assert sweeps.table["launcher"] == launcher
    assert "two is not for me" in sweeps.jobs[1]["reason"]
    with (sweeps.folder / "sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["status"] for row in rows] == ["completed", "failed", "completed"]
    assert [row["result"] for row in rows] == ["1.0", "", "3.0"]
    assert "training.seed=2" in rows[1]["overrides"]
    lines = ended.stdout.splitlines()
    assert any(line.split()[:2] == ["1", "failed"] for line in lines)
    assert any(line.startswith("2 of 3 completed, 1 failed") for line in lines)
    assert lines[-1].startswith("to go on: ")
    assert lines[-1].endswith(f"robust-train resume {sweeps.folder}")
    if launcher == "gpu_queue":  # a job's output goes into its own log and not onto the screen
        assert "Traceback" not in ended.output
        assert "ValueError: two is not for me" in ended.output
        logs = [(sweeps.folder / number / "output.log").read_text() for number in "01"]
        assert ["Traceback" in log for log in logs] == [False, True]


@pytest.mark.slow
def test_a_job_whose_process_is_killed_is_listed_and_the_others_go_on(sweeps: SweepWorld):
    ended = sweeps.sweep("is_killed_at_2", "training.seed=1,2,3", RECORDING)
    assert ended.returncode == 1, ended.output
    assert sweeps.returned() == ["1.0", "nan", "3.0"]
    assert sweeps.column("status") == ["completed", "died", "completed"]
    assert "SIGKILL" in sweeps.jobs[1]["reason"]


def test_a_job_that_can_write_nothing_is_not_taken_for_one_that_was_not_started(
    sweeps: SweepWorld,
):
    sweeps.folder.mkdir()
    (sweeps.folder / "0").touch()  # no folder can be made there
    ended = sweeps.sweep("fails_at_2", "training.seed=1")
    assert ended.returncode == 2, ended.output
    assert sweeps.column("status") == ["refused"]
    assert "0 of 1 completed, 1 refused" in ended.stdout


@pytest.mark.parametrize(
    ("swept", "reason"),
    [
        ("training.lr=0.1,hello", "training.lr=hello"),
        ("hydra.sweep.subdir=.", "hydra.sweep.subdir=.: each job needs a run folder of its own"),
        ("hydra.launcher.n_jobs=0", "hydra.launcher.n_jobs=0: must be 1 or more"),
    ],
)
def test_a_value_that_cannot_be_used_is_refused_before_the_first_job_starts(
    sweeps: SweepWorld, swept: str, reason: str
):
    ended = sweeps.sweep("objective", swept, n_jobs=None)
    assert ended.returncode == 2, ended.output
    assert reason in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
    assert sweeps.ran == []
    assert not (sweeps.folder / "sweep.json").exists()


@pytest.mark.slow
@LAUNCHERS
def test_a_refused_job_says_so_once_and_the_exit_code_is_2(sweeps: SweepWorld, launcher: str):
    both = ("training.batch_size=8,4", "min_batch_size=4,8")  # each is fine beside the first ones
    ended = sweeps.sweep("objective", *both, f"hydra/launcher={launcher}")
    assert ended.returncode == 2, ended.output
    assert ended.output.count("must not be above") == 1
    assert sweeps.column("status") == ["completed", "completed", "completed", "refused"]
    assert "min_batch_size=8" in sweeps.jobs[3]["reason"]


def test_fail_fast_starts_no_more_jobs_and_ends_those_that_run(sweeps: SweepWorld):
    ended = sweeps.sweep(
        "fails_at_2_while_others_work",
        "training.seed=1,2,3,4",
        "sweep_fail_fast=true",
        RECORDING,
    )
    assert ended.returncode == 1, ended.output
    assert sweeps.column("status") == ["interrupted", "failed", "not_started", "not_started"]
    assert sweeps.returned() == ["nan"] * 4
    assert sweeps.summary(0)["checkpoint"] is not None
    assert json.loads((sweeps.folder / "0" / "job.json").read_text())["launches"] == 0
    assert not (sweeps.folder / "2").exists()
    assert not (sweeps.folder / "3").exists()
