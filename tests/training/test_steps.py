"""An optimizer step that continues when memory runs out in the middle of it."""

import contextlib
import functools
import gc
import operator
import random
import threading
import weakref

import numpy
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from noted import Noted
from robust_train.attempt.run import live_of
from robust_train.config.training_plans import MicroBatchPlan
from robust_train.memory.tensors import live_tensors
from robust_train.model.errors import UserError
from robust_train.step.batcher import MicroBatcher
from robust_train.step.rng import GeneratorStates
from watched_run import WatchedRun


def out_of_memory():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


class OutOfMemoryInBackward(torch.autograd.Function):
    """The identity, whose gradient needs more memory than there is."""

    @staticmethod
    def forward(ctx, x, fails):
        ctx.fails = fails
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.fails:
            out_of_memory()
        return gradient, None


class Network(nn.Module):
    """Runs out of memory above ``most`` samples: in its forward pass, in its backward pass, where
    the last layer has its gradient already, or when it is computed again in that."""

    def __init__(self, most=10**9, where="forward", *, dropout=0.0, norm=False):
        super().__init__()
        torch.manual_seed(0)
        self.most, self.where = most, where
        self.first = nn.Linear(6, 16)
        self.norm = nn.BatchNorm1d(16) if norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.last = nn.Linear(16, 3)
        self.sizes = Noted()

    def forward(self, x):
        self.sizes.append(len(x))
        fails = len(x) > self.most
        hidden = self.dropout(torch.relu(self.norm(self.first(x))))
        is_again = self.where == "again" and len(self.sizes) % 2 == 0
        if fails and (self.where == "forward" or is_again):
            out_of_memory()
        hidden = OutOfMemoryInBackward.apply(hidden, fails and self.where == "backward")
        return self.last(hidden)


class Checkpointed(Network):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


def data(samples=12, dtype=torch.float32):
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(samples, 6, generator=generator).to(dtype)
    return x, torch.randint(3, (samples,), generator=generator)


def loss_with(model):
    def loss_of(batch):
        x, y = batch
        return cross_entropy(model(x), y)

    return loss_of


def step(batcher, model, batch=None, **options):
    return batcher.backward(loss_with(model), data() if batch is None else batch, model, **options)


def gradients(model):
    return [p.grad.clone() for p in model.parameters()]


def assert_same(ours, expected, **tolerance):
    for tensor, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(tensor, other, **tolerance)


def unlimited(batch=None, **options):
    model = Network()
    step(MicroBatcher(), model, batch, **options)
    return model


def scaled(loss):
    torch.amp.GradScaler("cpu", init_scale=4.0).scale(loss).backward()


@pytest.mark.proves("functions (`run.backward`)", "one GPU", "in the step")
@pytest.mark.parametrize(
    ("kind", "most", "where", "names_model", "backward"),
    [
        (Network, 11, "forward", True, None),
        (Network, 1, "forward", False, None),
        (Network, 1, "backward", True, None),
        (Network, 11, "backward", False, None),
        (Network, 4, "backward", True, scaled),
        (Checkpointed, 4, "forward", True, None),
        (Checkpointed, 4, "again", True, None),
    ],
)
def test_running_out_leaves_the_whole_batchs_gradient(kind, most, where, names_model, backward):
    model, batcher = kind(most, where), MicroBatcher()
    named = model if names_model else None
    loss = batcher.backward(loss_with(model), data(), named, backward=backward)
    whole = unlimited(backward=backward)
    assert_same(gradients(model), gradients(whole))
    torch.testing.assert_close(loss, cross_entropy(whole(data()[0]), data()[1]).detach())
    assert not loss.requires_grad
    assert batcher.size < 12


def test_a_fitting_size_is_kept_and_recorded(tmp_path):
    """The record has the reason for the change."""
    run = WatchedRun(tmp_path)
    live_of(run).parts.split_by(MicroBatchPlan(batch_size=12, min_batch_size=2))
    run.started(30)
    run.progress(39)
    model = Network(most=6)
    for _ in range(2):
        run.backward(loss_with(model), data(), model)
    # The split is checked once, by a part, its halves, and a quarter and the rest.
    assert model.sizes == [12, 6, 3, 3, 1, 5, 6, 6, 6, 6]
    (event,) = run.of("micro_batch_changed")
    assert (event["step"], event["before"], event["after"]) == (40, 12, 6)
    assert (event["kind"], event["requested_bytes"]) == ("device_oom", 2 * 2**30)
    assert "out of memory" in event["reason"]
    assert live_of(run).parts.last_micro_batch == event["last_micro_batch"] == 6


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_means_over_tokens_are_weighted_by_tokens(reduction):
    """A sum is not weighted."""
    x = torch.randn(6, 4, 6)
    y = torch.randint(3, (6, 4))
    y[0, 1:], y[1], y[5, :3] = -100, -100, -100

    def tokens(part):
        return (part["y"] != -100).sum() if reduction == "mean" else 1

    def loss_of(model, part):
        logits = model(part["x"].flatten(0, 1))
        return cross_entropy(logits, part["y"].flatten(), reduction=reduction)

    whole, model = Network(), Network()
    loss_of(whole, {"x": x, "y": y}).backward()
    # the part without any token has a loss that is no number
    loss = MicroBatcher(1).backward(
        lambda part: loss_of(model, part), {"x": x, "y": y}, model, count=tokens
    )
    assert_same(gradients(model), gradients(whole))
    assert torch.isfinite(loss)


def draws():
    return random.random(), float(numpy.random.rand()), float(torch.rand(()))


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_repeated_step_draws_the_same_numbers(where):
    def train(model, batcher):
        random.seed(1)
        numpy.random.seed(1)
        torch.manual_seed(1)

        def loss_of(batch):
            drawn = draws()
            return loss_with(model)(batch), drawn

        _, drawn = batcher.backward(loss_of, data(), model)
        return drawn, gradients(model), draws()

    split = train(Network(dropout=0.5), MicroBatcher(6))
    recovered = train(Network(6, where, dropout=0.5), MicroBatcher(12))
    assert split[0] == recovered[0]
    assert split[2] == recovered[2]
    assert_same(split[1], recovered[1], rtol=0, atol=0)


class Codebook(Network):
    """A buffer written through .data, which leaves no trace in its version, and a replaced one."""

    def __init__(self):
        super().__init__(norm=True)
        self.register_buffer("written", torch.zeros(3))
        self.register_buffer("replaced", torch.zeros(3))
        self.register_buffer("constant", torch.arange(3.0))

    def forward(self, x):
        self.written.data.add_(1)
        self.replaced = self.replaced + self.constant
        return super().forward(x)


@pytest.mark.parametrize(("where", "fails_in_step"), [("forward", 3), ("backward", 1)])
def test_buffers_count_each_sample_once(fails_in_step, where):
    """Batch statistics are among them."""

    def train(fails):
        model, batcher = Codebook(), MicroBatcher(12)
        model.where = where
        for number in (1, 2, 3):
            if number == fails_in_step:
                model.most, batcher = (6, batcher) if fails else (12, MicroBatcher(6))
            step(batcher, model)
        return model.buffers()

    assert_same(train(fails=True), train(fails=False), rtol=0, atol=0)


class Criterion(nn.Module):
    """Has a state that each pass changes, weights, and what only some modules have as buffers."""

    def __init__(self):
        super().__init__()
        self.weights = nn.Linear(3, 3)
        self.register_buffer("center", torch.zeros(3))
        self.register_buffer("graph", torch.eye(3).to_sparse())
        self.register_buffer("seen", torch.zeros(0))
        self.generator = torch.Generator().manual_seed(1)
        self.scripted = torch.jit.script(nn.BatchNorm1d(3))

    def forward(self, logits, y):
        self.center = self.center * 0.9 + logits.detach().mean(0)
        self.seen.resize_(len(self.seen) + 1).fill_(1)  # as an observer's
        noise = torch.rand(3, generator=self.generator)
        logits = self.scripted(logits @ self.graph) + noise - self.center
        return cross_entropy(self.weights(logits), y)


@pytest.mark.filterwarnings("ignore:.*jit.script")
@pytest.mark.parametrize("holder", ["the function", "its owner"])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_everything_the_function_uses_is_restored(holder, where):
    """To the start of the step, in addition to the named model."""

    def train(fails):
        torch.manual_seed(0)
        model, criterion = Network(where=where), Criterion()

        class Trainer:
            def loss_of(self, part):
                mine = self.loss if holder == "its owner" else inner
                return mine(model(part[0]), part[1])

        trainer, batcher = Trainer(), MicroBatcher(12)
        inner = trainer.loss = None
        if holder == "its owner":
            trainer.loss = criterion
        else:
            inner = criterion
        for number in (1, 2):
            if number == 2:
                model.most, batcher = (6, batcher) if fails else (12, MicroBatcher(6))
            batcher.backward(trainer.loss_of, data(), model)
        kept = [buffer for buffer in criterion.buffers() if not buffer.is_sparse]
        return [*gradients(model), *gradients(criterion), *kept]

    assert_same(train(fails=True), train(fails=False), rtol=0, atol=0)


def test_a_buffer_is_restored_in_its_present_format():
    """Its number format has changed."""
    model, batcher = Network(), MicroBatcher(12)
    model.register_buffer("scale", torch.ones(1))
    step(batcher, model)
    model.scale.data = torch.ones(1, dtype=torch.float64) / 3
    model.most = 6
    step(batcher, model)
    assert model.scale.item() == 1 / 3


class Quantized(Network):
    """Has a large buffer, as GPTQ's and AWQ's weights; ``writes`` changes it in a step."""

    def __init__(self):
        super().__init__()
        self.writes = False
        self.register_buffer("weights", torch.zeros(2**20))

    def forward(self, x):
        if self.writes:
            self.weights += 1
        return super().forward(x)


def test_large_unchanged_buffers_are_not_copied():
    model, batcher = Quantized(), MicroBatcher(12)
    alike = []
    for _ in range(2):
        step(batcher, model)
        alike.append(sum(tensor.shape == (2**20,) for tensor in live_tensors()))
    assert alike == [1, 1]
    # a step that begins to write to it cannot be repeated, so its error ends the attempt
    model.writes, model.most = True, 6
    with pytest.raises(torch.OutOfMemoryError):
        step(batcher, model)
    assert model.weights[0] == 1


def of_torch(generator):
    return float(torch.rand(1, generator=generator))


@pytest.mark.parametrize("step", ["backward", "forward"])
@pytest.mark.parametrize(
    ("where", "generator", "draw"),
    [
        ("a variable", torch.Generator(), of_torch),
        ("the model", torch.Generator(), of_torch),
        ("the function's owner", numpy.random.default_rng(), lambda generator: generator.random()),
        ("a variable", numpy.random.RandomState(), lambda generator: generator.rand()),
        ("the function's owner", random.Random(), lambda generator: generator.random()),
    ],
)
def test_a_users_generator_repeats_its_numbers(where, generator, draw, step):
    class Trainer:
        def loss_of(self, part):
            drawn.append(draw(mine or holder.generator))
            return loss_with(model)(part)

    model, trainer, drawn = Network(most=6), Trainer(), []
    mine = generator if where == "a variable" else None
    holder = model if where == "the model" else trainer
    if mine is None:
        holder.generator = generator
    getattr(MicroBatcher(), step)(trainer.loss_of, data(), model)
    assert len(drawn) == 3
    assert drawn[0] == drawn[1]


def test_statistics_of_a_validation_count_samples_once():
    """For example those of averaged weights, whose BatchNorm has seen no batch."""

    def collected(model, batcher):
        with torch.no_grad():
            batcher.forward(model, data()[0], model)
        return model.buffers()

    ours = collected(Network(most=6, norm=True), MicroBatcher())
    assert_same(ours, collected(Network(norm=True), MicroBatcher(6)), rtol=0, atol=0)


def test_layers_added_later_are_restored_as_well():
    """They are restored to the start of the step."""

    def train(fails):
        model, batcher = Network(), MicroBatcher(12)
        step(batcher, model)
        model.last = nn.Sequential(model.last, nn.Linear(3, 3), nn.BatchNorm1d(3))
        step(batcher, model)
        model.most, batcher = (6, batcher) if fails else (12, MicroBatcher(6))
        step(batcher, model)
        return [*gradients(model), *model.buffers()]

    torch.manual_seed(0)
    later = train(fails=True)
    torch.manual_seed(0)
    assert_same(later, train(fails=False), rtol=0, atol=0)


@pytest.mark.parametrize("step", ["backward", "forward"])
@pytest.mark.parametrize("what", ["the batch", "weights", "a copy of the weights", None])
def test_changes_in_place_are_warned_of(step, what, caplog):
    """One line warns of changes that are repeated."""
    model, teacher = Network(most=6), Network()

    @torch.no_grad()
    def change(batch):
        batch["x"] = batch["x"].mul_(2) if what == "the batch" else batch["x"] * 2
        if what == "weights":
            model.last.weight.mul_(0.9)
        elif what is not None and what != "the batch":
            teacher.last.weight.data = teacher.last.weight.data * 0.9

    def loss_of(batch):
        change(batch)
        return model(batch["x"]).mean()

    getattr(MicroBatcher(), step)(loss_of, {"x": data()[0]}, model)
    lines = [r.getMessage() for r in caplog.records if "in place" in r.getMessage()]
    is_known = what == "the batch" or (what is not None and step == "backward")
    said = "the batch" if what == "the batch" else "weights"
    assert len(lines) == is_known
    assert all(f"the function changes {said} in place, and does so again" in line for line in lines)


def test_weights_made_by_a_pass_count_as_unchanged(caplog):
    """The pass makes them before it runs out of memory."""
    model = nn.Sequential(nn.LazyLinear(6), Network(most=6))
    MicroBatcher().backward(loss_with(model), data(), model)
    assert "in place" not in caplog.text
    whole = nn.Sequential(nn.Linear(6, 6), Network())
    whole.load_state_dict(model.state_dict())
    MicroBatcher().backward(loss_with(whole), data(), whole)
    assert_same(gradients(model), gradients(whole))


def test_unchangeable_or_new_buffers_are_no_obstacle():
    """No step can change them, or the first one makes them."""
    model = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d())
    with torch.inference_mode():
        model.register_buffer("table", torch.ones(3))
    for _ in range(2):
        MicroBatcher(4).backward(lambda x: model(x).mean(), torch.randn(8, 6), model)
    assert model[1].num_batches_tracked == 4


def test_the_smallest_size_raises_and_leaves_nothing():
    """The step that failed has left no trace."""
    events = []
    model = Network(most=1, where="backward", norm=True)
    batcher = MicroBatcher(12, min_batch_size=4, on_event=events.append)
    buffers = [buffer.clone() for buffer in model.buffers()]
    state = torch.get_rng_state()
    with pytest.raises(torch.OutOfMemoryError) as caught:
        step(batcher, model)
    assert all(p.grad is None for p in model.parameters())
    assert_same(model.buffers(), buffers, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), state)
    assert (events[-1].name, events[-1].tried) == ("micro_batch_exhausted", (12, 6, 4))
    if hasattr(caught.value, "add_note"):
        assert "every micro-batch tried (12, 6, 4)" in caught.value.__notes__[0]


def test_a_requested_size_outlives_a_checkpoint():
    model, events = Network(), []
    batcher = MicroBatcher(12, on_event=events.append)
    assert batcher.shrink("wished") == (12, 6)
    again, other, whole = MicroBatcher(12), MicroBatcher(8), MicroBatcher()
    for restored in (again, other, whole):
        restored.restore(batcher.state())
    for _ in range(20):
        step(batcher, model)
        step(again, model)
    assert batcher.size == again.size == 6
    assert (other.size, whole.size) == (8, None), "somebody asked for another size since"
    assert [(e.before, e.after, e.reason) for e in events] == [(12, 6, "wished")]
    batcher = MicroBatcher(64)
    step(batcher, model, data(5))
    assert batcher.shrink("of what is really in use") == (5, 3)
    assert MicroBatcher().shrink("nothing was split yet") is None
    assert MicroBatcher(4, min_batch_size=4).shrink("as small as may be") is None


def test_validation_takes_each_sample_once():
    """It repeats only what failed."""
    model = Network(most=3)
    batcher = MicroBatcher(8)
    x = torch.arange(20.0).unsqueeze(1).expand(20, 6)
    ran, kept = [], []

    def forward(part):
        ran.append(len(part))
        # only what would be new memory may fail
        if len(ran) > 1:
            model(part)
        return part[:, 0].tolist()

    with torch.no_grad():
        for start in range(0, 20, 10):
            kept += batcher.forward(forward, x[start : start + 10])
    assert [value for part in kept for value in part] == list(range(20))
    assert ran[0] == 5, "the part that went through is not repeated"
    assert ran.count(5) == 2
    assert batcher.size == 8, "training needs memory of another kind"
    assert batcher.forward(len, torch.zeros(0, 2)) == []


def test_a_validation_loss_is_a_gradientless_mean():
    model, (x, y) = Network(most=5), data()
    with torch.no_grad():
        loss, kept = MicroBatcher(12).backward(
            lambda batch: (loss_with(model)(batch), batch[1]), (x, y), training=False
        )
    torch.testing.assert_close(loss, cross_entropy(Network()(x), y))
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.cat(kept), y)


@pytest.mark.parametrize("around", ["the loss", "the step"])
def test_autocast_may_surround_loss_or_step(around):
    def train(model, batcher):
        def loss_of(batch):
            x, y = batch
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = model(x)
            assert logits.dtype == torch.bfloat16
            return cross_entropy(logits.float(), y)

        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=around == "the step"):
            batcher.backward(loss_of, data(), model)
        return gradients(model)

    recovered = train(Network(6, "backward"), MicroBatcher(12))
    assert_same(recovered, train(Network(), MicroBatcher(6)), rtol=0, atol=0)


def slope_of(loss, weight, thread):
    """Return the derivative, made in this thread or, as a GPU's are, in another one."""
    slopes = []

    def work():
        slopes.extend(torch.autograd.grad(loss, weight, create_graph=True))

    if thread == "this":
        work()
    else:
        worker = threading.Thread(target=work)
        worker.start()
        worker.join()
    return slopes[0]


@pytest.mark.parametrize("thread", [None, "this", "another"])
@pytest.mark.parametrize("names_model", [False, True])
def test_a_failed_pass_is_freed_immediately(names_model, thread):
    """The garbage collector is off: the frames that held it are empty; nothing else holds it."""
    activations: list[weakref.ref[torch.Tensor]] = []
    alive: list[bool] = []

    class Watched(Network):
        def forward(self, x):
            alive.append(any(ref() is not None for ref in activations))
            inside = self.first(x)
            activations.append(weakref.ref(inside))
            # the product's gradient needs its factors, so the graph holds them
            return self.last(OutOfMemoryInBackward.apply(inside * inside, len(x) > self.most))

    model = Watched(most=3)

    def loss_of(batch):
        x, y = batch
        logits = model(x)
        view = {"logits": [logits.view(-1, 3)]}
        loss = cross_entropy(view["logits"][0], y)
        if thread is not None:
            loss = loss + slope_of(loss, model.last.weight, thread).square().sum()
        return loss

    gc.disable()
    try:
        MicroBatcher().backward(loss_of, data(), model if names_model else None)
    finally:
        gc.enable()
    assert alive[:3] == [False, False, False]


@pytest.mark.parametrize("error", [KeyboardInterrupt, KeyError])
def test_leaving_a_step_restores_its_earlier_gradients(error):
    model = Network()
    step(MicroBatcher(), model)
    before = gradients(model)

    def is_interrupted(batch):
        if not torch.equal(batch[0], data()[0][:3]):
            raise error
        return loss_with(model)(batch)

    with pytest.raises(error) as caught:
        MicroBatcher(3).backward(is_interrupted, data(), model)
    assert caught.traceback[-1].name == "is_interrupted"
    assert not getattr(caught.value, "__notes__", [])
    assert_same(gradients(model), before)


@pytest.mark.parametrize("most", [10**9, 4])
def test_zeroed_gradients_are_reused(most):
    """Zeros of ``zero_grad`` are added to without a second set."""
    model, wanted = Network(most, "backward"), unlimited()
    model.last.weight.grad = torch.zeros_like(model.last.weight)
    zeros, sets = model.last.weight.grad, []
    model.first.weight.register_hook(lambda _: sets.append(model.last.weight.grad is zeros))
    with pytest.raises(KeyError):
        MicroBatcher().backward(lambda batch: {}[0], data(), model)
    step(MicroBatcher(), model)
    assert set(sets) == {True}
    assert model.last.weight.grad is zeros
    assert_same(gradients(model), gradients(wanted))


@pytest.mark.parametrize("zeroes", [False, True])
def test_earlier_gradients_leave_the_gpu_before_splitting(monkeypatch, caplog, zeroes):
    """They stay the same tensors, whose memory is free for the time of a step."""

    def train():
        model, batcher, seen = Network(), MicroBatcher(), []
        held = []

        def loss_of(batch):
            seen.append(
                (len(batch[0]), sum(gradient.untyped_storage().nbytes() for gradient in held))
            )
            if seen[-1][1] and is_short:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return loss_with(model)(batch)

        for _ in range(3):
            if zeroes:
                model.zero_grad(set_to_none=False)
            batcher.backward(loss_of, data(), model)
            current = [parameter.grad for parameter in model.parameters()]
            assert not held or all(map(operator.is_, held, current))
            held = current
        return gradients(model), seen

    is_short = False
    wanted, _ = train()
    is_short = True
    # tensors on the host stand for those on a GPU
    monkeypatch.setattr("robust_train.step.gradients.is_on_gpu", lambda tensor: True)
    actual, seen = train()
    assert_same(actual, wanted, rtol=0, atol=0)
    assert [samples for samples, _ in seen] == [12] * 4
    assert [in_use > 0 for _, in_use in seen] == [False, True, False, False]
    assert caplog.text.count("batches go to the host") == 1


def test_nested_steps_recover_independently():
    outer, inner = Network(), Network(most=2)

    def loss_of(batch):
        step(MicroBatcher(), inner, batch)
        return loss_with(outer)(batch)

    MicroBatcher().backward(loss_of, data(), outer)
    assert outer.sizes == [12]
    for model in (outer, inner):
        assert_same(gradients(model), gradients(unlimited()))


def test_several_models_learn_in_one_step():
    def train(body):
        torch.manual_seed(1)
        head = nn.Linear(3, 3)
        models = (m for m in [body, head])
        MicroBatcher().backward(loss_with(lambda x: head(body(x))), data(), models)
        return [*gradients(body), *gradients(head)]

    assert_same(train(Network(most=5)), train(Network()))


def stepping_in_backward():
    network = Network()
    network.last.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    return step(MicroBatcher(4), network)


def returning(loss):
    return lambda: MicroBatcher().backward(lambda batch: loss, data(), Network())


@pytest.mark.parametrize(
    ("call", "kind", "said"),
    [
        (returning(None), TypeError, "mean loss of its part.*a NoneType"),
        (returning(3.5), TypeError, "mean loss of its part.*a float"),
        (returning(torch.ones(3)), TypeError, r"mean loss of its part.*a Tensor of shape \(3,\)"),
        (returning((torch.ones(()), 1, 2)), TypeError, "mean loss of its part.*a tuple"),
        (lambda: step(MicroBatcher(), Network(), data(0)), ValueError, "The batch is empty"),
        (stepping_in_backward, UserError, "last.weight has a hook for its gradient"),
        (lambda: MicroBatcher(0), ValueError, "^batch_size=0"),
        (lambda: MicroBatcher(min_batch_size=0), ValueError, "min_batch_size=0"),
        (
            lambda: MicroBatcher(gradient_accumulation_steps=-1),
            ValueError,
            "gradient_accumulation_steps=-1",
        ),
    ],
)
def test_invalid_steps_are_refused_with_the_fix(call, kind, said):
    """In one line that says what to write."""
    with pytest.raises(kind, match=said) as refused:
        call()
    assert "\n" not in str(refused.value)


class Holder:
    """A user's trainer, whose method is the function of the step."""

    def __init__(self, model):
        self.parts = {"models": [model]}

    def loss_of(self, batch):
        return loss_with(self.parts["models"][0])(batch)


def through_a_global(model):
    global GLOBAL
    GLOBAL = model

    def loss_of(batch):
        return loss_with(GLOBAL)(batch)

    return loss_of


def through_a_partial(model):
    def loss_of(net, batch):
        return loss_with(net)(batch)

    return functools.partial(loss_of, model)


def through_a_default(model):
    def loss_of(batch, net=model):
        return loss_with(net)(batch)

    return loss_of


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize(
    "reach",
    [
        loss_with,
        lambda model: Holder(model).loss_of,
        through_a_partial,
        through_a_default,
        through_a_global,
    ],
    ids=["closure", "method", "partial", "default", "global"],
)
def test_all_reached_models_are_restored(reach, where):
    """The buffers and earlier gradients of each model that the function reaches."""

    def train(fails):
        model = Network(norm=True)
        step(MicroBatcher(), model, data(8))
        held = model.last.weight.grad
        if fails:
            model.most, model.where = 6, where
        MicroBatcher(None if fails else 6).backward(reach(model), data())
        assert model.last.weight.grad is held, "others may have a view of it"
        return [*gradients(model), *model.buffers()]

    assert_same(train(fails=True), train(fails=False), rtol=0, atol=0)


def test_unnamed_models_count_their_gradients_once():
    """Their parameters are found in the graph of the loss."""

    def train(model):
        hidden = weakref.ref(model)
        step(MicroBatcher(), model, data(3))
        MicroBatcher().backward(lambda batch: loss_with(hidden())(batch), data())
        return gradients(model)

    assert_same(train(Network(4, "backward")), train(Network()))


def test_neither_model_nor_parameters_are_kept_alive():
    batcher = MicroBatcher()
    model = Network(norm=True)
    step(batcher, model)
    gone = weakref.ref(model), weakref.ref(model.first.weight)
    del model
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


class Fault(RuntimeError):
    """As torch.AcceleratorError, from every call that reaches the device."""


def test_a_device_fault_is_raised_without_restoring(caplog):
    """Although the start of the step cannot be restored."""
    model = nn.Sequential(nn.Linear(3, 1), nn.BatchNorm1d(1))
    fault = Fault("CUDA error: an illegal memory access was encountered")

    class Poisoned(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            raise Fault(str(fault))

    with contextlib.ExitStack() as from_now_on:

        def loss_of(part):
            model(part)
            from_now_on.enter_context(Poisoned())
            raise fault

        with pytest.raises(Fault) as raised:
            MicroBatcher(4).backward(loss_of, torch.ones(8, 3), model)
    assert raised.value is fault
    assert "the step's start cannot be restored: CUDA error" in caplog.text


def test_generators_of_all_gpus_are_rewound(monkeypatch):
    """The model may be on another GPU than the current one."""
    states = [torch.tensor([1]), torch.tensor([2])]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: list(states))

    def set_states(new):
        states[:] = new

    monkeypatch.setattr(torch.cuda, "set_rng_state_all", set_states)
    kept = GeneratorStates()
    states[:] = [torch.tensor([3]), torch.tensor([4])]
    kept.restore()
    assert [int(state) for state in states] == [1, 2]
