"""GPU time by user, root's rules and idle GPUs, in a real queue directory."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from test_other_users import NOBODY, needs_root

from robust_train.cli import gpus, queue
from robust_train.errors import ConfigError
from robust_train.gpu.visible import Visible
from robust_train.queue import host_queue, reservations
from robust_train.queue.host_queue import HostQueue
from robust_train.queue.order import DEFAULT_RULES, QueueRules
from robust_train.queue.queue_rules import NAME, read_rules
from robust_train.queue.records import IDLE_SECONDS, JobRecord, JobState, decode, encode, sealed
from robust_train.queue.reservations import JobRegistry, boottime, new_record
from robust_train.queue.usage import HOUR, WEEK, add_usage, read_usage, recent_hours, week_hours
from robust_train.queue.waiting import GpuRequest
from robust_train.values import MIB, GpuInfo

ME = os.geteuid()
A = GpuInfo("GPU-a", "A100", 0, "0", 40000 * MIB, 40000 * MIB, 0, utilization_percent=0)
RUNNING = JobRecord(
    *("1-aaaaaa", 1, JobState.RUNNING, "ada", ME, 2, 3.0, "job", "/run", 4000),
    count=2,
    gpus=("GPU-a", "GPU-b"),
    taken_bytes=(None, None),
    charged_at=100 * HOUR,
)


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[JobRegistry]:
    found = JobRegistry(tmp_path / "queue")
    yield found
    with contextlib.suppress(OSError):
        found.close()


def hours_of(registry: JobRegistry, now: float = 0.0) -> dict[int, float]:
    return read_usage(registry.directory, (), now).get(ME, {})


def files_of(registry: JobRegistry) -> list[str]:
    return [name for name in registry.directory.names() if name.startswith("usage.")]


def test_gpu_time_is_kept_by_the_hour_and_for_a_week(registry: JobRegistry) -> None:
    add_usage(registry.directory, RUNNING, 101.5 * HOUR)
    assert hours_of(registry) == {100: 2 * HOUR, 101: HOUR}
    add_usage(registry.directory, replace(RUNNING, charged_at=101.5 * HOUR), 102 * HOUR)
    assert hours_of(registry) == {100: 2 * HOUR, 101: 2 * HOUR, 102: 0.0}
    for hour in range(102, 300):
        add_usage(registry.directory, replace(RUNNING, charged_at=hour * HOUR), (hour + 1) * HOUR)
    assert len(hours_of(registry)) == WEEK
    assert week_hours(hours_of(registry), 300 * HOUR) == pytest.approx(2 * WEEK, abs=4)
    assert len(files_of(registry)) == 1
    assert (registry.directory.path / files_of(registry)[0]).stat().st_size == 4096


def test_recent_hours_halve_every_six_and_end_after_a_day() -> None:
    hour = {100: HOUR}
    assert recent_hours(hour, 100.5 * HOUR) == 1.0
    assert recent_hours(hour, 106.5 * HOUR) == 0.5
    assert recent_hours(hour, 112.5 * HOUR) == 0.2
    assert recent_hours(hour, 125 * HOUR) == 0.0
    assert week_hours(hour, 125 * HOUR) == 1.0


def test_jobs_that_share_a_gpu_are_charged_a_share_and_running_ones_until_now(
    registry: JobRegistry,
) -> None:
    shared = replace(RUNNING, jobs_per_device=4)
    usage = read_usage(registry.directory, [(7, shared), (7, RUNNING)], 101 * HOUR)
    assert week_hours(usage[7], 101 * HOUR) == 2.5


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"x" * 40000, sealed([[1, float("nan")]]), sealed([[1, -5]]), sealed({"a": 1})),
        *(sealed([[10**400, 5]]), sealed([[-(10**400), 5]])),
    ],
)
def test_a_damaged_usage_file_counts_nothing_and_is_written_anew(
    registry: JobRegistry, content: bytes
) -> None:
    add_usage(registry.directory, RUNNING, 101 * HOUR)
    (registry.directory.path / files_of(registry)[0]).write_bytes(content)
    assert hours_of(registry) == {}
    assert read_rules(registry.directory, ()).used == {ME: 0.0}
    add_usage(registry.directory, RUNNING, 101 * HOUR)
    assert hours_of(registry)[100] == 2 * HOUR


def test_a_file_under_a_second_name_counts_once(registry: JobRegistry) -> None:
    add_usage(registry.directory, RUNNING, 101 * HOUR)
    folder = registry.directory.path
    os.link(folder / files_of(registry)[0], folder / "usage.ffffff")
    assert hours_of(registry)[100] == 2 * HOUR


def queue_of(registry: JobRegistry, gpu: list[GpuInfo]) -> HostQueue:
    def read(processes: bool) -> Visible:
        return Visible(tuple(gpu), tuple(gpu))

    path = registry.directory.path.parent
    made = HostQueue(path, name="job", run_dir="/", jobs_per_device=1, read=read)
    request = GpuRequest(4000 * MIB, wait=False)
    assert made.wait(request, lambda status: None, lambda seconds, wake=None: None)
    return made


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that the clock of the queue is ahead; a test adds to them."""
    ahead = [0.0]
    for module in (reservations, host_queue, queue):
        monkeypatch.setattr(module, "boottime", lambda: boottime() + sum(ahead))
    return ahead


def test_a_job_charges_its_user_while_it_runs_and_when_it_ends(
    registry: JobRegistry, later: list[float]
) -> None:
    job = queue_of(registry, [A])
    job.tick()
    later.append(HOUR / 2)
    job.tick()
    assert sum(hours_of(registry).values()) == pytest.approx(HOUR / 2, abs=30)
    later.append(HOUR / 2)
    job.release()
    assert sum(hours_of(registry).values()) == pytest.approx(HOUR, abs=30)


def test_a_report_without_news_writes_nothing(registry: JobRegistry, later: list[float]) -> None:
    job = queue_of(registry, [A])
    for taken, charged in ((5 * MIB, 60.0), (5 * MIB, 60.0), (6 * MIB, 180.0)):
        later.append(60.0)
        job.report(taken)
        assert sum(hours_of(registry).values()) == pytest.approx(charged, abs=20)
    job.release()


def test_a_killed_job_is_charged_when_its_reservation_is_seen_free(
    registry: JobRegistry, later: list[float]
) -> None:
    with registry.locked():
        dead = registry.enter(new_record("job", "/", 4000 * MIB, 1), ())
        dead.update(dead.record.on(["GPU-a"]))
    later.append(300.0)
    os.close(dead.fd)
    with registry.locked():
        assert registry.jobs(sweep=True) == []
    assert sum(hours_of(registry).values()) == pytest.approx(300.0, abs=30)


def test_a_gpu_that_its_job_leaves_idle_for_an_hour_is_marked(
    registry: JobRegistry,
    later: list[float],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = [A]
    job = queue_of(registry, seen)
    path = str(registry.directory.path.parent)
    monkeypatch.setenv("ROBUST_TRAIN_QUEUE_DIR", path)

    def shown() -> int | None:
        assert queue.main(["--json"]) == 0
        (one,) = json.loads(capsys.readouterr().out)["jobs"]
        found: int | None = one["gpus"][0]["idle_seconds"]
        return found

    job.tick()
    for _ in range(6):
        assert shown() is None
        later.append(600.0)
        job.tick()
    assert shown() == pytest.approx(6 * 600, abs=30)
    assert queue.main([]) == 0
    assert "1 of its GPUs idle for 1:00:" in capsys.readouterr().out
    seen[0] = replace(A, utilization_percent=3)
    later.append(600.0)
    job.tick()
    assert shown() is None
    job.release()


def test_a_gpu_that_was_others_meanwhile_has_not_been_idle(
    registry: JobRegistry, later: list[float]
) -> None:
    job = queue_of(registry, [A])
    job.tick()
    assert job.take((), 0)  # an attempt on the CPU
    later.append(2 * HOUR)
    request = GpuRequest(4000 * MIB, wait=False)
    assert job.wait(request, lambda status: None, lambda seconds, wake=None: None)
    job.tick()
    assert [one.record.idle() for one in registry.jobs() if one.record] == [{}]
    job.release()


def test_usage_is_a_table_and_json(
    registry: JobRegistry, later: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(registry.directory.path.parent)
    assert queue.main(["--usage", "--dir", path]) == 0
    assert capsys.readouterr().out.startswith("nobody has had a GPU")
    job = queue_of(registry, [A])
    later.append(2 * HOUR)
    assert queue.main(["--usage", "--dir", path, "--json"]) == 0
    (user,) = json.loads(capsys.readouterr().out)["users"]
    assert (user["uid"], user["gpus"], user["gpu_hours"]) == (ME, 1, 2.0)
    assert queue.main(["--usage", "--dir", path]) == 0
    header, row = capsys.readouterr().out.splitlines()
    assert header.split("  ")[0] == "user"
    assert row.split()[1:] == ["1", str(user["recent_gpu_hours"]), "2.0"]
    job.release()


def test_a_record_of_the_version_before_is_read_and_so_is_one_of_a_later_version() -> None:
    values = json.loads(encode(RUNNING)[9:])
    old = {k: v for k, v in values.items() if k not in ("charged_at", "busy_at", "overtaken")}
    read = decode(sealed(old))
    assert read == replace(RUNNING, charged_at=RUNNING.since)
    assert decode(sealed(values | {"new_field": [1]})) == RUNNING


def test_idle_is_what_was_seen_last_not_what_the_clock_says_now() -> None:
    looked = replace(RUNNING, charged_at=9000.0, busy_at=(9000.0 - IDLE_SECONDS, 8990.0))
    assert looked.idle() == {"GPU-a": IDLE_SECONDS}
    assert RUNNING.idle() == {}, "nobody looked"


# --- root's file ---


def rules_of(registry: JobRegistry, content: bytes) -> QueueRules:
    (registry.directory.path.parent / NAME).write_bytes(content)
    return read_rules(registry.directory, ())


@needs_root
def test_root_may_limit_gpus_per_user_and_choose_first_come_first_served(
    registry: JobRegistry,
) -> None:
    assert read_rules(registry.directory, ()) == DEFAULT_RULES
    content = b"# of root\nmax_gpus_per_user: 4  # half\n\norder: fifo\n"
    assert rules_of(registry, content) == QueueRules("fifo", 4)


def test_a_job_that_asks_for_more_than_root_allows_is_refused_before_it_begins(
    registry: JobRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = [replace(A, uuid=f"GPU-{n}", pci_bus_id=str(n)) for n in range(2)]
    limits = [QueueRules(max_gpus_per_user=1), QueueRules()]
    monkeypatch.setattr(host_queue, "read_rules", lambda *of: limits[0])
    path = registry.directory.path.parent
    seen = Visible(tuple(gpus), tuple(gpus))
    job = HostQueue(path, name="job", run_dir="/", jobs_per_device=1, read=lambda processes: seen)
    asked = [GpuRequest(4000 * MIB, wait=False, count=2), lambda status: None, lambda *of: None]
    with pytest.raises(ConfigError, match="max_gpus_per_user: 1; ask for at most num_gpus=1"):
        job.wait(*asked)
    limits.reverse()
    assert len(job.wait(*asked)) == 2
    limits.reverse()  # while it runs
    assert len(job.wait(*asked)) == 2, "queue and rules of the other jobs decide, not an error"
    job.release()


@needs_root
@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"max_gpu_per_user: 4\n", "no such key; did you mean max_gpus_per_user?"),
        (b"order: fifo\ncolour: red\n", "colour: no such key; accepted are max_gpus_per_user,"),
        (b"max_gpus_per_user: 0\n", "max_gpus_per_user is a number of GPUs from 1, not 0"),
        (b"max_gpus_per_user:\n", "max_gpus_per_user is a number of GPUs from 1, not empty"),
        (b"order: lifo\x1b[2J\n", "order is fair or fifo, not lifo?[2J"),
        (b"\xff\xfe\x00" * 9, "no such key"),
        (b"#" * 5000, "it has over 4096 bytes"),
    ],
)
def test_a_mistake_in_roots_file_is_one_line_and_means_the_defaults(
    registry: JobRegistry, content: bytes, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        assert rules_of(registry, content) == DEFAULT_RULES
    (line,) = caplog.messages
    assert f"{NAME} is ignored: " in line
    assert why in line
    assert "\n" not in line


@needs_root
def test_a_file_that_others_than_root_may_write_is_ignored(
    registry: JobRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    path = registry.directory.path.parent / NAME
    path.write_text("order: fifo")
    for mode, owner in ((0o666, 0), (0o664, 0), (0o644, NOBODY)):
        path.chmod(mode)
        os.chown(path, owner, owner)
        assert read_rules(registry.directory, ()) == DEFAULT_RULES
        assert "(chown root, chmod 644)" in caplog.messages[-1]
    path.unlink()
    path.symlink_to("/etc/hostname")
    assert read_rules(registry.directory, ()) == DEFAULT_RULES
    assert "it is no plain file" in caplog.messages[-1]


def test_gpus_marks_a_gpu_that_its_job_leaves_idle(
    registry: JobRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {"index": 0, "name": "A100", "uuid": "GPU-a", "used_bytes": 0, "free_bytes": 0}
    row |= {"total_bytes": 0, "utilization_percent": 0, "processes": [], "visible": True}
    row |= {"unusable": None, "unified_memory": False, "parent_uuid": None}
    assert gpus.table_row(row | {"idle_seconds": None})[-1] == ""
    assert gpus.table_row(row | {"idle_seconds": 4000})[-1].startswith(
        "idle for 1:06:40 under its job"
    )
