"""What is checked before the first job of a sweep, and what is left to the jobs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hydra import initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import setup_globals
from hydra.types import RunMode
from omegaconf import open_dict

from robust_train.cli import jobs
from robust_train.errors import ConfigError
from robust_train.sweep import session


@pytest.fixture(autouse=True)
def composing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(session, "_check", jobs.check)
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
    session.check_jobs(config)


@pytest.mark.parametrize("name", ["job.num", "job.id", "job.name", "runtime.output_dir"])
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
