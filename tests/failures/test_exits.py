"""Processes that ended without a report: real ones, by their exit status and last words."""

import subprocess
import sys

import pytest

from robust_train.failures import classify_exit
from robust_train.failures.stack import native_stack_in
from robust_train.model.failure import FailureKind

SEGFAULT = "import ctypes\ndef reads_nothing():\n    ctypes.string_at(0)\nreads_nothing()"
BUS_ERROR = """
import mmap, tempfile
file = tempfile.TemporaryFile()
file.truncate(mmap.PAGESIZE)
mapped = mmap.mmap(file.fileno(), mmap.PAGESIZE)
file.truncate(0)
mapped[0]
"""
OVERCOME = """
try:
    bytearray(1 << 62)
except MemoryError as error:
    print('MemoryError: Unable to allocate 4 EiB, trying less')
raise TypeError('no')
"""
ONLY_LOGGED = """
import logging, sys
logging.basicConfig(format='%(asctime)s %(levelname)s %(message)s')
logging.warning('CUDA out of memory. Trying half the batch')
print('bad checkpoint')
sys.exit(3)
"""


@pytest.mark.parametrize(
    ("program", "kind", "message"),
    [
        ("import os; os.kill(os.getpid(), 9)", FailureKind.INTERRUPTED, "SIGKILL"),
        (
            SEGFAULT,
            FailureKind.BUG,
            'ended by SIGSEGV: Segmentation fault at "<string>", line 3 in reads_nothing',
        ),
        ("import os; os.abort()", FailureKind.BUG, "SIGABRT"),
        (BUS_ERROR, FailureKind.WORKER_DEATH, "SIGBUS"),  # a full shared memory
        (OVERCOME, FailureKind.BUG, "TypeError"),
        (ONLY_LOGGED, FailureKind.BUG, "exit code 3"),
    ],
)
def test_status_and_last_words_explain_real_ends(program, kind, message):
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
    )
    failure = classify_exit(done.returncode, done.stdout)
    assert failure.kind is kind
    assert message in failure.message


def test_of_torchruns_failures_the_root_cause_is_shown():
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


def test_a_crash_shows_its_threads_stack():
    """Frames of the launcher are left out."""
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
    assert stack.headline == 'Segmentation fault at "/home/me/my.py", line 3 in train'
    assert len(stack.frames) == 2
    assert "psutil" not in str(stack)
    assert native_stack_in("Killed") is None


def test_a_long_log_is_read_from_its_end():
    log = "step\n" * 100_000 + "Traceback (most recent call last):\n  File x\nMemoryError\n"
    assert classify_exit(1, log).kind is FailureKind.HOST_OOM
