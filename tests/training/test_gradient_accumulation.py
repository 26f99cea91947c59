import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from robust_train.compat import TorchDispatchMode
from robust_train.model.errors import UserError
from robust_train.step.batcher import MicroBatcher
from robust_train.step.splitting import share_of
from robust_train.step.update import update
from robust_train.vision.images import BatchPlan
from robust_train.vision.models import SmallCnn
from robust_train.vision.step import CosineSchedule, Precision, loss_of, make_optimizer

CPU = torch.device("cpu")


def small_model():
    torch.manual_seed(0)
    model = SmallCnn(channels=1, image_size=8, num_classes=3, width=8, dropout=0.0)
    return model.double().train()


def batch_of(samples):
    generator = torch.Generator().manual_seed(samples)
    images = torch.randn(samples, 1, 8, 8, generator=generator, dtype=torch.float64)
    return images, torch.randint(3, (samples,), generator=generator)


def scaled_precision(scale):
    precision = Precision(CPU, mixed=False)
    precision.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    return precision


def step_with(precision, max_grad_norm, loss_factor=1):
    model = small_model().float()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    images, labels = batch_of(4)

    def count_of(data):
        """Count the whole batch as 2, and each of its parts as ``loss_factor``."""
        return 2 if len(data[0]) == 4 else loss_factor

    MicroBatcher(2).backward(
        lambda part: loss_of(model, part, device=CPU, precision=precision),
        (images.float(), labels * 0),
        model,
        count=count_of,
        backward=lambda loss: precision.scaler.scale(loss).backward(),
    )
    done = update(optimizer, None, precision.scaler, max_grad_norm)
    assert all(p.grad is None for p in model.parameters())
    assert done.is_bad is None or not done.is_bad
    return done.moved, model


def moved(model):
    both = zip(model.parameters(), small_model().float().parameters(), strict=True)
    return float(torch.stack([((new - old).detach() ** 2).sum() for new, old in both]).sum().sqrt())


@pytest.mark.parametrize("max_grad_norm", [0.0, 0.5])
def test_overflowing_gradients_are_skipped_and_lower_the_scale(max_grad_norm):
    precision = scaled_precision(2.0**127)
    # so large a loss makes gradients that float32 cannot hold when scaled
    is_step, model = step_with(precision, max_grad_norm, loss_factor=8)
    assert not is_step
    assert moved(model) == 0
    assert precision.scaler.get_scale() < 2.0**127


def test_clipping_sees_unscaled_gradients():
    """Zero does not clip."""
    is_step, clipped = step_with(scaled_precision(1024.0), 0.05)
    _, scaled = step_with(scaled_precision(1024.0), 0)
    _, plain = step_with(Precision(CPU, mixed=False), 0)
    assert is_step
    assert moved(clipped) == pytest.approx(0.05, rel=1e-3)
    assert moved(scaled) == pytest.approx(moved(plain), rel=1e-4)
    assert moved(plain) > 0.05


@pytest.mark.parametrize("is_scaled", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"nesterov": True}, {"dampening": 0.3, "weight_decay": 0.1}]
)
def test_a_skipped_first_update_leaves_no_momentum(options, is_scaled):
    """A fused SGD's momentum of such an update would be uninitialised memory, here NaN."""
    ends = []
    torch.use_deterministic_algorithms(True)
    try:
        for fused in (False, True):
            weight = torch.nn.Parameter(torch.ones(5))
            optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9, fused=fused, **options)
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0) if is_scaled else None
            for gradient in (float("nan"), 1.0, float("nan"), 2.0):
                weight.grad = torch.full_like(weight, gradient)
                if scaler is not None:
                    scaler.scale(torch.zeros(()))
                update(optimizer, torch.tensor(gradient), scaler)
            ends.append([weight.detach(), optimizer.state[weight]["momentum_buffer"]])
    finally:
        torch.use_deterministic_algorithms(False)
    torch.testing.assert_close(*ends)
    assert ends[0][0].isfinite().all()


class Wrapper:
    """Forwards what is read, as Fabric's and many people's own optimizers do."""

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)


@pytest.mark.parametrize("is_scaled", [False, True])
def test_a_wrapper_does_not_hide_a_skipped_update(is_scaled):
    weight = torch.nn.Parameter(torch.zeros(4))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0) if is_scaled else None
    if scaler is not None:
        scaler.scale(torch.zeros(()))
    weight.grad = torch.full_like(weight, float("nan"))
    wrapped = Wrapper(torch.optim.AdamW([weight], lr=0.1, fused=True))
    done = update(wrapped, torch.tensor(float("nan")), scaler)
    assert not done.moved
    assert done.is_bad
    assert torch.equal(weight, torch.zeros(4))


class Kernels(TorchDispatchMode):
    """Collects the names of what torch runs."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_gradients_that_are_not_clipped_are_not_multiplied():
    weight = torch.nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([weight], lr=0.1, fused=True)
    weight.grad = torch.ones(4)
    with Kernels() as kernels:
        update(optimizer, torch.tensor(1.0))
    assert any("norm" in name for name in kernels.names)
    assert not [name for name in kernels.names if "foreach_mul" in name]
    assert not [name for name in kernels.names if "scalar" in name], "nothing waits"


def test_optimizers_that_compute_the_loss_are_refused():
    """The refusal comes before anything changes."""
    weight = torch.nn.Parameter(torch.ones(1))
    weight.grad = torch.full((1,), 9.0)
    with pytest.raises(UserError, match=r"call optimizer.step\(closure\)"):
        update(torch.optim.LBFGS([weight]), None, None, 1.0)
    assert weight.grad == 9


@given(
    samples=st.integers(1, 200),
    size=st.integers(1, 17),
    accumulation=st.integers(1, 5),
    ranks=st.integers(1, 5),
    epoch=st.integers(0, 3),
    data=st.data(),
)
def test_an_epoch_visits_each_sample_once(samples, size, accumulation, ranks, epoch, data):
    """In steps of the effective batch of all ranks."""
    effective = size * accumulation * ranks
    alone = BatchPlan(samples, effective, effective, 7)
    plans = [BatchPlan(samples, effective, size, 7, ranks, rank) for rank in range(ranks)]
    done, *rest = [list(plan.steps(epoch)) for plan in plans]
    steps = list(zip(done, *rest, strict=True))
    assert len(steps) == plans[0].steps_left(0)
    whole = [[i for share in step for chunk in share for i in chunk] for step in steps]
    assert sorted(i for step in whole for i in step) == list(range(samples))
    assert whole == [list(step[0]) for step in alone.steps(epoch)]
    starts = range(0, samples, effective)
    assert [len(step) for step in whole] == [plans[0].samples_in_step(start) for start in starts]
    assert all(len(step) == effective for step in whole[:-1])
    assert all(len(chunk) <= size for step in steps for share in step for chunk in share)
    from_now_on = data.draw(st.integers(0, len(steps) - 1))
    assert list(plans[0].steps(epoch, from_now_on * effective)) == done[from_now_on:]
    lengths = [len(share_of(range(samples), rank, ranks)) for rank in range(ranks)]
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths, reverse=True)


def test_the_order_depends_on_epoch_and_seed():
    orders = {tuple(BatchPlan(30, 4, 4, seed).order(epoch)) for seed in (1, 2) for epoch in (0, 1)}
    assert len(orders) == 4


def test_only_trained_weights_decay():
    """Biases and norms do not, and frozen parameters are left out."""
    model = small_model()
    model.head.weight.requires_grad_(False)
    optimizer = make_optimizer(model.parameters(), lr=0.1, weight_decay=0.3)
    held = {id(p): g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    assert id(model.head.weight) not in held
    assert held[id(model.head.bias)] == 0.0
    assert all(
        held[id(p)] == (0.3 if p.ndim >= 2 else 0.0) for p in model.parameters() if p.requires_grad
    )


def test_the_learning_rate_peaks_and_falls_to_zero():
    schedule = CosineSchedule(peak=2.0, total_samples=1000, warmup_fraction=0.1)
    rates = [schedule.rate(seen, 10) for seen in range(0, 1000, 10)]
    assert rates[0] == pytest.approx(0.2)
    assert max(rates) == pytest.approx(2.0)
    assert rates.index(max(rates)) in (9, 10)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] < 0.01
    assert schedule.rate(1000, 10) == pytest.approx(0)
    assert CosineSchedule(2.0, 1000, 0.0).rate(0, 10) == pytest.approx(2.0), "without a warm-up"
