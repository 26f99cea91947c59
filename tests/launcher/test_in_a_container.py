"""As the first process of a container, by the manifests for those who start containers, and in a
memory cgroup."""

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import uuid
from pathlib import Path

import pytest
import yaml

import warm
from robust_train.readable import MIB
from world import ROOT, wait_until

_NAMESPACE = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]
CAN_UNSHARE = not subprocess.run([*_NAMESPACE, "true"], capture_output=True).returncode


@pytest.mark.skipif(not CAN_UNSHARE, reason="this kernel or sandbox allows no PID namespaces")
def test_process_1_saves_on_sigterm_and_resumes(world, ready):
    job = world.command("trainer._target_=trainers.stops_once_then_completes")
    process = subprocess.Popen([*_NAMESPACE, *job], cwd=world.folder, env=world.environ)
    wait_until(ready.exists, "the trainer runs")
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[0]), signal.SIGTERM)
    assert process.wait(timeout=120) == 143
    again = subprocess.run([*_NAMESPACE, *job], cwd=world.folder, env=world.environ)
    assert again.returncode == 0
    summary = json.loads((world.run_dir / "summary.json").read_text())
    assert summary["result"] == "continued from when-preempted"


JOB = yaml.safe_load((ROOT / "examples/kubernetes/job.yaml").read_text())["spec"]
TASK = yaml.safe_load((ROOT / "examples/skypilot/task.yaml").read_text())


def test_the_manifests_are_valid_and_patient(tmp_path):
    """Their commands can be composed, and a pod is given longer than its trainer."""
    pod = JOB["template"]["spec"]
    container = pod["containers"][0]
    assert container["command"] == ["python", "train_robust.py"]
    of_skypilot = shlex.split(TASK["run"].replace("\\\n", " "))
    del of_skypilot[: of_skypilot.index("train_robust.py") + 1]
    for arguments in (of_skypilot, container["args"]):
        words = (str(ROOT / "train_robust.py"), *arguments, "--cfg", "job")
        shown = warm.run(words, os.environ, tmp_path)
        assert shown.returncode == 0, shown.stderr
        cfg = yaml.safe_load(shown.stdout)
        assert cfg["allow_cpu_fallback"] is False, arguments
    assert pod["terminationGracePeriodSeconds"] > cfg["stop_grace_seconds"] + 10


def test_pods_do_not_restart_after_final_failures():
    """Repeated are the failures that a restart may overcome."""
    rules = JOB["podFailurePolicy"]["rules"]
    (fatal,) = (rule["onExitCodes"] for rule in rules if rule["action"] == "FailJob")
    assert fatal["values"] == [1, 2, 76]
    page = (ROOT / "docs" / "walk-away.md").read_text()
    codes = dict(re.findall(r"^\| (\d+) \| (.+) \|$", page, re.MULTILINE))
    words = {"1": "trainer failed", "2": "configuration", "76": "do not requeue", "75": "later"}
    assert all(what in codes[code] for code, what in words.items())
    service = (ROOT / "examples/systemd/robust-train.service").read_text()
    assert "\nRestartPreventExitStatus=1 2 76\n" in service


# --- the kernel's OOM killer, for real: the launcher in a memory cgroup of its own ---

LIMIT_BYTES = 1200 * MIB


class Cgroup:
    """A memory cgroup with a limit; v2 or v1, whichever this machine has."""

    def __init__(self, limit_bytes):
        root = Path("/sys/fs/cgroup")
        is_v2 = "memory" in _text(root / "cgroup.controllers").split()
        self.folder = (root if is_v2 else root / "memory") / f"robust-train-{uuid.uuid4().hex}"
        self.folder.mkdir()
        limit = "memory.max" if is_v2 else "memory.limit_in_bytes"
        (self.folder / limit).write_text(str(limit_bytes))
        with contextlib.suppress(OSError):  # no swap to flee to, where the kernel counts it
            swap = "memory.swap.max" if is_v2 else "memory.memsw.limit_in_bytes"
            (self.folder / swap).write_text("0" if is_v2 else str(limit_bytes))

    def enter(self):
        """Move the calling process into it; called in the child before it becomes the launcher."""
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    def remove(self):
        wait_until(lambda: not _text(self.folder / "cgroup.procs"), "the cgroup is empty")
        self.folder.rmdir()


def _text(path):
    try:
        return path.read_text()
    except OSError:
        return ""


@pytest.fixture
def cgroup():
    try:
        made = Cgroup(LIMIT_BYTES)
    except OSError as error:
        pytest.skip(f"a memory cgroup cannot be made here: {error}")
    yield made
    made.remove()


def test_a_child_killed_for_memory_gets_less(world, cgroup):
    """It is tried again with a smaller batch or fewer workers."""
    overrides = ("trainer._target_=trainers.fills_memory", "training.num_workers=0")
    ended = world.end(world.start(*overrides, preexec_fn=cgroup.enter), code=0)
    assert [attempt["outcome"] for attempt in ended.attempts] == ["host_oom", "completed"]
    assert "OOM killer" in ended.attempts[0]["message"]
    assert [attempt["batch_size"] for attempt in ended.attempts] == [64, 32]
