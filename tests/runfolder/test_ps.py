"""``robust-train ps``: a line a job that fits a terminal, a line a sweep."""

import json
import os
import sys

import pytest
from live_folder import died, ended, open_folder

from robust_train.cli.ps import short_folder
from robust_train.sweep.record import SweepJob, SweepTable
from terminal import run_at_a_terminal

LONG = "a-run-folder-with-a-long-name-and-a-date-2026-11-29_12-00-00-123456"


@pytest.fixture
def a_sweep(tmp_path):
    folder = tmp_path / "multirun" / "lr"
    for number in (0, 1):
        ended(folder / str(number), "training.train", "completed", result=0.5 + number)
        job = SweepJob(number, ("a=1", f"lr={number}"), "id", folder=str(folder / str(number)))
        job.write(folder / str(number))
    SweepTable("id", "gpu_queue", "ended", 0).write(folder)
    return folder


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_each_job_is_one_line_of_the_terminal(tmp_path, says, columns):
    job = ended(tmp_path / LONG / "1", "a.trainer.of.a.long.name", "interrupted")
    ps = [sys.executable, "-m", "robust_train.cli.main", "ps"]
    _, shown = run_at_a_terminal(ps, dict(os.environ), columns=columns)
    header, row = shown.splitlines()
    assert row.startswith(job)
    assert max(len(header), len(row)) <= columns
    assert row.endswith("56/1"), "the end of the folder is what differs"


def test_whole_paths_on_demand_and_in_a_pipe(tmp_path, says):
    ended(tmp_path / LONG, "lora", "completed")
    for more in ([], ["--paths"]):
        assert says("ps", *more).out.splitlines()[1].endswith(str(tmp_path / LONG))


def test_a_sweep_is_one_line_that_opens(tmp_path, says, a_sweep):
    alone = died(tmp_path / "alone")
    out = says("ps").out.splitlines()
    assert [line.split()[:2] for line in out[1:3]] == [["sweep", "ended"], [alone, "died"]]
    assert "2 of 2 jobs" in out[1]
    assert out[1].endswith(str(a_sweep))
    jobs = says("ps", a_sweep).out.splitlines()[1:]
    assert [line.split()[-2] for line in jobs] == ["lr=0", "lr=1"]
    assert len(json.loads(says("ps", a_sweep, "--json").out)["runs"]) == 2
    assert len(json.loads(says("ps", "--json").out)["runs"]) == 3
    assert "not a sweep folder" in says("ps", tmp_path / "alone", code=2).err


def test_commands_that_were_refused_are_left_out(tmp_path, says):
    with open_folder(tmp_path / "mistake") as folder:
        folder.record_end("failed", "model.lr=x: must be a number", 2)
        mistake = folder.state.id
    job = ended(tmp_path / "a", "lora", "completed")
    _, row, note = says("ps").out.splitlines()
    assert row.startswith(job)
    assert note == "refused before training: 1 job; --all shows them"
    assert mistake in says("ps", "--all").out


def test_a_folder_is_shown_from_here_or_home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    assert short_folder(tmp_path / "outputs" / "1", 20) == "outputs/1"
    assert short_folder(tmp_path.parent / "other", 20) == "~/other"
    assert short_folder(tmp_path / "outputs" / "2026-11-29", 8) == "…6-11-29"
