"""Who holds a tensor, by the name that a person knows it by; and inline attempts that ask."""

from __future__ import annotations

import json
import weakref

import pytest
import torch
from torch import nn

from robust_train import launch
from robust_train.errors import TrainerFailed
from robust_train.memory import holders
from robust_train.memory.holders import holders_of
from robust_train.vision.step import Precision, apply_gradients

pytestmark = pytest.mark.usefixtures("whole_heap")

KEPT = []


class Owner:
    def __init__(self, value):
        self.value = value


class Slotted:
    __slots__ = ("value",)


def new_tensor():
    return torch.zeros(3)


def the_holder(tensor_of):
    """Of a tensor that nothing here refers to while it is looked for."""
    return holders_of([tensor_of()])[0]


def test_a_list_of_a_module_is_named():
    KEPT.append(new_tensor())
    assert the_holder(lambda: KEPT[0]) == f"KEPT[0] (global of module {__name__})"
    KEPT.clear()


def test_a_local_variable_of_a_running_function_is_named():
    table = {"outputs": (new_tensor(),)}
    name = the_holder(lambda: table["outputs"][0])
    assert name.startswith("table['outputs'][0] (")
    assert "test_a_local_variable_of_a_running_function_is_named" in name


def test_an_attribute_is_named():
    owner = Owner(new_tensor())
    name = the_holder(lambda: owner.value)
    assert name.startswith("owner.value (")


def test_an_optimizer_s_state_is_named_without_the_numbers_of_its_parameter():
    weight = nn.Parameter(torch.zeros(3))
    table = {weight: {"momentum": new_tensor()}}
    name = the_holder(lambda: table[weight]["momentum"])
    assert name.startswith("table[Parameter]['momentum'] (")


def test_a_module_s_weight_is_named_as_its_user_writes_it(monkeypatch: pytest.MonkeyPatch):
    # a session of thousands of tests, which is met on the way, is larger than a user's program
    monkeypatch.setattr(holders, "MOST_PATHS", 2_000_000)
    model = nn.Sequential(nn.Linear(2, 2))
    assert the_holder(lambda: model[0].weight).startswith("model.0.weight (")


def test_a_function_s_closure_is_named():
    def make():
        inside = new_tensor()
        return lambda: inside

    KEPT.append(make())
    assert "inside (closure of" in the_holder(lambda: KEPT[0]())
    KEPT.clear()


def test_a_slot_is_named_by_its_owner():
    owner = Slotted()
    owner.value = new_tensor()
    assert the_holder(lambda: owner.value).startswith("owner (local variable")


def test_what_nothing_holds_is_said_so():
    name = holders_of([new_tensor()])[0]
    assert name == "no Python object"


def test_looking_for_a_holder_holds_nothing_itself():
    tensor = new_tensor()
    gone = weakref.ref(tensor)
    holders_of([tensor])
    del tensor
    assert gone() is None


def test_an_inline_attempt_that_left_memory_behind_says_what_holds_it(tmp_path, caplog):
    def train(cfg):
        outputs = torch.zeros(cfg.training.batch_size, 2**14)
        if cfg.training.batch_size > 32:
            KEPT.append(outputs)
            raise MemoryError
        return "trained"

    summary = launch(
        train,
        {
            "isolation": "none",
            "auto_device": False,
            "device": "cpu",
            "training": {"batch_size": 64, "num_workers": 0},
        },
        run_dir=tmp_path,
    )
    KEPT.clear()
    assert summary.result == "trained"
    assert "4.0 MiB float32 (64, 16384), held by" in caplog.text
    events = [json.loads(line) for line in (tmp_path / "journal.jsonl").open()]
    held = [event for event in events if event["event"] == "memory_held"]
    assert len(held) == 1
    assert "KEPT[0]" in held[0]["description"]


class NoRoomForState(torch.optim.AdamW):
    def _init_group(self, group, *args, **kwargs):
        first = group["params"][0]
        self.state[first]["step"] = torch.tensor(0.0)
        raise MemoryError


def test_the_built_in_step_removes_half_made_optimizer_state_and_raises():
    model = nn.Linear(2, 2)
    optimizer = NoRoomForState(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    weights = model.weight.detach().clone()
    precision = Precision(torch.device("cpu"), mixed=False)
    with pytest.raises(MemoryError):
        apply_gradients(model, optimizer, precision=precision, max_grad_norm=0)
    assert not optimizer.state
    assert model.weight.grad is None
    assert torch.equal(model.weight, weights)


def test_a_fault_is_reported_where_the_device_gives_no_gradient_back(tmp_path, monkeypatch):
    message = "CUDA error: an illegal memory access was encountered"

    def fails(*arguments):
        raise RuntimeError(message)

    monkeypatch.setattr("robust_train.memory.cleanup.KeptGradients.restore", fails)
    cfg = {"isolation": "none", "device": "cpu", "auto_device": False}
    with pytest.raises(TrainerFailed, match="illegal memory access"):
        launch(fails, cfg, run_dir=tmp_path)
    [attempt] = json.loads((tmp_path / "summary.json").read_text())["attempts"]
    assert attempt["outcome"] == "device_fault"
