"""What other users of the machine, and a directory that fails, can do to a job: make it wait."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
from hosts import Host
from hypothesis import given
from hypothesis import strategies as st

import warm
from robust_train.cli import doctor, queue
from robust_train.cli.gpu_probe import exercise
from robust_train.gpu.visible import Visible
from robust_train.queue.host_queue import HostQueue
from robust_train.queue.queue_dir import boot_name, tmpfiles_line
from robust_train.queue.queued_job import QueuedJob
from robust_train.queue.records import LAST_TICKET, JobRecord, JobState, decode, encode, sealed
from robust_train.queue.reservations import JobRegistry, Reservation, new_record
from robust_train.queue.usage import HOUR, add_usage, read_usage
from robust_train.queue.waiting import GpuRequest, NoGpu
from robust_train.values import MIB, GpuInfo
from simulated_nvml import Gpu
from world import is_running, wait_until

HostWith = Callable[..., Host]
NOBODY = 65534
A = GpuInfo("GPU-a", "A100", 0, "0", 40000 * MIB, 40000 * MIB, 0)

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@pytest.fixture
def base() -> Iterator[Path]:
    """A queue directory that a second user can reach."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o777)
    yield folder / "queue"
    shutil.rmtree(folder)


@pytest.fixture
def registry(base: Path) -> Iterator[JobRegistry]:
    found = JobRegistry(base)
    yield found
    found.close()


def enter(registry: JobRegistry, name: str = "test") -> Reservation:
    with registry.locked():
        return registry.enter(new_record(name, "/run", 4000 * MIB, 1), registry.jobs(sweep=True))


@contextlib.contextmanager
def as_nobody(act: Callable[[], None]) -> Iterator[int]:
    """Another user's process that has done something and keeps all that it has open."""
    done, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            act()
            os.write(told, b".")
            time.sleep(300)
        finally:
            os._exit(1)
    os.close(told)
    try:
        assert os.read(done, 1) == b".", "it could not"
        yield pid
    finally:
        os.close(done)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def plant(folder: Path, name: str, content: bytes = b"") -> Callable[[], None]:
    """Make a locked record with this content."""

    def act() -> None:
        fd = os.open(folder / name, os.O_RDWR | os.O_CREAT, 0o644)
        fcntl.flock(fd, fcntl.LOCK_EX)
        os.write(fd, content)

    return act


def forged(**wrong: Any) -> bytes:
    values = json.loads(encode(RECORD)[9:]) | wrong
    line = json.dumps(values).encode()
    return b"%08x %s" % (zlib.crc32(line), line)


RECORD = JobRecord("1-aaaaaa", 1, JobState.WAITING, "eve", 1, 2, 3.0, "job", "/run", 4000)


@pytest.mark.parametrize(
    "wrong",
    [
        {"queued_at": float("nan")},
        {"queued_at": float("-inf")},
        {"queued_at": float("inf")},
        {"queued_at": "1"},
        {"queued_at": True},
        {"since": 1e300},
        {"since": -1.0},
        {"started": None},
        {"reserved_bytes": 2**61},
        {"reserved_bytes": -1},
        {"reserved_bytes": 4e9},
        {"count": 10**9},
        {"jobs_per_device": 0},
        {"ticket": 10**15},
        {"pid": 2**40},
        {"only": ["GPU-\x1b[2J"]},
        {"only": ["GPU-a"] * 300},
        {"only": "GPU-a"},
        {"name": ["x"]},
        {"name": "x" * 301},
        {"state": "asleep"},
        {"state": ["waiting"]},
    ],
)
def test_a_record_with_one_wrong_field_is_unreadable(wrong: dict[str, Any]) -> None:
    assert decode(forged()) == RECORD
    assert decode(forged(**wrong)) is None


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


@given(st.sampled_from(sorted(json.loads(encode(RECORD)[9:]))), JSON)
def test_no_value_of_any_field_crashes_who_reads_it(field: str, value: Any) -> None:
    read = decode(forged(**{field: value}))
    if read is not None:
        assert all(text.isprintable() for text in (read.name, read.user, read.run_dir))
        assert encode(read)


@needs_root
def test_an_empty_record_with_the_last_ticket_lets_nobody_start_without_a_reservation(
    base: Path, registry: JobRegistry
) -> None:
    name = f"job.{LAST_TICKET}.aaaaaa"
    with as_nobody(plant(registry.directory.path, name)):
        job = queue_of(base)
        found = job.wait(
            GpuRequest(4000 * MIB, wait=False), lambda status: None, lambda seconds, wake=None: None
        )
        assert isinstance(found, NoGpu)
        assert f"job {LAST_TICKET}-aaaaaa of nobody cannot be read" in found.reason
        assert "\n" not in found.reason
        job.release()
        first, second = enter(registry), enter(registry)
        assert [first.record.ticket, second.record.ticket] == [LAST_TICKET] * 2
        assert first.record.queued_at < second.record.queued_at, "and the first goes first"
    assert [entry.id for entry in registry.jobs()] == sorted(
        [first.record.id, second.record.id], key=lambda id_: id_
    )


def queue_of(base: Path) -> HostQueue:
    seen = Visible((A,), machine=(A,))
    return HostQueue(base, name="t", run_dir="/", jobs_per_device=1, read=lambda processes: seen)


def test_a_running_job_keeps_its_own_gpus_while_somebody_holds_the_queue_lock(
    base: Path, registry: JobRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = queue_of(base)
    request = GpuRequest(4000 * MIB, wait=False)
    assert job.wait(request, lambda status: None, lambda seconds, wake=None: None) == (A,)
    monkeypatch.setattr(JobRegistry, "locked", partialmethod(JobRegistry.locked, 0.0))
    fcntl.flock(registry.directory.fd, fcntl.LOCK_EX)
    assert job.open_gpus() == (A,), "or its next attempt would run on the CPU"
    fcntl.flock(registry.directory.fd, fcntl.LOCK_UN)
    monkeypatch.undo()
    job.release()


@needs_root
def test_a_running_job_keeps_its_gpus_beside_a_record_that_cannot_be_read(
    base: Path, registry: JobRegistry, capsys: pytest.CaptureFixture[str]
) -> None:
    job = queue_of(base)
    request = GpuRequest(4000 * MIB, wait=False)
    assert job.wait(request, lambda status: None, lambda seconds, wake=None: None) == (A,)
    content = forged(queued_at=float("nan"), id="9-aaaaaa", ticket=9)
    with as_nobody(plant(registry.directory.path, "job.0000000009.aaaaaa", content)):
        assert queue.main(["--dir", str(base), "cancel", "9-aaaaaa"]) == 1
        assert "it belongs to user 65534" in capsys.readouterr().err
        assert [gpu.uuid for gpu in job.open_gpus()] == [A.uuid]
        assert job.take([A.uuid], 5000 * MIB)
        assert registry.jobs()[0].record.reserved_bytes == 5000 * MIB  # type: ignore[union-attr]
    job.release()


@needs_root
def test_control_characters_of_others_never_reach_the_terminal(
    base: Path, registry: JobRegistry, capsys: pytest.CaptureFixture[str]
) -> None:
    content = forged(id="7-bbbbbb", ticket=7, name="\x1b[2Jx\u202e", user="e\rve\n")
    with as_nobody(plant(registry.directory.path, "job.0000000007.bbbbbb", content)):
        assert queue.main(["--dir", str(base)]) == 0
        assert queue.main(["--dir", str(base), "cancel", "7-bbbbbb"]) == 1
        assert queue.main(["--dir", str(base), "cancel", "\x1b[2J"]) == 1
    shown = capsys.readouterr()
    text = shown.out + shown.err
    assert "7-bbbbbb" in text
    assert all(c.isprintable() or c == "\n" for c in text)


def test_a_hard_link_to_a_record_neither_hides_nor_doubles_it(
    registry: JobRegistry, tmp_path: Path
) -> None:
    place = enter(registry)
    folder = registry.directory.path
    for name in ("job.0000000009.abcdef", "job.0000000000.abcdef", "elsewhere"):
        os.link(folder / place.name, folder / name)
    (found,) = registry.jobs()
    assert (found.id, found.record) == (place.record.id, place.record)


@needs_root
def test_a_directory_that_a_user_made_is_named_once_and_doctor_says_how_to_give_it_to_root(
    base: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    def make() -> None:
        os.umask(0)
        JobRegistry(base).close()

    with as_nobody(make):
        job = queue_of(base)
        request = GpuRequest(4000 * MIB, wait=False)
        for _ in range(2):
            job.wait(request, lambda status: None, lambda seconds, wake=None: None)
        job.release()
    assert [r.message for r in caplog.records if "belongs to user nobody" in r.message] != []
    assert sum("belongs to user nobody" in r.message for r in caplog.records) == 1
    doctor.main(["--dir", str(base)])
    shown = capsys.readouterr().out
    assert f"{base} belongs to nobody" in shown
    assert f"\n  {tmpfiles_line(base)}\n" in shown
    assert tmpfiles_line(base).endswith("/boot-%b 1777 root root -")


@needs_root
def test_a_directory_as_tmpfiles_makes_it_is_used_by_everybody(base: Path) -> None:
    """systemd makes the parents as root's own."""
    base.mkdir(mode=0o755)
    (base / boot_name()).mkdir()
    (base / boot_name()).chmod(0o1777)

    def use() -> None:
        registry = JobRegistry(base)
        enter(registry)
        assert registry.directory.owner == 0

    with as_nobody(use):
        registry = JobRegistry(base)
        assert len(registry.jobs()) == 1
        registry.close()


@needs_root
def test_a_full_disk_is_said_as_what_it_is(base: Path) -> None:
    base.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16k,mode=1777", "tmpfs", str(base)],
        capture_output=True,
    )
    if mounted.returncode != 0:
        pytest.skip("tmpfs cannot be mounted here")
    try:
        registry = JobRegistry(base)
        place = enter(registry)
        with contextlib.suppress(OSError):
            (base / "filler").write_bytes(b"x" * 10**6)
        with pytest.raises(Exception, match=r"is on a file system that is full \(No space left"):
            enter(registry)
        # the record is lost and cannot be made again: the job goes on with what it has
        fd = place.fd
        os.unlink(registry.directory.path / place.name)
        (registry.directory.path / place.name).mkdir()
        for _ in range(3):
            with registry.locked(), pytest.raises(Exception, match=r"cannot be written|full"):
                place.update(place.record.on(["GPU-a"]))
        assert place.fd == fd
        assert os.fstat(fd)
        place.release()
        place.release()
        registry.close()
    finally:
        subprocess.run(["umount", "-l", str(base)], check=True)


def test_a_directory_replaced_by_a_file_leaves_a_running_job_alone(
    base: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = queue_of(base)
    request = GpuRequest(4000 * MIB, wait=False)
    assert job.wait(request, lambda status: None, lambda seconds, wake=None: None) == (A,)
    hold = job.hold
    shutil.rmtree(base)
    base.write_text("no directory")
    others = os.open("/dev/null", os.O_RDONLY)
    for _ in range(3):
        job.report(5 * MIB)
        job.drain()
        assert job.hold == hold
    assert job.take([A.uuid], 5000 * MIB)
    assert job.hold is None
    assert sum("without a reservation" in record.message for record in caplog.records) == 1
    assert [gpu.uuid for gpu in job.open_gpus()] == [A.uuid]
    job.release()
    os.close(others)  # nobody closed it in the place of a descriptor of the queue


def test_a_record_made_anew_is_held_by_the_launcher_and_by_its_attempt(
    host_with: HostWith,
) -> None:
    host = host_with(Gpu())
    running = host.start(4000)
    child = running.wait_for("granted")["child"]
    (record,) = host.job_files()
    record.unlink()
    running.tell("report 100", "done")
    assert host.job_files() == [record], "it is there again"
    registry = JobRegistry(host.base)
    running.kill()
    assert is_running(child)
    assert registry.is_alive(record.name), "the attempt has only the old descriptor"
    late = host.start(4000, wait="no")
    assert "gpu_jobs_per_device=1" in late.wait_for("refused")["reason"]
    os.kill(child, signal.SIGKILL)
    wait_until(lambda: not registry.is_alive(record.name), "the reservation ends with it")
    registry.close()


def test_a_stopped_keeper_or_none_changes_nothing_for_the_launcher(base: Path) -> None:
    registry = JobRegistry(base)
    place = enter(registry)
    os.unlink(registry.directory.path / place.name)
    with registry.locked():
        place.update(place.record)
    assert registry.is_alive(place.name)
    place.release()
    assert not registry.is_alive(place.name)
    assert list(registry.directory.path.iterdir()) == []
    registry.close()


def test_doctor_fails_without_a_driver_and_refuses_to_probe_nothing() -> None:
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = warm.robust_train("doctor", "--probe", "--json", environ=environ)
    report = json.loads(done.stdout)
    assert done.returncode == (0 if any(gpu["usable"] for gpu in report["gpus"]) else 1)
    assert report["probes"] == []
    assert set(report["packages"]) >= {"torch", "robust-train"}
    assert report["kernel"] == os.uname().release


def test_a_probe_computes_runs_out_of_memory_and_goes_on_with_less() -> None:
    """On the CPU, with a limit in place of a GPU's memory."""
    script = """
import json, psutil, resource, torch
from robust_train.cli.gpu_probe import exercise
total = 2**29
torch.ones(64, 64) @ torch.ones(64, 64)
data = next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("VmData"))
resource.setrlimit(resource.RLIMIT_DATA, (data * 1024 + total * 5 // 8,) * 2)
print(json.dumps(exercise(torch.device("cpu"), total)))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["parts"] == 2
    assert seen["left_bytes"] == 0
    with pytest.raises(RuntimeError, match="twice the memory"):
        exercise(torch.device("cpu"), 2**20)


def test_a_probe_leaves_a_gpu_alone_that_a_job_has_and_fails_without_cuda(
    host_with: HostWith,
) -> None:
    host = host_with(Gpu(), Gpu())
    busy = host.start(4000).wait_for("granted")["gpu"]
    done = subprocess.run(
        [sys.executable, "-m", "robust_train.cli.main", "doctor", "--probe", "--json"],
        env=host.machine.environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, done.stderr
    results = {p["uuid"]: (p["passed"], p["result"]) for p in json.loads(done.stdout)["probes"]}
    assert results[busy][0]
    assert results[busy][1].startswith("not probed: no GPU was available now: GPU ")
    (other,) = set(results) - {busy}
    assert results[other][0] is False
    assert "torch finds no GPU" in results[other][1]
    assert len(host.job_files()) == 1


@needs_root
def test_another_user_writes_neither_my_usage_nor_takes_it_away(
    base: Path, registry: JobRegistry
) -> None:
    charge = replace(RECORD.on(["GPU-a"]), charged_at=100 * HOUR)
    add_usage(registry.directory, charge, 101 * HOUR)
    (mine,) = registry.directory.path.glob("usage.*")

    def attack() -> None:
        with pytest.raises(PermissionError):
            mine.unlink()
        with pytest.raises(PermissionError):
            mine.write_bytes(b"")
        (registry.directory.path / "usage.bbbbbb").write_bytes(sealed([[100, 1e6]]))

    with as_nobody(attack):
        usage = read_usage(registry.directory, (), 101 * HOUR)
        assert usage[0][100] == HOUR
        assert usage[NOBODY] == {100: 1e6}, "it counts for who wrote it"


@needs_root
def test_a_job_of_a_user_who_holds_nothing_goes_before_the_next_of_one_who_does(
    base: Path, registry: JobRegistry, capsys: pytest.CaptureFixture[str]
) -> None:
    other = replace(A, uuid="GPU-b", index=1)

    def act() -> None:
        theirs = JobRegistry(base)
        record = replace(new_record("small", "/", 4000 * MIB, 1), only=("GPU-a", "GPU-b"))
        with theirs.locked():
            act.__dict__["kept"] = theirs.enter(record, theirs.jobs())

    running = queue_of(base)
    request = GpuRequest(4000 * MIB, wait=False)
    assert running.wait(request, lambda status: None, lambda seconds, wake=None: None)
    sweep = QueuedJob(registry, new_record("sweep", "/", 4000 * MIB, 1))
    with registry.locked():
        sweep.reservation = registry.enter(new_record("sweep", "/", 4000 * MIB, 1), registry.jobs())
    with as_nobody(act):
        free = Visible((A, other), (A, other))
        found = sweep.poll(lambda: free, lambda gpu: True)
        assert not found.gpus, "the free one is nobody's"
        assert found.position == 2
        assert queue.main(["--dir", str(base)]) == 0
        printed = capsys.readouterr().out
        assert "goes first: nobody has fewer GPUs (0; root 1), jobs ahead included; " in printed
        rows = [line.split()[:2] for line in printed.splitlines()[1:4]]
        assert [position for _, position in rows] == ["-", "1", "2"]
        (base / "queue.yaml").write_text("order: fifo")
        assert sweep.poll(lambda: free, lambda gpu: True).gpus[0].uuid == "GPU-b"
    running.release()
