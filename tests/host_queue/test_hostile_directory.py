"""A queue directory in which anything may lie: a clear sentence or a safe recovery each time."""

from __future__ import annotations

import fcntl
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hosts import Host
from hypothesis import given
from hypothesis import strategies as st

from robust_train.queue import exclusions, queue_dir
from robust_train.queue.queue_dir import QueueProblem, boot_name, directory_for, open_queue_dir
from robust_train.queue.records import JobRecord, JobState, decode, encode
from robust_train.queue.reservations import JobRegistry, Reservation, new_record
from simulated_nvml import Gpu

HostWith = Callable[..., Host]

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[JobRegistry]:
    found = JobRegistry(tmp_path / "queue")
    yield found
    found.close()


def enter(registry: JobRegistry, name: str = "test") -> Reservation:
    with registry.locked():
        return registry.enter(new_record(name, "/run", 4000, 1), registry.jobs(sweep=True))


def folder_of(registry: JobRegistry) -> Path:
    return registry.directory.path


# --- the directory ---


def test_the_directory_is_made_for_every_user_of_the_host(tmp_path: Path) -> None:
    old = os.umask(0o077)
    try:
        open_queue_dir(tmp_path / "queue").close()
    finally:
        os.umask(old)
    for folder in (tmp_path / "queue", tmp_path / "queue" / boot_name()):
        assert folder.stat().st_mode & 0o7777 == 0o1777


def test_key_before_variable_before_the_runtime_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = {"ROBUST_TRAIN_QUEUE_DIR": "/from/environment"}
    assert directory_for("/from/key", environ) == Path("/from/key")
    assert directory_for(None, environ) == Path("/from/environment")
    shared = tmp_path / "lock"
    shared.mkdir()
    shared.chmod(0o1777)
    monkeypatch.setattr(queue_dir, "RUNTIME", shared)
    assert directory_for(None, {}) == shared / "robust-train"
    # one that not everybody can make it in would split the users' jobs
    shared.chmod(0o755)
    assert directory_for(None, {}) == Path("/tmp/robust-train")
    (shared / "robust-train").mkdir()
    assert directory_for(None, {}) == shared / "robust-train"


def refusal(path: Path) -> str:
    with pytest.raises(QueueProblem) as caught:
        open_queue_dir(path)
    message = str(caught.value)
    assert str(path) in message
    assert "gpu_queue_dir=" in message
    return message


@pytest.mark.parametrize("level", ["base", "boot"])
def test_a_link_or_a_file_in_its_place_is_refused(tmp_path: Path, level: str) -> None:
    base = tmp_path / "queue"
    target = tmp_path / "elsewhere"
    target.mkdir()
    place = base
    if level == "boot":
        base.mkdir()
        place = base / boot_name()
    place.symlink_to(target)
    assert "symbolic link" in refusal(base)
    place.unlink()
    place.write_text("not a directory")
    assert "no directory" in refusal(base)
    assert list(target.iterdir()) == []


def test_one_that_others_may_write_without_a_sticky_bit_is_refused(tmp_path: Path) -> None:
    base = tmp_path / "queue"
    base.mkdir()
    base.chmod(0o777)
    assert "sticky" in refusal(base)


@needs_root
def test_somebody_elses_private_directory_is_refused_and_a_shared_one_is_not(
    tmp_path: Path,
) -> None:
    base = tmp_path / "queue"
    base.mkdir(mode=0o755)
    os.chown(base, 12345, 12345)
    assert "belongs to user 12345" in refusal(base)
    base.chmod(0o1777)
    open_queue_dir(base).close()


def test_a_network_file_system_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_dir, "file_system_of", lambda fd: "nfs")
    assert "nfs, where a lock may hang" in refusal(tmp_path / "queue")


def test_a_file_system_is_that_of_the_nearest_mount() -> None:
    fd = os.open("/proc/sys/kernel", os.O_RDONLY)
    assert queue_dir.file_system_of(fd) == "proc"
    os.close(fd)


@pytest.mark.parametrize("name", [b"\xff", b"a\x0cb", b"a\rb", "a\u3000b".encode()])
def test_a_mount_with_a_name_of_another_users_choice_is_no_trouble(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: bytes
) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_bytes(
        b"mine %s fuse.sshfs rw 0 0\nnone / ext4 rw 0 0\n"
        % os.fsencode(tmp_path / os.fsdecode(name))
    )
    monkeypatch.setattr(queue_dir, "MOUNTS", mounts)
    fd = os.open(tmp_path, os.O_RDONLY)
    assert queue_dir.file_system_of(fd) == "ext4"
    os.close(fd)


def test_without_working_locks_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(fd: int, operation: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    assert "no working locks (No locks available)" in refusal(tmp_path / "queue")


def test_a_read_only_place_is_refused(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        assert "cannot be used" in refusal(Path("/proc/robust-train"))
        return
    tmp_path.chmod(0o555)
    assert "cannot be used" in refusal(tmp_path / "queue")


def test_a_directory_that_was_removed_is_made_again(registry: JobRegistry) -> None:
    shutil.rmtree(folder_of(registry).parent)
    place = enter(registry)
    assert place.is_in_place()
    other = JobRegistry(folder_of(registry).parent)
    assert [entry.id for entry in other.jobs()] == [place.record.id]
    other.close()


# --- what lies in it ---


@given(st.binary(max_size=9000))
def test_random_bytes_are_no_record(data: bytes) -> None:
    assert decode(data) is None


@given(st.integers(0, 4095), st.randoms())
def test_a_truncated_or_changed_record_is_none(cut: int, rng: random.Random) -> None:
    record = JobRecord("1-aa", 1, JobState.WAITING, "ada", 1, 2, 3, "job", "/run", 4000)
    data = encode(record)
    assert decode(data) == record
    content = data.rstrip()
    assert decode(content[: cut % len(content)]) is None
    at = rng.randrange(len(content))
    changed = content[:at] + bytes([content[at] ^ (1 << rng.randrange(8))]) + content[at + 1 :]
    assert decode(changed) in (None, record)


@pytest.mark.parametrize(
    "plant",
    [
        lambda path: path.symlink_to("/etc/passwd"),
        lambda path: path.mkdir(),
        lambda path: os.mkfifo(path),
        lambda path: path.write_bytes(os.urandom(5000)),
        lambda path: path.write_bytes(b"x" * 10**6),
        lambda path: path.write_bytes(b""),
    ],
    ids=["link", "directory", "fifo", "random", "huge", "empty"],
)
def test_what_is_planted_under_a_jobs_name_is_no_job(
    registry: JobRegistry, plant: Callable[[Path], None]
) -> None:
    plant(folder_of(registry) / "job.0000000007.abcdef")
    plant(folder_of(registry) / "unhealthy.GPU-1.0")
    with registry.locked():
        assert registry.jobs(sweep=True) == []
    assert exclusions.read_exclusions(registry.directory) == []
    place = enter(registry)
    assert place.record.ticket == 1
    assert Path("/etc/passwd").exists()


@pytest.mark.parametrize("damage", [b"", b"\xff" * 300, b"00000000 {}", None])
def test_a_living_job_whose_record_is_damaged_shuts_all_gpus_and_heals(
    host_with: HostWith, damage: bytes | None
) -> None:
    host = host_with(Gpu(), Gpu())
    running = host.start(4000)
    running.wait_for("granted")
    (file,) = host.job_files()
    with file.open("r+b") as opened:
        opened.truncate(100 if damage is None else 0)
        if damage:
            opened.write(damage)
    late = host.start(4000, wait="no")
    assert "cannot be read" in late.wait_for("refused")["reason"]
    running.tell("report 100", "done")
    after = host.start(4000)
    after.wait_for("granted")


JOB = JobRecord("1-aa", 1, JobState.WAITING, "ada", 1, 2, 3, "job", "/run", 4000, count=2)


@pytest.mark.parametrize(
    "wrong",
    [
        {"count": 0},
        {"count": True},
        {"count": 3},
        {"gpus": ["GPU-a"], "taken_bytes": [None]},
        {"gpus": ["GPU-a", "GPU-a"]},
        {"gpus": ["GPU-a", 7]},
        {"gpus": "ab"},
        {"gpus": [], "taken_bytes": []},
        {"state": "waiting"},
        {"taken_bytes": [5]},
        {"taken_bytes": [5, -1]},
        {"taken_bytes": None},
        {"taken_bytes": [5, 1.5]},
    ],
)
def test_a_record_with_a_part_of_its_gpus_or_other_nonsense_is_none(wrong: dict[str, Any]) -> None:
    running = JOB.on(("GPU-a", "GPU-b"))
    assert decode(encode(running)) == running
    line = encode(running)[9:].rstrip()
    assert decode(b"%08x %s" % (zlib.crc32(line), line)) == running
    told = json.dumps(json.loads(line) | wrong).encode()
    assert decode(b"%08x %s" % (zlib.crc32(told), told)) is None


def test_a_record_of_an_earlier_version_is_none() -> None:
    told = json.loads(encode(JOB)[9:])
    for name in ("gpus", "count"):
        del told[name]
    line = json.dumps(told | {"gpu": None, "taken_bytes": None}).encode()
    assert decode(b"%08x %s" % (zlib.crc32(line), line)) is None


def test_a_record_that_claims_another_jobs_name_is_not_believed(registry: JobRegistry) -> None:
    place = enter(registry)
    forged = encode(JobRecord("9-ffffff", 9, JobState.WAITING, "eve", 1, 2, 3, "x", "/x", 1))
    (folder_of(registry) / place.name).write_bytes(forged)
    assert [entry.record for entry in registry.jobs()] == [None]


def test_a_file_that_a_cleaner_removed_is_made_again_under_its_ticket(
    registry: JobRegistry,
) -> None:
    place, later = enter(registry), enter(registry)
    os.unlink(folder_of(registry) / place.name)
    assert [entry.ticket for entry in registry.jobs()] == [2]
    with registry.locked():
        place.update(place.record)
    assert [entry.ticket for entry in registry.jobs()] == [1, 2]
    later.release()
    place.release()
    assert list(folder_of(registry).iterdir()) == []


def test_stale_files_are_removed_by_the_next_job(registry: JobRegistry) -> None:
    for number in range(500):
        (folder_of(registry) / f"job.{number:010}.abcdef").touch()
    place = enter(registry)
    assert place.record.ticket == 1
    with registry.locked():
        registry.jobs(sweep=True)
    assert [path.name for path in folder_of(registry).iterdir()] == [place.name]


@needs_root
def test_stale_files_of_others_are_passed_over() -> None:
    script = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "import pwd\n"
        "from robust_train.queue.reservations import JobRegistry, new_record\n"
        "os.setuid(23456)\n"
        "registry = JobRegistry(Path(sys.argv[1]))\n"
        "with registry.locked():\n"
        "    assert registry.jobs(sweep=True) == []\n"
        "    place = registry.enter(new_record('x', '/x', 1, 1), [])\n"
        "assert place.is_in_place()\n"
    )
    # a directory that the other user can reach
    shared = Path(tempfile.mkdtemp(dir="/tmp"))
    shared.chmod(0o755)
    try:
        found = JobRegistry(shared / "queue")
        found.close()
        dead = shared / "queue" / boot_name() / "job.0000000003.abcdef"
        dead.touch()
        done = subprocess.run(
            [sys.executable, "-c", script, str(shared / "queue")], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert dead.exists()
    finally:
        shutil.rmtree(shared)


@needs_root
def test_a_full_disk_means_a_warning_and_no_reservation(host_with: HostWith) -> None:
    host = host_with(Gpu())
    host.base.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16k,mode=1777", "tmpfs", str(host.base)],
        capture_output=True,
    )
    if mounted.returncode != 0:
        pytest.skip("tmpfs cannot be mounted here")
    try:
        host.folder.mkdir()
        host.folder.chmod(0o1777)
        filler = host.folder / "filler"
        with pytest.raises(OSError, match="No space"):
            filler.write_bytes(b"x" * 10**6)
        job = host.start(4000)
        assert job.wait_for("granted")["gpu"] == host.machine.uuid(0)
        assert host.job_files() == []
        job.end()
        assert "is on a file system that is full (No space left on device)" in job.errors
        assert job.errors.count("goes on without a reservation") == 1
    finally:
        subprocess.run(["umount", "-l", str(host.base)], check=True)


def test_a_directory_that_cannot_be_used_means_one_warning_and_the_job_runs(
    host_with: HostWith,
) -> None:
    host = host_with(Gpu())
    host.base.symlink_to("/tmp")
    job = host.start(4000)
    assert job.wait_for("granted")["gpu"] == host.machine.uuid(0)
    job.end()
    job.process.wait()
    assert "symbolic link" in job.errors
    assert job.errors.count("goes on without a reservation") == 1


def test_a_registry_lock_that_is_never_let_go_only_makes_wait(
    host_with: HostWith, registry: JobRegistry
) -> None:
    host = host_with(Gpu())
    held = JobRegistry(host.base)
    with held.locked():
        waits = host.start(4000)
        assert "holds the lock" in waits.wait_for("waiting")["sentence"]
        assert held.lock_holder() == f"pid {os.getpid()}"
    waits.wait_for("granted")
    held.close()
