"""Reservations around real jobs: ``python train_robust.py`` on simulated machines."""

import json
import os
import re
from pathlib import Path

import pytest
import torch

import warm
from robust_train.cli.doctor import exercise
from robust_train.compat import torch_cuda_version
from robust_train.queue.queue_dir import boot_name
from robust_train.queue.registry import QueuedJob, Registry
from simulated_nvml import VERSION_MISMATCH, Gpu
from world import World, wait_until

A = "GPU-aaaaaaaa-0000-0000-0000-000000000000"
B = "GPU-bbbbbbbb-0000-0000-0000-000000000000"
NEVER = "gpu_check_interval_seconds=600"
FILES = ("ready", "go", "attempts", "failures")
ECC = "CUDA error: uncorrectable ECC error encountered"


class Shared:
    """A machine, and a world for each job on it."""

    def __init__(self, tmp_path, machine):
        self.tmp_path = tmp_path
        self.machine = machine
        self.base = Path(machine.environ["ROBUST_TRAIN_QUEUE_DIR"])

    def world(self, name):
        folder = self.tmp_path / name
        folder.mkdir()
        files = {f"{name.upper()}_FILE": str(folder / name) for name in FILES}
        return World(folder).with_environ({**self.machine.environ, **files})

    def command(self, *arguments):
        return warm.robust_train(*arguments, environ=self.machine.environment())

    def jobs(self):
        done = self.command("queue", "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)["jobs"]


@pytest.fixture
def shared(tmp_path, cuda_machine_with):
    def build(*gpus):
        return Shared(tmp_path, cuda_machine_with(*gpus))

    return build


def test_a_second_job_starts_after_the_first(shared):
    """It waits for the end of that job."""
    host = shared(Gpu(uuid=A, total_mib=24000))
    first, second = host.world("first"), host.world("second")
    first.environ["BATCH_BUDGETS"] = "{}"
    running = first.start("trainer._target_=trainers.within_a_budget", NEVER)
    wait_until((first.folder / "attempts").exists, "the first one trains")
    waiting = second.start("trainer._target_=trainers.what_it_was_given", NEVER)
    wait_until(lambda: [j["state"] for j in host.jobs()] == ["running", "waiting"], "it waits")
    table = host.command("queue").stdout
    header, first_row, second_row, why = table.splitlines()
    assert header.split() == ["id", "#", "state", "job", "user", "MiB", "held", "GPU", "for"]
    assert re.search(r"- +running .* 4000 +- +GPU 0 ", first_row), first_row
    assert " 1  waiting" in second_row
    assert max(map(len, table.splitlines())) <= 80
    assert "\x1b" not in table
    taken = "GPU 0: taken, one job per GPU (gpu_jobs_per_device=1)"
    assert why == f"job {second_row.split()[0]}: {taken}"
    verbose = host.command("queue", "--verbose").stdout
    assert f"4000 MiB reserved by job {first_row.split()[0]}" in verbose
    (first.folder / "go").touch()
    assert first.end(running).returncode == 0
    ended = second.end(waiting, code=0)
    assert ended.summary["result"]["visible"] == A
    assert f"left: {taken}" in ended.output
    assert list((host.base / boot_name()).glob("record.*")) == []


def test_a_queued_job_is_stopped_by_id(shared):
    host = shared(Gpu(uuid=A, total_mib=24000))
    world = host.world("first")
    process = world.start("trainer._target_=trainers.never_looks_whether_to_stop", NEVER)
    wait_until((world.folder / "ready").exists, "it trains")
    (job,) = host.jobs()
    done = host.command("stop", job["id"])
    assert done.returncode == 0, done.stderr
    assert f"pid {process.pid}" in done.stdout
    assert world.end(process).returncode == 143
    assert host.jobs() == []


def test_an_unhealthy_gpu_is_excluded_until_cleared(shared):
    host = shared(Gpu(uuid=A, total_mib=24000), Gpu(uuid=B, total_mib=24000, free_mib=9000))
    world = host.world("first")
    (world.folder / "failures").write_text(f"3 {ECC}")
    ended = world.run("trainer._target_=failing_trainers.fails_by_script")
    assert [a["gpu_uuid"] for a in ended.attempts] == [A, B]
    doctor = host.command("doctor")
    assert doctor.returncode == 0, doctor.stderr
    for words in ("GPU 0: excluded for another 30 min by a job of ", "uncorrectable ECC"):
        assert words in doctor.stdout
    assert "excluded for another 30 min" in host.command("gpus").stdout
    assert f"{A}: excluded for another 30 min" in host.command("queue").stdout
    assert host.world("second").train("what_it_was_given").summary["result"]["visible"] == B
    assert [host.command("doctor", "--include", A).returncode for _ in range(2)] == [0, 1]
    assert "excluded" not in host.command("doctor").stdout


def test_a_key_moves_or_removes_the_queue(world, shared):
    host = shared(Gpu(uuid=A, total_mib=24000))
    elsewhere = world.folder / "elsewhere"
    for name, queue in (("first", "false"), ("second", elsewhere)):
        ended = host.world(name).train("what_it_was_given", f"gpu_queue={queue}")
        assert ended.summary["result"]["visible"] == A, f"{queue=}"
        assert not host.base.exists(), f"{queue=}"
        assert elsewhere.exists() is (queue == elsewhere)
    ended = world.train("what_it_was_given")
    assert ended.summary["result"]["device"] == "cpu"
    assert not Path(world.environ["ROBUST_TRAIN_QUEUE_DIR"]).exists()


@pytest.mark.slow
def test_an_inline_job_reserves_its_gpu(shared):
    """It runs in the launcher's own process."""
    host = shared(Gpu(uuid=A, total_mib=24000))
    world = host.world("first")
    process = world.start("trainer._target_=trainers.never_looks_whether_to_stop", "isolation=none")
    wait_until((world.folder / "ready").exists, "it trains")
    assert [[gpu["uuid"] for gpu in job["gpus"]] for job in host.jobs()] == [[A]]
    process.kill()
    process.communicate()
    assert host.jobs() == []


def test_doctor_says_why_a_gpu_is_not_usable(shared):
    well = {"recovery": 0, "remap_failed": 0, "pages_pending": 0}
    sick = {
        "it has to be reset": Gpu(recovery=1),
        "could not be remapped": Gpu(remap_failed=1),
        "wait to be retired": Gpu(pages_pending=1),
    }
    host = shared(*sick.values(), Gpu(free_mib=2000, **well))
    done, plain = host.command("doctor", "--json"), host.command("doctor").stdout
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    *unusable, full = report["gpus"]
    for gpu, words in zip(unusable, sick, strict=True):
        assert not gpu["usable"]
        assert words in gpu["why_not"]
        assert words in plain
    assert full["usable"]
    assert "a job needs 4000 MiB by default (min_gpu_memory_mb)" in full["why_no_room"]
    assert "GPU 3: full: a job needs" in plain
    assert report["queue"].items() >= {"directory": str(host.base), "jobs": 0}.items()
    assert report["queue"]["file_system"]
    assert report["packages"].keys() >= {"torch", "robust-train"}
    assert (report["driver_version"], report["kernel"]) == ("570.86.15", os.uname().release)


def test_doctor_fails_without_gpu_or_queue(shared):
    host = shared(Gpu(uuid=A, recovery=1))

    def code(words=""):
        done = host.command("doctor")
        assert words in done.stdout
        return done.returncode

    assert code() == 1
    host.machine.update(0, recovery=0, compute_mode=3, compute=[(1, 2000)])
    assert code("GPU 0: busy: compute mode is exclusive_process and pid 1 owns it") == 0
    host.machine.update(0, compute_mode=0, compute=[])
    hidden = host.machine.environment(CUDA_VISIBLE_DEVICES="")
    done = warm.robust_train("doctor", "--probe", "--json", environ=hidden)
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    assert [gpu["why_not"] for gpu in report["gpus"]] == ["hidden by CUDA_VISIBLE_DEVICES"]
    assert report["probes"] == []
    host.machine.fail("nvmlInit", VERSION_MISMATCH)
    assert code("different versions") == 1
    for folder in (host.base / boot_name(), host.base):
        folder.rmdir()
    host.base.symlink_to("/tmp")
    assert code("symbolic link") == 1
    assert host.command("queue").returncode == 2
    assert os.path.realpath(host.base) == "/tmp"


def test_doctor_compares_torchs_cuda_with_the_drivers(shared):
    wanted = torch_cuda_version()
    if wanted in (None, "none"):
        pytest.skip("this torch is built without CUDA")
    host = shared(Gpu(uuid=A))
    for major, code in ((int(wanted.split(".")[0]), 0), (11, 1)):
        host.machine.cuda = 1000 * major
        host.machine.update(0)
        done = host.command("doctor")
        assert done.returncode == code, done.stdout
    assert "GPU 0: CUDA probably cannot work: the driver supports CUDA 11.0" in done.stdout
    assert f"this torch was built for CUDA {wanted} (a guess" in done.stdout
    assert "usable" not in done.stdout


def test_a_probe_survives_running_out_of_memory():
    """It computes, runs out and continues with less. On the CPU, with a limit in place of a
    GPU's memory.
    """
    script = """
import resource, torch
from robust_train.cli.doctor import exercise
total = 2**29
torch.ones(64, 64) @ torch.ones(64, 64)
data = next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("VmData"))
resource.setrlimit(resource.RLIMIT_DATA, (data * 1024 + total * 5 // 8,) * 2)
print(exercise(torch.device("cpu"), total))
"""
    done = warm.run(("-c", script), os.environ)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "2"
    with pytest.raises(RuntimeError, match="twice the free memory"):
        exercise(torch.device("cpu"), 2**20)


def test_a_probe_spares_busy_gpus(shared):
    """Others compute there. It fails without CUDA."""
    host = shared(Gpu(), Gpu(), Gpu(free_mib=20000, utilization=97, compute=[(1, 20000)]))
    registry = Registry(host.base)
    job = registry.enter(QueuedJob(name="job"))
    job.update(job.job.on([host.machine.uuid(1)]))
    done = host.command("doctor", "--probe", "--json")
    assert done.returncode == 1, done.stderr
    probes = {probe["uuid"]: probe for probe in json.loads(done.stdout)["probes"]}
    idle, queued, busy = (probes[host.machine.uuid(number)] for number in range(3))
    assert [probe["passed"] for probe in (idle, queued, busy)] == [False, True, True]
    # torch's own words
    assert idle["result"].startswith("Found no NVIDIA driver on your system")
    assert queued["result"].startswith("not probed: busy: job ")
    assert busy["result"].startswith("not probed: ")
    assert busy["result"].endswith(" 20000 MiB")
    assert len(registry.jobs()) == 1
    registry.close()


def test_a_reservation_follows_what_the_attempts_show(shared):
    host = shared(Gpu(uuid=A, total_mib=24000))
    world = host.world("first")
    process = world.start("trainer._target_=trainers.tells_its_memory", NEVER)

    def shows(claim):
        seen = [(job["claim_bytes"], job["gpus"][0]["taken_bytes"]) for job in host.jobs()]
        return seen == [(claim, 3 * 1024**3)]

    wait_until(lambda: shows(4000 * 1024**2), "what it took is known")
    (world.folder / "go.1").touch()
    learned = int(5 * 1024**3 * 1.1) + 512 * 1024**2
    wait_until(lambda: shows(learned), "the next attempt claims what the first needed")
    (world.folder / "go.2").touch()
    assert world.end(process).returncode == 0
