"""The same sweep into the same folder, after an interruption or while it runs."""

import signal

import pytest

from robust_train.sweep.page import sweep_story_of
from world import wait_until


@pytest.mark.parametrize("launcher", [pytest.param("basic", marks=pytest.mark.slow), "gpu_queue"])
def test_an_interrupted_sweep_is_finished(sweeps, launcher):
    arguments = ("completes_1_and_works_at_2", "training.seed=1,2", f"hydra/launcher={launcher}")
    process = sweeps.start(*arguments)
    wait_until(lambda: sweeps.pid_at_work(2), "the second job is at work")
    process.send_signal(signal.SIGTERM)
    sweeps.end(process).with_code(143)
    assert sweeps.column("status") == ["completed", "interrupted"]
    sweeps.sweep(*arguments).with_code(0)
    assert sweeps.ran == ["1"]
    assert sweeps.column("result") == [1.5, "went on from when-told"]
    assert sweeps.column("reused") == [True, False]


def test_another_sweep_in_the_folder_of_a_live_one_is_refused(sweeps):
    arguments = ("completes_1_and_works_at_2", "training.seed=1,2")
    first = sweeps.start(*arguments)
    wait_until(lambda: sweeps.pid_at_work(2), "the second job is at work")
    second = sweeps.sweep("objective", "training.seed=1,2")
    in_use = f"folder {sweeps.folder} is in use by the job of "
    second.was_refused([in_use, f", pid {first.pid}, since ", "hydra.sweep.dir="])
    assert sweep_story_of(sweeps.folder).sentence.endswith(" It is still running.")
    first.kill()
    first.communicate()
    # its jobs save a checkpoint and end; then the folder is free
    sweeps.sweep(*arguments).with_code(0)
    assert sweeps.column("result") == [1.5, "went on from when-told"]
    stopped = sweeps.world.robust_train("stop", str(sweeps.folder), code=1)
    assert "this sweep has ended" in stopped.stderr
