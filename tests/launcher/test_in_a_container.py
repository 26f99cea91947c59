"""As the first process of a container, and by the manifests for those who start containers."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
from pathlib import Path

import pytest
import yaml

import warm
from world import ROOT, World, wait_until

_NAMESPACE = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]
CAN_UNSHARE = not subprocess.run([*_NAMESPACE, "true"], capture_output=True).returncode


@pytest.mark.skipif(not CAN_UNSHARE, reason="this kernel or sandbox allows no PID namespaces")
def test_as_process_1_it_saves_a_checkpoint_on_sigterm_and_goes_on_from_it(world: World) -> None:
    ready = world.folder / "ready"
    world.environ["READY_FILE"] = str(ready)
    job = world.command("trainer._target_=trainers.stops_once_then_completes")
    process = subprocess.Popen([*_NAMESPACE, *job], cwd=world.folder, env=world.environ)
    wait_until(ready.exists, "the trainer runs")
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[0]), signal.SIGTERM)
    assert process.wait(timeout=120) == 143
    again = subprocess.run([*_NAMESPACE, *job], cwd=world.folder, env=world.environ)
    assert again.returncode == 0
    summary = json.loads((world.run_dir / "summary.json").read_text())
    assert summary["result"] == "went on from when-preempted"


def _kubernetes() -> dict:
    return yaml.safe_load((ROOT / "examples/kubernetes/job.yaml").read_text())


def _arguments_of_skypilot() -> list[str]:
    task = yaml.safe_load((ROOT / "examples/skypilot/task.yaml").read_text())
    words = shlex.split(task["run"].replace("\\\n", " "))
    return words[words.index("train_robust.py") + 1 :]


def test_the_manifests_commands_are_composed(tmp_path: Path) -> None:
    container = _kubernetes()["spec"]["template"]["spec"]["containers"][0]
    assert container["command"] == ["python", "train_robust.py"]
    for arguments in (container["args"], _arguments_of_skypilot()):
        words = (str(ROOT / "train_robust.py"), *arguments, "--cfg", "job")
        shown = warm.run(words, os.environ, tmp_path)
        assert shown.returncode == 0, shown.stderr
        assert yaml.safe_load(shown.stdout)["allow_cpu_fallback"] is False


def test_the_pod_is_given_longer_than_the_trainer() -> None:
    pod = _kubernetes()["spec"]["template"]["spec"]
    (grace,) = (a for a in pod["containers"][0]["args"] if a.startswith("stop_grace_seconds="))
    assert pod["terminationGracePeriodSeconds"] > int(grace.partition("=")[2]) + 10


def test_what_is_not_repeated_is_what_readme_says_cannot_be_mended() -> None:
    rules = _kubernetes()["spec"]["podFailurePolicy"]["rules"]
    (fatal,) = (rule["onExitCodes"] for rule in rules if rule["action"] == "FailJob")
    readme = (ROOT / "README.md").read_text()
    codes = dict(re.findall(r"^\| (\d+) \| (.+) \|$", readme, re.MULTILINE))
    assert "trainer failed" in codes["1"]
    assert "configuration" in codes["2"]
    assert "do not requeue" in codes["76"]
    assert "later" in codes["75"]
    assert fatal["values"] == [1, 2, 76]
    service = (ROOT / "examples/systemd/robust-train.service").read_text()
    assert "\nRestartPreventExitStatus=1 2 76\n" in service
