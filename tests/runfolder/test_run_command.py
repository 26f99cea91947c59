"""``robust-train VERB`` against runs in processes of their own.

The runs are real commands; the verbs are carried out in this process, but for those in a terminal.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import steered_trainers
import warm
from robust_train import launch
from robust_train.attempt.run import Run
from robust_train.cli.main import main
from robust_train.folder.live import ControlError, StillQueued, ask
from robust_train.folder.run_list import choose_run, read_run
from robust_train.model.errors import ConfigError
from simulated_nvml import Gpu
from sweep_world import SweepWorld
from two_gpu_machine import A
from world import Ended, World, is_running, wait_until

NEVER = "gpu_check_interval_seconds=600"
SLOW = pytest.mark.slow


class Host:
    """Several runs of one user, and his commands."""

    def __init__(self, tmp_path: Path) -> None:
        self.tmp_path = tmp_path
        self.started: list[subprocess.Popen[str]] = []

    def world(self, name: str) -> World:
        folder = self.tmp_path / name
        folder.mkdir()
        world = World(folder)
        world.environ |= {
            "ROBUST_TRAIN_QUEUE_DIR": str(self.tmp_path / "queue_of_jobs"),
            "READY_FILE": str(folder / "ready"),
            "GO_FILE": str(folder / "go"),
        }
        return world

    def train(self, world: World, trainer: str, *more: str, **options: Any) -> Any:
        """Start a run and wait until it trains."""
        process = world.start(f"trainer._target_=steered_trainers.{trainer}", *more, **options)
        self.started.append(process)
        wait_until((world.folder / "ready").exists, "it trains")
        return process

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        stdout, stderr = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
            try:
                code = main(list(arguments))
            except SystemExit as end:  # of argparse
                code = end.code
        texts = (stdout.getvalue(), stderr.getvalue())
        return subprocess.CompletedProcess(arguments, code, *texts)

    def told(self, *arguments: str) -> Any:
        done = self.command(*arguments, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def refused(self, *arguments: str) -> str:
        done = self.command(*arguments)
        assert done.returncode == 1, done.stdout
        assert done.stdout == ""
        (line,) = done.stderr.splitlines()
        return line

    def in_terminal(self, *arguments: str) -> str:
        ours, theirs = pty.openpty()
        process = subprocess.Popen(
            [sys.executable, "-m", "robust_train.cli.main", *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
        )
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):
            while data := os.read(ours, 4096):
                shown += data
        os.close(ours)
        assert process.wait() == 0, shown.decode()
        return shown.decode()


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2] / "src"))
    monkeypatch.setenv("COLUMNS", "200")
    host = Host(tmp_path)
    yield host
    for process in host.started:
        if process.poll() is None:
            process.kill()
            process.communicate()


@pytest.mark.parametrize(
    "how", ["process", pytest.param("none", marks=SLOW), pytest.param("train.py", marks=SLOW)]
)
def test_status_and_list_in_pipe_and_terminal(host: Host, how: str):
    world = host.world("first")
    options = {"script": "train.py"} if how == "train.py" else {}
    more = () if how == "train.py" else (f"isolation={how}",)
    process = host.train(world, "reports_and_nothing_else", "device=cpu", *more, **options)
    wait_until(lambda: host.told("status").get("step", 0) > 1, "a step is reported")
    wait_until(lambda: host.told("status").get("loss"), "a loss is reported")
    status = host.told("status")
    assert status["state"] == "running"
    assert status["pid"] == process.pid
    assert (status["attempt_pid"] != process.pid) == (how == "process")
    assert (status["attempt"], status["device"], status["batch_size"]) == (1, "cpu", 64)
    assert status["effective_batch_size"] == 64
    assert 0 < status["loss"] <= 1
    assert status["memory"]["resident"] > 0
    assert Path(status["run_dir"]) == world.run_dir
    table = host.command("ps", "--live")
    header, row = table.stdout.splitlines()
    assert header.split()[:4] == ["id", "state", "job", "where"]
    assert row.startswith(f"{status['id']}  running")
    assert "\x1b" not in table.stdout
    assert status["id"] in host.in_terminal("ps", "--live").splitlines()[1], "a line for each run"
    shown = host.in_terminal("status", status["id"])
    assert "micro-batch 64" in shown
    assert str(world.run_dir) in shown
    for which in (str(process.pid), str(status["attempt_pid"]), str(world.run_dir)):
        assert host.told("status", which)["id"] == status["id"]
    (world.folder / "go").touch()
    assert world.end(process).returncode == 0
    assert host.told("ps", "--live") == {"runs": []}
    ended = host.told("status", status["id"])
    assert (ended["state"], ended["exit_code"], ended["alive"]) == ("completed", 0, False)
    assert list((world.run_dir / "requests").iterdir()) == []


def test_of_two_runs_one_is_named_and_stops_with_a_checkpoint_as_at_sigterm(host: Host):
    assert "no run of yours is alive on this machine" in host.refused("status")
    worlds = [host.world(name) for name in ("first", "second")]
    for world in worlds:
        host.train(world, "saves_when_it_stops")
    ids = [run["id"] for run in host.told("ps", "--live")["runs"]][::-1]
    line = host.refused("stop")
    assert "2 runs of yours are alive; name one: " in line
    assert all(run_id in line for run_id in ids)
    answer = host.told("stop", ids[1])
    assert (answer["run"], answer["before"], answer["after"]) == (ids[1], "running", "stopping")
    ended = worlds[1].end(host.started[1])
    assert ended.returncode == 143, ended.output
    assert ended.summary["status"] == "interrupted"
    assert Path(ended.summary["checkpoint"]).exists()
    wait_until(
        lambda: [run["id"] for run in host.told("ps", "--live")["runs"]] == ids[:1], "one is left"
    )


def test_stop_a_second_time_has_to_be_meant(host: Host):
    world = host.world("first")
    process = host.train(world, "does_not_hear_a_stop", "stop_grace_seconds=600")
    status = host.told("status")
    host.told("stop")
    assert "--now" in host.refused("stop")
    host.told("stop", "--now")
    assert world.end(process).returncode == 143
    assert not is_running(status["attempt_pid"])


@pytest.mark.parametrize("isolation", ["process", pytest.param("none", marks=SLOW)])
def test_halving_during_training_ends_in_the_same_weights(host, isolation, tmp_path, monkeypatch):
    world = host.world("halved")
    process = host.train(world, "trains_in_parts", f"isolation={isolation}", "min_batch_size=16")
    answer = host.told("halve-batch", str(world.run_dir))
    assert (answer["before"], answer["after"]) == ({"micro_batch": 64}, {"micro_batch": 32})
    assert "from the next step" in answer["how"]
    said = host.command("halve-batch")
    assert "micro-batch 32 → 16" in said.stdout
    wait_until(
        lambda: "micro-batch 64 → 16" in host.command("status").stdout,
        "status shows it, which is at most once a second",
    )
    line = host.refused("halve-batch")
    assert "the micro-batch is 16 already, and min_batch_size=16" in line
    (world.folder / "go").touch()
    ended = world.end(process)
    assert ended.returncode == 0, ended.output
    changes = [e for e in ended.journal if e["event"] == "micro_batch_changed"]
    assert [(e["before"], e["after"]) for e in changes] == [(64, 32), (32, 16)]
    assert all("halve-batch" in e["reason"] for e in changes)
    assert len(ended.attempts) == 1
    for name in ("READY_FILE", "GO_FILE"):
        monkeypatch.setenv(name, world.environ[name])
    undisturbed = steered_trainers.trains_in_parts(None, Run(run_dir=tmp_path))
    halved = ended.summary["result"]
    assert halved["sizes"] == [64] * 5 + [16] * 25
    assert undisturbed["sizes"] == [64] * 30
    assert halved["weights"] == pytest.approx(undisturbed["weights"], abs=1e-5)


def test_trainers_that_do_not_look_are_told_of_plainly(host: Host):
    world = host.world("first")
    process = host.train(world, "never_uses_run")
    line = host.refused("checkpoint")
    assert "does not read run.checkpoint_requested" in line
    assert "does not use run.backward" in host.refused("halve-batch")
    answer = ask(choose_run(None), "memory_clear", force=True)
    assert {"before", "after", "sentence"} <= answer.keys()
    with pytest.raises(ControlError, match="memory_clear"):
        ask(choose_run(None), "memory_clear", force="perhaps")
    (world.folder / "go").touch()
    ended = world.end(process)
    assert (ended.returncode, ended.summary["result"]) == (0, "ended")
    assert ended.output.count(answer["sentence"]) == 1


def test_a_run_that_hangs_answers_and_says_that_the_request_is_queued(host: Host):
    world = host.world("first")
    host.train(world, "hangs_after_a_step")
    with pytest.raises(StillQueued, match=r"within 0.2 s; the request stays queued"):
        ask(choose_run(None), "checkpoint", wait_seconds=0.2)
    status = wait_until(lambda: (s := host.told("status")).get("step") and s, "it reports")
    assert (status["state"], status["step"], status["total_steps"]) == ("running", 1, 10)
    assert ask(choose_run(None), "memory_info")["sentence"]
    with pytest.raises(StillQueued):
        ask(choose_run(None), "memory_clear", wait_seconds=0.2, force=False)
    os.kill(status["attempt_pid"], signal.SIGSTOP)
    assert host.told("status")["step"] == 1, "the launcher answers for it"


def test_a_run_that_waits_in_line_says_so_and_can_be_stopped(host, cuda_machine_with):
    machine = cuda_machine_with(Gpu(uuid=A, total_mib=24000))
    first, second = (host.world(name).with_environ(machine.environ) for name in ("one", "two"))
    host.train(first, "never_uses_run", NEVER)
    waiting = second.start("trainer._target_=steered_trainers.never_uses_run", NEVER)
    host.started.append(waiting)

    def as_listed() -> list[str]:
        return [run["state"] for run in host.told("ps", "--live")["runs"]]

    wait_until(lambda: as_listed() == ["waiting", "running"], "it waits")
    status = host.told("status", str(second.run_dir))
    assert status["waiting"]["position"] == 1
    assert "taken, one job per GPU" in status["waiting"]["reason"]
    environ = machine.environment(ROBUST_TRAIN_QUEUE_DIR=second.environ["ROBUST_TRAIN_QUEUE_DIR"])
    queue = warm.robust_train("queue", "--json", environ=environ)
    ids = {job["run_dir"]: job["id"] for job in json.loads(queue.stdout)["jobs"]}
    assert status["id"] == ids[str(second.run_dir)], "one id serves both commands"
    running = host.told("status", ids[str(first.run_dir)])
    assert (running["state"], running["gpu_uuid"]) == ("running", A)
    assert "the run is waiting" in host.refused("checkpoint", status["id"])
    assert host.told("stop", status["id"])["before"] == "waiting"
    ended = second.end(waiting)
    assert ended.returncode == 143, ended.output
    assert ended.summary["status"] == "interrupted"


def contents(folder: Path, but: str) -> dict[Path, bytes]:
    """Every file of a folder that a job at work does not write to."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name not in but.split()]
    return {path: path.read_bytes() for path in files}


def test_a_second_launcher_in_the_folder_is_refused_and_the_first_unharmed(host: Host):
    world = host.world("first")
    process = host.train(world, "hangs_after_a_step")
    target = "trainer._target_=steered_trainers.never_uses_run"
    wait_until(lambda: host.told("status").get("step"), "it reports")
    status, before = host.told("status"), contents(world.run_dir, but="state.json memory.jsonl")
    since = time.strftime("%Y-%m-%d %H:%M", time.localtime(status["started"]))
    words = (
        socket.gethostname(),
        f"pid {process.pid}",
        since,
        "hydra.run.dir",
        "robust-train stop",
    )
    for script in ("train_robust.py", "train.py"):
        world.run(target, "device=cpu", "training.seed=7", script=script).was_refused(words)
    assert contents(world.run_dir, but="state.json memory.jsonl") == before, "Hydra's files too"
    with pytest.raises(ConfigError, match=f"pid {process.pid}"):
        launch(lambda cfg: 1, {"device": "cpu", "auto_device": False}, run_dir=world.run_dir)
    assert contents(world.run_dir, but="state.json memory.jsonl") == before
    assert host.told("status")["attempt_pid"] == status["attempt_pid"]
    (world.folder / "go").touch()
    ended = world.end(process)
    assert (ended.returncode, ended.summary["result"]) == (0, "ended")


def listening_sockets(process: psutil.Process) -> list[str]:
    """Unix sockets at which a process or one of its descendants listens, and its TCP ports."""
    table = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    listening = {f"socket:[{row[6]}]" for row in table if int(row[3], 16) & 0x10000}
    found = []
    for one in (process, *process.children(recursive=True)):
        for link in Path(f"/proc/{one.pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if os.readlink(link) in listening:
                    found.append(f"{one.pid} {link}")
        found += [str(c) for c in one.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    return found


def test_nothing_of_a_job_listens_and_the_launcher_has_one_thread(host: Host):
    world = host.world("first")
    world.alone = True
    process = host.train(world, "hangs_after_a_step")
    launcher = psutil.Process(process.pid)
    assert launcher.children(recursive=True), "the attempt runs"
    assert listening_sockets(launcher) == []
    # the thread that writes environment.json ends
    wait_until(lambda: launcher.num_threads() == 1, "one thread is left")


def test_an_error_inside_the_launcher_leaves_a_summary_and_the_last_lines(tmp_path, monkeypatch):
    def break_down(*_: Any) -> None:
        raise ZeroDivisionError("a bug of ours")

    monkeypatch.setattr("robust_train.queue.devices.Devices.acquire", break_down)
    with pytest.raises(ZeroDivisionError):
        launch(lambda cfg: 1, {"isolation": "none"}, run_dir=tmp_path / "run")
    ended = Ended(1, "", "", tmp_path / "run")
    assert ended.summary["status"] == "failed"
    assert "error in the launcher: ZeroDivisionError: a bug of ours" in ended.summary["reason"]
    assert (ended.journal[-1]["event"], ended.journal[-1]["status"]) == ("job_ended", "failed")
    run = read_run(tmp_path / "run")
    assert run is not None
    assert (run.status, run.alive, run.about()["exit_code"]) == ("failed", False, 1)


@pytest.mark.parametrize(
    "how",
    [
        ("gpu_queue", "isolation=process"),
        pytest.param(("basic", "isolation=none"), marks=pytest.mark.slow),
        pytest.param(("joblib", "isolation=none"), marks=pytest.mark.slow),
    ],
    ids=lambda how: how[0],
)
def test_a_sweep_is_stopped_with_all_its_jobs_and_their_checkpoints(host, how):
    launcher, isolation = how
    world = host.world("first")
    sweeps = SweepWorld(world)
    process = sweeps.start(
        "works_until_told",
        "training.seed=1,2,3",
        f"hydra/launcher={launcher}",
        isolation,
        "device=cpu",
        "auto_device=false",
        *([] if launcher == "basic" else ["hydra.launcher.n_jobs=2"]),
    )
    host.started.append(process)
    numbers = (1,) if launcher == "basic" else (1, 2)
    wait_until(lambda: all(sweeps.pid_at_work(number) for number in numbers), "jobs are at work")
    answer = host.told("stop", str(sweeps.folder))
    assert len(answer["jobs"]) == len(numbers)
    ended = sweeps.end(process)
    assert ended.returncode == 143, ended.output
    assert "Traceback" not in ended.output
    for number in numbers:
        assert sweeps.summary(number - 1)["checkpoint"].endswith("when-told")
    stopped = ["interrupted"] * len(numbers)
    assert sweeps.column("status") == stopped + ["not_started"] * (3 - len(numbers))
