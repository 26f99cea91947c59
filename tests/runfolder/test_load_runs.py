"""``load_runs``: one row a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from live_folder import open_folder

from robust_train import load_runs
from robust_train.folder.state import Summary
from robust_train.model.attempt import Attempt
from robust_train.model.spec import AttemptSpec


def job(folder: Path, lr: float, result: object) -> None:
    record = Attempt(1, AttemptSpec((), 8, 2), seconds=4.0, end_step=10)
    with open_folder(folder, "lora") as live:
        Summary("completed", folder, result=result, attempts=(record,)).write()
        live.ended("completed", None)
    (folder / ".hydra").mkdir()
    (folder / ".hydra" / "config.yaml").write_text(
        f"training:\n  lr: {lr}\n  batch: ${{training.lr}}\nwhere: ${{nowhere:}}\n"
    )


def test_a_sweep_folder_gives_a_row_for_each_job(tmp_path: Path):
    sweep = tmp_path / "sweep"
    for number, lr in enumerate((0.1, 0.2)):
        job(sweep / str(number), lr, {"objective": number, "loss": 1.0})
    rows = load_runs(sweep)
    assert [row["result"]["objective"] for row in rows] == [0, 1]
    assert [row["config"]["training"]["lr"] for row in rows] == [0.1, 0.2]
    assert (rows[0]["status"], rows[0]["name"]) == ("completed", "lora")
    assert rows[0]["samples_per_second"] == pytest.approx(10 * 16 / 4.0)
    assert rows[0]["attempts"][0]["batch_size"] == 8
    json.dumps(rows)
    (only,) = load_runs(sweep / "1")
    assert only == rows[1]
    pytest.importorskip("pandas")
    table = rows.to_pandas()
    assert list(table["config.training.lr"]) == [0.1, 0.2]
    assert list(table["result.loss"]) == [1.0, 1.0]


def test_a_config_that_is_broken_costs_the_config(tmp_path: Path):
    job(tmp_path, 0.1, 1)
    (tmp_path / ".hydra" / "config.yaml").write_text("a: [1,")
    assert [(row["result"], row["config"]) for row in load_runs(tmp_path)] == [(1, {})]


def test_live_and_unknown_folders(tmp_path: Path):
    with open_folder(tmp_path / "live"):
        (row,) = load_runs(tmp_path / "live")
        assert (row["status"], row["result"], row["config"]) == ("starting", None, {})
        assert row["samples_per_second"] is None
    assert load_runs(tmp_path / "live" / "requests") == []
    with pytest.raises(FileNotFoundError, match="no such folder"):
        load_runs(tmp_path / "nowhere")
