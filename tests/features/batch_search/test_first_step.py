"""``training.batch_size=auto`` inside an attempt: what is found, and that nothing else changes."""

import random

import pytest
import torch
from torch import nn

from networks import Noisy
from robust_train.attempt.run import live_of
from robust_train.config.schema import RobustConfig
from robust_train.config.training_plans import MicroBatchPlan
from robust_train.features.batch_search.attempt import BatchSearch
from robust_train.features.batch_search.model import SearchPlan
from robust_train.features.batch_search.record import SearchKnob
from robust_train.model.spec import AttemptSpec
from watched_run import WatchedRun


def three_steps(run):
    """Weights, buffers, optimizer state and the next draws after three steps of a user's loop."""
    torch.manual_seed(1)
    random.seed(1)
    model, lengths = Noisy(), []
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
    for tensor, other in zip(actual, expected, strict=True):
        assert torch.equal(tensor, other)


def searching(folder, batch_size, min_batch_size=1):
    """A run that has to find its size, of this one at most."""
    run = WatchedRun(folder)
    live = live_of(run)
    live.parts.split_by(MicroBatchPlan(batch_size=batch_size, min_batch_size=min_batch_size))
    live.spec = AttemptSpec((), batch_size, 1).having(SearchKnob(True))
    BatchSearch(live, RobustConfig(min_batch_size=min_batch_size)).begin()
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
    search, *changes = (e for e in run.events if e["event"] != "memory")
    assert (search["event"], search["batch_size"]) == ("batch_size_found", None)
    assert changes[-1]["event"] == "micro_batch_exhausted"
    assert changes[-1]["tried"] == [16, 8, 4]
    assert model.weight.grad is None


@pytest.mark.parametrize(
    ("effective", "least", "divisors"),
    [
        (64, 4, (4, 8, 16, 32, 64)),
        (96, 8, (8, 12, 16, 24, 32, 48, 96)),
        (61, 4, (61,)),
        (2, 4, (2,)),
    ],
)
def test_a_search_tries_divisors_within_the_batch(effective, least, divisors):
    for samples in (3, 50, 200):
        within = tuple(size for size in divisors if size <= samples)
        assert SearchPlan(effective, least).sizes(samples) == within
