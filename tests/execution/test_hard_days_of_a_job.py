"""Signals, silence and hangs in the processes of a job, with the real command."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from trainers import LARGE_BYTES
from world import is_running, wait_for_text, wait_until


def ready(world):
    """Wait for the trainer; return its process id."""
    path = Path(world.environ["READY_FILE"])
    return int(wait_for_text(path, "the trainer runs"))


def start(world, trainer):
    files = {f"{name.upper()}_FILE": str(world.folder / name) for name in ("ready", "go", "steps")}
    return world.with_environ(files).start(f"trainer._target_={trainer}")


@pytest.mark.parametrize(
    "signum",
    [
        signal.SIGHUP,
        pytest.param(signal.SIGUSR1, marks=pytest.mark.slow),
        pytest.param(signal.SIGUSR2, marks=pytest.mark.slow),
    ],
)
def test_signals_to_all_processes_spare_the_last_checkpoint(world, signum):
    """SIGTERM, and other kinds of trainers: see tests/conformance."""
    process = start(world, "trainers.saves_when_stopped")
    ready(world)
    launcher = psutil.Process(process.pid)
    for target in (*reversed(launcher.children(recursive=True)), launcher):
        target.send_signal(signum)
    ended = world.end(process)
    assert ended.returncode == (129 if signum == signal.SIGHUP else 143), ended.output
    assert ended.summary["status"] == "interrupted"
    assert Path(ended.summary["checkpoint"]).stat().st_size == 20_000


def test_repeated_signals_do_not_interrupt_a_checkpoint(world):
    process = start(world, "trainers.saves_when_stopped")
    attempt = ready(world)
    process.send_signal(signal.SIGTERM)
    for _ in range(3):
        os.kill(attempt, signal.SIGTERM)
    ended = world.end(process, code=143)
    assert Path(ended.summary["checkpoint"]).stat().st_size == 20_000


def test_a_stopped_launcher_does_not_hold_training_up(world):
    """Nor is its result lost, whatever its size."""
    steps = world.folder / "steps"
    process = start(world, "trainers.goes_on_alone")
    ready(world)
    process.send_signal(signal.SIGSTOP)
    (world.folder / "go").touch()
    wait_until(lambda: steps.exists() and steps.read_text() == "3000", "training continues")
    process.send_signal(signal.SIGCONT)
    ended = world.end(process, code=0)
    assert ended.summary["result"] == {"steps": 3000, "large": "z" * LARGE_BYTES}


def test_output_that_nobody_reads_holds_nothing_up(world):
    process = start(world, "trainers.prints_a_lot")
    ready(world)  # 4 MB were printed, and nobody has read a byte
    process.send_signal(signal.SIGTERM)
    summary = world.run_dir / "summary.json"
    wait_until(summary.exists, "the job ends")
    ended = world.end(process, code=143)
    assert "the last line" in (world.run_dir / "attempt-1.log").read_text()
    assert "Output truncated: no one was reading" in ended.output


@pytest.mark.usefixtures("alone")
def test_a_signal_at_startup_prints_no_traceback(world):
    process = world.start("trainer._target_=trainers.returns_its_pid")
    wait_until(lambda: _has_handler(process.pid), "signals are handled")
    process.send_signal(signal.SIGINT)
    ended = world.end(process, code=130)
    assert "Traceback" not in ended.output


def _has_handler(pid):
    status = Path(f"/proc/{pid}/status").read_text()
    (caught,) = [line.split()[1] for line in status.splitlines() if line.startswith("SigCgt")]
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)


@pytest.mark.parametrize(
    ("job", "words"),
    [
        (("trainer=command", "trainer.argv=[sh,-c,exit 3]"), "exit code 3"),
        pytest.param(
            ("trainer._target_=trainers.dies_of_segfault",), "SIGSEGV", marks=pytest.mark.slow
        ),
    ],
)
def test_the_end_is_known_without_waiting_for_children(world, job, words):
    """Whoever started the launcher ignores SIGCHLD, which a process inherits."""
    ended = world.run(
        *job, code=1, preexec_fn=lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    )
    assert words in ended.attempts[0]["message"]


def test_a_stop_request_is_seen_during_imports(world):
    process = start(world.with_libraries(), "takes_long_to_import.train")
    server = ready(world)
    wait_until((world.run_dir / "state.json").exists, "the run can be found")
    stop = [sys.executable, "-m", "robust_train.cli.main", "stop", str(world.run_dir)]
    subprocess.run(stop, env=world.environ, check=True, capture_output=True)
    world.end(process, code=143)
    wait_until(lambda: not is_running(server), "the server ends")


def test_libraries_read_the_environment_that_the_job_sets(world):
    sets = "+hydra.job.env_set.READ_AT_IMPORT=by the library"
    trainer = "trainer._target_=reads_the_environment.train"
    ended = world.with_libraries().run(trainer, sets, code=0)
    assert ended.summary["result"] == "by the library"
