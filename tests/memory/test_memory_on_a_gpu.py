"""What only CUDA shows of the memory functions, and of a run's memory."""

import gc
import json
import os
import pickle
import signal
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

from robust_train import memory, save_checkpoint
from robust_train.folder.memory_samples import FILE_NAME, read_samples
from robust_train.gpu.inventory import read_inventory
from robust_train.memory.reports import perform
from robust_train.readable import GIB, MIB
from world import wait_until

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def clean():
    torch.zeros(1, device="cuda")
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


def gpu_tensor(size):
    return torch.empty(size, dtype=torch.uint8, device="cuda")


def free_says_nvml():
    uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    return next(g.free_bytes for g in read_inventory(processes=False).gpus if g.uuid == uuid)


def python(code):
    """What a program of its own prints last, in JSON."""
    command = [sys.executable, "-c", f"import json, torch, robust_train\n{code}"]
    environ = {k: v for k, v in os.environ.items() if not k.startswith("PYTORCH_")}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def test_the_cache_goes_back_to_the_driver():
    tensor = gpu_tensor(GIB)
    del tensor
    before = free_says_nvml()
    cleared = memory.clear_gpu_memory()
    assert cleared.freed >= GIB
    assert cleared.after.reserved < 64 * MIB
    wait_until(lambda: free_says_nvml() - before > 0.9 * GIB, "NVML sees it free")


def test_a_forced_clear_drops_frozen_cycles(tmp_path):
    """The collector was kept from collecting them."""
    gc.disable()
    try:
        cycle = [gpu_tensor(256 * MIB)]
        cycle.append(cycle)
        gone = weakref.ref(cycle[0])
        del cycle
        gc.freeze()
        assert perform("memory_clear", {}, tmp_path)["after"]["allocated"] >= 256 * MIB
        kept = gpu_tensor(64 * MIB)
        answer = perform("memory_clear", {"force": True}, tmp_path)
    finally:
        gc.enable()
        gc.unfreeze()
    assert gone() is None
    assert answer["after"]["allocated"] < 128 * MIB
    assert answer["held"][0].startswith("64.0 MiB uint8 (67108864,) on cuda:0")
    assert kept.numel() == 64 * MIB


def test_a_fraction_limits_until_it_is_one():
    total = torch.cuda.mem_get_info()[1]
    limit = memory.set_memory_fraction((GIB + torch.cuda.memory_reserved()) / total)
    assert limit.device == "cuda:0"
    small = gpu_tensor(256 * MIB)
    with pytest.raises(torch.OutOfMemoryError):
        gpu_tensor(2 * GIB)
    assert memory.get_gpu_memory_stats().oom_count >= 1
    memory.set_memory_fraction(1.0)
    assert gpu_tensor(2 * GIB).numel() + small.numel() > 2 * GIB


def test_a_second_snapshot_has_the_history(tmp_path):
    """Each snapshot can be opened."""
    from torch.cuda import _memory_viz

    held = gpu_tensor(32 * MIB)
    try:
        first = perform("memory_snapshot", {}, tmp_path)
        passing = gpu_tensor(16 * MIB)
        del passing
        second = perform("memory_snapshot", {}, tmp_path)
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    assert "the history is recorded from now on" in first["sentence"]
    assert "from now on" not in second["sentence"]
    snapshots = [
        pickle.loads(Path(answer["written"][1]).read_bytes()) for answer in (first, second)
    ]
    assert sum(segment["allocated_size"] for segment in snapshots[0]["segments"]) >= 32 * MIB
    actions = [entry["action"] for entry in snapshots[1]["device_traces"][0]]
    assert "alloc" in actions
    assert _memory_viz.segsum(snapshots[1])
    tensors = json.loads(Path(first["written"][0]).read_text())
    assert tensors[0]["device"] == "cuda:0"
    assert held.numel()


def test_figures_of_the_allocator():
    blocks = [gpu_tensor(64 * MIB) for _ in range(3)]
    del blocks[1]
    stats = memory.get_gpu_memory_stats()
    assert stats.device == "cuda:0"
    assert 128 * MIB <= stats.allocated < 160 * MIB
    assert stats.peak >= 192 * MIB
    assert stats.largest_free_block >= 64 * MIB
    assert 0 <= stats.fragmentation < 1
    assert stats.free + stats.reserved <= stats.total
    assert "fragmentation" in stats.description
    with pytest.raises(ValueError, match="this process sees"):
        memory.get_gpu_memory_stats("cuda:99")


def test_a_question_starts_no_cuda():
    device, total, is_initialized = python(
        "stats = robust_train.get_gpu_memory_stats()\n"
        "print(json.dumps([stats.device, stats.total, torch.cuda.is_initialized()]))"
    )
    assert device == "cuda:0"
    assert abs(total - torch.cuda.mem_get_info()[1]) < 0.05 * total
    assert not is_initialized


def test_a_block_s_peak_nested():
    with memory.GPUMemoryContext() as outer:
        gpu_tensor(256 * MIB)
        with memory.GPUMemoryContext() as inner:
            kept = gpu_tensor(64 * MIB)
    assert outer.peak - outer.before >= 256 * MIB
    assert 64 * MIB <= inner.peak - inner.before < 128 * MIB
    assert inner.delta == outer.delta == kept.numel()


def test_a_checkpoint_is_not_duplicated_on_gpus(tmp_path):
    model = nn.Linear(4096, 4096, device="cuda")
    with memory.GPUMemoryContext() as block:
        save_checkpoint({"model": model}, tmp_path / "last.pt")
    assert block.peak == block.before
    content = torch.load(tmp_path / "last.pt", weights_only=True, map_location="cpu")
    assert torch.equal(content["model"]["weight"], model.weight.cpu())


def test_gapped_tensors_are_copied_without_gpu_memory():
    tensor = torch.arange(64 * MIB, device="cuda")[::2]
    with memory.GPUMemoryContext() as block:
        moved = memory.safe_tensor_to_cpu({"a": [tensor]})
    assert torch.equal(moved["a"][0], tensor.cpu())
    assert block.peak == block.before


@pytest.mark.parametrize("keep_weights", [True, False])
def test_a_model_leaves_the_gpu(keep_weights):
    model = nn.Linear(4096, 4096, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(8, 4096, device="cuda")).sum().backward()
    optimizer.step()
    cleared = memory.cleanup_model_memory(model, keep_weights=keep_weights)
    # weights, gradients and two moments of 64 MiB each
    assert cleared.before.allocated - cleared.after.allocated >= 250 * MIB
    assert cleared.after.reserved < 64 * MIB
    assert model.weight.device.type == "cpu"
    assert model.weight.numel() == (4096**2 if keep_weights else 0)


def test_efficient_settings_say_what_they_did():
    sentences, is_expandable, precision = python(
        "done = robust_train.enable_memory_efficient_settings(fraction=0.5)\n"
        "torch.ones(9, device='cuda')\n"
        "segments = torch.cuda.memory_snapshot()\n"
        "print(json.dumps([done, segments[0]['is_expandable'],\n"
        "    torch.get_float32_matmul_precision()]))"
    )
    assert any("(0.5)" in sentence for sentence in sentences)
    assert is_expandable
    assert precision == "high"


def test_kill_ends_a_process_that_holds_the_gpu():
    code = "import signal, torch; torch.ones(9, device='cuda'); print('ready', flush=True); "
    holder = subprocess.Popen(
        [sys.executable, "-c", code + "signal.pause()"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout.readline() == "ready\n"
        listed = {p.pid for gpu in read_inventory().gpus for p in gpu.processes or ()}
        if holder.pid not in listed:
            pytest.skip("the driver tells other process ids here, those outside of a container")
        command = [sys.executable, "-m", "robust_train.cli.main", "memory", "kill", "--yes"]
        done = subprocess.run([*command, "--pid", str(holder.pid)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert holder.wait(timeout=30) == -signal.SIGTERM
    finally:
        holder.kill()
        holder.communicate()


# --- a run's memory ---


def test_a_spikes_memory_returns_after_some_steps(own_trainers):
    """It returns to the driver."""
    ended = own_trainers.run("has_a_spike_on_the_gpu", "memory.empty_cache_frequency=5", code=0)
    (reserved, free), (reserved_at_end, free_at_end) = ended.summary["result"]
    assert reserved >= 1024 * MIB
    assert reserved_at_end <= 256 * MIB
    # NVML's view of the driver: free memory has grown by most of what was returned
    assert free_at_end - free >= 700 * MIB
    cleared = [event for event in ended.journal if event["event"] == "memory_cleared"]
    first = next(event for event in cleared if event["reason"] == "step")
    assert first["of"] == "reserved"
    assert first["returned_bytes"] >= 768 * MIB
    assert ended.attempts[0]["memory_returned"]["of"] == "reserved"


def test_memory_beyond_the_fraction_leaves_a_snapshot(own_trainers):
    """The fraction is enforced, and the snapshot of the failure opens."""
    ended = own_trainers.run(
        "takes_half_of_the_gpu",
        "memory.fraction=0.25",
        "min_batch_size=32",
        "allow_cpu_fallback=false",
        code=1,
    )
    assert ended.attempts[0]["outcome"] == "device_oom"
    for attempt, has_history in ((1, False), (2, True)):
        snapshot = pickle.loads((ended.run_dir / f"oom-attempt-{attempt}.pickle").read_bytes())
        assert snapshot["segments"], attempt
        assert any(snapshot["device_traces"]) == has_history, attempt
        report = json.loads((ended.run_dir / f"oom-attempt-{attempt}.json").read_text())
        assert report["snapshot"] == f"oom-attempt-{attempt}.pickle"
        assert report["tensors"][0]["device"] == "cuda:0", attempt


def test_a_gpu_leak_is_sampled_and_found(own_trainers):
    ended = own_trainers.run("leaks_on_the_gpu", code=0)
    stability = ended.attempts[0]["memory_stability"]
    assert stability["kind"] == "growing"
    assert stability["mib_per_100_steps"] == pytest.approx(100, rel=0.2)
    samples = read_samples(ended.run_dir / FILE_NAME)
    assert max(sample.allocated or 0 for sample in samples) >= 200 * MIB
    assert all((s.reserved or 0) <= (s.gpu_total or 0) for s in samples)
    assert {sample.device for sample in samples} == {ended.attempts[0]["device"]}
