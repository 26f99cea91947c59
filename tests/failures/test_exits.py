"""Processes that ended without a report: real ones, by their exit status and last words."""

from __future__ import annotations

import subprocess
import sys

import pytest

from robust_train.failures import classify_exit
from robust_train.failures.advice import advice_for
from robust_train.failures.stack import native_stack_in
from robust_train.model.failure import Clue, Failure, FailureKind

KILL_ME = "import os, signal; os.kill(os.getpid(), signal.{})"


def run(program: str, *options: str) -> tuple[int, str]:
    """A Python process that runs the program: its return code and all it printed."""
    done = subprocess.run(
        [sys.executable, *options, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout


def ended(program: str, *options: str, oom_killed: bool | None = None) -> Failure:
    return classify_exit(*run(program, *options), oom_killed=oom_killed)


def test_a_bare_sigkill_is_an_interruption() -> None:
    failure = ended(KILL_ME.format("SIGKILL"))

    assert failure.kind is FailureKind.INTERRUPTED
    assert failure.evidence.clue == Clue.KILLED
    assert "SIGKILL" in failure.message


def test_a_sigkill_that_the_cgroup_counted_is_the_hosts_memory() -> None:
    failure = ended(KILL_ME.format("SIGKILL"), oom_killed=True)

    assert failure.kind is FailureKind.HOST_OOM
    assert failure.evidence.library == "kernel"
    assert "num_workers" in advice_for(failure.kind, failure.evidence)[0]


def test_a_shells_word_for_sigkill_is_understood() -> None:
    done = subprocess.run(["sh", "-c", "sh -c 'kill -9 $$'; exit $?"], timeout=60)

    assert done.returncode == 137
    assert classify_exit(done.returncode).kind is FailureKind.INTERRUPTED
    assert classify_exit(done.returncode, oom_killed=True).kind is FailureKind.HOST_OOM


def test_of_torchruns_failures_the_root_cause_is_shown() -> None:
    output = (
        'Traceback (most recent call last):\n  File "run.py", line 3, in <module>\n'
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n=====\n"
        "train.py FAILED\n-----\nFailures:\n[1]:\n  rank      : 0 (local_rank: 0)\n"
        "  exitcode  : -15 (pid: 17)  (SIGTERM)\n  error_file: <N/A>\n-----\n"
        "Root Cause (first observed failure):\n[0]:\n  rank      : 1 (local_rank: 1)\n"
        "  exitcode  : -9 (pid: 18)  (SIGKILL)\n  error_file: <N/A>\n"
        "  traceback : Signal 9 (SIGKILL) received by PID 18\n=====\n"
    )

    failure = classify_exit(1, output)

    assert failure.message.endswith(": ChildFailedError: rank 1: exit code -9 (pid: 18) (SIGKILL)")


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGXCPU"])
def test_signals_that_ask_to_stop_are_interruptions(name: str) -> None:
    program = f"import signal; signal.signal(signal.{name}, signal.SIG_DFL)\n"

    failure = ended(program + KILL_ME.format(name))

    assert failure.kind is FailureKind.INTERRUPTED
    assert name in failure.message


def test_a_segmentation_fault_is_a_bug_and_said_where() -> None:
    program = "import ctypes\ndef reads_nothing():\n    ctypes.string_at(0)\nreads_nothing()"
    failure = ended(program, "-X", "faulthandler")

    assert failure.kind is FailureKind.BUG
    assert failure.message == (
        'ended by SIGSEGV: Segmentation fault at "<string>", line 3 in reads_nothing'
    )


def test_the_stack_of_a_crash_is_that_of_its_thread_without_the_launchers_frames() -> None:
    stack = native_stack_in(
        "epoch 1: loss 0.1\nFatal Python error: Segmentation fault\n\n"
        "Thread 0x1 (most recent call first):\n"
        '  File "/x/site-packages/psutil/__init__.py", line 9 in wait\n\n'
        "Current thread 0x2 (most recent call first):\n"
        '  File "/x/site-packages/torch/nn/functional.py", line 5 in conv\n'
        '  File "/home/me/my.py", line 3 in train\n'
        '  File "/x/site-packages/robust_train/attempt/runner.py", line 7 in call_trainer\n'
        '  File "<frozen runpy>", line 198 in _run_module_as_main\n\n'
        "Extension modules: yaml._yaml (total: 1)\n"
    )

    assert stack is not None
    assert stack.headline == 'Segmentation fault at "/home/me/my.py", line 3 in train'
    assert len(stack.frames) == 2
    assert "psutil" not in str(stack)
    assert native_stack_in("Killed") is None


def test_an_abort_is_a_bug() -> None:
    failure = ended("import os; os.abort()", "-X", "faulthandler")

    assert failure.kind is FailureKind.BUG
    assert "SIGABRT" in failure.message


def test_a_bus_error_is_a_full_shared_memory() -> None:
    program = (
        "import mmap, tempfile\n"
        "file = tempfile.TemporaryFile()\n"
        "file.truncate(mmap.PAGESIZE)\n"
        "mapped = mmap.mmap(file.fileno(), mmap.PAGESIZE)\n"
        "file.truncate(0)\n"
        "mapped[0]\n"
    )

    failure = ended(program)

    assert failure.kind is FailureKind.WORKER_DEATH
    assert "SIGBUS" in failure.message


@pytest.mark.parametrize("code", [1, 2, 3, 255])
def test_leaving_with_a_code_is_a_bug(code: int) -> None:
    failure = classify_exit(code)

    assert failure.kind is FailureKind.BUG
    assert str(code) in failure.message


def test_an_oom_that_was_overcome_does_not_count() -> None:
    program = (
        "try:\n"
        "    bytearray(1 << 62)\n"
        "except MemoryError as error:\n"
        "    print('MemoryError: Unable to allocate 4 EiB, trying less')\n"
        "raise TypeError('no')\n"
    )

    assert ended(program).kind is FailureKind.BUG


def test_what_is_only_logged_is_no_reason_to_end() -> None:
    program = (
        "import logging, sys\n"
        "logging.basicConfig(format='%(asctime)s %(levelname)s %(message)s')\n"
        "logging.warning('CUDA out of memory. Trying half the batch')\n"
        "print('bad checkpoint')\n"
        "sys.exit(3)\n"
    )

    assert ended(program).kind is FailureKind.BUG


def test_a_trainer_that_only_writes_of_a_kill_and_fails_otherwise_is_not_killed() -> None:
    failure = ended("import ctypes; print('saw an OOMKilled pod'); ctypes.string_at(0)")

    assert "SIGSEGV" in failure.message


def test_a_long_log_is_read_from_its_end() -> None:
    log = "step\n" * 100_000 + "Traceback (most recent call last):\n  File x\nMemoryError\n"

    assert classify_exit(1, log).kind is FailureKind.HOST_OOM
