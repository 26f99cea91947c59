"""A split is checked before it is made: the loss of a part against the losses of its pieces."""

import copy
import logging
import random
import warnings
from collections import Counter, deque
from dataclasses import replace

import numpy
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from robust_train import AttemptsExhaustedError, check_split, launch
from robust_train.compat import version_of
from robust_train.model.errors import UserError
from robust_train.step.batcher import MicroBatcher
from robust_train.step.split_check import Kept, SplitCheck
from robust_train.step.split_losses import (
    Losses,
    describe_losses,
    differ_beyond_noise,
    mean_of_ranks,
)
from robust_train.step.split_watch import SplitWatch, kind_of_step
from robust_train.step.splitting import Parts

numbers = st.floats(-1e6, 1e6)
shares = st.floats(0.01, 0.99)


# --- the figures ---


@given(numbers, numbers, shares)
def test_a_weighted_mean_agrees_only_with_itself(first, second, share):
    """One more part does not agree."""
    weights = (share, 1 - share)
    whole = share * first + (1 - share) * second
    losses = Losses(whole, (first, second), weights)
    assert losses.agree
    more = losses.whole + 1e-3 * max(abs(first), abs(second), 1.0)
    assert not replace(losses, whole=more).agree


@given(numbers, shares, st.sampled_from([1e-9, 1e-3, 1e3, 1e9]))
def test_how_large_a_loss_is_does_not_matter(loss, share, scale):
    assume(abs(loss) > 1e-3)
    halves = (loss, 1.01 * loss)
    plain = Losses(loss, halves, (share, 1 - share))
    scaled = Losses(scale * loss, tuple(scale * half for half in halves), plain.weights)
    assume((1 - share) > 0.1)
    assert not plain.agree
    assert not scaled.agree


def test_a_difference_of_large_terms_has_their_rounding():
    losses = Losses(1e-5, (3e-5, -2e-5), (0.5, 0.5))
    assert not losses.agree
    assert replace(losses, largest_term=100.0).agree


def test_a_half_without_weight_may_have_any_loss():
    assert Losses(2.0, (2.0, float("nan")), (1.0, 0.0)).agree
    assert not Losses(2.0, (2.0, float("nan")), (0.5, 0.5)).agree


def test_a_rank_without_items_does_not_count():
    assert mean_of_ranks([2.0, 5.0], [1.0, 3.0]) == 4.25
    assert mean_of_ranks([2.0, float("nan")], [3.0, 0.0]) == 2.0


@given(st.integers(0, 2**32 - 1), st.floats(0.01, 10.0))
def test_noise_neither_is_nor_hides_a_difference(seed, size):
    draw = random.Random(seed)

    def draws(shift):
        return [
            Losses(draw.gauss(shift, size), (0.0, 0.0), (0.5, 0.5), rounding=0.0) for _ in range(16)
        ]

    assert differ_beyond_noise(draws(10 * size))


def test_noise_alone_is_rarely_taken_for_a_difference():
    draw = random.Random(0)
    alarms = [
        differ_beyond_noise([Losses(draw.gauss(0, 1), (0.0, 0.0), (0.5, 0.5)) for _ in range(16)])
        for _ in range(500)
    ]
    assert sum(alarms) <= 2


def test_the_sentence_has_the_figures_to_compare():
    losses = Losses(1.93, (1.0, 1.42), (0.5, 0.5))
    assert describe_losses(losses, 8) == (
        "a part of 8 has loss 1.93, its halves 1 and 1.42, which make 1.21"
    )
    uneven = Losses(1.93, (1.0, 1.0), (0.25, 0.75))
    assert describe_losses(uneven, 8, 2) == (
        "a part of 8 has loss 1.93, its first 2 and its other 6 samples 1 and 1 "
        "with weights 0.25 and 0.75, which make 1"
    )


# --- losses ---

CLASS_WEIGHTS = torch.tensor([0.1, 1.0, 5.0, 2.0])


class Model(nn.Module):
    """A small network, with the layer that a case is about."""

    def __init__(self, layer=None):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, 16), nn.ReLU(), layer or nn.Identity(), nn.Linear(16, 4)
        )

    def forward(self, x):
        return self.layers(x)


def cross_entropy(logits, y):
    return functional.cross_entropy(logits, y)


def info_nce(logits, y):
    vectors = functional.normalize(logits, dim=1)
    similarity = vectors @ vectors.flip(1).T / 0.1
    return functional.cross_entropy(similarity, torch.arange(len(y)))


def batch_hard_triplets(logits, y):
    distances = torch.cdist(logits, logits)
    is_same = y[:, None] == y
    furthest = (distances * is_same).amax(1)
    nearest = (distances + 1e3 * is_same).amin(1).clamp(max=10)
    return torch.relu(furthest - nearest + 1).mean()


def dice(logits, y):
    truth = functional.one_hot(y, 4)
    predicted = logits.softmax(1)
    return 1 - (2 * (predicted * truth).sum() + 1) / ((predicted**2).sum() + truth.sum() + 1)


def focal(logits, y):
    loss = functional.cross_entropy(logits, y, reduction="none")
    return ((1 - torch.exp(-loss)) ** 2 * loss).mean()


def class_weights(logits, y):
    return functional.cross_entropy(logits, y, CLASS_WEIGHTS)


def ignoring(logits, y):
    return functional.cross_entropy(logits, y.masked_fill(y == 0, -100))


def summed(logits, y):
    return functional.cross_entropy(logits, y, reduction="sum")


def root_mean_square(logits, y):
    return functional.mse_loss(logits, functional.one_hot(y, 4).float()).sqrt()


def barlow_twins(logits, y):
    normal = (logits - logits.mean(0)) / (logits.std(0, unbiased=False) + 1e-3)
    correlation = normal[:, :2].T @ normal[:, 2:] / len(y)
    return (correlation - torch.eye(2)).square().sum()


def balance_of_experts(logits, y):
    shares = logits.softmax(1).mean(0)
    return functional.cross_entropy(logits, y) + (shares * shares).sum()


def hardest(logits, y):
    return functional.cross_entropy(logits, y, reduction="none").max()


def critic(logits, y):
    """A Wasserstein distance, a small difference of large means."""
    return (logits[:, 0] + 100).mean() - (logits[:, 1] + 100).mean()


def sampling(logits, y):
    noisy = logits + torch.randn_like(logits)
    return functional.cross_entropy(noisy, y)


def dropping_always(logits, y):
    return info_nce(functional.dropout(logits, 0.1), y)


def in_a_shape_of_its_own(logits, y):
    return functional.cross_entropy(logits.view(16, 4), y)


def is_labelled(batch):
    return (batch[1] != 0).sum()


def weights_of(batch):
    return CLASS_WEIGHTS[batch[1]].sum()


def samples_but_wrong(batch):
    return len(batch[1]) + 3.0


CASES = [
    # the loss, what is known of it, a layer, count=
    (cross_entropy, Kept.YES, None, None),
    (cross_entropy, Kept.YES, nn.Dropout(0.5), None),
    (cross_entropy, Kept.YES, nn.BatchNorm1d(16), None),
    (cross_entropy, Kept.YES, nn.BatchNorm1d(16, track_running_stats=False), None),
    (cross_entropy, Kept.NO, None, samples_but_wrong),
    (focal, Kept.YES, None, None),
    (critic, Kept.YES, None, None),
    (sampling, Kept.YES, None, None),
    (sampling, Kept.YES, nn.Dropout(0.5), None),
    (ignoring, Kept.NO, None, None),
    (ignoring, Kept.YES, None, is_labelled),
    (class_weights, Kept.NO, None, None),
    (class_weights, Kept.YES, None, weights_of),
    (summed, Kept.NO, None, None),
    (summed, Kept.YES, None, lambda batch: 1),
    (info_nce, Kept.NO, None, None),
    (info_nce, Kept.NO, nn.BatchNorm1d(16), None),
    (dropping_always, Kept.NO, None, None),
    (batch_hard_triplets, Kept.NO, None, None),
    (dice, Kept.NO, None, None),
    (root_mean_square, Kept.NO, None, None),
    (barlow_twins, Kept.NO, None, None),
    (balance_of_experts, Kept.NO, nn.Dropout(0.5), None),
    (hardest, Kept.NO, None, None),
    (in_a_shape_of_its_own, Kept.CANNOT, None, None),
]


def data(samples=16):
    generator = torch.Generator().manual_seed(3)
    y = torch.tensor([0, 1, 2, 3, 1, 0, 3, 3, 2, 1, 1, 0, 0, 2, 3, 2]).repeat(4)
    return torch.randn(samples, 6, generator=generator), y[:samples]


def case_of(loss, layer=None):
    torch.manual_seed(0)
    model = Model(copy.deepcopy(layer))

    def loss_of(batch):
        x, y = batch
        return loss(model(x), y)

    return loss_of, model


@pytest.mark.parametrize(("loss", "kept", "layer", "count"), CASES)
def test_what_splitting_keeps_is_seen(loss, kept, layer, count):
    loss_of, model = case_of(loss, layer)
    check = check_split(loss_of, data(), model, count=count)
    assert check.kept is kept, check.message


def test_equal_label_counts_do_not_hide_means():
    """A mean over labels is found although both halves have equally many."""
    loss_of, model = case_of(ignoring)
    x, _ = data(8)
    y = torch.tensor([0, 2, 1, 1, 3, 2, 0, 1])
    check = check_split(loss_of, (x, y), model, size=8)
    assert check.kept is Kept.NO
    assert "its first 2 and its other 6 samples" in check.message


def test_equal_samples_do_not_hide_means():
    """A mean over labels is found although two samples are alike."""

    def mean_over_labels(logits, y):
        if len(y) > 2:
            out_of_memory()
        is_labelled = y > 0
        return logits[is_labelled].sum() / is_labelled.sum()

    loss_of, model = case_of(mean_over_labels)
    x, _ = data(6)
    check = check_split(loss_of, (x, torch.tensor([1, 1, 1, 0, 1, 1])), model)
    assert check.kept is Kept.NO
    assert check.samples == 2


@pytest.mark.parametrize("scale", [1e-9, 1e6])
def test_scaled_losses_are_told_apart(scale):
    for loss, kept in ((cross_entropy, Kept.YES), (info_nce, Kept.NO)):
        loss_of, model = case_of(lambda logits, y, of=loss: scale * of(logits, y))
        assert check_split(loss_of, data(), model).kept is kept


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_number_formats_are_no_difference(dtype):
    for loss, kept in ((cross_entropy, Kept.YES), (info_nce, Kept.NO)):
        torch.manual_seed(0)
        model = Model().to(dtype)
        x, y = data()
        check = check_split(
            lambda batch, of=loss, model=model: of(model(batch[0]), batch[1]),
            (x.to(dtype), y),
            model,
        )
        assert check.kept is kept, check.message


def test_a_gradient_penalty_is_computed_with_gradients():
    torch.manual_seed(0)
    model = Model()

    def loss_of(x):
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return (slope.norm(dim=1) - 1).square().mean()

    assert check_split(loss_of, data()[0], model).is_kept


def test_time_as_first_dimension_is_noticed():
    """``split`` helps."""
    torch.manual_seed(0)
    model = nn.LSTM(6, 4)

    def loss_of(batch):
        return (model(batch[0])[0] - batch[1]).square().mean()

    batch = (torch.randn(8, 6, 6), torch.randn(8, 6, 4))
    assert check_split(loss_of, batch, model).kept is Kept.NO
    check = check_split(
        loss_of,
        batch,
        model,
        split=lambda batch, start, stop: tuple(tensor[:, start:stop] for tensor in batch),
        length=lambda batch: batch[0].shape[1],
    )
    assert check.is_kept


def test_a_loss_without_two_samples_proves_nothing():
    """It has no sample, or one."""
    loss_of, model = case_of(lambda logits, y: torch.relu(cross_entropy(logits, y) - 100))
    assert check_split(loss_of, data(), model).kept is Kept.UNKNOWN
    loss_of, model = case_of(cross_entropy)
    assert check_split(loss_of, data(1), model).kept is Kept.UNKNOWN
    with pytest.raises(ValueError, match="size=1: must be 2 or more"):
        check_split(loss_of, data(), model, size=1)


# --- what it leaves behind ---


class Meter:
    """Averages as users write them."""

    def __init__(self):
        self.total, self.values = 0.0, []

    def update(self, value):
        self.total += value
        self.values.append(value)


class Watched(Model):
    def __init__(self):
        super().__init__(nn.BatchNorm1d(16))
        self.layers.append(nn.Dropout(0.5))
        self.calls, self.hidden = 0, None
        self.register_buffer("seen", torch.zeros(()))

    def train(self, mode=True):
        raise AssertionError("a user's own train() may do more than set flags")

    def forward(self, x):
        self.calls += 1
        self.seen += len(x)
        self.hidden = super().forward(x)
        return self.hidden


def test_a_check_leaves_nothing_behind():
    torch.manual_seed(0)
    model, teacher = Watched(), Model()  # the teacher is not frozen
    calls, losses, names, meter = 0, deque(maxlen=3), Counter(a=2), Meter()
    center, bank = torch.zeros(4), torch.zeros(64, 4)
    generator = numpy.random.default_rng(0)
    held = next(model.parameters())
    held.grad = torch.ones_like(held)
    hook_calls = Meter()
    model.register_forward_hook(lambda *_: None)

    def loss_of(batch):
        nonlocal calls, center
        calls += 1
        x, y = batch
        with torch.no_grad():
            for mine, theirs in zip(teacher.parameters(), model.parameters(), strict=False):
                if mine.shape == theirs.shape:
                    mine.lerp_(theirs, 0.5)
            target = teacher(x) - center
        random.random(), generator.random(), torch.rand(1), numpy.random.rand()
        logits = model(x)
        center = 0.9 * center + 0.1 * target.mean(0)
        bank[calls : calls + len(x)] = target
        loss = functional.mse_loss(logits, target) + cross_entropy(logits, y)
        losses.append(float(loss))
        names["a"] += 1
        meter.update(float(loss))
        hook_calls.update(1.0)
        warnings.warn("each pass warns", stacklevel=1)
        return loss

    def state():
        generators = (random.getstate(), generator.bit_generator.state, torch.get_rng_state())
        tensors = [*model.state_dict().values(), *teacher.state_dict().values(), held.grad]
        flags = [module.training for module in model.modules()]
        plain = (calls, list(losses), dict(names), vars(meter), model.calls, model.hidden)
        others = (numpy.random.get_state()[1].tolist(), warnings.filters, center, bank)
        return repr((generators, [tensor.tolist() for tensor in tensors], flags, plain, others))

    before, center_before = state(), center
    versions = [version_of(parameter) for parameter in model.parameters()]
    check_split(loss_of, data(), model)
    assert state() == before
    assert center is center_before
    assert [version_of(parameter) for parameter in model.parameters()] == versions


def test_a_moving_average_in_the_function_is_seen():
    torch.manual_seed(0)
    model, teacher = Model(), Model()

    def loss_of(x):
        with torch.no_grad():
            for mine, theirs in zip(teacher.parameters(), model.parameters(), strict=True):
                mine.lerp_(theirs, 0.5)
        return functional.mse_loss(model(x), teacher(x).detach())

    assert check_split(loss_of, data()[0], model).kept is Kept.NO


# --- in a step ---


def out_of_memory():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


class Limited(Model):
    """Runs out of memory above ``most`` samples in training, where gradients are needed."""

    def __init__(self, most, layer, sizes):
        torch.manual_seed(0)
        super().__init__(layer)
        self.most = most
        # A list of the module's own would be put back where a step starts over.
        self.note = sizes.append

    def forward(self, x):
        if torch.is_grad_enabled():
            self.note(len(x))
            if len(x) > self.most:
                out_of_memory()
        return super().forward(x)


def limited(loss, most, layer=None, sizes=None):
    model = Limited(most, layer, [] if sizes is None else sizes)

    def loss_of(batch):
        return loss(model(batch[0]), batch[1])

    return loss_of, model


def warned(caplog):
    texts = [record.getMessage() for record in caplog.records]
    return [text for text in texts if "splitting changes this loss" in text]


def test_a_split_that_changes_losses_warns_once(caplog):
    batcher = MicroBatcher()
    loss_of, model = limited(info_nce, 8)
    for _ in range(3):
        batcher.backward(loss_of, data(), model)
    assert len(warned(caplog)) == 1
    assert "step 1: splitting changes this loss: a part of 8 has loss" in warned(caplog)[0]


def test_another_structure_or_function_is_checked_again(caplog):
    batcher = MicroBatcher(8)
    loss_of, model = limited(info_nce, 8)
    x, y = data()
    batcher.backward(loss_of, (x, y), model)
    batcher.backward(lambda batch: dice(model(batch[0]), batch[1]), (x, y), model)
    batcher.backward(loss_of, [x, y], model)
    assert len(warned(caplog)) == 3


def test_a_loss_that_is_kept_says_nothing(caplog):
    loss_of, model = limited(cross_entropy, 8)
    MicroBatcher().backward(loss_of, data(), model)
    MicroBatcher(4).backward(loss_of, data(), model)
    assert warned(caplog) == []


@pytest.mark.parametrize("size", [None, 8])
def test_exact_splits_no_loss_that_it_changes(size):
    loss_of, model = limited(info_nce, 8)
    with pytest.raises(UserError, match=r"run\.backward: splitting changes this loss: .* count=…"):
        MicroBatcher(size, exact=True).backward(loss_of, data(), model)
    assert all(parameter.grad is None for parameter in model.parameters())
    loss_of, model = limited(cross_entropy, 8)
    MicroBatcher(size, exact=True).backward(loss_of, data(), model)


def test_a_parts_error_does_not_hide_the_shortage():
    loss_of, model = limited(in_a_shape_of_its_own, 8)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        MicroBatcher().backward(loss_of, data(), model)
    note = " ".join(getattr(raised.value, "__notes__", ["this step cannot be split: RuntimeError"]))
    assert "this step cannot be split: RuntimeError" in note


def test_five_samples_become_two_and_three():
    """Four of them fit."""
    sizes = []
    loss_of, model = limited(cross_entropy, 4, sizes=sizes)
    MicroBatcher().backward(loss_of, data(5), model)
    assert sizes == [5, 2, 3]


def test_no_lone_sample_where_batch_norm_trains():
    sizes = []
    loss_of, model = limited(cross_entropy, 1, nn.BatchNorm1d(16), sizes)
    with pytest.raises(torch.OutOfMemoryError):
        MicroBatcher().backward(loss_of, data(5), model)
    assert 1 not in sizes


def test_steps_differ_by_structure_and_code_alone():
    def loss_of(batch): ...

    def kind(batch, function=loss_of):
        return kind_of_step(Parts.of(batch, None, None), function)

    x, y = data()
    assert kind((x, y)) == kind((x[:8], y[:8]))
    assert kind((x, y)) != kind({"x": x, "y": y})
    assert kind((x, y)) != kind((x.double(), y))
    assert kind((x, y)) != kind((x, y), lambda batch: None)


def test_nothing_to_see_is_looked_at_again(caplog):
    watch = SplitWatch()
    nothing = SplitCheck(Kept.UNKNOWN, "its part has no loss", 4)
    with caplog.at_level(logging.WARNING):
        assert watch.accept("kind", nothing, 1, ran_out=True)
    assert not watch.knows("kind")
    assert caplog.records == []


# --- in a job ---


@pytest.fixture
def job(tmp_path):
    """Launch a job with a contrastive loss, of whose 16 samples 8 fit; return its summary."""

    def train(cfg, run):
        loss_of, model = limited(info_nce, 8)
        run.started(0)
        loss = run.backward(loss_of, data(), model)
        run.progress(1)
        return float(loss)

    def start(preserves):
        keys = {
            "isolation": "none",
            "training": {"batch_size": 16, "num_workers": 0},
            "preserve_effective_batch_size": preserves,
        }
        return launch(train, keys, run_dir=tmp_path)

    return start


def test_a_job_splits_losses_in_its_last_attempt(job, caplog):
    summary = job("auto")
    assert [attempt.action for attempt in summary.attempts] == ["split_loss", "none"]
    assert len(warned(caplog)) >= 1


def test_preserving_the_batch_means_giving_up(job):
    """The message has the figures."""
    with pytest.raises(
        AttemptsExhaustedError, match=r"splitting changes this loss: a part of 8 has"
    ):
        job(True)


def test_not_preserving_the_batch_means_splitting_immediately(job, caplog):
    assert len(job(False).attempts) == 1
    assert len(warned(caplog)) == 1
