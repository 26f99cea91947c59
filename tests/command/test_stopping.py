"""However the job ends, the script ends with it, and all that it started."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest

from command_world import CommandWorld, all_gone, argv, script
from world import wait_until


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_script_that_saves_and_ends_when_asked_to_counts_as_interrupted(scripts, is_stopped):
    """One that stands still by SIGSTOP is continued to hear it."""
    ready, saved = scripts.folder / "ready", scripts.folder / "saved"
    process = scripts.start("--checkpoint", "save?", "--", *script("polite.py", ready, saved))
    pid = scripts.started_script(ready)
    if is_stopped:
        os.kill(pid, signal.SIGSTOP)
    process.send_signal(signal.SIGINT)
    ended = scripts.world.end(process)
    assert ended.returncode == 130, ended.output
    assert ended.summary["status"] == "interrupted"
    assert ended.attempts[0]["outcome"] == "interrupted"
    assert "ended with exit code 0" in ended.attempts[0]["message"]
    assert ended.summary["checkpoint"] == str(saved)
    assert "saved" in ended.stdout
    all_gone([pid])


def test_the_program_behind_a_shell_is_asked_to_stop_as_well(scripts: CommandWorld):
    """The shell itself ends at once, and does not hand the signal on."""
    ready, saved = scripts.folder / "ready", scripts.folder / "saved"
    words = " ".join(script("polite.py", str(ready), str(saved)))
    process = scripts.start("--", "sh", "-c", f"{words}; echo never; exit 0")
    pid = scripts.started_script(ready)
    process.terminate()
    ended = scripts.world.end(process)
    assert ended.returncode == 143, ended.output
    assert saved.read_text() == "saved"
    assert "never" not in (scripts.run_dir / "attempt-1.log").read_text()
    all_gone([pid])


def test_our_run_tells_a_python_script_to_stop(scripts: CommandWorld):
    ready = scripts.folder / "ready"
    process = scripts.start("--", *script("with_our_help.py", str(ready), "until-stopped"))
    scripts.started_script(ready)
    process.terminate()
    ended = scripts.world.end(process)
    assert ended.returncode == 143, ended.output
    assert ended.summary["checkpoint"] == str(scripts.run_dir / "mine.txt")
    assert next(e for e in ended.journal if e["event"] == "checkpoint")["step"] == 7


def _stubborn(scripts: CommandWorld, *options: str) -> tuple[subprocess.Popen[str], list[int]]:
    pids = scripts.folder / "pids"
    process = scripts.start(*options, "--", *script("stubborn.py", str(pids)))
    wait_until(pids.with_suffix(".ready").exists, "all are at work")
    return process, [int(pid) for pid in pids.read_text().split()]


def test_who_ignores_sigterm_is_killed_after_the_grace_time(scripts: CommandWorld):
    process, pids = _stubborn(scripts, "stop_grace_seconds=0.5")
    assert len(pids) == 5
    process.terminate()
    ended = scripts.world.end(process)
    assert ended.returncode == 143, ended.output
    assert ended.attempts[0]["outcome"] == "interrupted"
    all_gone(pids)


def test_a_second_signal_kills_at_once(scripts: CommandWorld):
    process, pids = _stubborn(scripts, "stop_grace_seconds=1000")
    process.send_signal(signal.SIGINT)
    wait_until((scripts.folder / "pids.asked").exists, "the script got SIGTERM")
    process.send_signal(signal.SIGINT)
    ended = scripts.world.end(process)
    assert ended.returncode == 130, ended.output
    all_gone(pids)


def test_what_a_script_leaves_running_when_it_completes_is_ended(scripts: CommandWorld):
    pids = scripts.folder / "pids"
    code = f"setsid sleep 1000 & echo $! >> {pids}; sleep 1000 & echo $! >> {pids}"
    ended = scripts.run("--", "sh", "-c", code)
    assert ended.returncode == 0, ended.output
    left = [int(pid) for pid in pids.read_text().split()]
    assert len(left) == 2
    all_gone(left)


def test_train_py_hands_sigterm_on(scripts: CommandWorld):
    ready, saved = scripts.folder / "ready", scripts.folder / "saved"
    words = argv(*script("polite.py", str(ready), str(saved)))
    process = scripts.world.start("trainer=command", words, script="train.py")
    pid = scripts.started_script(ready)
    process.terminate()
    ended = scripts.world.end(process)
    assert ended.returncode == 143, ended.output
    assert saved.read_text() == "saved"
    all_gone([pid])
