"""``hydra/launcher=gpu_queue``: jobs side by side, each in a process of its own."""

import pytest

from sweep_world import RECORDING
from world import wait_until


def test_a_running_sweep_can_change_its_parallelism(sweeps):
    """This is the number of jobs at once."""
    process = sweeps.start("meets_the_other", "seed=1,2", n_jobs=1)
    wait_until(lambda: (sweeps.place / "here-1").exists(), "the first waits for the second")
    assert not (sweeps.place / "here-2").exists(), "n_jobs caps how many run at once"
    words = ("sweep", "limit", str(sweeps.folder), "2")
    changed = sweeps.world.robust_train(*words)
    assert changed.stdout == f"{sweeps.folder}: at most 2 jobs at once from now on\n"
    sweeps.end(process).with_code(0)
    assert sweeps.column("result") == [1, 2]
    assert "this sweep has ended" in sweeps.world.robust_train(*words, code=1).stderr


def test_the_sweeper_gets_results_in_order(sweeps):
    """It does not matter which job ends first."""
    sweeps.world.environ["SWEEP_JOBS"] = "3"
    seeds = "seed=1,2,3"
    sweeps.sweep("ends_in_reverse_order", seeds, RECORDING, n_jobs=3, code=0)
    assert sweeps.returned() == ["1.0", "2.0", "3.0"]


def test_a_terminal_table_shows_each_jobs_progress(sweeps):
    arguments = sweeps.arguments("objective", "seed=1,2", n_jobs=1)
    shown = sweeps.world.run_in_terminal(*arguments)
    assert "overrides" in shown
    assert "0 of 2 completed, 1 not started, 1 " in shown
    assert "starting" in shown or "waiting" in shown or "running" in shown
    assert "2 of 2 completed" in shown


OF_ITS_OWN = """
import hydra
from robust_train import launch
@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg):
    return launch("sweep_trainers.fails_at_2", cfg).result
if __name__ == "__main__":
    main()
"""


@pytest.mark.slow
def test_projects_with_their_own_main_can_sweep(sweeps):
    project = sweeps.world.folder / "project"
    (project / "conf").mkdir(parents=True)
    searchpath = "hydra: {searchpath: [pkg://robust_train.configs]}"
    text = f"defaults: [robust, _self_]\nisolation: none\n{searchpath}\n"
    (project / "conf" / "config.yaml").write_text(text)
    (project / "main.py").write_text(OF_ITS_OWN)
    folder = f"hydra.sweep.dir={sweeps.folder}"
    arguments = ("-m", "seed=1,2,3", "hydra/launcher=gpu_queue", folder)
    sweeps.world.run(*arguments, script=str(project / "main.py"), code=1)
    assert sweeps.column("status") == ["completed", "failed", "completed"]
    assert sweeps.column("result") == [1.0, None, 3.0]
