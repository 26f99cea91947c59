"""Which variable holds a tensor; and inline attempts that name it."""

from __future__ import annotations

import gc
import json
import weakref

import pytest
import torch
from torch import nn

from robust_train import launch
from robust_train.memory.tensors import frames_of, running_frames, variables_of
from robust_train.model.errors import TrainerFailed

pytestmark = pytest.mark.usefixtures("whole_heap")

KEPT = []


class Owner:
    def __init__(self, value):
        self.value = value


def new_tensor():
    return torch.zeros(3)


def the_holder(tensor_of):
    """The variable that leads to a tensor; None if there is none."""
    found = variables_of(running_frames())
    return found.get(id(tensor_of()), (None, None))[1]


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


def test_a_module_s_weight_and_its_gradient_are_named_as_their_user_writes_them():
    model = nn.Sequential(nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    assert the_holder(lambda: model[0].weight).startswith("model.0.weight (")
    assert the_holder(lambda: model[0].weight.grad).startswith("model.0.weight.grad (")


def test_the_variables_of_a_failed_function_and_of_its_causes_are_named():
    def inner():
        activations = [new_tensor()]
        raise ValueError(activations[0].shape)

    def outer():
        try:
            inner()
        except ValueError as error:
            raise RuntimeError from error

    with pytest.raises(RuntimeError) as raised:
        outer()
    names = [name for _, name in variables_of(frames_of(raised.value)).values()]
    assert any(name.startswith("activations[0] (local variable of inner, ") for name in names)


def test_a_tensor_that_no_variable_leads_to_has_no_holder():
    assert the_holder(new_tensor) is None


def test_a_search_for_holders_is_bounded():
    many = [[number] for number in range(100_000)]
    last = new_tensor()
    many.append(last)
    del last
    assert the_holder(lambda: many[-1]) is None


def test_a_search_for_holders_holds_nothing_itself():
    def holds() -> weakref.ref[torch.Tensor]:
        tensor = new_tensor()
        variables_of(running_frames())
        return weakref.ref(tensor)

    gc.disable()
    try:
        assert holds()() is None
    finally:
        gc.enable()


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
    assert "4.0 MiB float32 (64, 16384) on cpu" in caplog.text
    events = [json.loads(line) for line in (tmp_path / "journal.jsonl").open()]
    held = [event for event in events if event["event"] == "memory_held"]
    assert len(held) == 1
    assert "4.0 MiB more on cpu than before the first try" in held[0]["description"]


def test_a_fault_is_reported_where_the_device_answers_nothing_after_it(tmp_path, monkeypatch):
    message = "CUDA error: an illegal memory access was encountered"

    def fails(*arguments):
        raise RuntimeError(message)

    monkeypatch.setattr("robust_train.memory.clearing.StartingMemory.describe_rest", fails)
    cfg = {"isolation": "none", "device": "cpu", "auto_device": False}
    with pytest.raises(TrainerFailed, match="illegal memory access"):
        launch(fails, cfg, run_dir=tmp_path)
    [attempt] = json.loads((tmp_path / "summary.json").read_text())["attempts"]
    assert attempt["outcome"] == "device_fault"
