"""Giving memory back: what nobody can reach, and what a model holds."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref

import pytest
import torch
from torch import nn

from robust_train import cleanup_model_memory, clear_gpu_memory
from robust_train.memory.tensors import largest_tensors
from simulated_nvml import MIB

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="tests/memory/test_memory_on_a_gpu.py has CUDA's"
)

SIZE = 64 << 20  # above what malloc ever takes from its heap, which others may keep in use
KEPT = []


class Node:
    pass


def unreachable_cycle() -> weakref.ref[torch.Tensor]:
    one, other = Node(), Node()
    one.other, other.one, one.tensor = other, one, torch.ones(SIZE // 4)
    return weakref.ref(one.tensor)


def test_garbage_goes_and_the_system_gets_its_memory_back(caplog) -> None:
    gc.disable()
    try:
        gone = unreachable_cycle()
        with caplog.at_level("INFO", "robust_train"):
            cleared = clear_gpu_memory()
    finally:
        gc.enable()
    assert gone() is None
    assert cleared.freed >= SIZE // 2
    assert cleared.before.reserved - cleared.after.reserved == cleared.freed
    assert "no CUDA in this process; host memory: " in cleared.description
    assert caplog.messages == [cleared.description]
    assert not cleared.held


def test_force_collects_what_gc_freeze_has_put_aside() -> None:
    gc.disable()
    try:
        gone = unreachable_cycle()
        gc.freeze()
        clear_gpu_memory()
        assert gone() is not None
        cleared = clear_gpu_memory(force=True)
        assert gone() is None
    finally:
        gc.enable()
        gc.unfreeze()
    assert cleared.freed >= SIZE // 2


@pytest.mark.slow
def test_force_lets_go_of_the_last_uncaught_exception_s_variables() -> None:
    # as an interactive interpreter and a notebook keep it, so in one
    code = """
import sys, torch
def forward():
    activations = torch.ones(4 * 2**20)
    raise MemoryError
forward()

from robust_train import clear_gpu_memory
cleared = clear_gpu_memory()
print("kept", sum(t.nbytes for t in __import__("gc").get_objects() if type(t) is torch.Tensor))
cleared = clear_gpu_memory(force=True)
print("dropped", cleared.freed)
"""
    code = code.replace("    raise MemoryError\n", "    raise MemoryError\n\n")
    done = subprocess.run(
        [sys.executable, "-i", "-q"], input=code, capture_output=True, text=True, timeout=120
    )
    kept, dropped = done.stdout.splitlines()[-2:]
    assert kept == f"kept {16 * MIB}", done.stderr
    assert int(dropped.split()[1]) >= 15 * MIB


@pytest.mark.slow
def test_force_empties_the_collector_s_own_list_but_not_a_debugger_s() -> None:
    gc.garbage.append(torch.ones(SIZE // 4))
    gone = weakref.ref(gc.garbage[0])
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        clear_gpu_memory(force=True)
        assert gone() is not None
    finally:
        gc.set_debug(0)
    clear_gpu_memory(force=True)
    assert gone() is None
    assert not gc.garbage


def test_force_names_the_largest_tensors_that_are_left() -> None:
    KEPT.append(torch.ones(2 * SIZE // 4))
    try:
        cleared = clear_gpu_memory(force=True)
        largest = largest_tensors(1)
    finally:
        KEPT.clear()
    first = cleared.held[0]
    assert (first.bytes, first.shape, first.dtype) == (2 * SIZE, (2 * SIZE // 4,), "float32")
    assert "the largest tensors left: 128.0 MiB float32" in cleared.description
    assert largest == [
        {
            "bytes": 2 * SIZE,
            "shape": [2 * SIZE // 4],
            "dtype": "float32",
            "device": "cpu",
            "has_graph": False,
        }
    ]


def trained_model():
    model = nn.Sequential(nn.Linear(512, 512), nn.BatchNorm1d(512), nn.Linear(512, 512))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 512)).square().mean().backward()
    optimizer.step()
    return model, optimizer


def test_a_model_s_gradients_and_optimizer_states_go_and_its_weights_stay() -> None:
    model, optimizer = trained_model()
    of_another = trained_model()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    gone = weakref.ref(optimizer.state[model[0].weight]["exp_avg"])
    cleared = cleanup_model_memory(model)
    assert gone() is None
    assert not optimizer.state
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(model.state_dict()[name], value) for name, value in weights.items())
    assert "optimizer state (1 found) dropped, weights on the host" in cleared.description
    # nobody else's
    assert of_another[1].state
    assert all(p.grad is not None for p in of_another[0].parameters())


def test_weights_can_be_dropped_altogether() -> None:
    model, optimizer = trained_model()
    cleared = cleanup_model_memory(model, keep_weights=False)
    assert all(value.numel() == 0 for value in model.state_dict().values())
    assert all(p.numel() == 0 for group in optimizer.param_groups for p in group["params"])
    assert "weights dropped" in cleared.description
