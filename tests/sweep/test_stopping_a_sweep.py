"""However a sweep ends, each job has its checkpoint, nothing is left behind, and it can resume."""

import os
import signal
from pathlib import Path

import pytest

from robust_train.sweep.page import read_sweep_story
from sweep_world import processes_mentioning
from world import is_running, wait_until

# the environment of forks is not seen in /proc
pytestmark = pytest.mark.usefixtures("alone")


COMPLETES_1 = ("completes_1_and_works_at_2", "seed=1,2,3")


def at_work(sweeps, *numbers):
    wait_until(lambda: all(map(sweeps.pid_at_work, numbers)), "jobs are at work")


def left_behind(sweeps):
    # every process of this sweep has the place in its environment
    return processes_mentioning(str(sweeps.place))


def test_a_stopped_sweep_resumes_by_its_command(sweeps):
    """A signal ends every job with a checkpoint. A second launcher is refused for as long as the
    first one lives.
    """
    process = sweeps.start(*COMPLETES_1, start_new_session=True)
    at_work(sweeps, 2, 3)
    second = sweeps.sweep(*COMPLETES_1)
    in_use = f"folder {sweeps.folder} is in use by the job of "
    second.was_refused([in_use, f", pid {process.pid}, since ", "hydra.sweep.dir="])
    assert read_sweep_story(sweeps.folder).sentence.endswith(" It is still running.")
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    ended = sweeps.end(process).with_code(130)
    assert "Traceback" not in ended.output
    assert sweeps.column("status") == ["completed", "interrupted", "interrupted"]
    assert sweeps.column("exit_code") == [0, 130, 130]
    for number in (1, 2):
        assert sweeps.summary(number)["checkpoint"].endswith("when-told")
    assert left_behind(sweeps) == []
    sweeps.sweep(*COMPLETES_1).with_code(0)
    assert sweeps.ran == ["1"]
    assert sweeps.column("result") == [1.5, "continued from when-told", "continued from when-told"]
    assert sweeps.column("reused") == [True, False, False]
    stopped = sweeps.world.robust_train("stop", str(sweeps.folder), code=1)
    assert "this sweep has ended" in stopped.stderr


def test_a_replaced_sweep_writes_nothing(sweeps):
    """Another sweep has its folder by now."""
    process = sweeps.start("first_waits_for_the_third", "seed=1,2,3", n_jobs=1)
    wait_until((sweeps.place / "here-0").exists, "job 0 is at work")
    # gone at once, whatever the sweep writes meanwhile
    sweeps.folder.rename(sweeps.place / "deleted")
    sweeps.sweep("objective", "seed=4,5").with_code(0)
    left = {path: path.stat().st_mtime_ns for path in sweeps.folder.rglob("*")}
    (sweeps.place / "here-2").touch()
    ended = sweeps.end(process)
    assert ended.returncode == 1
    assert ended.output.count("another sweep has begun there; this sweep starts no more jobs") == 1
    assert {path: path.stat().st_mtime_ns for path in sweeps.folder.rglob("*")} == left
    assert sweeps.column("result") == [6.0, 7.5]


def test_a_second_signal_kills(sweeps):
    process = sweeps.start("never_stops", "seed=1,2")
    at_work(sweeps, 1, 2)
    process.send_signal(signal.SIGINT)
    trainers = [sweeps.pid_at_work(1), sweeps.pid_at_work(2)]
    while any(is_running(pid) for pid in trainers):
        # one after the other: a signal that comes while the same one is pending is lost
        wait_until(
            lambda: process.poll() is not None or not pending(process.pid, signal.SIGINT),
            "the signal is taken",
        )
        process.send_signal(signal.SIGINT)
    sweeps.end(process).with_code(130)
    assert sweeps.column("status") == ["died", "died"]
    wait_until(lambda: not left_behind(sweeps), "nothing is left behind")


def pending(pid, signum):
    """Whether a signal was sent that the process has not yet taken."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    masks = [line.split() for line in status.splitlines() if line[:6] in ("SigPnd", "ShdPnd")]
    return any(int(mask, 16) >> (signum - 1) & 1 for _, mask in masks)
