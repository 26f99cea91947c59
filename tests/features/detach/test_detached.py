"""Jobs that continue in the background."""

import contextlib
import json
import os
import signal
import sys
import threading
from pathlib import Path

import psutil
import pytest

from robust_train import ConfigError, launch
from robust_train.children import detach
from robust_train.cli.main import main
from robust_train.folder.run_list import choose_run, find_runs
from terminal import run_at_a_terminal
from world import wait_for_text, wait_until

_SCRIPT = """
import os, sys, time
print("trains", os.isatty(0), flush=True)
while not os.path.exists("go"):
    time.sleep(0.02)
"""


def test_a_detached_job_outlives_its_terminal(world, capfdbinary):
    """Afterwards its id is enough to follow it."""
    (world.folder / "train.py").write_text(_SCRIPT)
    run = [sys.executable, "-m", "robust_train.cli.main", "run", "--detach", "device=cpu"]
    command = [*run, "--", sys.executable, "train.py"]
    # the terminal is closed once the command has ended: the kernel hangs up whoever is in it
    code, shown = run_at_a_terminal(command, world.environ, cwd=world.folder)
    assert code == 0, shown
    live = choose_run(None)
    for line in ("continues in the background as", f"robust-train logs -f {live.id}"):
        assert line in shown
    assert "\x1b" not in shown
    launcher = psutil.Process(live.pid)
    assert os.getsid(launcher.pid) == launcher.pid, "a session of its own"
    log = live.run_dir / "attempt-1.log"
    wait_until(lambda: log.exists() and "trains False" in log.read_text(), "it trains")
    for process in (launcher, *launcher.children(recursive=True)):
        for descriptor in Path(f"/proc/{process.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                assert not os.readlink(descriptor).startswith("/dev/pts"), process
    (world.folder / "go").touch()
    assert main(["wait", live.id]) == 0
    capfdbinary.readouterr()
    assert main(["logs", live.id]) == 0
    assert capfdbinary.readouterr().out == b"trains False\n"
    printed = (live.run_dir / "detached.log").read_text()
    assert "attempt 1 on the CPU" in printed
    assert "trains False" in printed


def test_what_cannot_run_is_refused_in_the_foreground(tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["run", "--detach", "device=tpu", "--", "true"]) == 2
    assert capfd.readouterr().err.startswith("device=tpu: must be")
    with pytest.raises(ConfigError, match="only a command continues in the background"):
        launch(lambda cfg: None, {"detach": True, "device": "cpu"})
    assert find_runs() == []


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_start_ends_the_job_too(tmp_path, monkeypatch, signum):
    """Whatever ends the command before the job has begun ends the job."""
    file = tmp_path / "pid"
    code = f"import os, time; open('{file}', 'w').write(str(os.getpid())); time.sleep(60)"
    monkeypatch.setattr(sys, "orig_argv", ["python", "-c", code])

    def stop():
        wait_for_text(file, "it runs")
        os.kill(os.getpid(), signum)

    threading.Thread(target=stop).start()
    assert detach.start() == 128 + signum
    assert not psutil.pid_exists(int(file.read_text()))


def test_a_detached_job_survives_the_users_logout(tmp_path, monkeypatch):
    """If a logout kills, the job gets a systemd scope, or its user a line that says what to do."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert detach.find_logout_protection() == ([], ""), "no systemd"
    for answer in ("b false", "b true"):
        (tmp_path / "busctl").write_text(f"#!/bin/sh\necho {answer}\n")
        (tmp_path / "busctl").chmod(0o755)
        assert (detach.find_logout_protection() == ([], "")) is (answer == "b false")
    prefix, note = detach.find_logout_protection()
    assert prefix == []
    assert "systemd-run --user --scope" in note
    (tmp_path / "systemd-run").write_text("#!/bin/sh\nexit 0\n")
    (tmp_path / "systemd-run").chmod(0o755)
    prefix, note = detach.find_logout_protection()
    assert prefix[:3] == ["systemd-run", "--user", "--scope"]
    assert "loginctl enable-linger" in note


@pytest.mark.slow
def test_a_sweep_goes_on_in_the_background(world, capfd):
    world.alone = True  # what detaches starts its own command line once more
    folder = world.folder / "sweep"
    sweep = ("-m", "detach=true", f"hydra.sweep.dir={folder}", "device=cpu")
    world.run(*sweep, "training.lr=x,1").was_refused(["training.lr=x"])
    assert not folder.exists()
    trainer = "trainer._target_=trainers.what_it_was_given"
    ended = world.run(*sweep, trainer, "training.lr=1,2", code=0)
    assert f"robust-train wait {folder}" in ended.stdout
    assert main(["wait", str(folder)]) == 0
    jobs = json.loads((folder / "sweep.json").read_text())["jobs"]
    assert [job["status"] for job in jobs] == ["completed", "completed"]
    assert "2 of 2 completed" in (folder / "detached.log").read_text()
