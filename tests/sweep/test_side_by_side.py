"""``hydra/launcher=gpu_queue``: jobs side by side, each in a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from simulated_nvml import Gpu
from sweep_world import RECORDING, SweepWorld


def test_n_jobs_caps_how_many_run_at_once(sweeps: SweepWorld):
    ended = sweeps.sweep("counts_those_at_work", "training.seed=1,2,3", n_jobs=2)
    assert ended.returncode == 0, ended.output
    assert max(sweeps.column("result")) <= 2


def test_the_sweeper_gets_results_in_order_whichever_job_ends_first(sweeps: SweepWorld):
    sweeps.world.environ["SWEEP_JOBS"] = "3"
    ended = sweeps.sweep("ends_in_reverse_order", "training.seed=1,2,3", RECORDING, n_jobs=3)
    assert ended.returncode == 0, ended.output
    assert sweeps.returned() == {"values": ["1.0", "2.0", "3.0"], "numbers": [0, 1, 2]}


@pytest.mark.slow
def test_a_sweeper_that_hands_out_batches_goes_on_counting(sweeps: SweepWorld):
    ended = sweeps.sweep(
        "objective", "training.seed=1,2,3", RECORDING, "hydra.sweeper.max_batch_size=2"
    )
    assert ended.returncode == 0, ended.output
    assert sweeps.returned() == {"values": ["1.5", "3.0", "4.5"], "numbers": [0, 1, 2]}
    assert sweeps.column("job") == [0, 1, 2]


@pytest.mark.slow
def test_a_job_looks_like_one_of_the_basic_launcher(sweeps: SweepWorld):
    """The same files with the same content in ``.hydra``, but for the launcher's own part."""
    subdir = r"hydra.sweep.subdir=seed_${training.seed}/${hydra.job.num}"
    contents = []
    for launcher in ("basic", "gpu_queue"):
        sweeps.folder = sweeps.world.folder / launcher
        ended = sweeps.sweep("objective", "training.seed=4,5", subdir, f"hydra/launcher={launcher}")
        assert ended.returncode == 0, ended.output
        folder = sweeps.folder / "seed_5" / "1"
        assert (folder / "train_robust.log").exists()
        contents.append(
            {
                path.name: _without_launcher(path, launcher)
                for path in sorted((folder / ".hydra").iterdir())
            }
        )
    assert contents[0] == contents[1]


def _without_launcher(path: Path, launcher: str) -> object:
    content = yaml.safe_load(path.read_text().replace(f"/{launcher}", "/x"))
    if path.name == "hydra.yaml":
        hydra = content["hydra"]
        del hydra["launcher"], hydra["runtime"]["choices"]["hydra/launcher"]
        hydra["overrides"]["hydra"] = [
            line for line in hydra["overrides"]["hydra"] if not line.startswith("hydra/launcher")
        ]
    return content


def test_on_a_terminal_a_table_shows_how_far_each_job_is(sweeps: SweepWorld):
    shown = sweeps.world.run_in_terminal(*sweeps.arguments("objective", "training.seed=1,2"))
    assert "overrides" in shown
    assert "2 jobs:" in shown
    assert "starting" in shown or "waiting" in shown or "running" in shown
    assert "2 of 2 completed" in shown


def test_jobs_that_would_share_a_folder_are_refused_but_for_the_first(sweeps: SweepWorld):
    ended = sweeps.sweep("objective", "training.seed=1,2", "hydra.sweep.subdir=one")
    assert ended.returncode == 2, ended.output
    assert "hydra.sweep.subdir must differ between jobs" in ended.output
    assert sweeps.column("status") == ["completed", "refused"]


def test_a_job_in_the_sweeps_own_folder_is_refused_before_anything_is_written(sweeps: SweepWorld):
    ended = sweeps.sweep("objective", "training.seed=1", "hydra.sweep.subdir=.")
    assert ended.returncode == 2, ended.output
    assert "hydra.sweep.subdir=.: a job needs a run folder of its own" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
    assert not sweeps.folder.exists()


def test_n_jobs_below_1_is_refused_in_one_line(sweeps: SweepWorld):
    ended = sweeps.sweep("objective", "training.seed=1,2", n_jobs=0)
    assert ended.returncode == 2, ended.output
    assert len(ended.stderr.splitlines()) == 1
    assert "hydra.launcher.n_jobs=0" in ended.stderr


def test_without_n_jobs_there_is_a_job_for_each_gpu(sweeps: SweepWorld, machine_with):
    sweeps.world.with_environ(machine_with(Gpu(), Gpu()).environ)
    ended = sweeps.sweep("objective", "training.seed=1,2,3", n_jobs=None)
    assert ended.returncode == 0, ended.output
    assert "3 jobs, 2 at once" in ended.output


def test_a_project_with_a_main_function_of_its_own_can_use_it(sweeps: SweepWorld):
    project = sweeps.world.folder / "project"
    (project / "conf").mkdir(parents=True)
    (project / "conf" / "config.yaml").write_text("defaults: [robust, _self_]\nisolation: none\n")
    (project / "main.py").write_text(
        "import hydra\n"
        "from robust_train import launch\n"
        "@hydra.main(version_base='1.3', config_path='conf', config_name='config')\n"
        "def main(cfg):\n"
        "    return launch('sweep_trainers.fails_at_2', cfg).result\n"
        "if __name__ == '__main__':\n"
        "    main()\n"
    )
    ended = sweeps.world.run(
        "-m",
        "training.seed=1,2,3",
        "hydra/launcher=gpu_queue",
        f"hydra.sweep.dir={sweeps.folder}",
        script=str(project / "main.py"),
    )
    assert ended.returncode == 1, ended.output
    assert sweeps.column("status") == ["completed", "failed", "completed"]
    assert sweeps.column("result") == [1.0, None, 3.0]
