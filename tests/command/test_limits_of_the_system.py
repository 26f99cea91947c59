"""Where the system gives no other file or process: one line that names the limit, and code 75."""

import errno
import os
import resource
import subprocess
import sys

import pytest

from another_user import as_another_user, needs_root
from robust_train.features.provenance.environment import Provenance
from robust_train.gpu.bounded import ask
from robust_train.model.errors import EXIT_TRY_LATER, find_limit_error


def test_too_few_open_files_name_the_limit(tmp_path):
    """The message is one line."""
    argv = f"{sys.executable} -m robust_train.cli.main run --run-dir {tmp_path} -- true"
    ended = subprocess.run(
        ["sh", "-c", f"ulimit -n 12; exec {argv}"], capture_output=True, text=True
    )
    assert ended.returncode == EXIT_TRY_LATER
    (line,) = ended.stderr.splitlines()
    assert line.endswith("the limit of a process is 12; raise it: ulimit -n 1024")


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.EMFILE, "ulimit -n"),
        (errno.ENFILE, "on this machine"),
        (errno.EAGAIN, "no other process or thread can be started"),
    ],
)
def test_each_limit_is_named_and_may_pass(number, words):
    limit = find_limit_error(OSError(number, "words of the system"))
    assert words in str(limit)
    assert limit.exit_code == EXIT_TRY_LATER
    assert find_limit_error(OSError(errno.ENOSPC, "full")) is None
    assert find_limit_error(ValueError()) is None


@needs_root
def test_a_lack_of_threads_costs_no_job(tmp_path):
    """No record is worth a job, and the limit is named."""

    def fill():
        resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
        assert Provenance(tmp_path, (), {}).read_summary() is None
        with pytest.raises(RuntimeError) as refused:
            ask(os.getpid, 1.0)
        assert "ulimit -u is 1)" in str(find_limit_error(refused.value))

    with as_another_user(fill):
        pass
