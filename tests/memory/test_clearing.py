"""Giving memory back: garbage, what a model holds, and tensors that go to the host."""

import gc
import subprocess
import sys
import weakref
from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from robust_train import cleanup_model_memory, clear_gpu_memory, safe_tensor_to_cpu
from robust_train.memory.tensors import copy_strided, largest_tensors
from robust_train.readable import MIB

SIZE = 64 * MIB  # above what malloc ever takes from its heap, which others may keep in use
KEPT = []


@pytest.fixture
def no_collector():
    gc.disable()
    yield
    gc.enable()
    gc.unfreeze()


def unreachable_cycle():
    cycle = [torch.ones(SIZE // 4)]
    cycle.append(cycle)
    return weakref.ref(cycle[0])


def test_clearing_returns_memory_to_the_system(no_collector, caplog):
    """It collects garbage first."""
    gone = unreachable_cycle()
    with caplog.at_level("INFO", "robust_train"):
        cleared = clear_gpu_memory()
    assert gone() is None
    assert cleared.freed >= SIZE // 2
    assert cleared.before.reserved - cleared.after.reserved == cleared.freed
    assert "no CUDA in this process; host memory: " in cleared.description
    assert caplog.messages == [cleared.description]
    assert not cleared.held


def test_force_collects_what_gc_freeze_has_put_aside(no_collector):
    gone = unreachable_cycle()
    gc.freeze()
    clear_gpu_memory()
    assert gone() is not None
    cleared = clear_gpu_memory(force=True)
    assert gone() is None
    assert cleared.freed >= SIZE // 2


@pytest.mark.slow
def test_force_frees_the_last_exceptions_variables():
    """That exception was not caught."""
    # as an interactive interpreter and a notebook keep it, so in one
    code = """
import gc, torch
def forward():
    activations = torch.ones(4 * 2**20)
    raise MemoryError

forward()

from robust_train import clear_gpu_memory
cleared = clear_gpu_memory()
print("kept", sum(t.nbytes for t in gc.get_objects() if type(t) is torch.Tensor))
cleared = clear_gpu_memory(force=True)
print("dropped", cleared.freed)
"""
    done = subprocess.run(
        [sys.executable, "-i", "-q"], input=code, capture_output=True, text=True, timeout=120
    )
    kept, dropped = done.stdout.splitlines()[-2:]
    assert kept == f"kept {16 * MIB}", done.stderr
    assert int(dropped.split()[1]) >= 15 * MIB


def test_force_empties_the_collectors_own_list():
    """The list of a debugger stays."""
    gc.garbage.append(torch.ones(9))
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


def test_force_names_the_largest_tensors_that_are_left():
    KEPT.append(torch.ones(SIZE // 2))
    try:
        cleared = clear_gpu_memory(force=True)
        (largest,) = largest_tensors(1)
    finally:
        KEPT.clear()
    assert "the largest tensors left: 128.0 MiB float32" in cleared.description
    expected = {"bytes": 2 * SIZE, "shape": [SIZE // 2], "dtype": "float32", "device": "cpu"}
    assert cleared.held[0].as_json() == largest == {**expected, "has_graph": False}


def trained_model():
    model = nn.Sequential(nn.Linear(512, 512), nn.BatchNorm1d(512), nn.Linear(512, 512))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 512)).square().mean().backward()
    optimizer.step()
    return model, optimizer


def test_clearing_a_model_may_keep_its_weights():
    """Its gradients and optimizer states go."""
    (model, optimizer), of_another = trained_model(), trained_model()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    gone = weakref.ref(optimizer.state[model[0].weight]["exp_avg"])
    cleared = cleanup_model_memory(model)
    assert gone() is None
    assert not optimizer.state
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(model.state_dict()[name], value) for name, value in weights.items())
    assert "optimizer state (1 found) dropped, weights on the host" in cleared.description
    cleared = cleanup_model_memory(model, keep_weights=False)
    assert all(value.numel() == 0 for value in model.state_dict().values())
    assert all(p.numel() == 0 for group in optimizer.param_groups for p in group["params"])
    assert "weights dropped" in cleared.description
    # nobody else's
    assert of_another[1].state
    assert all(p.grad is not None for p in of_another[0].parameters())


# --- to the host ---

Pair = namedtuple("Pair", "first second")


@dataclass(frozen=True)
class Batch:
    images: torch.Tensor
    more: dict = field(default_factory=dict)


def with_graph():
    return torch.ones(3, requires_grad=True) * 2


@pytest.mark.parametrize(
    ("container", "tensor_in"),
    [
        (lambda t: t, lambda t: t),
        (lambda t: [1, t], lambda c: c[1]),
        (lambda t: (t, "text"), lambda c: c[0]),
        (lambda t: Pair(None, t), lambda c: c.second),
        (lambda t: {"a": {"b": [t]}}, lambda c: c["a"]["b"][0]),
        (lambda t: OrderedDict(z=t, a=1), lambda c: c.popitem(last=False)[1]),
        (lambda t: UserDict({"x": t}), lambda c: c["x"]),
        (lambda t: {t}, lambda c: c.pop()),
        (lambda t: Batch(t), lambda c: c.images),
        (lambda t: Batch(None, {"more": [t]}), lambda c: c.more["more"][0]),
        (lambda t: torch.max(t[None], dim=1), lambda c: c.values.expand(3)),
    ],
)
def test_containers_are_rebuilt_as_what_they_are(container, tensor_in):
    before = container(with_graph())
    after = safe_tensor_to_cpu(before)
    assert type(after) is type(before)
    moved = tensor_in(after)
    assert moved.grad_fn is None
    assert not moved.requires_grad
    assert moved.tolist() == [2, 2, 2]
    assert tensor_in(before).grad_fn is not None, "what was passed in is as it was"


def test_containers_keep_what_they_have_beside_their_content():
    assert safe_tensor_to_cpu(defaultdict(list, {"x": [with_graph()]}))["missing"] == []
    assert safe_tensor_to_cpu(deque([with_graph(), 2], maxlen=5)).maxlen == 5
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    assert torch.equal(safe_tensor_to_cpu(packed).data, packed.data)
    value = {"model": nn.Linear(2, 2), "n": 3, "text": "x", "cls": nn.Linear, "none": None}
    assert safe_tensor_to_cpu(value) == value, "everything except tensors is passed on"


def test_shared_tensors_and_cyclic_containers_are_cleared():
    """A tensor in several places stays one, and a container may hold itself."""
    tensor = with_graph()
    loop = {"a": tensor, "b": [tensor]}
    loop["self"] = loop
    after = safe_tensor_to_cpu(loop)
    assert after["a"] is after["b"][0]
    assert after["self"] is after


@given(
    st.lists(st.integers(1, 4), max_size=4),
    st.lists(st.integers(0, 9), min_size=4, max_size=4),
    st.integers(0, 5),
    st.sampled_from([torch.float32, torch.int64, torch.bool, torch.complex64]),
    st.booleans(),
)
def test_tensors_of_any_layout_are_recognised(shape, steps, offset, dtype, is_conjugated):
    """Each is copied out of the stretch of memory that it shares."""
    strides = steps[: len(shape)]
    span = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    memory = torch.arange(offset + span).to(dtype)
    if dtype.is_complex:
        memory *= 1 + 2j
    tensor = torch.as_strided(memory, shape, strides, offset)
    tensor = tensor.conj() if is_conjugated else tensor
    copied = copy_strided(tensor)
    assert torch.equal(copied, tensor)
    assert copied.dtype == tensor.dtype
    # no elements but its own are kept
    assert copied.untyped_storage().nbytes() == max(tensor.numel(), 1) * tensor.itemsize
