"""``robust-train resume`` of scripts and sweeps that real signals have ended."""

import os
import shutil
import signal
import sys

import pytest

import warm
from another_user import ANOTHER_USER
from robust_train.children.detach import OUTPUT_FILE
from robust_train.folder.run_list import find_runs
from sweep_world import SweepWorld
from world import ROOT, wait_until

COUNTS = """
import os, pathlib, time
place = os.environ.get("PLACE_OF_OUTPUT")
count = pathlib.Path("count")
for step in range(int(count.read_text()) if count.exists() else 0, 3):
    count.write_text(str(step))
    print("step", step, flush=True)
    while step == 1 and not os.path.exists("go"):
        time.sleep(0.02)
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The folder of a script that halts at its second step until there is a file ``go``."""
    folder = tmp_path / "my && work"
    folder.mkdir()
    (folder / "counts.py").write_text(COUNTS)
    monkeypatch.setenv("ROBUST_TRAIN_QUEUE_DIR", str(tmp_path / "queue"))
    return folder


def start(here, name):
    """Start the script, without ``--`` before it, and wait for its second step."""
    (here / "count").unlink(missing_ok=True)
    options = ["wait_for_gpu=false", "--name", name, "--checkpoint", "count"]
    words = ["-m", "robust_train.cli.main", "run", *options, sys.executable, "counts.py"]
    process = warm.start(words, here, os.environ, alone=True, start_new_session=True)
    wait_until(lambda: (here / "count").exists() and (here / "count").read_text() == "1", name)
    return process


def end(process, signum):
    process.send_signal(signum)
    process.wait()
    wait_until(lambda: not any(run.alive for run in find_runs()), "its attempt has ended, too")


def test_a_script_goes_on_by_one_word_wherever_that_is_said(here, tmp_path, says):
    end(start(here, "mine"), signal.SIGINT)
    (here / "go").touch()
    if os.geteuid() == 0:
        state = next(here.rglob("state.json"))
        os.chown(state, ANOTHER_USER, -1)
        # a file of another user may name any command
        assert "began this" in says("resume", "mine", code=1).err
        os.chown(state, 0, -1)
    environ = {**os.environ, "PLACE_OF_OUTPUT": "/other"}
    resumed = warm.robust_train("resume", "mine", environ=environ, cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert "since the last launch: PLACE_OF_OUTPUT was not set and is '/other'" in resumed.stdout
    assert "completed" in resumed.stdout
    assert "step 0" not in resumed.stdout
    (run,) = find_runs()
    assert run.status == "completed"


@pytest.mark.slow
def test_all_are_those_that_no_one_has_ended(here, says):
    for name, signum in (
        ("stopped by its user", signal.SIGINT),
        ("killed, its output in the way", signal.SIGKILL),
        ("killed", signal.SIGKILL),
    ):
        end(start(here, name), signum)
    (blocked,) = (run for run in find_runs() if run.state and "way" in run.state.name)
    (blocked.run_dir / OUTPUT_FILE).mkdir()
    (here / "go").touch()
    shown = says("resume", "--all")
    (line, _) = shown.out.splitlines()
    assert "in the background" in line
    assert f"{blocked.id} is not resumed" in shown.err
    shutil.rmtree(blocked.run_dir)

    def status():
        return {run.state.name: run.status for run in find_runs() if run.state}

    wait_until(lambda: status()["killed"] == "completed", "it goes on in the background")
    wait_until(lambda: not any(run.alive for run in find_runs()), "its launcher has ended")
    assert status()["stopped by its user"] == "interrupted"
    assert says("resume", "--all").out == "nothing is to be resumed\n"
    assert "has completed" in says("resume", "killed", code=1).err


@pytest.mark.slow
def test_a_sweep_goes_on_as_a_whole(world):
    sweeps = SweepWorld(world)
    words = sweeps.arguments("works_until_told", "seed=1,2")
    process = warm.start([str(ROOT / "train_robust.py"), *words], ROOT, world.environ, alone=True)
    wait_until(lambda: len(list(sweeps.place.glob("working-*"))) == 2, "both jobs work")
    process.send_signal(signal.SIGTERM)
    assert f"to go on: robust-train resume {sweeps.folder}" in process.communicate()[0]
    world.robust_train("resume", str(sweeps.folder), code=0)
    assert {*sweeps.column("result")} == {"went on from when-told"}
    again = world.robust_train("resume", str(sweeps.folder), code=1)
    assert "has completed" in again.stderr
