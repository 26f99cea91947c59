"""A launcher chosen where Hydra would silently ignore it: one line, exit code 2, nothing run."""

from __future__ import annotations

from pathlib import Path

import pytest

from sweep_world import SweepWorld
from world import Ended


def refused(ended: Ended, sweeps: SweepWorld) -> str:
    assert ended.returncode == 2, ended.output
    assert "Traceback" not in ended.output
    (line,) = ended.stderr.splitlines()
    assert sweeps.ran == []
    return line


@pytest.fixture
def configs(sweeps: SweepWorld) -> Path:
    folder = sweeps.world.folder / "conf"
    (folder / "experiment").mkdir(parents=True)
    return folder


@pytest.mark.parametrize("script", ["train_robust.py", "train.py"])
def test_a_launcher_without_m(sweeps: SweepWorld, script: str):
    ended = sweeps.world.run(
        "trainer._target_=sweep_trainers.objective", "hydra/launcher=gpu_queue", script=script
    )
    line = refused(ended, sweeps)
    assert "hydra/launcher=gpu_queue" in line
    assert "add -m" in line


def test_several_values_without_m(sweeps: SweepWorld):
    ended = sweeps.world.run("trainer._target_=sweep_trainers.objective", "training.seed=1,2")
    line = refused(ended, sweeps)
    assert "training.seed=1,2" in line
    assert "-m" in line


@pytest.mark.slow
def test_in_an_experiment_file_that_the_sweep_varies(sweeps: SweepWorld, configs: Path):
    for name in ("one", "two"):
        (configs / "experiment" / f"{name}.yaml").write_text(
            "# @package _global_\ndefaults:\n  - override /hydra/launcher: gpu_queue\n"
        )
    arguments = sweeps.arguments("objective", "+experiment=one,two", "hydra/launcher=basic")
    arguments.remove("hydra/launcher=basic")
    ended = sweeps.world.run("--config-dir", str(configs), *arguments)
    line = refused(ended, sweeps)
    assert "gpu_queue" in line
    assert "put hydra/launcher=gpu_queue on the command line" in line


@pytest.mark.slow
def test_in_an_experiment_file_that_is_not_varied_it_counts(sweeps: SweepWorld, configs: Path):
    (configs / "experiment" / "one.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /hydra/launcher: gpu_queue\n"
    )
    arguments = sweeps.arguments(
        "meets_the_other", "+experiment=one", "training.seed=1,2", "hydra.launcher.n_jobs=2"
    )
    arguments.remove("hydra/launcher=gpu_queue")
    ended = sweeps.world.run("--config-dir", str(configs), *arguments)
    assert ended.returncode == 0, ended.output
    assert sweeps.table["launcher"] == "gpu_queue"


def test_in_an_experiment_file_with_a_relative_path(sweeps: SweepWorld, configs: Path):
    (configs / "experiment" / "one.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override hydra/launcher: gpu_queue\n"
    )
    arguments = sweeps.arguments("objective", "+experiment=one", "training.seed=1,2")
    ended = sweeps.world.run("--config-dir", str(configs), *arguments)
    line = refused(ended, sweeps)
    assert "override /hydra/launcher: " in line
    assert "experiment" in line


def test_in_front_of_other_entries_of_a_defaults_list(sweeps: SweepWorld, configs: Path):
    (configs / "mine.yaml").write_text(
        "defaults:\n  - override hydra/launcher: gpu_queue\n  - robust\n"
    )
    arguments = sweeps.arguments("objective", "training.seed=1,2")
    ended = sweeps.world.run("--config-dir", str(configs), "--config-name", "mine", *arguments)
    line = refused(ended, sweeps)
    assert "hydra/launcher: gpu_queue" in line
    assert "end of the defaults list" in line
