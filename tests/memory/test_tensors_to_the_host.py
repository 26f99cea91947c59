"""safe_tensor_to_cpu and save_checkpoint."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from robust_train import save_checkpoint
from robust_train.folder.checkpoints import CheckpointError
from robust_train.memory.tensors import picked_out, safe_tensor_to_cpu

Pair = namedtuple("Pair", "first second")


@dataclass(frozen=True)
class Batch:
    images: torch.Tensor
    names: list[str]
    extra: dict = field(default_factory=dict)


def with_graph() -> torch.Tensor:
    return torch.ones(3, requires_grad=True) * 2


def tensors_in(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, UserDict)):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple, set, deque)):
        for item in value:
            yield from tensors_in(item)


@pytest.mark.parametrize(
    "container",
    [
        lambda t: t,
        lambda t: [t, 1],
        lambda t: (t, "text"),
        lambda t: Pair(t, None),
        lambda t: {"a": {"b": [t]}},
        lambda t: OrderedDict(z=t, a=1),
        lambda t: defaultdict(list, {"x": [t]}),
        lambda t: UserDict({"x": t}),
        lambda t: {t},
        lambda t: deque([t, 2], maxlen=5),
    ],
)
def test_containers_are_rebuilt_as_what_they_are(container) -> None:
    before = container(with_graph())
    after = safe_tensor_to_cpu(before)
    assert type(after) is type(before)
    (tensor,) = tensors_in(after)
    assert tensor.grad_fn is None
    assert not tensor.requires_grad
    assert tensor.tolist() == [2, 2, 2]
    # what was passed in is as it was
    (original,) = tensors_in(before)
    assert original.grad_fn is not None
    if isinstance(before, defaultdict):
        assert after["missing"] == []
    if isinstance(before, deque):
        assert after.maxlen == 5
    if isinstance(before, dict):
        assert list(after)[: len(before)] == list(before)


def test_dataclasses_frozen_ones_too() -> None:
    before = Batch(with_graph(), ["a"], {"more": [with_graph()]})
    after = safe_tensor_to_cpu(before)
    assert type(after) is Batch
    assert after.names == ["a"]
    assert after.images.grad_fn is None
    assert after.extra["more"][0].grad_fn is None
    assert before.images.grad_fn is not None
    assert before.extra["more"][0].grad_fn is not None


def test_what_torch_returns_as_tuples_of_its_own() -> None:
    best = torch.max(torch.tensor([[1.0, 3.0]], requires_grad=True), dim=1)
    after = safe_tensor_to_cpu(best)
    assert after.values.grad_fn is None
    assert after.values.item() == 3
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    assert torch.equal(safe_tensor_to_cpu(packed).data, packed.data)


def test_one_tensor_stays_one_and_a_container_may_hold_itself() -> None:
    tensor = with_graph()
    loop = {"a": tensor, "b": [tensor]}
    loop["self"] = loop
    after = safe_tensor_to_cpu(loop)
    assert after["a"] is after["b"][0]
    assert after["self"] is after


def test_everything_else_is_passed_on_as_it_is() -> None:
    model = nn.Linear(2, 2)
    value = {"model": model, "n": 3, "text": "x", "cls": nn.Linear, "none": None}
    assert safe_tensor_to_cpu(value) == value


@given(
    st.lists(st.integers(1, 4), max_size=4),
    st.lists(st.integers(0, 9), min_size=4, max_size=4),
    st.integers(0, 5),
    st.sampled_from([torch.float32, torch.int64, torch.bool, torch.complex64]),
)
def test_tensors_of_any_layout_are_picked_out_of_their_stretch(shape, steps, offset, dtype) -> None:
    strides = steps[: len(shape)]
    span = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    memory = torch.arange(offset + span).to(dtype)
    tensor = torch.as_strided(memory, shape, strides, offset)
    copied = picked_out(tensor)
    assert torch.equal(copied, tensor)
    assert copied.dtype == tensor.dtype
    # no elements but its own are kept
    assert copied.untyped_storage().nbytes() == max(tensor.numel(), 1) * tensor.itemsize


def test_a_conjugated_view_keeps_its_values() -> None:
    tensor = torch.tensor([1 + 2j, 3 + 4j, 5 + 6j]).conj()[::2]
    assert torch.equal(picked_out(tensor), torch.tensor([1 - 2j, 5 - 6j]))


def test_a_checkpoint_holds_the_states_of_whatever_has_one(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    path = save_checkpoint(
        {"model": model, "optimizer": optimizer, "step": 7}, tmp_path / "new" / "last.pt"
    )
    content = torch.load(path, weights_only=True)
    assert content["step"] == 7
    assert torch.equal(content["model"]["weight"], model.weight)
    other = torch.optim.AdamW(model.parameters())
    other.load_state_dict(content["optimizer"])
    assert other.state[model.weight]["step"] == 1


def test_a_checkpoint_that_cannot_be_written_says_where_and_why(tmp_path: Path) -> None:
    (tmp_path / "last.pt").mkdir()
    with pytest.raises(CheckpointError, match=r"cannot write .*last\.pt: Is a directory"):
        save_checkpoint({"step": 1}, tmp_path / "last.pt")
    assert [path.name for path in tmp_path.iterdir()] == ["last.pt"]
