"""However a sweep ends: each job has its checkpoint, and nothing is left behind."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import pytest

from sweep_world import SweepWorld, processes_mentioning
from world import is_running, wait_until

# the environment of forks is not seen in /proc
pytestmark = pytest.mark.usefixtures("alone")


def both_at_work(sweeps: SweepWorld) -> bool:
    return bool(sweeps.pid_at_work(1) and sweeps.pid_at_work(2))


def left_behind(sweeps: SweepWorld) -> list:
    # every process of this sweep has the place in its environment
    return processes_mentioning(str(sweeps.place))


@pytest.mark.parametrize(
    ("signum", "code"),
    [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)],
)
def test_a_signal_ends_every_job_with_a_checkpoint(sweeps: SweepWorld, signum: int, code: int):
    process = sweeps.start("works_until_told", "training.seed=1,2,3", start_new_session=True)
    wait_until(lambda: both_at_work(sweeps), "both jobs are at work")
    os.killpg(process.pid, signum)  # as a terminal does
    ended = sweeps.end(process)
    assert ended.returncode == code, ended.output
    assert "Traceback" not in ended.output
    assert sweeps.column("status") == ["interrupted", "interrupted", "not_started"]
    assert sweeps.column("exit_code") == [code, code, None]
    for number in (0, 1):
        assert sweeps.summary(number)["checkpoint"].endswith("when-told")
    assert left_behind(sweeps) == []


def test_a_second_signal_kills(sweeps: SweepWorld):
    process = sweeps.start("never_stops", "training.seed=1,2")
    wait_until(lambda: both_at_work(sweeps), "both jobs are at work")
    process.send_signal(signal.SIGINT)
    trainers = [sweeps.pid_at_work(1), sweeps.pid_at_work(2)]
    while any(is_running(pid) for pid in trainers):
        # one after the other: a signal that comes while the same one is pending is lost
        wait_until(
            lambda: process.poll() is not None or not pending(process.pid, signal.SIGINT),
            "the signal is taken",
        )
        process.send_signal(signal.SIGINT)
    ended = sweeps.end(process)
    assert ended.returncode == 130, ended.output
    assert sweeps.column("status") == ["died", "died"]
    wait_until(lambda: not left_behind(sweeps), "nothing is left behind")


def pending(pid: int, signum: int) -> bool:
    """Whether a signal was sent that the process has not yet taken."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    masks = [line.split() for line in status.splitlines() if line[:6] in ("SigPnd", "ShdPnd")]
    return any(int(mask, 16) >> (signum - 1) & 1 for _, mask in masks)


JOBLIB = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]


@pytest.mark.parametrize(
    "launcher",
    [
        ["hydra/launcher=gpu_queue", "hydra.launcher.n_jobs=2"],
        pytest.param(JOBLIB, marks=pytest.mark.slow),
        pytest.param(["hydra/launcher=submitit_local"], marks=pytest.mark.slow),
        pytest.param(["hydra/launcher=basic"], marks=pytest.mark.slow),
    ],
    ids=lambda launcher: launcher[0].rpartition("=")[2],
)
def test_run_stop_ends_a_sweep_and_each_job_saves_a_checkpoint(
    sweeps: SweepWorld, launcher: list[str]
):
    name = launcher[0].rpartition("=")[2].partition("_")[0]
    if name in ("joblib", "submitit"):
        pytest.importorskip(f"hydra_plugins.hydra_{name}_launcher", reason="extra [sweep]")
    process = sweeps.start("works_until_told", "training.seed=1,2,3", *launcher)
    at_work = (1,) if name == "basic" else (1, 2)
    wait_until(lambda: all(map(sweeps.pid_at_work, at_work)), "the first jobs are at work")
    stopped = sweeps.run_stop()
    assert stopped.returncode == 0, stopped.stderr
    ended = sweeps.end(process)
    assert ended.returncode == 143, ended.output
    for number in range(len(at_work)):
        assert sweeps.jobs[number]["status"] == "interrupted"
        assert sweeps.summary(number)["checkpoint"].endswith("when-told")
    assert "Traceback" not in ended.output
    wait_until(lambda: not left_behind(sweeps), "nothing is left behind")


@pytest.mark.parametrize("isolation", ["none", pytest.param("process", marks=pytest.mark.slow)])
def test_sigterm_to_every_process_at_once_ends_each_job_with_a_whole_checkpoint(
    sweeps: SweepWorld, isolation: str
):
    """As a logout, ``pkill -f`` or a batch system sends it."""
    process = sweeps.start("saves_slowly_when_told", "training.seed=1,2", f"isolation={isolation}")
    wait_until(lambda: both_at_work(sweeps), "both jobs are at work")
    for found in left_behind(sweeps):
        with contextlib.suppress(ProcessLookupError):  # ended on hearing of the others
            os.kill(int(found.name), signal.SIGTERM)
    ended = sweeps.end(process)
    assert ended.returncode == 143, ended.output
    assert sweeps.column("status") == ["interrupted", "interrupted"]
    for number in (0, 1):
        checkpoint = Path(sweeps.summary(number)["checkpoint"])
        assert checkpoint.read_text() == "whole"
    wait_until(lambda: not left_behind(sweeps), "nothing is left behind")


@pytest.mark.parametrize("isolation", [pytest.param("none", marks=pytest.mark.slow), "process"])
def test_a_killed_sweep_leaves_no_job_behind_and_each_has_its_checkpoint(
    sweeps: SweepWorld, isolation: str
):
    process = sweeps.start("works_until_told", "training.seed=1,2,3", f"isolation={isolation}")
    wait_until(lambda: both_at_work(sweeps), "both jobs are at work")
    process.kill()
    process.communicate()
    wait_until(lambda: not left_behind(sweeps), "nothing is left behind")
    for number in (0, 1):
        assert sweeps.summary(number)["status"] == "interrupted"
        assert sweeps.summary(number)["checkpoint"].endswith("when-told")
