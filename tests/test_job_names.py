"""What a job is called that was given no name."""

import re

import pytest
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra

import trainers
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


def test_a_function_within_another_and_a_long_name_make_names_of_folders():
    assert folder_name(None, None, None, "fit.main.<locals>.train") == "main.train"
    assert len(f"12-00-00_{folder_name('ä' * 300)}_12345".encode()) <= 255
    assert folder_name("a/b c") == "a_b_c"


def test_a_function_gives_its_name_to_its_job_and_run_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = launch(trainers.plain, {"isolation": "none"}).run_dir
    assert re.fullmatch(r"[\d-]+_trainers.plain_\d+", folder.name), folder
    assert read_state(folder).name == "trainers.plain"
