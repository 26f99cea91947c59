"""However a sweep ends: each job has its checkpoint, and nothing is left behind."""

import os
import signal
from pathlib import Path

import pytest

from sweep_world import processes_mentioning
from world import is_running, wait_until

# the environment of forks is not seen in /proc
pytestmark = pytest.mark.usefixtures("alone")


def both_at_work(sweeps):
    return bool(sweeps.pid_at_work(1) and sweeps.pid_at_work(2))


def left_behind(sweeps):
    # every process of this sweep has the place in its environment
    return processes_mentioning(str(sweeps.place))


def test_a_signal_ends_every_job_with_a_checkpoint(sweeps):
    process = sweeps.start("works_until_told", "training.seed=1,2,3", start_new_session=True)
    wait_until(lambda: both_at_work(sweeps), "both jobs are at work")
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    ended = sweeps.end(process).with_code(130)
    assert "Traceback" not in ended.output
    assert sweeps.column("status") == ["interrupted", "interrupted", "not_started"]
    assert sweeps.column("exit_code") == [130, 130, None]
    for number in (0, 1):
        assert sweeps.summary(number)["checkpoint"].endswith("when-told")
    assert left_behind(sweeps) == []


def test_a_second_signal_kills(sweeps):
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
