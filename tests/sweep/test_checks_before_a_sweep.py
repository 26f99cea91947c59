"""What is checked before the first job of a sweep, and what is left to the jobs."""

import math

import pytest
from hydra import initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import setup_globals
from hydra.types import RunMode
from omegaconf import open_dict

from robust_train.cli import jobs
from robust_train.model.errors import ConfigError
from robust_train.sweep import checks
from robust_train.sweep.checks import check_jobs


@pytest.fixture
def composed(monkeypatch):
    """Hydra as it is when it calls us."""
    monkeypatch.setattr(HydraConfig.instance(), "cfg", None)
    monkeypatch.setattr(checks, "MOST_SECONDS", math.inf)  # however slow this machine is
    setup_globals()
    GlobalHydra.instance().clear()
    with initialize_config_module("robust_train.configs", version_base="1.3"):
        yield


@pytest.mark.parametrize(
    ("overrides", "params", "refusal"),
    [
        # what Hydra knows of each job may be used, as its seed too
        (["training.lr=1,2", "job_name='of_${hydra:job.num}'"], {}, None),
        (["training.lr=1,2", "job_name='of_${hydra:runtime.output_dir}'"], {}, None),
        (["training.lr=1,2", "seed='${hydra:job.num}'"], {}, None),
        # values that only go together are no mistake, nor jobs that are impossible by themselves
        (["training.batch_size=32,64", "training.effective_batch_size=32,64"], {}, None),
        (["training.batch_size=64,32", "training.effective_batch_size=96,64"], {}, None),
        (["min_batch_size=8,4", "training.batch_size=4,8", "seed=1,2,3"], {}, None),
        (["isolation=none,process", "num_gpus=2,1", "training.lr=0.1,0.2"], {}, None),
        # what a key cannot be
        (["training.lr=hello,0.1"], {}, "training.lr=hello"),
        (["training.lr=0.1,hello"], {}, "training.lr=hello"),
        (["training.lr=0.1,hello", "seed=range(100)"], {}, "training.lr=hello"),
        (["model=none,cnn,cmn"], {}, "model=cmn: no such option"),
        # each job is refused for a reason of its own: left to them
        (["training.batch_size=64", "training.effective_batch_size=96,32"], {}, None),
        # what no job can have
        (["training.lr=0.1,0.2", "seed=range(100)", "device=moon"], {}, "device=moon"),
        (
            ["dataset=image_folder", "dataset.root='~nobody-here/x'", "training.lr=1,2"],
            *({}, "dataset.root=~nobody-here/x: no such folder"),
        ),
        # values of a file count too
        (["training.effective_batch_size=16"], {"training.batch_size": "8,16"}, None),
        (["seed=1,2"], {"training.lr": "0.1,hello"}, "training.lr=hello"),
    ],
)
def test_a_sweep_that_cannot_be_run_is_refused(composed, overrides, params, refusal):
    loader = GlobalHydra.instance().config_loader()
    config = loader.load_configuration("robust", overrides, run_mode=RunMode.MULTIRUN)
    with open_dict(config):
        config.hydra.sweeper.params = params
    if refusal is None:
        check_jobs(config, jobs.check_before_sweep)
        assert HydraConfig.instance().cfg is None
    else:
        with pytest.raises(ConfigError) as error:
            check_jobs(config, jobs.check_before_sweep)
        assert refusal in str(error.value)
