"""``robust-train VERB`` against runs in processes of their own.

The runs are real commands. Verbs run in this process, except for those in a terminal.
"""

import contextlib
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

import psutil
import pytest

import warm
from robust_train import launch
from robust_train.folder.live import StillQueuedError, ask
from robust_train.folder.run_list import choose_run, read_run
from robust_train.model.errors import ConfigError
from simulated_nvml import Gpu
from sweep_world import SweepWorld
from terminal import run_at_a_terminal
from two_gpu_machine import A
from world import Ended, World, is_running, wait_until

NEVER = "gpu_check_interval_seconds=600"
AT_ONCE = "hydra.launcher.n_jobs=2"
SLOW = pytest.mark.slow


class Host(World):
    """A machine on which a job is told when to end, and its user's commands in this process."""

    def __init__(self, folder, says):
        super().__init__(folder)
        self.says = says
        self.started = []
        for name in ("ready", "go"):
            self.environ[f"{name.upper()}_FILE"] = str(folder / name)

    def begin(self, trainer, *more, **options):
        """Start a job and wait until it trains."""
        process = self.start(f"trainer._target_=trainers.{trainer}", *more, **options)
        self.started.append(process)
        wait_until((self.folder / "ready").exists, "it trains")
        return process

    def let_end(self, process):
        (self.folder / "go").touch()
        return self.end(process, code=0)

    def told(self, *words):
        return json.loads(self.says(*words, "--json").out)

    def refused(self, *words):
        (line,) = self.says(*words, code=1).err.splitlines()
        return line


@pytest.fixture
def host(tmp_path, says):
    host = Host(tmp_path, says)
    yield host
    for process in host.started:
        if process.poll() is None:
            process.kill()
            process.communicate()


@pytest.mark.parametrize(
    ("script", "how"),
    [
        ("train_robust.py", "process"),
        pytest.param("train_robust.py", "none", marks=SLOW),
        pytest.param("train.py", "none", marks=SLOW),
    ],
)
def test_status_and_list_in_pipe_and_terminal(host, script, how):
    more = () if script == "train.py" else (f"isolation={how}",)
    process = host.begin("reports_and_nothing_else", "device=cpu", *more, script=script)
    wait_until(lambda: host.told("status").get("step", 0) > 1, "a step is reported")
    status = host.told("status")
    assert status["pid"] == process.pid
    assert (status["attempt_pid"] != process.pid) == (how == "process")
    expected = {"state": "running", "attempt": 1, "device": "cpu", "batch_size": 64}
    expected |= {"effective_batch_size": 64, "run_dir": str(host.run_dir)}
    assert status.items() >= expected.items()
    assert 0 < status["loss"] <= 1
    assert status["memory"]["resident"] > 0
    table = host.says("ps", "--live").out
    header, row = table.splitlines()
    assert header.split()[:4] == ["id", "state", "age", "result"]
    assert row.startswith(f"{status['id']}  running")
    assert "\x1b" not in table
    ps = [sys.executable, "-m", "robust_train.cli.main", "ps", "--live"]
    _, shown = run_at_a_terminal(ps, host.environ, columns=200)
    assert shown.splitlines()[1].startswith(status["id"]), "a line for each run"
    shown = host.says("status", status["id"]).out
    assert "micro-batch 64" in shown
    assert str(host.run_dir) in shown
    for which in (str(process.pid), str(status["attempt_pid"]), str(host.run_dir)):
        assert host.told("status", which)["id"] == status["id"]
    host.let_end(process)
    assert host.told("ps", "--live")["runs"] == []
    ended = host.told("status", status["id"])
    assert (ended["state"], ended["exit_code"], ended["alive"]) == ("completed", 0, False)
    assert list((host.run_dir / "requests").iterdir()) == []


def test_stop_a_second_time_has_to_be_meant(host):
    process = host.begin("does_not_hear_a_stop", "stop_grace_seconds=600")
    status = host.told("status")
    host.told("stop")
    assert "--now" in host.refused("stop")
    host.told("stop", "--now")
    host.end(process, code=143)
    assert not is_running(status["attempt_pid"])


@pytest.mark.parametrize("isolation", ["process", pytest.param("none", marks=SLOW)])
def test_halving_takes_effect_at_the_next_step(host, isolation):
    process = host.begin("trains_in_parts", f"isolation={isolation}", "min_batch_size=16")
    answer = host.told("halve-batch", str(host.run_dir))
    assert (answer["before"], answer["after"]) == ({"micro_batch": 64}, {"micro_batch": 32})
    assert "from the next step" in answer["how"]
    assert "micro-batch 32 → 16" in host.says("halve-batch").out
    wait_until(
        lambda: "micro-batch 64 → 16" in host.says("status").out,
        "status shows it, which is at most once a second",
    )
    line = host.refused("halve-batch")
    assert "the micro-batch is already 16, and min_batch_size=16" in line
    ended = host.let_end(process)
    changes = [e for e in ended.journal if e["event"] == "micro_batch_changed"]
    assert [(e["before"], e["after"]) for e in changes] == [(64, 32), (32, 16)]
    assert all("halve-batch" in e["reason"] for e in changes)
    assert len(ended.attempts) == 1
    assert ended.summary["result"]["sizes"] == [64] * 5 + [16] * 25


def test_a_hanging_run_queues_the_request(host):
    """The answer says that the request is queued."""
    host.begin("hangs_after_a_step")
    with pytest.raises(StillQueuedError, match=r"within 0.2 s; the request stays queued"):
        ask(choose_run(None), "checkpoint", wait_seconds=0.2)

    def status_with_a_step():
        status = host.told("status")
        return status if status.get("step") else None

    status = wait_until(status_with_a_step, "it reports")
    assert (status["state"], status["step"], status["total_steps"]) == ("running", 1, 10)
    assert ask(choose_run(None), "memory_info")["sentence"]
    with pytest.raises(StillQueuedError):
        ask(choose_run(None), "memory_clear", wait_seconds=0.2, force=False)
    os.kill(status["attempt_pid"], signal.SIGSTOP)
    assert host.told("status")["step"] == 1, "the launcher answers for it"


def test_a_queued_run_says_so_and_stops(host, tmp_path, cuda_machine_with):
    machine = cuda_machine_with(Gpu(uuid=A, total_mib=24000))
    host.with_environ(machine.environ)
    host.begin("reports_and_nothing_else", NEVER)
    (tmp_path / "second").mkdir()
    second = World(tmp_path / "second").with_environ(machine.environ)
    waiting = second.start("trainer._target_=trainers.never_uses_run", NEVER)
    host.started.append(waiting)

    def states():
        return [run["state"] for run in host.told("ps", "--live")["runs"]]

    wait_until(lambda: states() == ["waiting", "running"], "it waits")
    status = host.told("status", str(second.run_dir))
    assert status["waiting"]["position"] == 1
    assert "taken, one job per GPU" in status["waiting"]["reason"]
    environ = machine.environment(ROBUST_TRAIN_QUEUE_DIR=second.environ["ROBUST_TRAIN_QUEUE_DIR"])
    queue = warm.robust_train("queue", "--json", environ=environ)
    ids = {job["run_dir"]: job["id"] for job in json.loads(queue.stdout)["jobs"]}
    assert status["id"] == ids[str(second.run_dir)], "one id serves both commands"
    running = host.told("status", ids[str(host.run_dir)])
    assert (running["state"], running["gpu_uuid"]) == ("running", A)
    assert "the run is waiting" in host.refused("checkpoint", status["id"])
    assert host.told("stop", status["id"])["before"] == "waiting"
    assert second.end(waiting, code=143).summary["status"] == "interrupted"


def test_a_second_launcher_leaves_the_first_alone(host):
    """It is refused in the folder."""
    process = host.begin("hangs_after_a_step")
    target = "trainer._target_=trainers.never_uses_run"
    wait_until(lambda: host.told("status").get("step"), "it reports")
    status = host.told("status")
    hydras = {path: path.read_bytes() for path in (host.run_dir / ".hydra").iterdir()}
    since = time.strftime("%Y-%m-%d %H:%M", time.localtime(status["started"]))
    who = (socket.gethostname(), f"pid {process.pid}", since)
    for script in ("train_robust.py", "train.py"):
        refused = host.run(target, "device=cpu", "seed=7", script=script)
        refused.was_refused((*who, "hydra.run.dir", "robust-train stop"))
    with pytest.raises(ConfigError, match=f"pid {process.pid}"):
        launch(lambda cfg: 1, {"device": "cpu", "auto_device": False}, run_dir=host.run_dir)
    assert {path: path.read_bytes() for path in hydras} == hydras
    assert host.told("status")["attempt_pid"] == status["attempt_pid"]
    assert host.let_end(process).summary["result"] == "ended"


def listening_sockets(process):
    """Unix sockets at which a process or one of its descendants listens, and its TCP ports."""
    table = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    listening = {f"socket:[{row[6]}]" for row in table if int(row[3], 16) & 0x10000}
    listeners = []
    for member in (process, *process.children(recursive=True)):
        for link in Path(f"/proc/{member.pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if os.readlink(link) in listening:
                    listeners.append(f"{member.pid} {link}")
        listeners += [
            str(c) for c in member.net_connections("inet") if c.status == psutil.CONN_LISTEN
        ]
    return listeners


def test_a_job_listens_nowhere(host):
    """The launcher has one thread."""
    host.alone = True
    launcher = psutil.Process(host.begin("hangs_after_a_step").pid)
    assert launcher.children(recursive=True), "the attempt runs"
    assert listening_sockets(launcher) == []
    # the thread that writes environment.json ends
    wait_until(lambda: launcher.num_threads() == 1, "one thread is left")


def test_an_internal_error_leaves_a_summary(tmp_path, monkeypatch):
    """The launcher fails, and still prints the last lines."""

    def break_down(*_):
        raise ZeroDivisionError("a bug of ours")

    monkeypatch.setattr("robust_train.queue.devices.Devices.acquire", break_down)
    with pytest.raises(ZeroDivisionError):
        launch(lambda cfg: 1, {"isolation": "none"}, run_dir=tmp_path / "run")
    ended = Ended(1, "", "", tmp_path / "run")
    assert ended.summary["status"] == "failed"
    assert "error in the launcher: ZeroDivisionError: a bug of ours" in ended.summary["reason"]
    assert (ended.journal[-1]["event"], ended.journal[-1]["status"]) == ("job_ended", "failed")
    run = read_run(tmp_path / "run")
    assert (run.status, run.alive, run.about()["exit_code"]) == ("failed", False, 1)


@pytest.mark.parametrize(
    ("launcher", "isolation"),
    [
        ("gpu_queue", "process"),
        pytest.param("basic", "none", marks=SLOW),
        pytest.param("joblib", "none", marks=SLOW),
    ],
)
def test_stopping_a_sweep_keeps_every_checkpoint(host, launcher, isolation):
    """It is stopped with all its jobs."""
    sweeps = SweepWorld(host)
    numbers = (1,) if launcher == "basic" else (1, 2)
    keys = ("seed=1,2,3", f"isolation={isolation}", "device=cpu", "auto_device=false")
    more = (f"hydra/launcher={launcher}", *([] if len(numbers) == 1 else [AT_ONCE]))
    process = sweeps.start("works_until_told", *keys, *more)
    host.started.append(process)
    wait_until(lambda: all(map(sweeps.pid_at_work, numbers)), "jobs are at work")
    answer = host.told("stop", str(sweeps.folder))
    assert len(answer["jobs"]) == len(numbers)
    ended = sweeps.end(process).with_code(143)
    assert "Traceback" not in ended.output
    for number in numbers:
        assert sweeps.summary(number - 1)["checkpoint"].endswith("when-told")
    stopped = ["interrupted"] * len(numbers)
    assert sweeps.column("status") == stopped + ["not_started"] * (3 - len(numbers))
