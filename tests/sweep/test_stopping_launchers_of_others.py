"""Ctrl-C, SIGTERM and SIGKILL for sweeps under joblib's and submitit's launchers."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest

from sweep_world import SweepWorld, processes_mentioning
from world import Ended, wait_until

LAUNCHERS = {
    "joblib": ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"],
    "submitit": ["hydra/launcher=submitit_local"],
}


@pytest.fixture(params=LAUNCHERS)
def launcher(request: pytest.FixtureRequest) -> list[str]:
    pytest.importorskip(f"hydra_plugins.hydra_{request.param}_launcher", reason="extra [sweep]")
    return LAUNCHERS[request.param]


def start(sweeps: SweepWorld, launcher: list[str], *more: str) -> subprocess.Popen[str]:
    """A sweep in a session of its own, as in a terminal; until its first two jobs are at work."""
    arguments = ("works_until_told", *more, *launcher)
    process = sweeps.start(*arguments, n_jobs=None, start_new_session=True)
    wait_until(
        lambda: (sweeps.pid_at_work(1) and sweeps.pid_at_work(2)) or process.poll() is not None,
        "both jobs are at work",
    )
    assert process.poll() is None, sweeps.end(process).output
    return process


def each_saved(sweeps: SweepWorld, code: int, ended: Ended) -> None:
    assert ended.returncode == code, ended.output
    assert sweeps.column("status")[:2] == ["interrupted", "interrupted"], ended.output
    assert sweeps.column("exit_code")[:2] == [code, code]
    for number in (0, 1):
        assert sweeps.summary(number)["status"] == "interrupted"
        assert sweeps.summary(number)["checkpoint"].endswith("when-told")
    assert "2 interrupted" in ended.stdout
    wait_until(lambda: not processes_mentioning(str(sweeps.place)), "nothing is left behind")


@pytest.mark.parametrize("isolation", ["none", "process"])
@pytest.mark.parametrize(
    ("signum", "whole_group", "code"),
    [(signal.SIGINT, True, 130), (signal.SIGTERM, False, 143)],
    ids=["ctrl-c", "sigterm"],
)
def test_a_signal_ends_every_job_with_a_checkpoint(
    sweeps: SweepWorld,
    launcher: list[str],
    isolation: str,
    signum: int,
    whole_group: bool,
    code: int,
):
    process = start(sweeps, launcher, "training.seed=1,2", f"isolation={isolation}")
    if whole_group:
        os.killpg(process.pid, signum)
    else:
        process.send_signal(signum)
    ended = sweeps.end(process)
    each_saved(sweeps, code, ended)
    assert "Traceback" not in ended.output


def test_jobs_that_have_not_started_are_not_started_any_more(sweeps: SweepWorld):
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher", reason="extra [sweep]")
    process = start(sweeps, LAUNCHERS["joblib"], "training.seed=1,2,3,4")
    process.send_signal(signal.SIGTERM)
    ended = sweeps.end(process)
    each_saved(sweeps, 143, ended)
    assert sweeps.pid_at_work(3) is sweeps.pid_at_work(4) is None
    assert set(sweeps.column("status")[2:]) <= {"not_started"}
    ended = sweeps.sweep("works_until_told", "training.seed=1,2", *LAUNCHERS["joblib"])
    assert ended.returncode == 0, ended.output
    assert sweeps.column("result") == ["went on from when-told"] * 2


def test_a_killed_sweep_leaves_no_job_behind_and_each_has_its_checkpoint(
    sweeps: SweepWorld, launcher: list[str]
):
    process = start(sweeps, launcher, "training.seed=1,2")
    process.kill()
    wait_until(lambda: not processes_mentioning(str(sweeps.place)), "nothing is left behind")
    for number in (0, 1):
        assert sweeps.summary(number)["status"] == "interrupted"
        assert sweeps.summary(number)["checkpoint"].endswith("when-told")
    process.communicate()


def test_a_second_signal_kills(sweeps: SweepWorld, launcher: list[str]):
    process = sweeps.start("never_stops", "training.seed=1,2", *launcher, n_jobs=None)
    wait_until(lambda: sweeps.pid_at_work(1) and sweeps.pid_at_work(2), "both are at work")
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    assert any("once more kills" in line for line in process.stderr)
    process.send_signal(signal.SIGINT)
    ended = sweeps.end(process)
    assert ended.returncode == 130, ended.output
    assert sweeps.column("status") == ["died", "died"]
    wait_until(lambda: not processes_mentioning(str(sweeps.place)), "nothing is left behind")
