"""The queue directory on a real disk: what may lie there, who may lock it, who is alive."""

import contextlib
import fcntl
import io
import json
import os
import resource
import shutil
import struct
import subprocess
import tempfile
import time
import zlib
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from another_user import ANOTHER_USER, as_another_user, hide_processes_of_others, needs_root
from disks import fill, small_disk
from robust_train.cli import machine
from robust_train.cli.main import main
from robust_train.gpu.visible import Visible
from robust_train.host.linux import is_locked, lock
from robust_train.model.gpu import GpuInfo, Inventory
from robust_train.queue import queue_dir
from robust_train.queue.host_queue import GpuRequest, HostQueue
from robust_train.queue.queue_dir import (
    MOST_FILES_PER_USER,
    NO_LIMIT,
    QueueDir,
    QueueError,
    boot_name,
    directory_for,
)
from robust_train.queue.registry import QueuedJob, Registry, decode, encode
from robust_train.queue.waiting import wait_for_gpus
from robust_train.readable import MIB

A = GpuInfo("GPU-a", "A100", 0, "0", 40000 * MIB, 40000 * MIB, 0)
REQUEST = GpuRequest(4000 * MIB, timeout_seconds=0.0)
READ_LOCK = struct.pack("hhqqi0q", fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)


@pytest.fixture
def base():
    """A queue directory that a second user can reach."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o1777)
    yield folder / "queue"
    shutil.rmtree(folder)


@pytest.fixture
def registry(base):
    opened = Registry(base)
    yield opened
    opened.close()


def enter(registry, name="test"):
    return registry.enter(QueuedJob(name=name, reserved_bytes=4000 * MIB))


def queue_of(base, token=""):
    seen = Visible((A,), inventory=Inventory((A,)))
    return HostQueue(base, lambda processes: seen, QueuedJob(name="t"), token)


def running_in(base):
    """A job that has the GPU."""
    job = queue_of(base)
    assert wait_for_gpus(job, REQUEST) == (A,)
    return job


def test_a_faulty_gpu_is_excluded_until_included(registry):
    """Its hardware failed."""
    assert registry.exclude(A.uuid, "/runs/1", "ECC")
    (excluded,) = registry.mark_excluded((replace(A, owned=True),))
    assert "excluded for another 30 min by a job of" in str(excluded.unusable)
    assert not excluded.owned, "no end of a job makes it usable"
    assert registry.include(A.uuid)
    assert registry.mark_excluded((A,)) == (A,)
    assert not registry.include(A.uuid)


@pytest.mark.parametrize("letter", ["a", "ü", "训", "🙂", "\udcff"])
def test_any_folder_name_can_exclude_a_gpu(registry, letter):
    """Whatever the folder of the job is called."""
    for number in range(2):
        assert registry.exclude(A.uuid, f"/runs/{letter * 300}/{number}", "ECC" * 100)
        (excluded,) = registry.exclusions()
        assert (excluded.uuid, excluded.job[-1]) == (A.uuid, str(number))


@pytest.mark.parametrize(("seconds", "stays"), [(-60, True), (60, True), (1900, False)])
def test_clock_changes_do_not_end_exclusions(registry, monkeypatch, seconds, stays):
    """The clock is set by a minute."""
    assert registry.exclude(A.uuid, "/runs/1", "ECC")
    now = time.time()
    monkeypatch.setattr(queue_dir.time, "time", lambda: now + seconds)
    assert bool(registry.exclusions()) is stays


@needs_root
def test_other_users_cannot_change_exclusions(registry):
    """No file of theirs ends one or makes one that stays."""
    path = registry.path
    assert registry.exclude(A.uuid, "/runs/1", "ECC")

    def plant():
        now = time.time()
        later = {"job": "/runs/1", "time": now + 86400, "reason": "x"}
        for uuid in (A.uuid, "GPU-b", *(f"GPU-0{number}" for number in range(1100))):
            (path / f"excluded.{uuid}.{ANOTHER_USER}").write_text(json.dumps(later))
        (path / f"excluded.GPU-c.{os.getppid()}").write_text(json.dumps(later | {"time": now}))
        (path / f"excluded.GPU-d.{ANOTHER_USER}").write_text("[" * 4000)

    with as_another_user(plant):
        assert [(exclusion.uuid, exclusion.by) for exclusion in registry.exclusions()] == [
            (A.uuid, "root")
        ]


# --- the directory ---


def test_all_users_share_the_directory(tmp_path):
    """It is made for every user of the host."""
    old = os.umask(0o077)
    QueueDir(tmp_path / "queue").close()
    os.umask(old)
    for folder in (tmp_path / "queue", tmp_path / "queue" / boot_name()):
        assert folder.stat().st_mode & 0o7777 == 0o1777


def test_key_before_variable_before_the_runtime_directory(tmp_path, monkeypatch):
    environ = {"ROBUST_TRAIN_QUEUE_DIR": "/from/environment"}
    assert directory_for("/from/key", environ) == Path("/from/key")
    assert directory_for(None, environ) == Path("/from/environment")
    shared = tmp_path / "lock"
    shared.mkdir()
    shared.chmod(0o1777)
    monkeypatch.setattr(queue_dir, "RUNTIME", shared)
    assert directory_for(None, {}) == shared / "robust-train"
    # one that not all users can make it in would split their jobs
    shared.chmod(0o755)
    assert directory_for(None, {}) == Path("/tmp/robust-train")
    (shared / "robust-train").mkdir()
    assert directory_for(None, {}) == shared / "robust-train"


def plant_link(base):
    base.symlink_to("/tmp")


def plant_file(base):
    base.write_text("x")


def plant_link_inside(base):
    base.mkdir()
    (base / boot_name()).symlink_to("/tmp")


def plant_file_inside(base):
    base.mkdir()
    (base / boot_name()).write_text("x")


def plant_without_sticky_bit(base):
    base.mkdir()
    base.chmod(0o777)


def plant_of_a_user(base):
    base.mkdir(0o755)
    os.chown(base, 12345, 12345)


@pytest.mark.parametrize(
    ("plant", "why"),
    [
        (plant_link, "symbolic link"),
        (plant_file, "not a directory"),
        (plant_link_inside, "symbolic link"),
        (plant_file_inside, "not a directory"),
        (plant_without_sticky_bit, "without a sticky bit"),
        pytest.param(plant_of_a_user, "belongs to user 12345", marks=needs_root),
    ],
)
def test_a_suspicious_queue_directory_is_refused(tmp_path, plant, why):
    """The directory must not lead elsewhere or be writable for others."""
    base = tmp_path / "queue"
    plant(base)
    with pytest.raises(QueueError, match=why) as caught:
        QueueDir(base)
    assert str(base) in str(caught.value)
    assert "gpu_queue=/" in str(caught.value)


def test_a_network_file_system_is_refused(tmp_path, monkeypatch):
    nearest = queue_dir.file_system_of(Path("/proc/sys/kernel"))
    assert nearest == "proc", "that of the nearest mount"
    monkeypatch.setattr(queue_dir, "file_system_of", lambda path: "nfs")
    with pytest.raises(QueueError, match="nfs, where locks may hang"):
        QueueDir(tmp_path / "queue")


def test_a_directory_that_was_removed_is_made_again(registry):
    shutil.rmtree(registry.path.parent)
    mine = enter(registry)
    other = Registry(registry.path.parent)
    assert [job.id for job in other.jobs()] == [mine.job.id]
    other.close()


def test_replacing_the_directory_spares_running_jobs(base, caplog):
    """A file takes its place."""
    job = running_in(base)
    shutil.rmtree(base)
    base.write_text("not a directory")
    for _ in range(3):
        job.report(5 * MIB)
        job.drain()
    assert job.take([A.uuid], 5000 * MIB)
    (line,) = [record.msg for record in caplog.records if "without a reservation" in record.msg]
    assert "gpu_queue=/" in line, "a project's keys can be put there"
    assert [gpu.uuid for gpu in job.find_open_gpus()] == [A.uuid]
    job.release()


@needs_root
def test_a_full_disk_means_no_reservation(base, caplog):
    """A warning says so."""
    with small_disk(base, "size=16k,mode=1777"):
        fill(base)
        job = running_in(base)
        assert list((base / boot_name()).glob("record.*")) == []
        assert job.hold == ()
        job.release()
        assert "is on a file system that is full (No space left on device)" in caplog.text
        assert caplog.text.count("continues without a reservation") == 1


@needs_root
def test_a_users_directory_is_named_once(base, capsys, caplog):
    """A user made it; ``doctor`` says how to give it to root."""

    def make_it():
        os.umask(0)
        Registry(base).close()

    with as_another_user(make_it):
        job = queue_of(base)
        assert [wait_for_gpus(job, REQUEST) for _ in range(2)] == [(A,), (A,)]
        assert job.hold, "it is used"
        job.release()
    assert sum("belongs to user nobody" in record.message for record in caplog.records) == 1
    main(["doctor", "--dir", str(base)])
    shown = capsys.readouterr().out
    assert f"{base} belongs to nobody" in shown
    assert f"\n  d {base}/boot-%b 1777 root root -\n" in shown


@needs_root
def test_an_unreachable_directory_is_not_empty(tmp_path, monkeypatch):
    """A user cannot reach it."""
    monkeypatch.setenv("ROBUST_TRAIN_QUEUE_DIR", str(tmp_path / "queue"))
    tmp_path.chmod(0o700)

    def look():
        with contextlib.redirect_stderr(io.StringIO()) as said:
            assert (main(["queue"]), main(["gpus"])) == (2, 0)
        assert "cannot be used (Permission denied); name another directory" in said.getvalue()

    assert main(["queue"]) == 0, "before it is made"
    with as_another_user(look):
        pass


@needs_root
def test_all_users_share_a_tmpfiles_directory(base):
    """systemd makes the parents as root's own."""
    base.mkdir(mode=0o755)
    (base / boot_name()).mkdir()
    (base / boot_name()).chmod(0o1777)
    with as_another_user(lambda: enter(Registry(base))):
        registry = Registry(base)
        assert ([job.owner for job in registry.jobs()], registry.owner) == ([ANOTHER_USER], 0)
        registry.close()


# --- limits by the administrator ---


@pytest.mark.parametrize(
    ("text", "limit", "warning", "changes"),
    [
        ("max_gpus_per_user: 4  # each\n", 4, None, {}),
        ("", NO_LIMIT, None, {}),
        ("max_gpus_per_user: 0", NO_LIMIT, "a number of GPUs from 1", {}),
        ("max_gpus: 4", NO_LIMIT, "its only key is max_gpus_per_user", {}),
        ("max_gpus_per_user: [", NO_LIMIT, "its only key is max_gpus_per_user", {}),
        ("#" * 40000, NO_LIMIT, "at most 32768 bytes", {}),
        ("max_gpus_per_user: 1", NO_LIMIT, "others may write it", {"mode": 0o666}),
        ("max_gpus_per_user: 1", NO_LIMIT, "others may write it", {"owner": ANOTHER_USER}),
    ],
)
@needs_root
def test_only_root_limits_gpus_per_user(registry, base, caplog, text, limit, warning, changes):
    """A mistake is one line."""
    limits = base / "queue.yaml"
    limits.write_text(text)
    limits.chmod(changes.get("mode", 0o644))
    os.chown(limits, changes.get("owner", 0), 0)
    assert [registry.gpu_limit() for _ in range(2)] == [limit, limit]
    assert [warning in record.message for record in caplog.records] == [True] * (
        warning is not None
    )


# --- records ---

JOB = QueuedJob(
    "1-aaaaaa", 1, 0, "job", "/run", 2, 3.0, 4000, 2, 1, ("GPU-a",), ("GPU-a", "GPU-b"), (None, 5)
)


def read(data):
    return decode(data, "1-aaaaaa", 1, 0)


def forged(**changes):
    line = json.dumps(json.loads(encode(JOB)[9:]) | changes).encode()
    return b"%08x %s" % (zlib.crc32(line), line)


@given(st.integers(0, 4095), st.randoms())
def test_a_record_that_is_half_written_is_none(cut, random):
    data = encode(JOB)
    assert read(data) == JOB
    content = data.rstrip()
    assert read(content[: cut % len(content)]) is None
    at = random.randrange(len(content))
    changed = content[:at] + bytes([content[at] ^ (1 << random.randrange(8))]) + content[at + 1 :]
    assert read(changed) in (None, JOB)


WRONG = {
    "since": (float("nan"), 1e300),
    "queued_at": ("1",),
    "reserved_bytes": (2**61, -1),
    "count": (0, 10**9, True),
    "pid": (2**40,),
    "only": (["GPU-\x1b[2J"], ["GPU-a"] * 300, "GPU-a"),
    "gpus": (["GPU-a"], ["GPU-a", "GPU-a"]),
    "taken_bytes": ([5, -1],),
    "idle_seconds": ([10**400],),
    "name": (["x"],),
}


def test_a_record_with_one_wrong_field_is_none():
    assert read(forged()) == JOB
    answers = {
        (key, str(value)): read(forged(**{key: value})) for key in WRONG for value in WRONG[key]
    }
    assert set(answers.values()) == {None}, answers


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


@given(st.sampled_from(sorted(json.loads(encode(JOB)[9:]))), JSON)
def test_no_field_value_stops_a_reader(field, value):
    job = read(forged(**{field: value}))
    if job is not None:
        assert (job.name + job.run_dir).isprintable()
        assert encode(job)


def test_planted_files_are_no_jobs(registry):
    """They have the name of a record."""
    plants = (
        lambda path: path.symlink_to("/etc/passwd"),
        lambda path: path.mkdir(),
        os.mkfifo,
        lambda path: path.write_bytes(os.urandom(5000)),
        lambda path: path.write_bytes(b"x" * 10**6),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(encode(JOB)),  # nobody holds its lock
    )
    for number, plant in enumerate(plants):
        plant(registry.path / f"record.{number:010}.abcdef")
        plant(registry.path / f"excluded.GPU-{number}.0")
    assert (registry.jobs(), registry.exclusions()) == ([], [])
    assert enter(registry).job.ticket == 1
    assert Path("/etc/passwd").exists()


def test_a_living_jobs_damaged_record_harms_no_one(registry):
    mine = enter(registry)
    (path,) = registry.path.glob("record.*")
    assert [job.id for job in registry.jobs()] == [mine.job.id]
    path.write_bytes(b"\xff" * 300)
    assert [job.id for job in registry.jobs()] == [mine.job.id], "as it was last read"
    newcomer = Registry(registry.path.parent)
    assert newcomer.jobs() == [], "parsed or ignored"
    newcomer.close()


def test_a_removed_record_returns_with_its_ticket(registry):
    mine, later = enter(registry), enter(registry)
    (registry.path / f"record.{1:010}.{mine.job.id[2:]}").unlink()
    assert [job.ticket for job in registry.jobs()] == [2]
    mine.update(mine.job)
    assert [job.ticket for job in registry.jobs()] == [1, 2]
    for entry in (later, mine):
        entry.release()
    assert list(registry.path.iterdir()) == []


def test_a_returning_job_is_seen_by_its_successor(base, registry):
    """The successor took the last record for that of a dead job."""
    job = queue_of(base, token="abcdef")
    job.join(REQUEST)
    job.requeue(REQUEST, (A.uuid,))
    job.withdraw()
    # as it is for a moment, unlocked and not yet removed
    (registry.path / "record.0000000001.abcdef").touch()
    assert registry.jobs() == []
    again = job.requeue(REQUEST, (A.uuid,))
    assert registry.jobs() == [again]
    job.release()


def test_out_of_files_no_gpu_counts_as_free(registry):
    """A process that can open no file says so."""
    enter(registry)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(registry.fd)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        with pytest.raises(QueueError, match=r"cannot be read \(Too many open files\)"):
            registry.jobs()
        with pytest.raises(QueueError, match=r"cannot be used \(Too many open files\)"):
            Registry(registry.base)
        assert registry.mark_excluded((A,)) == (A,)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_sixty_thousand_files_delay_no_one(registry):
    """One user made all of them."""
    folder = registry.path
    for number in range(MOST_FILES_PER_USER + 500):
        (folder / f"record.{number:010}.abcdef").touch()
    assert registry.jobs() == []
    assert len(list(folder.iterdir())) == 500, "own dead ones go, a thousand at a time"


# --- locks ---


def test_the_lock_lives_with_whoever_inherits_the_descriptor(registry):
    mine = enter(registry)
    (path,) = registry.path.glob("record.*")
    probe = os.open(path, os.O_RDONLY)
    attempt = subprocess.Popen(["sleep", "600"], pass_fds=[mine.fd])  # fork and exec
    mine.release()
    assert is_locked(probe)
    assert path.exists(), "others must see what an orphan keeps"
    attempt.kill()
    attempt.wait()
    assert not is_locked(probe)
    assert registry.jobs() == []
    assert not path.exists()
    os.close(probe)


def flock(path, how):
    fd = os.open(path, os.O_RDONLY)
    fcntl.flock(fd, how)


def read_lock(path):
    with pytest.raises(BlockingIOError):  # the job's lock is in the way, for now
        fcntl.fcntl(os.open(path, os.O_RDONLY), fcntl.F_OFD_SETLK, READ_LOCK)


@pytest.mark.parametrize(
    "take",
    [
        lambda path: flock(path, fcntl.LOCK_SH),
        lambda path: flock(path, fcntl.LOCK_EX),
        read_lock,
        lambda path: [flock(folder, fcntl.LOCK_EX) for folder in list(path.parents)[:2]],
    ],
    ids=["flock -s", "flock -x", "read lock", "directories"],
)
@needs_root
def test_another_users_lock_blocks_nothing(base, registry, take):
    """It keeps no GPU reserved and stops no job from deciding."""
    job = running_in(base)
    (path,) = registry.path.glob("record.*")

    def act():
        os.close(*job.hold)  # a fork inherits it
        with pytest.raises(PermissionError):
            os.open(path, os.O_RDWR)
        return take(path)

    with as_another_user(act):
        other = os.open(path, os.O_RDONLY)
        job.release()
        fcntl.fcntl(other, fcntl.F_OFD_SETLK, READ_LOCK)  # whoever waited for it gets it now
        late = running_in(base)
        assert [job.gpus for job in registry.jobs()] == [(A.uuid,)]
        late.release()
        os.close(other)


def test_a_lockless_file_system_means_no_reservation(base, monkeypatch, caplog):
    """A warning says so."""
    no_locks = mock.Mock(side_effect=OSError(37, "No locks available"))
    monkeypatch.setattr(fcntl, "fcntl", no_locks)
    running_in(base).release()
    assert "No locks available" in caplog.text


# --- other users ---


def test_the_queue_names_vanished_gpus_too(base, monkeypatch, capsys):
    both = A, replace(A, uuid="GPU-b", index=1, pci_bus_id="1")
    seen = Visible(both, inventory=Inventory(both))
    job = HostQueue(base, lambda processes: seen, QueuedJob(name="t", count=2), "")
    assert len(wait_for_gpus(job, replace(REQUEST, count=2))) == 2
    monkeypatch.setattr(machine, "read_inventory", lambda processes: Inventory((A,)))
    assert main(["queue", "--dir", str(base)]) == 0
    assert "GPU 0, GPU-b" in capsys.readouterr().out
    job.release()


@needs_root
def test_the_queue_shows_owners_and_their_processes(base, registry, capsys):
    """The owner of a record, and whose process it names."""
    claims = {"pid": os.getpid(), "name": "\x1b[2Jx\u202e", "user": "root", "gpus": []}

    def plant():
        path = registry.path / "record.0000000007.bbbbbb"
        path.write_bytes(forged(**claims, taken_bytes=[], polled_at=time.monotonic()))
        fd = os.open(path, os.O_RDWR)
        assert lock(fd)
        return fd

    with as_another_user(plant):
        assert main(["queue", "--dir", str(base)]) == 0
        shown = capsys.readouterr()
        assert f"pid {os.getpid()}, a process of root" in shown.out
        assert "nobody" in shown.out.splitlines()[1]
        assert all(c.isprintable() or c == "\n" for c in shown.out + shown.err)
        assert main(["stop", "7-bbbbbb"]) == 1
        assert "no run of yours" in capsys.readouterr().err


@needs_root
def test_hidden_processes_have_not_ended(base):
    """``/proc`` hides those of other users."""
    job = running_in(base)

    def look():
        assert not os.path.exists(f"/proc/{os.getppid()}")
        with contextlib.redirect_stdout(io.StringIO()) as shown:
            assert main(["queue", "--dir", str(base)]) == 0
        assert "running" in shown.getvalue()
        assert "has ended" not in shown.getvalue()

    with as_another_user(look, as_root=hide_processes_of_others):
        job.release()


@needs_root
def test_dead_records_of_others_are_left_alone(base, registry):
    dead = registry.path / "record.0000000003.abcdef"
    dead.touch()

    def use():
        theirs = Registry(base)
        assert theirs.jobs() == []
        assert dead.exists()
        enter(theirs).release()

    with as_another_user(use):
        pass
    assert registry.jobs() == []
    assert not dead.exists(), "root removes all"
