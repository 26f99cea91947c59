"""``-m``: several jobs from one command line, one after the other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from world import World


def job_summaries(sweep: Path) -> list[dict]:
    folders = sorted(p.parent for p in sweep.glob("*/summary.json"))
    return [json.loads((folder / "summary.json").read_text()) for folder in folders]


@pytest.fixture
def sweep(world: World) -> Path:
    return world.folder / "sweep"


def test_every_combination_is_a_job_with_a_folder_of_its_own(world: World, sweep: Path):
    ended = world.run(
        "-m",
        "trainer._target_=trainers.what_it_was_given",
        "training.batch_size=8,16",
        "training.lr=1e-3,1e-4",
        f"hydra.sweep.dir={sweep}",
    )
    assert ended.returncode == 0, ended.output
    results = [summary["result"] for summary in job_summaries(sweep)]
    assert [(r["batch_size"], r["lr"]) for r in results] == [
        (8, 1e-3),
        (8, 1e-4),
        (16, 1e-3),
        (16, 1e-4),
    ]


def test_a_failed_job_does_not_stop_the_others(world: World, sweep: Path):
    ended = world.run(
        "-m",
        "trainer._target_=trainers.fails_unless_first_lr",
        "training.lr=1e-2,1e-3",
        f"hydra.sweep.dir={sweep}",
    )
    assert ended.returncode == 1, ended.output
    assert [s["status"] for s in job_summaries(sweep)] == ["failed", "completed"]
    assert "this learning rate is not for me" in ended.stderr


def test_the_result_is_the_objective_of_a_sweeper(world: World, sweep: Path):
    """Hydra hands the task's return value to its sweeper; a callback sees the same value."""
    ended = world.run(
        "-m",
        "trainer._target_=trainers.returns_an_objective",
        "training.lr=1e-3,1e-2",
        f"hydra.sweep.dir={sweep}",
        "+hydra.callbacks.seen._target_=objective_recorder.ObjectiveRecorder",
    )
    assert ended.returncode == 0, ended.output
    lines = (world.folder / "objectives").read_text().splitlines()
    assert [yaml.safe_load(line) for line in lines] == [1.0, 10.0]
    assert [s["result"]["note"] for s in job_summaries(sweep)] == [0.5, 0.5]


def test_a_sweep_with_a_wrong_value_is_refused_before_its_first_job(world: World, sweep: Path):
    ended = world.run(
        "-m",
        "trainer._target_=trainers.returns_an_objective",
        "training.batch_size=0,8",
        f"hydra.sweep.dir={sweep}",
    )
    assert ended.returncode == 2, ended.output
    assert "training.batch_size=0" in ended.stderr
    assert job_summaries(sweep) == []
