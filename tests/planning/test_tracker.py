"""Memory is counted by storage: against bytes that were worked out by hand."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from robust_train.planning.tracker import (
    ACTIVATIONS,
    CATEGORIES,
    GRADIENTS,
    OPTIMIZER,
    TEMPORARIES,
    WEIGHTS,
    StorageTracker,
)

FLOAT = 4
kinds = pytest.mark.parametrize(
    "mode", [contextlib.nullcontext, FakeTensorMode], ids=["real", "fake"]
)


@kinds
def test_views_share_a_storage_and_it_counts_until_the_last_is_gone(mode: Any) -> None:
    with mode(), StorageTracker() as tracker:
        whole = torch.empty(10, 10)
        row = whole.view(100)[3:5]
        assert tracker.current == 100 * FLOAT
        del whole
        assert tracker.current == 100 * FLOAT
        copy = row.clone()
        assert tracker.current == (100 + 2) * FLOAT
        del row
        assert tracker.current == 2 * FLOAT
        copy.resize_(50)
        copy.add_(1)
        assert tracker.current == 50 * FLOAT
        del copy
    assert tracker.current == 0
    assert tracker.peak == (100 + 2) * FLOAT


@kinds
@settings(max_examples=20, deadline=None)
@given(
    widths=st.lists(st.integers(1, 40), min_size=2, max_size=5),
    samples=st.integers(1, 9),
    on_cuda=st.booleans(),
)
def test_a_stack_of_linear_layers_takes_what_was_worked_out_by_hand(
    mode: Any, widths: list[int], samples: int, on_cuda: bool
) -> None:
    block = 512 if on_cuda else 1

    def size(*numbers: int) -> int:
        return sum(-(-number * FLOAT // block) * block for number in numbers)

    weights = [a * b for a, b in itertools.pairwise(widths)]
    with mode(), StorageTracker(on_cuda=on_cuda) as tracker:
        with tracker.taking_for(WEIGHTS):
            layers = [nn.Linear(a, b, bias=False) for a, b in itertools.pairwise(widths)]
            network = nn.Sequential(*layers)
        assert tracker.current == size(*weights)
        tracker.reset_peak()
        with tracker.taking_for(ACTIVATIONS):
            result = network(torch.empty(samples, widths[0]))
        # autograd keeps the input of each layer, we keep the result of the last
        assert tracker.current == size(*weights) + size(*(samples * width for width in widths))
        assert tracker.at_peak == dict.fromkeys(CATEGORIES, 0) | {
            WEIGHTS: size(*weights),
            ACTIVATIONS: size(*(samples * width for width in widths)),
        }
        result.backward(torch.ones_like(result))
        del result
        tracker.label((layer.weight.grad for layer in layers), GRADIENTS)
        assert tracker.current == 2 * size(*weights)
        optimizer = torch.optim.AdamW(network.parameters(), foreach=False, capturable=False)
        for parameter in network.parameters():
            optimizer.state[parameter] = {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
        states = [t for s in optimizer.state.values() for t in s.values()]
        tracker.label(states, OPTIMIZER)
        steps = size(*([1] * len(weights)))
        assert tracker.current == 4 * size(*weights) + steps
        optimizer.zero_grad()
        assert tracker.current == 3 * size(*weights) + steps


def test_a_peak_says_what_it_was_made_of() -> None:
    with StorageTracker() as tracker:
        kept = torch.empty(10)
        tracker.label([kept, None], WEIGHTS)
        passing = torch.empty(100)
        del passing
        later = torch.empty(20)
    assert tracker.peak == 110 * FLOAT
    assert tracker.at_peak[WEIGHTS] == kept.numel() * FLOAT
    assert tracker.at_peak[TEMPORARIES] == 100 * FLOAT
    assert tracker.current == (10 + later.numel()) * FLOAT
