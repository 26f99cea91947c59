"""What is checked before the first job of a sweep, and what is left to the jobs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hydra import initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import setup_globals
from hydra.types import RunMode
from omegaconf import DictConfig, open_dict

from robust_train.cli import jobs
from robust_train.model.errors import ConfigError
from robust_train.sweep.checks import check_jobs


@pytest.fixture(autouse=True)
def composing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(HydraConfig.instance(), "cfg", None)  # as when Hydra calls us
    setup_globals()
    GlobalHydra.instance().clear()
    with initialize_config_module("robust_train.configs", version_base="1.3"):
        yield


def check(*overrides: str, **params: str) -> None:
    loader = GlobalHydra.instance().config_loader()
    config = loader.load_configuration("robust", list(overrides), run_mode=RunMode.MULTIRUN)
    with open_dict(config):
        config.hydra.sweeper.params = {key.replace("__", "."): v for key, v in params.items()}
    check_jobs(config, jobs.check)


@pytest.mark.parametrize("name", ["job.num", "runtime.output_dir"])
def test_what_hydra_knows_of_each_job_may_be_used(name: str):
    check("training.lr=1,2", f"job_name='of_${{hydra:{name}}}'")
    assert HydraConfig.instance().cfg is None


def test_a_number_of_each_job_may_be_its_seed():
    check("training.lr=1,2", "seed='${hydra:job.num}'")


def test_values_that_only_go_together_are_no_mistake():
    check("training.batch_size=32,64", "training.effective_batch_size=32,64")
    with pytest.raises(ConfigError, match=r"training\.lr=hello"):
        check("training.lr=0.1,hello", "seed=1,2")


def test_values_of_a_file_count_too():
    check("training.effective_batch_size=16", training__batch_size="8,16")
    with pytest.raises(ConfigError, match=r"training\.lr=hello"):
        check("seed=1,2", training__lr="0.1,hello")


@pytest.mark.parametrize(
    "overrides",
    [
        ("training.batch_size=64,32", "training.effective_batch_size=96,64"),
        ("min_batch_size=8,4", "training.batch_size=4,8", "seed=1,2,3"),
        ("isolation=none,process", "num_gpus=2,1", "training.lr=0.1,0.2", "seed=1,2"),
    ],
)
def test_jobs_that_alone_are_impossible_are_left_to_themselves(overrides: tuple[str, ...]):
    check(*overrides)


def test_a_value_that_goes_with_no_value_of_another_key_is_a_mistake():
    with pytest.raises(ConfigError, match=r"training\.batch_size=64"):
        check("seed=1,2", "training.batch_size=64,32", "training.effective_batch_size=96,32")


def test_a_mistake_is_checked_once_or_with_two_jobs_at_most(monkeypatch: pytest.MonkeyPatch):
    seen: list[list[str]] = []
    loader = GlobalHydra.instance().config_loader()
    compose = loader.load_sweep_config

    def count(config: DictConfig, overrides: list[str]) -> DictConfig:
        seen.append(overrides)
        return compose(config, overrides)

    monkeypatch.setattr(loader, "load_sweep_config", count)
    for overrides, checks in (
        (("training.lr=hello,0.1",), 1),
        (("training.lr=0.1,hello",), 2),
        (("training.lr=0.1,0.2", "seed=range(100)", "device=moon"), 2),
        (("training.lr=0.1,hello", "seed=1,2,3"), 3),
    ):
        seen.clear()
        with pytest.raises(ConfigError):
            check(*overrides)
        assert len(seen) == checks


def test_a_folder_of_a_user_that_does_not_exist_is_refused_in_one_line():
    with pytest.raises(ConfigError, match=r"dataset\.root=~nobody-here/x: no such folder"):
        check("dataset=image_folder", "dataset.root='~nobody-here/x'", "training.lr=1,2")
