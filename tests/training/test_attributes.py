"""Plain attributes of modules after a pass that is repeated: as at the step's start."""

import gc
import weakref
from collections import deque

import numpy
import pytest
import torch
from torch import nn

from robust_train.step.batcher import MicroBatcher
from robust_train.step.pass_state import PassState
from robust_train.step.step_start import StepStart, Watch


def out_of_memory():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


class Stateful(nn.Module):
    """Keeps what programs keep on their modules, and changes all of it in a pass."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.at, self.beta, self.name, self.is_warm = 3, 1.0, "first", False
        self.hidden = None
        self.figure, self.pair = torch.zeros(3), (torch.ones(2), torch.ones(2))
        self.shadow = {"weight": torch.zeros(2)}
        self.history = {"loss": [1.0, 2.0]}
        self.losses, self.lengths = [0.5], {1, 2}
        self.queue = deque([torch.zeros(2), torch.ones(2)], maxlen=2)
        self.counts = numpy.zeros(3)
        self.gone = 7

    def forward(self, x):
        self.at += len(x)
        self.beta, self.name, self.is_warm = self.beta / 2, "next", True
        self.hidden = self.layer(x)
        self.figure += 1
        self.pair = (self.hidden, self.hidden)
        self.shadow["weight"].add_(1)
        self.shadow["bias"] = self.hidden
        self.history["loss"].append(3.0)
        self.losses = [*self.losses, 1.5]
        self.lengths.add(len(x))
        self.queue.append(self.hidden.detach())
        self.counts[1] += 1
        self.made = self.hidden
        self.layer.drop = 0.5  # of torch's own module, by a user
        vars(self).pop("gone", None)
        return self.hidden.mean()

    def state(self):
        figures = {name: value.tolist() for name, value in self.tensors().items()}
        plain = (self.at, self.beta, self.name, self.is_warm, self.hidden, self.gone)
        return (
            plain,
            figures,
            list(self.shadow),
            {name: list(values) for name, values in self.history.items()},
            list(self.losses),
            set(self.lengths),
            self.counts.tolist(),
            "made" in vars(self) or "drop" in vars(self.layer),
        )

    def tensors(self):
        named = {"figure": self.figure, "weight": self.shadow["weight"]}
        pair = {f"pair {number}": tensor for number, tensor in enumerate(self.pair)}
        return named | pair | {f"queue {n}": tensor for n, tensor in enumerate(self.queue)}


def test_plain_attributes_are_restored_as_the_same_objects():
    """There are attributes of all kinds."""
    model = Stateful()
    before, objects = model.state(), (model.losses, model.queue, model.figure)
    start = StepStart(Watch(), [model])
    for repetition in (1, 2):
        model(torch.ones(4, 2))
        start.rewind()
        assert model.state() == before, f"rewind {repetition}"
    after = model.losses, model.queue, model.figure
    assert list(map(id, after)) == list(map(id, objects))
    model(torch.ones(4, 2))
    start.end()
    assert (model.at, hasattr(model, "gone")) == (7, False), "a step that went through"


class Counting(nn.Module):
    """Counts passes and samples, and runs out of memory above ``most`` at the end of a pass."""

    def __init__(self, most=10**9):
        super().__init__()
        self.layer, self.most = nn.Linear(1, 1), most
        self.samples = self.passes = 0

    def forward(self, x):
        self.samples += len(x)
        self.passes += 1
        if len(x) > self.most:
            out_of_memory()
        return self.layer(x).mean()


def test_a_failed_pass_counts_in_no_statistics():
    """It counts neither in training nor in validation."""
    model = Counting(most=4)
    MicroBatcher().backward(model, torch.ones(8, 1), model)
    assert (model.samples, model.passes) == (8, 2)
    model.eval()
    with torch.no_grad():
        MicroBatcher().forward(model, torch.ones(8, 1), model)
    assert (model.samples, model.passes) == (16, 4)


def test_modules_in_lists_and_closures_count_samples_once():
    """So do the metrics of torchmetrics: tests/integrations/test_lightning_in_step.py."""
    model, inner = Counting(), Counting(most=8)
    model.hidden_from_parameters = [inner]

    def loss_of(x):
        return model(x) + inner(x)

    MicroBatcher().backward(loss_of, torch.ones(32, 1), [model, inner])
    assert inner.samples == model.samples == 32


class Remembering(nn.Module):
    """Has a large tensor and a long list, which each pass changes."""

    def __init__(self, change):
        super().__init__()
        self.layer, self.change = nn.Linear(1, 1), change
        self.bank = torch.zeros(1 << 19)
        self.seen = list(range(5000))
        self.maps = torch.empty(17 << 18, 4)

    def forward(self, x):
        self.change(self, x)
        if len(x) > 4:
            out_of_memory()
        return self.layer(x).mean()


def write_to_bank(model, x):
    model.bank[: len(x)] = 1


def take_from_the_front(model, x):
    model.seen.pop(0)


def replace_maps(model, x):
    model.maps = torch.empty(17 << 18, 4)


@pytest.mark.parametrize(
    ("change", "name"),
    [(write_to_bank, "bank"), (take_from_the_front, "seen"), (replace_maps, "maps")],
)
def test_what_cannot_be_put_back_is_named_once(change, name, caplog):
    model, batcher = Remembering(change), MicroBatcher()
    for _ in range(3):
        batcher.backward(model, torch.ones(8, 1), model)
    lines = [line for line in caplog.messages if "cannot be restored" in line]
    assert len(lines) == 1
    assert lines[0].startswith(f"Remembering.{name} was changed")


def test_a_long_list_that_grows_is_cut_back(caplog):
    model = Remembering(lambda model, x: model.seen.append(len(x)))
    MicroBatcher().backward(model, torch.ones(8, 1), model)
    assert model.seen[5000:] == [4, 4]
    assert "cannot be restored" not in caplog.text


def test_a_nested_long_list_is_cut_back(caplog):
    model = Remembering(lambda model, x: model.history["loss"].append(len(x)))
    model.history = {"loss": list(range(5000)), "pairs": (list(range(2000)), [torch.zeros(1)])}
    MicroBatcher().backward(model, torch.ones(8, 1), model)
    assert model.history["loss"][5000:] == [4, 4]
    assert "cannot be restored" not in caplog.text


def test_leftovers_of_an_earlier_step_are_freed():
    """Feature maps, and what leads to them, are free once the next pass has others."""
    model = Stateful()
    watch = Watch()
    StepStart(watch, [model]).end()
    model(torch.ones(4, 2))
    model.features = [model.hidden * 2]
    old = weakref.ref(model.features[0]), weakref.ref(model.hidden)
    start = StepStart(watch, [model])
    model(torch.ones(4, 2))
    model.features = [model.hidden]
    gc.collect()
    assert [reference() for reference in old] == [None, None]
    start.rewind()
    assert model.features[0].shape == (4, 2), "its values are"
    start.end()


def test_torchs_own_changes_within_a_step_stay():
    """A lazy module stays initialised; weights that a pass makes, modes and hooks stay."""

    class Making(nn.Module):
        def __init__(self):
            super().__init__()
            self.lazy, self.weight = nn.LazyLinear(1), None

        def forward(self, x):
            if self.weight is None:
                self.weight = nn.Parameter(torch.ones(()))
            self.eval()
            return (self.lazy(x) * self.weight).mean()

    model = Making()
    start = StepStart(Watch(), [model])
    model(torch.ones(2, 3))
    start.rewind()
    assert type(model.lazy) is nn.Linear
    assert model.lazy.in_features == 3
    assert model.weight is dict(model.named_parameters())["weight"]
    assert not model.training
    start.end()


def test_an_evaluation_leaves_nothing_behind():
    model = Stateful().eval()
    model.register_buffer("moved", torch.zeros(()))
    before = model.state(), torch.get_rng_state().tolist()
    state = PassState([model], model)
    model(torch.rand(4, 2))
    model.moved += 1
    state.restore()
    assert (model.state(), torch.get_rng_state().tolist()) == before
    assert model.moved == 0


def test_an_attribute_that_replaces_another_is_restored_too():
    model, watch = Counting(), Watch()
    StepStart(watch, [model]).end()
    del model.passes
    model.calls = 5
    start = StepStart(watch, [model])
    model.calls, model.samples = 6, 1
    start.rewind()
    start.end()
    assert (model.calls, model.samples) == (5, 0)
