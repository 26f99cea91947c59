"""A job's reservation follows what NVML says of its processes, and the next job begins with it."""

import json
import os
import signal
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest

import warm
from command_world import CommandWorld
from robust_train.features.measured_memory import answers
from robust_train.features.measured_memory.store import Need
from robust_train.model.errors import NotDoneError
from robust_train.readable import MIB
from simulated_nvml import Gpu
from world import World, is_running, wait_for_text, wait_until

A = "GPU-aaaaaaaa-0000-0000-0000-000000000000"
PROGRAM = """
import os, time
from robust_train import current_run
run = current_run()
with open(os.environ["READY_FILE"], "w") as file:
    file.write(str(os.getpid()))
for step in range(1, 1000000):
    run.progress(step)
    time.sleep(0.01)
"""
AUTO = "min_gpu_memory_mb=auto"
OF_A_LIBRARY = "holds_memory_of_a_library"
TORCH = ["+trainer.library=libc10_cuda.so"]
JAX = ["+trainer.library=xla_cuda_plugin.so"]


class Host:
    """A machine with one GPU, on which one job at a time holds what the test says."""

    def __init__(self, tmp_path, machine):
        self.machine = machine
        files = {"READY_FILE": str(tmp_path / "ready"), "GO_FILE": str(tmp_path / "go")}
        cache = tmp_path / "cache"
        environ = {**machine.environ, **files, "XDG_CACHE_HOME": str(cache)}
        self.world = World(tmp_path).with_environ(environ)
        self.needs_file = cache / "robust-train" / "needs.json"
        self.tmp_path = tmp_path

    def start(self, *arguments, trainer="holds_memory"):
        """Start a job; return its process and the trainer's process id."""
        for name in ("ready", "go", "go2"):
            (self.tmp_path / name).unlink(missing_ok=True)
        target = f"trainer._target_=measured_trainers.{trainer}"
        job = self.world.start(target, *arguments)
        ready = self.tmp_path / "ready"
        pid = wait_for_text(ready, "it trains")
        return job, int(pid)

    def hold(self, pid, mib):
        self.machine.update(0, compute=[(pid, mib)], free_mib=40960 - mib)

    def go(self, name="go"):
        (self.tmp_path / name).touch()

    def finish(self, job):
        """Let a job that has not trained yet train and end."""
        self.go()
        self.go("go2")
        return self.world.end(job, code=0)

    def reserved(self):
        done = warm.robust_train("queue", "--json", environ=self.machine.environment())
        (job,) = json.loads(done.stdout)["jobs"]
        return job["claim_bytes"] // MIB, (job["gpus"][0]["taken_bytes"] or 0) // MIB

    def has_logged(self, words):
        return words in (self.world.run_dir / "train_robust.log").read_text()

    def need(self, *words):
        environ = {**self.machine.environment(), **self.world.environ}
        return warm.robust_train("need", *words, environ=environ)


@pytest.mark.slow
def test_reservation_follows_and_next_job_begins_with_it(tmp_path, cuda_machine_with):
    host = Host(tmp_path, cuda_machine_with(Gpu(uuid=A)))
    job, pid = host.start(AUTO, "gpu_jobs_per_device=2")
    host.hold(pid, 1000)
    wait_until(lambda: host.reserved() == (4000, 1000), "it holds less than the default")
    host.go()
    wait_until(lambda: host.reserved() == (1100, 1000), "the reservation shrinks once measured")
    host.hold(pid, 6000)
    wait_until(lambda: host.reserved() == (6600, 6000), "and grows with the peak")
    host.hold(pid, 3000)
    wait_until(lambda: host.reserved() == (6600, 3000), "but not back: it was needed once")
    host.go("go2")
    first = host.world.end(job, code=0)
    assert "not measured yet" in first.output
    (attempt,) = first.attempts
    assert attempt["memory"]["gpu_peak"] == 6000 * MIB
    done = host.need("--json", str(Path(first.run_dir)))
    assert json.loads(done.stdout)["need_bytes"] == 6600 * MIB, done.stderr
    page = host.world.robust_train("report", "--json", str(first.run_dir), code=0)
    assert json.loads(page.stdout)["about"]["GPU memory held"].startswith("5.9 GiB at its peak")
    host.hold(pid, 0)
    job, pid = host.start(AUTO, "seed=7", "job_name=second")
    assert host.reserved()[0] == 6600
    second = host.finish(job)
    assert "6600 MiB, because earlier runs of this job held 6000 MiB" in second.output


@pytest.mark.slow
def test_a_job_that_fills_its_gpu_starts_again(tmp_path, cuda_machine_with):
    """The GPU has no room for ten percent on top of its peak."""
    host = Host(tmp_path, cuda_machine_with(Gpu(uuid=A)))
    job, pid = host.start(AUTO)
    host.hold(pid, 15000)
    wait_until(lambda: host.reserved()[1] == 15000, "it is measured")
    host.hold(pid, 38500)
    host.go()
    wait_until(lambda: host.reserved()[1] == 38500, "it fills the GPU")
    host.go("go2")
    first = host.world.end(job, code=0)
    done = host.need("--json", str(Path(first.run_dir)))
    assert json.loads(done.stdout)["smallest_gpu"] == A
    host.hold(pid, 0)
    job, pid = host.start(AUTO, "seed=7", "job_name=second")
    assert host.reserved()[0] == 38912
    host.finish(job)


@pytest.mark.slow
def test_a_crash_keeps_what_was_measured(tmp_path, cuda_machine_with):
    """A neighbour would be let in beside the default otherwise, until the attempt has grown."""
    host = Host(tmp_path, cuda_machine_with(Gpu(uuid=A)))
    job, pid = host.start(AUTO, "gpu_jobs_per_device=2")
    host.hold(pid, 6000)
    host.go()
    wait_until(lambda: host.has_logged("6600 MiB are now reserved"), "it is measured")
    for name in ("ready", "go"):
        (tmp_path / name).unlink()
    os.kill(pid, signal.SIGKILL)
    ready = tmp_path / "ready"
    host.hold(1, 0)
    pid = int(wait_for_text(ready, "it trains again"))
    host.hold(pid, 500)
    wait_until(lambda: host.reserved() == (6600, 500), "the new attempt is seen")
    host.finish(job)


@pytest.mark.slow
def test_shared_gpus_grow_beyond_the_declared_figure(tmp_path, cuda_machine_with):
    host = Host(tmp_path, cuda_machine_with(Gpu(uuid=A)))
    job, pid = host.start("min_gpu_memory_mb=5000", "gpu_jobs_per_device=2")
    host.hold(pid, 1000)
    host.go()
    wait_until(lambda: host.reserved() == (5000, 1000), "it is measured")
    host.hold(pid, 8000)
    wait_until(lambda: host.reserved() == (8800, 8000), "it outgrows what was declared")
    host.go("go2")
    host.world.end(job, code=0)
    assert not host.needs_file.exists(), "a declared figure teaches nothing"


def test_a_declared_figure_changes_nothing(tmp_path, cuda_machine_with):
    """Neither what is reserved nor what is written: the default is a declaration too."""
    host = Host(tmp_path, cuda_machine_with(Gpu(uuid=A)))
    job, pid = host.start()
    host.hold(pid, 8000)
    ended = host.finish(job)
    assert "gpu_peak" not in ended.attempts[0]["memory"]
    assert not host.needs_file.exists()


@pytest.mark.parametrize(
    ("option", "words"),
    [("isolation=none", "are not measured: 4000 MiB are reserved"), ("device=cpu", "")],
)
def test_nothing_is_promised_without_a_measurement(tmp_path, option, words):
    """Training in the launcher's process is not measured, and the CPU has nothing to measure."""
    world = World(tmp_path)
    ended = world.run("trainer._target_=trainers.plain", AUTO, option)
    assert ended.returncode == 0, ended.output
    assert words in ended.output
    assert "not measured yet" not in ended.output


@pytest.mark.slow
def test_a_silent_driver_leaves_the_difference(tmp_path, cuda_machine_with):
    """As in containers, WSL2, MIG and vGPUs: what is used more than before, while alone."""
    host = Host(tmp_path, cuda_machine_with(Gpu(uuid=A, free_mib=40860)))
    job, pid = host.start(AUTO, "gpu_jobs_per_device=2")
    host.machine.update(0, compute=[(pid, None)], free_mib=38860)
    host.go()
    wait_until(lambda: host.reserved() == (2200, 2000), "the difference is measured")
    host.go("go2")
    ended = host.world.end(job, code=0)
    assert ended.output.count("counts as the job's") == 1


@pytest.mark.slow
def test_an_ending_process_is_not_a_silent_driver(tmp_path, cuda_machine_with):
    """NVML no longer lists it, and its memory is not back yet."""
    host = Host(tmp_path, cuda_machine_with(Gpu(uuid=A)))
    job, pid = host.start(AUTO, "gpu_jobs_per_device=2")
    host.hold(pid, 1000)
    host.go()
    wait_until(lambda: host.reserved() == (1100, 1000), "it is measured")
    host.machine.update(0, compute=[], free_mib=30960)
    reads = len(host.machine.calls("nvmlDeviceGetComputeRunningProcesses"))
    wait_until(
        lambda: len(host.machine.calls("nvmlDeviceGetComputeRunningProcesses")) > reads + 2,
        "it is read again",
    )
    host.go("go2")
    ended = host.world.end(job, code=0)
    assert "NVML does not show" not in ended.output
    assert ended.attempts[0]["memory"]["gpu_peak"] == 1000 * MIB


@pytest.mark.slow
def test_others_beside_a_silent_driver_stop_measuring(tmp_path, cuda_machine_with):
    """With a process of others on the GPU the declared figure stands, and one line says so."""
    host = Host(tmp_path, cuda_machine_with(Gpu(uuid=A)))
    job, pid = host.start(AUTO)
    host.machine.update(0, compute=[(pid, None), (1, None)], free_mib=20000)
    wait_until(lambda: host.has_logged("stays as it is"), "it is said")
    ended = host.finish(job)
    assert ended.output.count("the reservation stays as it is") == 1
    assert "gpu_peak" not in ended.attempts[0]["memory"]


@pytest.mark.slow
def test_a_program_that_takes_all_keeps_its_declaration(tmp_path, cuda_machine_with):
    host = Host(tmp_path, cuda_machine_with(Gpu(uuid=A)))
    job, pid = host.start(AUTO, "gpu_jobs_per_device=2", *JAX, trainer=OF_A_LIBRARY)
    host.hold(pid, 30720)
    wait_until(lambda: host.has_logged("at once, as JAX"), "it is recognised")
    host.go()
    host.go("go2")
    assert host.reserved()[0] == 4000
    ended = host.world.end(job, code=0)
    assert ended.output.count("at once, as JAX") == 1
    assert "took most of a GPU" in host.need(str(ended.run_dir)).stderr
    assert not host.needs_file.exists()


@pytest.mark.slow
def test_a_measured_job_that_grows_is_followed(tmp_path, cuda_machine_with):
    """A job that suddenly takes most of a GPU, for example in a validation, is not JAX."""
    host = Host(tmp_path, cuda_machine_with(Gpu(uuid=A)))
    job, pid = host.start(AUTO, "gpu_jobs_per_device=2")
    host.hold(pid, 1000)
    host.go()
    wait_until(lambda: host.reserved() == (1100, 1000), "it is measured")
    host.hold(pid, 30000)
    wait_until(lambda: host.reserved() == (33000, 30000), "the reservation grows with it")
    host.go("go2")
    host.world.end(job, code=0)


@pytest.mark.slow
def test_torch_may_fill_a_gpu_at_once(tmp_path, cuda_machine_with):
    """A script reports nothing of its allocator, and its first step may take most of a GPU."""
    host = Host(tmp_path, cuda_machine_with(Gpu(uuid=A)))
    job, pid = host.start(AUTO, "gpu_jobs_per_device=2", *TORCH, trainer=OF_A_LIBRARY)
    host.hold(pid, 30000)
    host.go()
    wait_until(lambda: host.reserved() == (33000, 30000), "it is measured")
    host.go("go2")
    host.world.end(job, code=0)


@pytest.mark.slow
def test_a_program_is_measured_by_a_probe(tmp_path, cuda_machine_with):
    """One that has not run says how; the probe ends the program, which would not end by itself."""
    host = Host(tmp_path, cuda_machine_with(Gpu(uuid=A)))
    script = tmp_path / "endless.py"
    script.write_text(PROGRAM)
    words = [sys.executable, str(script), "--width", "8"]
    before = host.need("--", *words)
    assert before.returncode == 1
    assert f"robust-train need --probe -- {sys.executable} {script} --width 8" in before.stderr
    command = ["-m", "robust_train.cli.main", "need", "--probe", "--json", "--", *words]
    probe = warm.start(command, tmp_path, {**host.machine.environment(), **host.world.environ})
    ready = tmp_path / "ready"
    host.hold(int(wait_for_text(ready, "it runs")), 3000)
    stdout, stderr = probe.communicate(timeout=120)
    answer = json.loads(stdout)
    assert answer["peak_bytes"] == 3000 * MIB, stderr
    assert answer["smallest_gpu"] == A
    after = host.need("--json", "--", *words, "--seed", "3")
    assert json.loads(after.stdout) == answer


@pytest.mark.slow
def test_a_stopped_probe_takes_its_program_along(tmp_path, cuda_machine_with):
    """The program would run on, unseen, on a GPU that others wait for."""
    host = Host(tmp_path, cuda_machine_with(Gpu(uuid=A)))
    script = tmp_path / "endless.py"
    script.write_text(PROGRAM)
    command = ["-m", "robust_train.cli.main", "need", "--probe", "--", sys.executable, str(script)]
    probe = warm.start(command, tmp_path, {**host.machine.environment(), **host.world.environ})
    ready = tmp_path / "ready"
    pid = int(wait_for_text(ready, "it runs"))
    probe.terminate()
    probe.communicate(timeout=120)
    assert probe.returncode == 130
    assert not is_running(pid)


def test_one_word_may_be_a_program(tmp_path, cuda_machine_with):
    host = Host(tmp_path, cuda_machine_with(Gpu(uuid=A)))
    assert "this program was not measured yet" in host.need("--", "true").stderr


@pytest.mark.slow
def test_a_program_of_several_gpus_is_known(tmp_path, cuda_machine_with):
    """The command line does not say how many it had."""
    host = Host(tmp_path, cuda_machine_with(Gpu(uuid=A), Gpu()))
    script = tmp_path / "two.py"
    script.write_text(PROGRAM.replace("1000000", "500"))
    words = [sys.executable, str(script)]
    job = CommandWorld(host.world).start(AUTO, "num_gpus=2", "--", *words)
    ready = tmp_path / "ready"
    host.hold(int(wait_for_text(ready, "it runs")), 3000)
    host.world.end(job, code=0)
    answer = host.need("--json", "--", *words)
    assert json.loads(answer.stdout)["num_gpus"] == 2, answer.stderr


def test_a_failed_probe_shows_no_earlier_figure(monkeypatch):
    need = Need(1.0, {"A100": {1: 1000 * MIB}})
    monkeypatch.setattr(answers, "read_needs", lambda: SimpleNamespace(get=lambda *key: need))
    monkeypatch.setattr(answers, "run_probe", lambda argv, batch_size: 3)
    arguments = Namespace(program=["python", "a.py"], probe=False, batch_size=None, json=False)
    data, _ = answers.need(arguments)
    assert data["peak_bytes"] == 1000 * MIB
    arguments.probe = True
    with pytest.raises(NotDoneError, match="ended with exit code 3 before it was measured"):
        answers.need(arguments)


@pytest.mark.slow
def test_a_shortage_caused_by_others_is_named(tmp_path, cuda_machine_with):
    host = Host(tmp_path, cuda_machine_with(Gpu(uuid=A, free_mib=39936)))
    job, pid = host.start(AUTO, "gpu_jobs_per_device=2", trainer="runs_out_in_a_step")
    host.machine.update(0, compute=[(pid, 2048), (1, 3072)], free_mib=34816)
    host.go()
    wait_until(lambda: host.has_logged("others took 3.0 GiB of GPU 0"), "it is said")
    host.go("go2")
    ended = host.world.end(job, code=0)
    assert ended.output.count("others took") == 1
    assert not host.needs_file.exists(), "a part of the batch says nothing of the whole"


@pytest.mark.slow
def test_a_smaller_gpu_by_name_is_not_refused(tmp_path, cuda_machine_with):
    """The figure is another model's, of which a smaller GPU may be enough."""
    host = Host(tmp_path, cuda_machine_with(Gpu(uuid=A), Gpu(name="L4", total_mib=20000)))
    job, pid = host.start(AUTO, "device=cuda:0")
    host.hold(pid, 15000)
    wait_until(lambda: host.reserved()[1] == 15000, "it is measured")
    host.hold(pid, 30000)
    host.go()
    wait_until(lambda: host.reserved()[1] == 30000, "it grows")
    host.go("go2")
    host.world.end(job, code=0)
    host.hold(pid, 0)
    job, pid = host.start(AUTO, "device=cuda:1", "job_name=second")
    assert host.reserved()[0] == 19000
    host.finish(job)
