"""``robust-train resume`` of scripts and sweeps that real signals have ended."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import warm
from another_user import ANOTHER_USER
from robust_train.children.detach import OUTPUT_FILE
from robust_train.folder.resume_command import with_overrides
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


def test_one_word_resumes_a_script_everywhere(here, tmp_path, says):
    """Each message that names the command has this word."""
    end(start(here, "mine"), signal.SIGINT)
    (here / "go").touch()
    if os.geteuid() == 0:
        state = next(here.rglob("state.json"))
        os.chown(state, ANOTHER_USER, -1)
        # a file of another user may name any command
        assert "started this" in says("resume", "mine", code=1).err
        os.chown(state, 0, -1)
    environ = {**os.environ, "PLACE_OF_OUTPUT": "/other"}
    resumed = warm.robust_train("resume", "mine", environ=environ, cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert "since the last launch: PLACE_OF_OUTPUT was not set and is '/other'" in resumed.stdout
    assert "completed" in resumed.stdout
    assert "step 0" not in resumed.stdout
    (run,) = find_runs()
    assert run.status == "completed"


def test_other_values_replace_those_of_the_command():
    """A program that calls ``launch`` gets a variable."""
    hydra = with_overrides(
        "cd '/my work' && python train.py lr=1 +seed=2 hydra.run.dir=/run", Path("/run"), ["lr=3"]
    )
    assert hydra == "cd '/my work' && python train.py +seed=2 hydra.run.dir=/run lr=3"
    launched = with_overrides("cd /w && python loop.py lr=1", Path("/run"), ["lr=3"])
    assert launched.startswith('cd /w && env \'ROBUST_TRAIN_OVERRIDES={"run_dir": "/run", ')
    assert launched.endswith(" python loop.py lr=1")


def interpreted(here, *words):
    """Run a new interpreter whose command line resumes the job."""
    return subprocess.run([sys.executable, *words], cwd=here, capture_output=True, text=True)


def typed(here, *words):
    return interpreted(here, "-m", "robust_train.cli.main", *words)


SIZES = """
import sys
print("given", sys.argv[1:])
undefined_name
"""


@pytest.mark.slow
def test_mistakes_are_fixed_and_resumed_repeatedly(here, says):
    """A bug of the program does not count as a launch without progress, and ``resume`` takes
    other values, also of what an option gave.
    """
    program = here / "sizes.py"
    program.write_text(SIZES)
    words = ["run", "wait_for_gpu=false", "max_launches=1", "--batch-size", "8", "--name", "mine"]
    words += ["--", sys.executable, "sizes.py", "{batch_size}"]
    first = typed(here, *words)
    assert "after fixing it: robust-train resume" in first.stdout
    again = typed(here, "resume", "mine", "training.batch_size=4")
    assert "given ['4']" in again.stdout, again.stderr
    program.write_text(SIZES.replace("undefined_name", "print('fixed')"))
    fixed = typed(here, "resume")
    assert fixed.returncode == 0, fixed.stderr
    assert "given ['4']" in fixed.stdout, "from now on"
    assert "fixed" in fixed.stdout
    assert "not KEY=VALUE" in says("resume", "mine", "lr", code=1).err


LAUNCHES = """
from robust_train import launch
def train(cfg):
    print("given", cfg.max_launches, cfg.mine)
    raise RuntimeError("at times")
launch(train, {"device": "cpu", "mine": 1, "max_retries": 0, "max_launches": 1})
"""


@pytest.mark.slow
def test_launching_programs_take_other_values_too(here):
    """The refusal of a launch without progress names the command that starts one."""
    (here / "loop.py").write_text(LAUNCHES)
    assert "given 1 1" in interpreted(here, "loop.py").stdout
    refused = typed(here, "resume")
    assert refused.returncode == 76, refused.stderr
    proposed = re.search(r"robust-train (resume \w+ max_launches=0)", refused.stderr)[1]
    assert "given 0 1" in typed(here, *proposed.split()).stdout
    (here / "loop.py").write_text(LAUNCHES.replace("at times", "at other times"))
    changed = typed(here, "resume", "mine=2", "max_launches=1")
    assert "is reset, because files have changed: loop.py" in changed.stdout
    assert "given 1 2" in changed.stdout


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

    wait_until(lambda: status()["killed"] == "completed", "it continues in the background")
    wait_until(lambda: not any(run.alive for run in find_runs()), "its launcher has ended")
    assert status()["stopped by its user"] == "interrupted"
    assert says("resume", "--all").out == "there is nothing to resume\n"
    assert "has completed" in says("resume", "killed", code=1).err


@pytest.mark.slow
def test_a_sweep_goes_on_as_a_whole(world):
    sweeps = SweepWorld(world)
    words = sweeps.arguments("works_until_told", "seed=1,2")
    process = warm.start([str(ROOT / "train_robust.py"), *words], ROOT, world.environ, alone=True)
    wait_until(lambda: len(list(sweeps.place.glob("working-*"))) == 2, "both jobs work")
    process.send_signal(signal.SIGTERM)
    assert f"to continue: robust-train resume {sweeps.folder}" in process.communicate()[0]
    world.robust_train("resume", str(sweeps.folder), code=0)
    assert {*sweeps.column("result")} == {"continued from when-told"}
    again = world.robust_train("resume", str(sweeps.folder), code=1)
    assert "has completed" in again.stderr
