"""Hydra's other launchers that run jobs on this machine."""

import os
import signal

import pytest

from simulated_nvml import Gpu
from world import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("alone")]

JOBLIB = ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2")
SUBMITIT = ("hydra/launcher=submitit_local",)
RAY = ("num_gpus=2", "num_cpus=2", "include_dashboard=false")


@pytest.fixture(params=[JOBLIB, SUBMITIT], ids=["joblib", "submitit_local"])
def launcher(request):
    name = request.param[0].partition("=")[2].partition("_")[0]
    pytest.importorskip(f"hydra_plugins.hydra_{name}_launcher", reason="the extra [sweep]")
    return request.param


def test_parallel_jobs_have_their_own_gpu(sweeps, launcher, cuda_machine_with):
    """In one sweep folder: the default folder, whose name holds the process's id; attempts by
    default.
    """
    sweeps.world.with_environ(cuda_machine_with(Gpu(), Gpu()).environ)
    arguments = sweeps.arguments("meets_the_other", "seed=1,2", *launcher)
    arguments.remove(f"hydra.sweep.dir={sweeps.folder}")
    arguments.remove("isolation=none")
    sweeps.world.run(*arguments).with_code(0)
    (sweeps.folder,) = (sweeps.world.folder / "multirun").glob("*/*")
    assert sweeps.column("result") == [1, 2]
    assert sorted(sweeps.column("devices")) == [["cuda:0"], ["cuda:1"]]


def test_a_preempted_sweep_job_is_requeued_and_resumes(sweeps):
    """As under Slurm, whose part submitit's local executor plays: a signal, an end, a new start."""
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="the extra [slurm]")
    arguments = ("works_until_told", "seed=1,2", *SUBMITIT)
    sweep = sweeps.start(*arguments)
    wait_until(lambda: sweeps.pid_at_work(1) and sweeps.pid_at_work(2), "both jobs are at work")
    for number in (1, 2):
        os.kill(sweeps.pid_at_work(number), signal.SIGUSR2)
    sweeps.end(sweep).with_code(0)
    assert sweeps.column("result") == ["continued from when-told"] * 2


def test_the_slurm_launcher_needs_slurm(sweeps):
    """It is refused in one line."""
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="the extra [slurm]")
    ended = sweeps.sweep("objective", "seed=1,2", "hydra/launcher=robust_slurm")
    ended.was_refused(["hydra/launcher=submitit_slurm: srun is not installed here"])


@pytest.mark.parametrize(
    ("choice", "missing", "extra"),
    [
        ("hydra/launcher=robust_ray", "hydra_plugins.hydra_ray_launcher", "ray"),
        ("hydra/sweeper=robust_optuna", "optuna", "sweep"),
    ],
)
def test_a_missing_plugin_is_named_with_its_extra(sweeps, choice, missing, extra):
    """Python finds no module of a package whose entry among the loaded ones is None."""
    hider = sweeps.world.folder / "hider"
    hider.mkdir()
    (hider / "sitecustomize.py").write_text(f"import sys\nsys.modules['{missing}'] = None\n")
    sweeps.world.environ["PYTHONPATH"] = f"{hider}:{sweeps.world.environ['PYTHONPATH']}"
    ended = sweeps.sweep("objective", "seed=1,2", choice, n_jobs=None)
    ended.was_refused([f'pip install "robust-train[{extra}]"'])


def test_ray_gives_each_job_a_gpu(sweeps, cuda_machine_with):
    """The job stays inside."""
    pytest.importorskip("hydra_plugins.hydra_ray_launcher", reason="the extra [ray]")
    sweeps.world.with_environ(cuda_machine_with(Gpu(), Gpu()).environ)
    of_ray = (f"+hydra.launcher.ray.init.{option}" for option in RAY)
    launcher = ("isolation=process", "hydra/launcher=robust_ray", *of_ray)
    arguments = sweeps.arguments("meets_the_other", "seed=1,2", *launcher)
    ended = sweeps.world.run(*arguments, code=0)
    assert sorted(sweeps.column("devices")) == [["cuda:0"], ["cuda:1"]]
    assert ended.output.count("allocated by Ray: the host's own queue is not used") == 2
