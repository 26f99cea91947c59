"""``training.batch_size=auto`` inside an attempt: what is found, and that nothing else changes."""

import json
import random
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from training_world import WatchedRun

import warm
from robust_train import find_batch_size
from robust_train.attempt.run import live_of
from robust_train.config.placeholders import MicroBatchPlan
from robust_train.model.errors import AttemptsExhaustedError
from robust_train.policy.sizes import BatchSearch
from robust_train.step.probing import Meter, device_of, optimizer_bytes, search_size
from robust_train.step.step_start import StepStart, Watch
from world import ROOT

# A real limit; what fits beside the answer is tried as well.
WITHIN_A_LIMIT = """
import json
import torch
from torch import nn
from robust_train import find_batch_size
from robust_train.memory.clearing import return_memory
from memory_limit import limit_growth

torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 2**15), nn.Tanh())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def try_batch(size):
    model(torch.randn(size, 64)).square().mean().backward()

try_batch(4)
model.zero_grad()
limit_growth(80 * 2**20)

def fits(size):
    try:
        try_batch(size)
        return True
    except RuntimeError:
        return False
    finally:
        model.zero_grad()
        return_memory()

found = find_batch_size(try_batch, 256, model=model)
sizes = found.batch_size, int(found.batch_size / 0.6)
print(json.dumps([len(found.probes), *map(fits, sizes)]))
"""


def test_four_probes_find_the_largest_size():
    """The limit of memory is real."""
    ended = warm.preloaded(WITHIN_A_LIMIT, cwd=ROOT / "tests")
    assert ended.returncode == 0, ended.stderr
    probes, it_fits, more_fits = json.loads(ended.stdout)
    # not affine: with few samples the peak is that of the last layer's weights, not of activations
    assert it_fits
    assert not more_fits
    assert probes <= 4


class Model(nn.Module):
    """Buffers that change, draws in the forward pass."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(5, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 3)
        )

    def forward(self, x):
        return self.layers(x * random.random())


def three_steps(run):
    """Weights, buffers, optimizer state and the next draws after three steps of a user's loop."""
    torch.manual_seed(1)
    random.seed(1)
    model, lengths = Model(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")

    def loss_of(batch):
        x, y = batch
        lengths.append(len(x))
        return nn.functional.cross_entropy(model(x), y), len(x)

    def backward(loss):
        scaler.scale(loss).backward()

    for x in torch.randn(3, 16, 5):
        loss, kept = run.backward(loss_of, (x, torch.arange(16) % 3), model, backward=backward)
        assert kept == [16]
        assert loss > 0
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    states = [v for s in optimizer.state.values() for v in s.values()]
    draws = torch.tensor([random.random(), float(torch.rand(())), scaler.get_scale()])
    return [*model.state_dict().values(), *states, draws], lengths


def test_probes_leave_no_trace(tmp_path):
    """Model, optimizer, scaler and generators are as before."""
    run = searching(tmp_path, 16)
    actual, probed = three_steps(run)
    expected, plain = three_steps(WatchedRun(tmp_path))
    assert plain == [16, 16, 16]
    assert probed == [4, 16, *plain], "the probes, then what would have been anyway"
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(one, other)


def searching(folder, batch_size, min_batch_size=1):
    """A run that has to find its size, of this one at most."""
    run = WatchedRun(folder)
    live_of(run).parts.split_by(
        MicroBatchPlan(batch_size=batch_size, min_batch_size=min_batch_size)
    )
    live_of(run).parts.search_with(BatchSearch(batch_size, min_batch_size=min_batch_size))
    return run


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt()])
def test_an_error_in_a_probe_undoes_the_step(tmp_path, error):
    model = nn.Linear(5, 3)
    before = torch.full((3, 5), 2.0)
    model.weight.grad = before

    def loss_of(part):
        raise error

    with pytest.raises(type(error)):
        searching(tmp_path, 8).backward(loss_of, torch.ones(8, 5), model)
    assert model.weight.grad is before
    assert torch.equal(before, torch.full((3, 5), 2.0))
    assert model.bias.grad is None


def test_a_small_first_batch_is_not_probed(tmp_path):
    """It is smaller than every size."""
    model, run = nn.Linear(5, 3), searching(tmp_path, 16, 4)
    for samples in (3, 16):
        run.backward(lambda part: model(part).mean(), torch.ones(samples, 5), model)
    assert run.micro_batcher.size == 16


def test_if_nothing_fits_the_step_still_fails(tmp_path):
    """It fails as it would without probes."""
    model, run = nn.Linear(5, 3), searching(tmp_path, 16, 4)

    def loss_of(part):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    with pytest.raises(torch.OutOfMemoryError):
        run.backward(loss_of, torch.ones(16, 5), model)
    found, *changes = (e for e in run.events if e["event"] != "memory")
    assert (found["event"], found["batch_size"]) == ("batch_size_found", None)
    assert changes[-1]["event"] == "micro_batch_exhausted"
    assert changes[-1]["tried"] == [16, 8, 4]
    assert model.weight.grad is None


def test_find_batch_size_leaves_no_trace():
    """No gradients and no draws; it says when nothing fits."""
    model, tried, own = Model(), [], torch.Generator()
    state = own.get_state()

    def try_batch(size):
        tried.append(size)
        model(torch.randn(size, 5, generator=own)).sum().backward()

    found = find_batch_size(try_batch, 96, model=model, effective_batch_size=96)
    assert torch.equal(own.get_state(), state)
    assert found.batch_size == 96
    assert tried == [probe.batch_size for probe in found.probes]
    assert all(parameter.grad is None for parameter in model.parameters())

    def never(size):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    with pytest.raises(AttemptsExhaustedError, match="none fits into"):
        find_batch_size(never, 8, model=model)
    with pytest.raises(ValueError, match="min_batch_size=9: must be from 1 to max_batch_size=8"):
        find_batch_size(never, 8, min_batch_size=9)
    with pytest.raises(ValueError, match="effective_batch_size=0: must be 1 or more"):
        find_batch_size(never, 8, effective_batch_size=0)
    with pytest.raises(KeyError):
        find_batch_size(lambda size: {}[size], 8, model=model)


@pytest.mark.parametrize(
    ("kind", "options", "states", "copies"),
    [
        (torch.optim.AdamW, {}, 2, 0),
        (torch.optim.AdamW, {"foreach": True}, 2, 1),
        (torch.optim.Adam, {"amsgrad": True}, 3, 0),
        (torch.optim.SGD, {"lr": 0.1, "foreach": True, "weight_decay": 0.1}, 0, 1),
        (torch.optim.SGD, {"lr": 0.1, "foreach": True, "momentum": 0.9}, 1, 0),
        (torch.optim.RMSprop, {}, 1, 0),
        (torch.optim.RMSprop, {"centered": True, "momentum": 0.1}, 3, 0),
    ],
)
def test_the_optimizers_predicted_memory_is_what_it_takes(kind, options, states, copies):
    model = nn.Linear(300, 200)
    optimizer = kind(model.parameters(), **options)
    size = 4 * (300 * 200 + 200)
    expected, in_a_step = optimizer_bytes(model.parameters())
    assert (expected, in_a_step) == (states * size, copies * size)
    model(torch.ones(1, 300)).sum().backward()
    optimizer.step()
    taken = sum(
        value.numel() * value.element_size()
        for state in optimizer.state.values()
        for value in state.values()
        if torch.is_tensor(value) and value.dim()
    )
    assert taken == expected
    assert optimizer_bytes(model.parameters())[0] == 0


def test_nothing_fits_without_room_for_the_copy():
    """Each step needs a copy of its own."""

    class Full(Meter):
        def begin(self):
            return 90

        def limit(self):
            return 100

        def peak(self):
            return 95

    full = Full(torch.device("cpu"), 1.0)

    def tried(*reserved):
        sizes: list[int] = []
        search_size(sizes.append, StepStart(Watch(), []), (1, 2), full, *reserved)
        return sizes

    assert tried(0, 10)
    assert tried(0, 11) == tried(11) == []


def test_probes_use_the_devices_of_the_parameters():
    """The current device may be another."""
    on = [SimpleNamespace(device=torch.device(name)) for name in ("cpu", "cuda:1")]
    assert device_of(on) == torch.device("cuda:1")
    assert Meter(device_of(on), 0.5).index == 1
    assert device_of(on[:1]) == torch.device("cpu")
