"""What a job is called that was given no name."""

import os
import re
import time

import pytest
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra

import trainers
import warm
from robust_train import launch
from robust_train.config.trainers import folder_name
from robust_train.folder.state import read_state

OWN = "trainer._target_=my_project.training.train"


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        ([], "cnn_digits"),
        (["model=lora", "dataset=flowers102"], "lora_flowers102"),
        ([OWN], "training.train"),
        ([OWN, "dataset=flowers102"], "cnn_flowers102"),
        ([OWN, "job_name=mine"], "mine"),
        (["trainer=command", "trainer.argv=[python, src/fit.py, -x]"], "fit"),
    ],
)
def test_the_run_folder_is_named_by_what_trains(overrides, name):
    GlobalHydra.instance().clear()
    with initialize_config_module("robust_train.configs", version_base="1.3"):
        cfg = compose("robust", overrides, return_hydra_config=True)
    folder = str(cfg.hydra.run.dir).rpartition("/")[2]
    assert re.fullmatch(rf"\d\d-\d\d-\d\d_{re.escape(name)}_\d+", folder), folder


def test_nested_functions_and_long_names_name_folders():
    assert folder_name(None, None, None, "fit.main.<locals>.train") == "main.train"
    assert len(f"12-00-00_{folder_name('ä' * 300)}_12345".encode()) <= 255
    assert folder_name("a/b c") == "a_b_c"


def test_a_function_names_jobs_and_run_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    at, clock = time.gmtime(0), time.strftime
    monkeypatch.setattr(time, "strftime", lambda form, *_: clock(form, at))  # in one second
    first, second = (launch(trainers.plain, {"isolation": "none"}).run_dir for _ in range(2))
    assert re.fullmatch(r"00-00-00_trainers.plain_\d+", first.name), first
    assert second == first.with_name(f"{first.name}_2")
    assert read_state(second).name == "trainers.plain"


def test_a_refused_command_removes_only_its_folder(tmp_path):
    """A run folder that a config names stays."""
    mine = "defaults: [robust, _self_]\nhydra: {run: {dir: logs}}\n"
    (tmp_path / "mine.yaml").write_text(mine)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "notes.log").touch()
    for config in ((), (f"--config-dir={tmp_path}", "--config-name=mine")):
        words = ("train", *config, "min_batch_size=999")
        refused = warm.robust_train(*words, environ=dict(os.environ), cwd=tmp_path)
        assert (refused.returncode, refused.stdout) == (2, ""), refused.stderr
    assert list((tmp_path / "outputs").iterdir()) == []
    assert (tmp_path / "logs" / "notes.log").exists()
