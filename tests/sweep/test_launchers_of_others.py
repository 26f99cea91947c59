"""Hydra's other launchers that run jobs on this machine."""

from __future__ import annotations

import pytest

from sweep_world import RECORDING, SweepWorld

JOBLIB = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
SUBMITIT = ["hydra/launcher=submitit_local"]


@pytest.fixture(params=[JOBLIB, SUBMITIT], ids=["joblib", "submitit_local"])
def launcher(request: pytest.FixtureRequest) -> list[str]:
    name = request.param[0].partition("=")[2].partition("_")[0]
    pytest.importorskip(f"hydra_plugins.hydra_{name}_launcher", reason="the extra [sweep]")
    return request.param


def test_a_failure_is_nan_and_the_repeated_sweep_runs_only_what_failed(
    sweeps: SweepWorld, launcher: list[str]
):
    arguments = ("fails_at_2", "training.seed=1,2", RECORDING, *launcher)
    ended = sweeps.sweep(*arguments)
    assert ended.returncode == 1, ended.output
    assert sweeps.returned() == {"values": ["1.0", "nan"], "numbers": [0, 1]}
    assert sweeps.column("status") == ["completed", "failed"]
    assert "1 of 2 completed, 1 failed" in ended.stdout
    ended = sweeps.sweep(*arguments)
    assert ended.returncode == 1, ended.output
    assert sweeps.returned()["values"] == ["1.0", "nan"]
    assert sweeps.column("reused") == [True, False]


def test_jobs_run_side_by_side_in_one_sweep_folder(sweeps: SweepWorld, launcher: list[str]):
    """In the default folder, whose name holds the process's id; attempts as by default."""
    arguments = sweeps.arguments("meets_the_other", "training.seed=1,2", *launcher)
    arguments.remove(f"hydra.sweep.dir={sweeps.folder}")
    arguments.remove("isolation=none")
    ended = sweeps.world.run(*arguments)
    assert ended.returncode == 0, ended.output
    (sweeps.folder,) = (sweeps.world.folder / "multirun").glob("*/*")
    assert sweeps.column("result") == [1, 2]
