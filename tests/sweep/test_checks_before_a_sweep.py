"""What is checked before the first job of a sweep, and what is left to the jobs."""

from __future__ import annotations

import pytest
from hydra import initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import setup_globals
from hydra.types import RunMode
from omegaconf import open_dict

from robust_train.cli import jobs
from robust_train.model.errors import ConfigError
from robust_train.sweep.checks import check_jobs


@pytest.fixture
def composed(monkeypatch):
    """The jobs that were composed to be checked."""
    monkeypatch.setattr(HydraConfig.instance(), "cfg", None)  # as when Hydra calls us
    setup_globals()
    GlobalHydra.instance().clear()
    with initialize_config_module("robust_train.configs", version_base="1.3"):
        loader, seen = GlobalHydra.instance().config_loader(), []
        compose = loader.load_sweep_config
        monkeypatch.setattr(
            loader, "load_sweep_config", lambda *own: seen.append(own) or compose(*own)
        )
        yield seen


@pytest.mark.parametrize(
    ("overrides", "params", "refusal", "checks"),
    [
        # what Hydra knows of each job may be used, as its seed too
        (["training.lr=1,2", "job_name='of_${hydra:job.num}'"], {}, None, 2),
        (["training.lr=1,2", "job_name='of_${hydra:runtime.output_dir}'"], {}, None, 2),
        (["training.lr=1,2", "seed='${hydra:job.num}'"], {}, None, 2),
        # values that only go together are no mistake, nor jobs that are impossible by themselves
        (["training.batch_size=32,64", "training.effective_batch_size=32,64"], {}, None, None),
        (["training.batch_size=64,32", "training.effective_batch_size=96,64"], {}, None, None),
        (["min_batch_size=8,4", "training.batch_size=4,8", "seed=1,2,3"], {}, None, None),
        (["isolation=none,process", "num_gpus=2,1", "training.lr=0.1,0.2"], {}, None, None),
        # a value that goes with none of another key's is; checked once, or with two jobs at most
        (["training.lr=hello,0.1"], {}, "training.lr=hello", 1),
        (["training.lr=0.1,hello"], {}, "training.lr=hello", 2),
        (["training.lr=0.1,hello", "seed=1,2,3"], {}, "training.lr=hello", 3),
        (["training.lr=0.1,0.2", "seed=range(100)", "device=moon"], {}, "device=moon", 2),
        (
            ["seed=1,2", "training.batch_size=64,32", "training.effective_batch_size=96,32"],
            *({}, "training.batch_size=64", None),
        ),
        (
            ["dataset=image_folder", "dataset.root='~nobody-here/x'", "training.lr=1,2"],
            *({}, "dataset.root=~nobody-here/x: no such folder", None),
        ),
        # values of a file count too
        (["training.effective_batch_size=16"], {"training.batch_size": "8,16"}, None, None),
        (["seed=1,2"], {"training.lr": "0.1,hello"}, "training.lr=hello", None),
    ],
)
def test_a_value_that_no_job_can_use_is_refused(composed, overrides, params, refusal, checks):
    loader = GlobalHydra.instance().config_loader()
    config = loader.load_configuration("robust", overrides, run_mode=RunMode.MULTIRUN)
    with open_dict(config):
        config.hydra.sweeper.params = params
    if refusal is None:
        check_jobs(config, jobs.check)
        assert HydraConfig.instance().cfg is None
    else:
        with pytest.raises(ConfigError) as error:
            check_jobs(config, jobs.check)
        assert refusal in str(error.value)
    assert checks in (None, len(composed))
