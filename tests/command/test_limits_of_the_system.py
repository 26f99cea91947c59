"""Where the system gives no other file or process: one line that names the limit, and code 75."""

from __future__ import annotations

import errno
import subprocess
import sys

import pytest

from robust_train.model.errors import EXIT_TRY_LATER, limit_reached


def test_too_few_files_are_one_line_that_names_the_limit(tmp_path):
    argv = f"{sys.executable} -m robust_train.cli.main run --run-dir {tmp_path} -- true"
    ended = subprocess.run(
        ["sh", "-c", f"ulimit -n 12; exec {argv}"], capture_output=True, text=True
    )
    assert ended.returncode == EXIT_TRY_LATER
    (line,) = ended.stderr.splitlines()
    assert line.endswith("a process may have 12 here; allow it more: ulimit -n 1024")


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.EMFILE, "ulimit -n"),
        (errno.ENFILE, "on this machine"),
        (errno.EAGAIN, "no other process or thread can be started"),
    ],
)
def test_each_limit_is_named_and_may_pass(number, words):
    limit = limit_reached(OSError(number, "words of the system"))
    assert words in str(limit)
    assert limit.exit_code == EXIT_TRY_LATER


def test_other_errors_are_no_limits():
    assert limit_reached(OSError(errno.ENOSPC, "full")) is None
    assert limit_reached(ValueError()) is None
