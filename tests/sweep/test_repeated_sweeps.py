"""The same sweep into the same folder: what is completed is not run again."""

from __future__ import annotations

import signal

import pytest

from robust_train.sweep.page import sweep_story_of
from sweep_world import RECORDING, SweepWorld
from world import wait_until

LAUNCHERS = pytest.mark.parametrize(
    "launcher", [pytest.param("basic", marks=pytest.mark.slow), "gpu_queue"]
)


@LAUNCHERS
def test_completed_jobs_are_not_run_again_and_failed_ones_are(sweeps: SweepWorld, launcher: str):
    arguments = (RECORDING, f"hydra/launcher={launcher}")
    assert sweeps.sweep("fails_at_2", "training.seed=1,2,3", *arguments).returncode == 1
    ended = sweeps.sweep("fails_at_2", "training.seed=1,2", *arguments)
    assert ended.returncode == 1, ended.output
    assert sweeps.returned() == ["1.0", "nan"]
    assert sweeps.column("job") == [0, 1], "those of the earlier, larger sweep are not in the table"
    assert sweeps.column("status") == ["completed", "failed"]
    assert sweeps.column("reused") == [True, False]
    assert sweeps.column("result") == [1.0, None]


@LAUNCHERS
def test_an_interrupted_sweep_is_finished(sweeps: SweepWorld, launcher: str):
    arguments = ("completes_1_and_works_at_2", "training.seed=1,2", f"hydra/launcher={launcher}")
    process = sweeps.start(*arguments)
    wait_until(lambda: sweeps.pid_at_work(2), "the second job is at work")
    process.send_signal(signal.SIGTERM)
    assert sweeps.end(process).returncode == 143
    assert sweeps.column("status") == ["completed", "interrupted"]
    ended = sweeps.sweep(*arguments)
    assert ended.returncode == 0, ended.output
    assert sweeps.ran == ["1"]
    assert sweeps.column("result") == [1.5, "went on from when-told"]
    assert sweeps.column("reused") == [True, False]


def test_another_sweep_in_the_folder_of_a_live_one_is_refused(sweeps: SweepWorld):
    arguments = ("completes_1_and_works_at_2", "training.seed=1,2")
    first = sweeps.start(*arguments)
    wait_until(lambda: sweeps.pid_at_work(2), "the second job is at work")
    second = sweeps.sweep("objective", "training.seed=1,2")
    assert second.returncode == 2, second.output
    (line,) = second.stderr.splitlines()
    assert line.startswith(f"folder {sweeps.folder} is in use by the job of ")
    assert f", pid {first.pid}, since " in line
    assert "hydra.sweep.dir=" in line
    assert sweep_story_of(sweeps.folder).sentence.endswith(" It is still running.")
    first.kill()
    first.communicate()
    # its jobs save a checkpoint and end; then the folder is free
    third = sweeps.sweep(*arguments)
    assert third.returncode == 0, third.output
    assert sweeps.column("result") == [1.5, "went on from when-told"]
    stopped = sweeps.run_stop()
    assert (stopped.returncode, "this sweep has ended" in stopped.stderr) == (1, True)
