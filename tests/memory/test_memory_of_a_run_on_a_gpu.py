"""What only CUDA shows of a run's memory; skipped where there is no GPU."""

from __future__ import annotations

import json
import pickle

import pytest
from memory_world import run

from robust_train.folder.memory_samples import FILE_NAME, read_samples
from world import World

pytestmark = pytest.mark.gpu

MIB = 1024**2


def test_what_one_spike_took_goes_back_to_the_driver_after_some_steps(own_trainers: World):
    ended = run(own_trainers, "has_a_spike_on_the_gpu", "memory.empty_cache_frequency=5")
    assert ended.returncode == 0, ended.output
    result = ended.summary["result"]
    assert result["reserved_at_spike"] >= 1024 * MIB
    assert result["reserved_at_end"] <= 256 * MIB
    # NVML's view of the driver: free memory has grown by most of what was returned
    assert result["free_at_end"] - result["free_at_spike"] >= 700 * MIB
    cleared = [event for event in ended.journal if event["event"] == "memory_cleared"]
    first = next(event for event in cleared if event["reason"] == "step")
    assert first["of"] == "reserved"
    assert first["returned_bytes"] >= 768 * MIB
    assert ended.attempts[0]["memory_returned"]["of"] == "reserved"


def test_the_fraction_is_enforced(own_trainers: World):
    ended = run(
        own_trainers, "takes_half_of_the_gpu", "memory.fraction=0.25", "allow_cpu_fallback=false"
    )
    assert ended.returncode == 1, ended.output
    assert ended.attempts[0]["outcome"] == "device_oom"


def test_an_oom_on_the_gpu_leaves_a_snapshot_that_opens(own_trainers: World):
    ended = run(own_trainers, "takes_half_of_the_gpu", "memory.fraction=0.25", "min_batch_size=32")
    for attempt, has_history in ((1, False), (2, True)):
        with (ended.run_dir / f"oom-attempt-{attempt}.pickle").open("rb") as file:
            snapshot = pickle.load(file)
        assert snapshot["segments"]
        assert any(snapshot["device_traces"]) == has_history
        found = json.loads((ended.run_dir / f"oom-attempt-{attempt}.json").read_text())
        assert found["snapshot"] == f"oom-attempt-{attempt}.pickle"
        assert found["tensors"][0]["device"] == "cuda:0"


def test_a_leak_on_the_gpu_is_found_and_sampled(own_trainers: World):
    ended = run(own_trainers, "leaks_on_the_gpu", "memory.sample_interval_ms=10")
    assert ended.returncode == 0, ended.output
    found = ended.attempts[0]["memory_stability"]
    assert found["kind"] == "growing"
    assert found["mib_per_100_steps"] == pytest.approx(100, rel=0.2)
    samples = read_samples(ended.run_dir / FILE_NAME)
    assert max(sample.allocated or 0 for sample in samples) >= 200 * MIB
    assert all((s.reserved or 0) <= (s.gpu_total or 0) for s in samples)
    assert {sample.device for sample in samples} == {ended.attempts[0]["device"]}
