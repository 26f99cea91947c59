"""memory.jsonl of real runs."""

import itertools
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from robust_train import files, launch
from robust_train.features.memory_samples import launcher
from robust_train.features.memory_samples.sampler import SampleFile
from robust_train.folder.memory_samples import FILE_NAME, Sample, encode, read_samples
from robust_train.folder.state import read_summary
from robust_train.readable import MIB
from simulated_nvml import Gpu
from two_gpu_machine import A, B
from world import wait_until


def start(world):
    """Start a run that trains until the file ``go`` exists."""
    world.environ["GO_FILE"] = str(world.folder / "go")
    return world.start("trains_until_told")


def samples_of(world):
    return read_samples(world.run_dir / FILE_NAME)


def test_the_last_sample_before_a_sigkill_is_kept(own_trainers):
    process = start(own_trainers)
    journal = own_trainers.run_dir / "journal.jsonl"
    wait_until(
        lambda: any((s.step or 0) >= 100 for s in samples_of(own_trainers)),
        "a hundred steps are sampled",
    )
    reported = [json.loads(line) for line in journal.read_text().splitlines()]
    step = max(event.get("step") or 0 for event in reported)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(process.pid, signal.SIGKILL)
    own_trainers.end(process)
    wait_until(
        lambda: not any(Path(f"/proc/{child}").exists() for child in children), "all are gone"
    )
    content = (own_trainers.run_dir / FILE_NAME).read_text()
    assert content.endswith("\n")
    assert len(samples_of(own_trainers)) == len(content.splitlines())
    assert samples_of(own_trainers)[-1].step >= min(step, 100)


def test_the_whole_gpu_is_sampled_by_nvml_index(own_trainers, cuda_machine_with):
    machine = cuda_machine_with(
        Gpu(uuid=A, total_mib=24000, free_mib=5000), Gpu(uuid=B, total_mib=24000, free_mib=20000)
    )
    world = own_trainers.with_environ(machine.environ)
    process = start(world)
    wait_until(lambda: any(s.gpu_used for s in samples_of(world)), "the GPU is sampled")
    machine.update(1, free_mib=1000)
    wait_until(lambda: samples_of(world)[-1].gpu_used == 23000 * MIB, "the sampler sees it fill")
    (world.folder / "go").touch()
    world.end(process, 0)
    samples = samples_of(world)
    assert {s.device for s in samples} == {"cuda:1"}
    assert {s.gpu_total for s in samples} == {24000 * MIB}
    # torch has not started CUDA, and the sampler must not
    assert {s.allocated for s in samples} == {None}


FORKS_AT_ONCE = """
import os, sys, threading, time
from pathlib import Path
os.register_at_fork(before=lambda: time.sleep(2 * (threading.current_thread() is slow)))
from robust_train.features.memory_samples.sampler import Sampler

def fork():
    if child := os.fork():
        os.waitpid(child, 0)
    else:
        os._exit(0)

slow, folder = threading.Thread(target=fork), Path(sys.argv[1])
sampler = Sampler(folder, 1, "cpu", lambda: 1, interval_seconds=0.001, cost_share=1)
sampler.start()
slow.start()
time.sleep(0.5)
fork()
slow.join()
before = os.path.getsize(folder / "memory.jsonl")
deadline = time.monotonic() + 30
while os.path.getsize(folder / "memory.jsonl") == before and time.monotonic() < deadline:
    time.sleep(0.01)
sys.exit(os.path.getsize(folder / "memory.jsonl") == before)
"""


@pytest.mark.slow
def test_sampling_survives_two_threads_that_fork_at_once(tmp_path):
    subprocess.run([sys.executable, "-c", FORKS_AT_ONCE, tmp_path], check=True)


def test_nvml_stays_open_for_a_minute_only(machine_with):
    """An open session blocks ``nvidia-smi --gpu-reset``; a minute is 50 ms here."""
    machine = machine_with(Gpu(), Gpu())
    open_and_asked = machine.python(
        f"""
        import json, pathlib, time
        from robust_train.gpu.inventory import known_session
        from robust_train.features.memory_samples.sampler import Sampler
        folder = pathlib.Path({str(machine.folder)!r})
        often = {{"interval_seconds": 0.001, "cost_share": 1, "nvml_seconds": 0.05}}
        sampler = Sampler(folder, 1, "cuda:0", lambda: 1, **often)
        sampler.start()
        calls, seen = folder / "calls", []
        while not calls.exists() or calls.read_text().count("nvmlShutdown") < 3:
            seen.append(known_session() is not None)
            time.sleep(0.002)
        sampler.stop()
        print(json.dumps([seen.count(True), len(seen)]))
        """,
        CUDA_VISIBLE_DEVICES=machine.uuid(1),
    )
    opened, shut = machine.calls("nvmlInit"), machine.calls("nvmlShutdown")
    assert 3 <= len(shut) <= len(opened) <= len(shut) + 1
    samples = read_samples(machine.folder / FILE_NAME)
    assert {sample.device for sample in samples} == {"cuda:1"}
    assert None not in {sample.gpu_used for sample in samples}, "between two looks the last counts"
    assert open_and_asked[0] < open_and_asked[1]


def test_workers_can_fork_despite_a_busy_sampler(own_trainers, cuda_machine_with):
    world = own_trainers.with_environ(cuda_machine_with(Gpu(uuid=A), Gpu(uuid=B)).environ)
    ended = world.run("forks_workers_that_ask_nvml", code=0)
    assert ended.summary["result"] == 8 * 8 * 2
    assert "starts a thread" not in ended.output


def test_the_file_stays_small_and_keeps_earlier_attempts(tmp_path, monkeypatch):
    clock = SimpleNamespace(monotonic=itertools.count(30.0, 0.1).__next__)
    monkeypatch.setattr(files, "time", clock)
    earlier = [Sample(float(number), 1, "cpu", number) for number in range(30)]
    path = tmp_path / FILE_NAME
    torn = encode(earlier[0])[:20]
    path.write_text("".join(encode(sample) + "\n" for sample in earlier) + torn)
    file = SampleFile(path)
    for number in range(100_000):
        file.add(Sample(30.0 + number / 10, 2, "cpu", number))
    assert path.stat().st_size < 2 * MIB
    file.flush()
    samples = read_samples(path)
    assert (samples[0], samples[-1].step) == (earlier[0], 99_999)
    of_attempt_2 = [s for s in samples if s.attempt == 2]
    gaps = [
        (after.time - before.time, before.time)
        for before, after in itertools.pairwise(of_attempt_2)
    ]
    assert all(gap <= 0.11 + 0.01 * time for gap, time in gaps), "spread over the time"
    assert [s.step for s in of_attempt_2][-3:] == [99_997, 99_998, 99_999], "the newest at the end"
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_warned_about_once(tmp_path, caplog):
    """No line of the file is torn."""
    path = tmp_path / FILE_NAME
    file = SampleFile(path)
    samples = [Sample(float(number), 1, "cpu", number) for number in range(10)]
    file.add(samples[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 5, hard))
    try:
        for sample in samples[1:5]:
            file.add(sample)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    [warning] = caplog.messages
    assert warning == f"cannot write {path}: File too large; training continues"
    for sample in samples[5:]:
        file.add(sample)
    assert read_samples(path) == [samples[0], *samples[5:]]


def test_a_killed_attempt_is_judged_by_its_samples(own_trainers):
    ended = own_trainers.run("dies_at_once", "max_retries=0", code=1)
    assert ended.attempts[0]["memory_returned"] is None
    assert ended.attempts[0]["memory_stability"]["kind"] == "unknown"


def test_an_unknown_stability_costs_only_a_warning(tmp_path, monkeypatch, caplog):
    def fails(*given):
        raise MemoryError("no room")

    monkeypatch.setattr(launcher, "attempt_stability", fails)
    summary = launch(lambda cfg: 0.5, {"isolation": "none"}, run_dir=tmp_path)
    assert (summary.status, read_summary(tmp_path).result) == ("completed", 0.5)
    assert "the stability of memory cannot be computed: MemoryError: no room" in caplog.text
