"""GPUs that their jobs leave idle: what ``queue`` and ``gpus`` show of them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import warm
from robust_train.cli.main import main
from robust_train.gpu.visible import Visible
from robust_train.model.gpu import GpuInfo, Inventory
from robust_train.queue.host_queue import GpuRequest, HostQueue
from robust_train.queue.registry import IDLE_SECONDS, QueuedJob, Registry
from robust_train.queue.waiting import wait_for_gpus
from robust_train.readable import MIB
from simulated_nvml import Gpu

A = GpuInfo("GPU-a", "A100", 0, "0", 40000 * MIB, 40000 * MIB, 0, utilization_percent=0)


class RunningJob:
    """A job on GPU A, in a real queue directory."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.gpu = A
        self.queue = HostQueue(
            base,
            name="job",
            run_dir="/",
            jobs_per_device=1,
            read=lambda processes: Visible((self.gpu,), inventory=Inventory((self.gpu,))),
        )
        self.wait()

    def wait(self) -> None:
        request = GpuRequest(4000 * MIB, wait=False)
        found = wait_for_gpus(self.queue, request)
        assert isinstance(found, tuple), found


@pytest.fixture
def job(tmp_path: Path) -> Iterator[RunningJob]:
    running = RunningJob(tmp_path / "queue")
    yield running
    running.queue.release()


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Moves this process's clock ahead by some seconds."""
    real, ahead = time.monotonic, [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: real() + sum(ahead))
    return ahead.append


@pytest.mark.parametrize("utilization_percent", [3, None])  # None: it does not report
def test_a_gpu_that_its_job_leaves_idle_for_an_hour_is_marked_until_it_computes(
    job, later, capsys, utilization_percent
):
    def shown() -> int | None:
        assert main(["queue", "--json", "--dir", str(job.base)]) == 0
        (one,) = json.loads(capsys.readouterr().out)["jobs"]
        seconds: int | None = one["gpus"][0]["idle_seconds"]
        return seconds

    job.queue.tick()
    for _ in range(6):
        assert shown() is None
        later(IDLE_SECONDS / 6)
        job.queue.tick()
    assert shown() == pytest.approx(IDLE_SECONDS, abs=30)
    assert main(["queue", "--dir", str(job.base)]) == 0
    assert "1 of its GPUs idle for 1:00:" in capsys.readouterr().out

    job.gpu = replace(A, utilization_percent=utilization_percent)
    later(IDLE_SECONDS / 6)
    job.queue.tick()
    assert shown() is None


def test_a_gpu_that_its_job_gave_back_meanwhile_has_not_been_idle(job, later, capsys):
    job.queue.tick()
    assert job.queue.take((), 0)  # an attempt on the CPU
    later(2 * IDLE_SECONDS)
    job.wait()
    job.queue.tick()
    assert main(["queue", "--json", "--dir", str(job.base)]) == 0
    (one,) = json.loads(capsys.readouterr().out)["jobs"]
    assert [gpu["idle_seconds"] for gpu in one["gpus"]] == [None]


def test_gpus_marks_a_gpu_that_its_job_leaves_idle(machine_with):
    machine = machine_with(Gpu(), Gpu())
    registry = Registry(Path(machine.environ["ROBUST_TRAIN_QUEUE_DIR"]))
    reservation = registry.enter(QueuedJob(name="job", reserved_bytes=4000 * MIB))
    reservation.update(replace(reservation.job.on([machine.uuid(1)]), idle_seconds=(4000,)))
    environ = machine.environment()
    found = json.loads(warm.robust_train("gpus", "--json", environ=environ).stdout)["gpus"]
    assert [gpu["idle_seconds"] for gpu in found] == [None, 4000]
    _, first, second = warm.robust_train("gpus", environ=environ).stdout.splitlines()
    assert "idle" not in first
    assert second.endswith("idle for 1:06:40 under its job (robust-train queue)")
    reservation.release()
    registry.close()
