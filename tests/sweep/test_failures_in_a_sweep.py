"""One job's failure: the others continue, or are ended, as the user wishes."""

import csv
import json

import pytest

from sweep_world import RECORDING

OTHERS = ("joblib", "submitit_local")


@pytest.fixture(
    params=[
        "gpu_queue",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("basic", *OTHERS)),
    ]
)
def launcher(request, world):
    if request.param in OTHERS:
        package = f"hydra_plugins.hydra_{request.param.partition('_')[0]}_launcher"
        pytest.importorskip(package, reason="the extra [sweep]")
        world.alone = True
    return request.param


def test_a_failed_job_can_be_run_alone(sweeps, launcher):
    """It is NaN, and a row in every table."""
    options = (RECORDING, f"hydra/launcher={launcher}")
    ended = sweeps.sweep("fails_at_2", "seed=1,2,3", *options, code=1)
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
    assert "seed=2" in rows[1]["overrides"]
    assert "two is not for me" in (sweeps.folder / "report.html").read_text()
    lines = ended.stdout.splitlines()
    assert any(line.split()[:2] == ["1", "failed"] for line in lines)
    assert any(line.startswith("2 of 3 completed, 1 failed") for line in lines)
    assert lines[-1].startswith("to continue: ")
    assert lines[-1].endswith(f"robust-train resume {sweeps.folder}")
    if launcher == "gpu_queue":  # a job's output goes into its own log and not onto the screen
        assert "Traceback" not in ended.output
        assert "ValueError: two is not for me" in ended.output
        logs = [(sweeps.folder / number / "output.log").read_text() for number in "01"]
        assert ["Traceback" in log for log in logs] == [False, True]

    sweeps.sweep("fails_at_2", "seed=1,2", *options, code=1)
    assert sweeps.returned() == ["1.0", "nan"]
    assert sweeps.column("job") == [0, 1], "those of the earlier, larger sweep are not in the table"
    assert sweeps.column("status") == ["completed", "failed"]
    assert sweeps.column("reused") == [True, False]
    assert sweeps.column("result") == [1.0, None]


def test_a_job_that_writes_nothing_has_started(sweeps):
    """It is not taken for a job that was not started."""
    sweeps.folder.mkdir()
    (sweeps.folder / "0").touch()  # no folder can be made there
    ended = sweeps.sweep("fails_at_2", "seed=1").with_code(2)
    assert sweeps.column("status") == ["refused"]
    assert "0 of 1 completed, 1 refused" in ended.stdout


@pytest.mark.parametrize(
    ("swept", "reason"),
    [
        ("training.lr=0.1,hello", "training.lr=hello"),
        ("hydra.sweep.subdir=.", "hydra.sweep.subdir=.: each job needs its own run"),
        ("hydra.launcher.n_jobs=0", "hydra.launcher.n_jobs=0: must be 1 or more"),
    ],
)
def test_unusable_values_are_refused_before_any_job(sweeps, swept, reason):
    sweeps.sweep("objective", swept, n_jobs=None).was_refused([reason])
    assert sweeps.ran == []
    assert not (sweeps.folder / "sweep.json").exists()


@pytest.mark.slow
def test_a_refused_job_says_so_once(sweeps, launcher):
    """The exit code is 2."""
    both = ("training.batch_size=8,4", "min_batch_size=4,8")  # each is fine beside the first ones
    ended = sweeps.sweep("objective", *both, f"hydra/launcher={launcher}").with_code(2)
    before, _, table = ended.stdout.rpartition("\nsweep, the largest result first:\n")
    said = (before + ended.stderr).count("must not be above")
    assert said == (launcher != "submitit_local"), "its jobs have logs of their own"
    assert table.count("must not be above") == 1
    assert sweeps.column("status") == ["completed", "completed", "completed", "refused"]
    assert "min_batch_size=8" in sweeps.jobs[3]["reason"]


def test_fail_fast_ends_all_other_jobs(sweeps):
    """It starts no more jobs and ends those that run."""
    options = ("seed=1,2,3,4", "sweep_fail_fast=true", RECORDING)
    sweeps.sweep("fails_at_2_while_others_work", *options, code=1)
    assert sweeps.column("status") == ["interrupted", "failed", "not_started", "not_started"]
    assert sweeps.returned() == ["nan"] * 4
    assert sweeps.summary(0)["checkpoint"] is not None
    assert json.loads((sweeps.folder / "0" / "job.json").read_text())["launches"] == 0
    assert not (sweeps.folder / "2").exists()
    assert not (sweeps.folder / "3").exists()


BREAKS = """
import os
from pathlib import Path

def train(cfg):
    Path(os.environ["SWEEP_PLACE"], "experiment", "two.yaml").write_text("{")
    return 1.0
"""


@pytest.mark.parametrize(
    ("fails_fast", "last"),
    [("false", "completed"), pytest.param("true", "not_started", marks=pytest.mark.slow)],
)
def test_a_broken_config_costs_only_its_job(sweeps, fails_fast, last):
    """It is broken while the sweep runs."""
    (sweeps.world.folder / "breaks.py").write_text(BREAKS)
    (sweeps.place / "experiment").mkdir()
    for name in ("one", "two", "three"):
        (sweeps.place / "experiment" / f"{name}.yaml").write_text("# @package _global_\nseed: 1\n")
    swept = ("+experiment=one,two,three", f"sweep_fail_fast={fails_fast}")
    arguments = sweeps.arguments("breaks.train", *swept, n_jobs=1)
    sweeps.world.run("--config-dir", str(sweeps.place), *arguments, code=2)
    assert sweeps.column("status") == ["completed", "refused", last]
    assert "two.yaml, line 1" in sweeps.jobs[1]["reason"]
