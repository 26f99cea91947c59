"""``find_batch_size``: what is found, and that nothing else changes."""

import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import warm
from networks import Noisy
from robust_train import find_batch_size
from robust_train.model.errors import AttemptsExhaustedError
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

search = find_batch_size(try_batch, 256, model=model)
sizes = search.batch_size, int(search.batch_size / 0.6)
print(json.dumps([len(search.probes), *map(fits, sizes)]))
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


def test_find_batch_size_leaves_no_trace():
    """No gradients and no draws; it says when nothing fits."""
    model, tried, generator = Noisy(), [], torch.Generator()
    state = generator.get_state()

    def try_batch(size):
        tried.append(size)
        model(torch.randn(size, 5, generator=generator)).sum().backward()

    search = find_batch_size(try_batch, 96, model=model, effective_batch_size=96)
    assert torch.equal(generator.get_state(), state)
    assert search.batch_size == 96
    assert tried == [probe.batch_size for probe in search.probes]
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
    """Each step needs its own copy."""

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
