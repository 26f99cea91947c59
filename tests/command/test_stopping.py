"""However the job ends, the script ends with it, and all that it started."""

import os
import signal

import psutil
import pytest

from command_world import all_gone, argv, script
from world import wait_until


def test_a_script_that_stops_on_request_is_interrupted(scripts):
    """It saves and ends. A script that SIGSTOP has stopped is continued so that it receives the
    signal.
    """
    ready, saved = scripts.folder / "ready", scripts.folder / "saved"
    process = scripts.start("--checkpoint", "save?", "--", *script("polite.py", ready, saved))
    pid = scripts.started_script(ready)
    os.kill(pid, signal.SIGSTOP)
    process.send_signal(signal.SIGINT)
    ended = scripts.world.end(process).with_code(130)
    assert ended.summary["status"] == "interrupted"
    assert ended.attempts[0]["outcome"] == "interrupted"
    assert "ended with exit code 0" in ended.attempts[0]["message"]
    assert ended.summary["checkpoint"] == str(saved)
    assert "saved" in ended.stdout
    all_gone([pid])


def behind_a_shell(scripts, words):
    """It ends at once, and does not hand the signal on."""
    return scripts.start("--", "sh", "-c", f"{' '.join(words)}; echo never; exit 0")


def under_train_py(scripts, words):
    return scripts.world.start("trainer=command", argv(*words), script="train.py")


def behind_a_fork_of_a_shell(scripts, words):
    return scripts.start("--", "sh", "-c", f"(true; {' '.join(words)}; echo never); echo never")


@pytest.mark.parametrize("start", [behind_a_shell, behind_a_fork_of_a_shell, under_train_py])
def test_wrapped_programs_are_asked_to_stop(scripts, start):
    """Another program, such as a shell, runs them."""
    ready, saved = scripts.folder / "ready", scripts.folder / "saved"
    process = start(scripts, script("polite.py", str(ready), str(saved)))
    pid = scripts.started_script(ready)
    process.terminate()
    ended = scripts.world.end(process, 143)
    assert saved.read_text() == "saved"
    assert "never" not in ended.stdout.splitlines()
    all_gone([pid])


def test_forks_end_without_their_scripts_stop_signal(scripts):
    ready, saved = scripts.folder / "ready", scripts.folder / "saved"
    words = script("forks.py", ready, saved)
    process = scripts.start("--stop-signal", "USR1", "--", *words)
    pid = scripts.started_script(ready)
    fork = int(ready.with_suffix(".fork").read_text())
    process.terminate()
    scripts.world.end(process).with_code(143)
    assert saved.read_text().split() == [str(pid)], "the fork has its handler, and not its work"
    all_gone([pid, fork])


def test_forks_end_even_after_a_kill(scripts):
    """Their program is killed with the attempt, whose launcher does not exist to end them."""
    ready, saved = scripts.folder / "ready", scripts.folder / "saved"
    process = scripts.start("--", *script("forks.py", ready, saved))
    pid = scripts.started_script(ready)
    fork = int(ready.with_suffix(".fork").read_text())
    attempt = psutil.Process(pid).ppid()
    process.kill()
    os.kill(attempt, signal.SIGKILL)
    scripts.world.end(process)
    all_gone([pid, fork])
    assert not saved.exists()


def test_our_run_tells_a_python_script_to_stop(scripts):
    ready = scripts.folder / "ready"
    process = scripts.start("--", *script("with_our_help.py", str(ready), "until-stopped"))
    scripts.started_script(ready)
    process.terminate()
    ended = scripts.world.end(process).with_code(143)
    assert ended.summary["checkpoint"] == str(scripts.run_dir / "mine.txt")
    assert next(e for e in ended.journal if e["event"] == "checkpoint")["step"] == 7


@pytest.mark.parametrize(("grace", "is_asked_twice"), [(0.5, False), (1000, True)])
def test_programs_that_ignore_sigterm_are_killed(scripts, grace, is_asked_twice):
    """After the grace time or by a second signal."""
    pids = scripts.folder / "pids"
    words = ("--", *script("stubborn.py", str(pids)))
    process = scripts.start(f"stop_grace_seconds={grace}", *words)
    wait_until(pids.with_suffix(".ready").exists, "all are at work")
    process.send_signal(signal.SIGINT)
    if is_asked_twice:
        wait_until(pids.with_suffix(".asked").exists, "the script got SIGTERM")
        process.send_signal(signal.SIGINT)
    ended = scripts.world.end(process, 130)
    assert ended.attempts[0]["outcome"] == "interrupted"
    started = [int(pid) for pid in pids.read_text().split()]
    assert len(started) == 5
    all_gone(started)


def test_leftovers_of_a_completed_script_are_ended(scripts):
    pids = scripts.folder / "pids"
    code = f"setsid sleep 1000 & echo $! >> {pids}; sleep 1000 & echo $! >> {pids}"
    scripts.run("--", "sh", "-c", code).with_code(0)
    left = [int(pid) for pid in pids.read_text().split()]
    assert len(left) == 2
    all_gone(left)
