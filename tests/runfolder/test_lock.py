"""The lock of a run folder. Real locks, real processes."""

import errno
import fcntl
import json
import os
import socket
import subprocess
import threading

import psutil
import pytest
from live_folder import another_launcher, as_on_another_host, change_json

from robust_train.cli.main import main
from robust_train.folder import lock
from robust_train.folder.lock import (
    RunLock,
    is_alive,
    is_held,
    read_holder,
    refusal,
    wait_until_free,
)
from robust_train.model.errors import ConfigError, RunFolderUnavailableError


@pytest.fixture
def held(tmp_path):
    """A job of this process holds the folder."""
    held = RunLock(tmp_path, "0-aaaaaa")
    yield held
    held.release()


@pytest.fixture
def short_lease(monkeypatch):
    monkeypatch.setattr(lock, "LEASE_SECONDS", 1.0)


def take(run_dir):
    RunLock(run_dir, "0-bbbbbb").release()


def test_a_second_launcher_is_refused(tmp_path, held):
    """The message has host, process and time of the first."""
    content = (tmp_path / "lock").read_bytes()
    with pytest.raises(ConfigError) as refused:
        take(tmp_path)
    assert refused.value.exit_code == 2
    line = str(refused.value)
    for words in (socket.gethostname(), f"pid {os.getpid()}", "since 2", "robust-train stop"):
        assert words in line
    assert "\n" not in line
    assert line == refusal(tmp_path)
    assert (tmp_path / "lock").read_bytes() == content
    held.release()
    assert refusal(tmp_path) is None
    take(tmp_path)


def test_a_dead_launchers_last_checkpoint_is_waited_for(tmp_path, caplog):
    """Its attempt may still be writing it."""
    (descriptor,) = RunLock(tmp_path, "0-aaaaaa").hold
    attempt = subprocess.Popen(["sleep", "600"], pass_fds=[descriptor])
    os.close(descriptor)  # as if this process had been killed
    assert is_held(tmp_path), "as long as an attempt has the descriptor"
    dead = subprocess.Popen(["true"])
    dead.wait()
    change_json(tmp_path / "lock", pid=dead.pid)
    threading.Timer(0.8, attempt.kill).start()
    take(tmp_path)
    attempt.wait()
    assert is_held(tmp_path) is False
    (record,) = caplog.records
    assert f"pid {dead.pid}, which was killed" in record.getMessage()
    assert "for the last checkpoint of its attempt" in record.getMessage()


@pytest.mark.usefixtures("held")
def test_an_attempt_that_stays_is_finally_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "ORPHAN_SECONDS", 0.8)
    change_json(tmp_path / "lock", process_started=1.0)  # another process has the number now
    with pytest.raises(RunFolderUnavailableError, match="was killed, but its attempt still runs"):
        take(tmp_path)


@pytest.mark.usefixtures("held")
def test_clocks_and_namespaces_do_not_kill_launchers(tmp_path, monkeypatch):
    """Neither a clock that is set nor another PID namespace makes a launcher dead."""
    with monkeypatch.context() as patched:
        # the time of the boot moves with the clock
        proc = tmp_path / "proc"
        proc.mkdir()
        (proc / "stat").write_text(f"btime {psutil.boot_time() + 3600:.0f}\n")
        (proc / str(os.getpid())).symlink_to(f"/proc/{os.getpid()}")
        patched.setattr(psutil, "PROCFS_PATH", str(proc))
        assert not read_holder(tmp_path).is_dead
    content = json.loads((tmp_path / "lock").read_text())
    assert content["pid_namespace"] == os.readlink("/proc/self/ns/pid")
    # as `unshare --pid` numbers it, on the same host
    change_json(tmp_path / "lock", pid=1, pid_namespace="pid:[4026532999]")
    holder = read_holder(tmp_path)
    assert (holder.is_dead, holder.process) == (False, None)


@pytest.mark.usefixtures("held")
def test_a_refused_script_leaves_the_folder_untouched(tmp_path, capfd):
    """A live job refuses it."""
    before = sorted(tmp_path.iterdir())
    assert main(["run", f"--run-dir={tmp_path}", "device=cpu", "--", "true"]) == 2
    assert "is in use by the job of" in capfd.readouterr().err
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.usefixtures("short_lease")
def test_a_job_on_another_host_may_live(tmp_path):
    """It is taken neither for dead nor for alive: a supervisor may try again."""
    with another_launcher(tmp_path):
        as_on_another_host(tmp_path)
        for begin in (take, wait_until_free):
            with pytest.raises(RunFolderUnavailableError, match=r"on another-host\.example, pid"):
                begin(tmp_path)


def test_a_lost_hosts_lock_is_waited_for(tmp_path, caplog, held):
    change_json(tmp_path / "lock", host="another-host.example")
    threading.Timer(0.8, held.release).start()
    take(tmp_path)
    (record,) = caplog.records
    assert "until the disk releases the lock of a lost host" in record.getMessage()


@pytest.mark.parametrize("operation", [fcntl.LOCK_SH, fcntl.LOCK_EX])
def test_a_foreign_flock_stops_no_resume(tmp_path, operation):
    """It shows no job either."""
    (tmp_path / "lock").touch(mode=0o644)
    with (tmp_path / "lock").open() as stranger:
        fcntl.flock(stranger, operation)
        assert is_held(tmp_path) is False
        take(tmp_path)
        change_json(tmp_path / "lock", process_started=1.0)  # that launcher has ended
        assert is_held(tmp_path) is False
        assert refusal(tmp_path) is None
        take(tmp_path)


@pytest.mark.usefixtures("short_lease", "held")
def test_torn_and_foreign_content_is_nobody_s_name(tmp_path):
    name = json.loads((tmp_path / "lock").read_text())
    absurd = [json.dumps(name | {"since": since}).encode() for since in (1e300, 10**400)]
    for content in (b"", b"{", b"[]", b"\xff" * 5000, b'{"host": 3}', *absurd):
        (tmp_path / "lock").write_bytes(content)
        assert read_holder(tmp_path) is None, content
    with pytest.raises(RunFolderUnavailableError, match="in use by another job"):
        take(tmp_path)


def test_a_disk_without_locks_costs_one_warning(tmp_path, monkeypatch, caplog):
    def no_locks(fd, *arguments):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "fcntl", no_locks)
    held = RunLock(tmp_path, "0-aaaaaa")
    assert held.hold == ()
    assert is_held(tmp_path) is None
    assert is_alive(tmp_path, has_ended=False)
    assert not is_alive(tmp_path, has_ended=True)
    assert read_holder(tmp_path).job == "0-aaaaaa"
    held.release()
    (record,) = caplog.records
    assert "cannot be locked (No locks available)" in record.getMessage()


@pytest.mark.parametrize("kind", ["link", "fifo"])
def test_a_foreign_lock_file_is_not_followed(tmp_path, kind):
    target = tmp_path / "precious"
    target.write_text("precious")
    (tmp_path / "run").mkdir()
    path = tmp_path / "run" / "lock"
    path.symlink_to(target) if kind == "link" else os.mkfifo(path)
    take(tmp_path / "run")
    assert target.read_text() == "precious"
    assert read_holder(tmp_path / "run") is None
