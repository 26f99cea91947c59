"""Where the built-in trainer draws: the real libraries, offline, where they are installed."""

import importlib.util
import json
import os
import signal
import sys

import pytest
from omegaconf import OmegaConf

from robust_train.model.errors import ConfigError
from robust_train.vision.keys import check_config
from world import wait_until

JOB = (
    "training.epochs=8",
    "training.num_workers=0",
    "training.log_every_steps=5",
    "training.checkpoint_every_steps=20",
)


@pytest.mark.parametrize("logger", ["wandb", "mlflow"])
def test_a_logger_that_is_not_installed_is_refused_with_the_command_that_brings_it(
    logger, monkeypatch
):
    # as if it were not, wherever this runs
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None)
    monkeypatch.setitem(sys.modules, logger, None)
    with pytest.raises(ConfigError) as refused:
        check_config(OmegaConf.create({"logger": logger}))
    assert str(refused.value) == (
        f"logger={logger}: needs {logger}, which is not installed; "
        f'pip install "robust-train[{logger}]"'
    )


def test_a_logger_that_does_not_exist_is_refused_before_any_attempt(world):
    world.run("logger=wanbd").was_refused(["logger=wanbd: did you mean wandb?"])


def killed_once(world, logger):
    """Run a job whose attempt is killed in its fourth epoch."""
    process = world.start(*JOB, f"logger={logger}")

    def state():
        try:
            return json.loads((world.run_dir / "state.json").read_text())
        except (OSError, ValueError):
            return {}

    wait_until(lambda: (state().get("step") or 0) >= 75, "step 75")
    os.kill(state()["attempt"]["pid"], signal.SIGKILL)
    ended = world.end(process)
    assert ended.returncode == 0, ended.output
    first, second = ended.attempts
    assert first["outcome"] == "interrupted"
    assert 0 < second["start_step"] < first["end_step"], "some steps are done again"


@pytest.mark.slow
def test_a_job_that_was_killed_is_one_run_in_wandb(world):
    pytest.importorskip("wandb", reason="needs robust-train[wandb]")
    killed_once(world.with_environ({"WANDB_MODE": "offline"}), "wandb")
    folders = (world.run_dir / "wandb").glob("offline-run-*")
    job = json.loads((world.run_dir / "job.json").read_text())["id"]
    assert [path.name.rpartition("-")[2] for path in folders] == [job, job]


@pytest.mark.slow
def test_a_job_that_was_killed_is_one_run_in_mlflow(world, tmp_path):
    mlflow = pytest.importorskip("mlflow", reason="needs robust-train[mlflow]")
    server = f"sqlite:///{tmp_path / 'mlflow.db'}"
    killed_once(world.with_environ({"MLFLOW_TRACKING_URI": server}), "mlflow")
    client = mlflow.MlflowClient(server)
    (run,) = client.search_runs(["0"])
    assert run.info.status == "FINISHED"
    assert run.data.params["training.epochs"] == "8"
    steps = [one.step for one in client.get_metric_history(run.info.run_id, "train/loss")]
    assert {1, *range(5, 185, 5)} <= set(steps)
    assert len(client.get_metric_history(run.info.run_id, "val/accuracy")) == 8
