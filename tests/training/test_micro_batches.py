"""An optimizer step that goes on when memory runs out in the middle of it."""

from __future__ import annotations

import gc
import random
import traceback
import weakref
from types import SimpleNamespace

import numpy
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from robust_train.microbatch import replicas
from robust_train.microbatch.batcher import MicroBatcher
from robust_train.microbatch.rng import GeneratorStates
from robust_train.run import MicroBatchPlan, Run


def out_of_memory() -> None:
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
    """Runs out of memory above ``most`` samples, in its forward or its backward pass.

    In the backward pass the last layer has its gradient already when it happens.
    """

    def __init__(self, most=10**9, where="forward", *, dropout=0.0, norm=False):
        super().__init__()
        torch.manual_seed(0)
        self.most, self.where = most, where
        self.first = nn.Linear(6, 16)
        self.norm = nn.BatchNorm1d(16) if norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.last = nn.Linear(16, 3)
        self.sizes = []

    def forward(self, x):
        self.sizes.append(len(x))
        fails = len(x) > self.most
        hidden = self.dropout(torch.relu(self.norm(self.first(x))))
        if fails and self.where == "forward":
            out_of_memory()
        hidden = OutOfMemoryInBackward.apply(hidden, fails and self.where == "backward")
        return self.last(hidden)


def data(samples=12, dtype=torch.float32):
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(samples, 6, generator=generator).to(dtype)
    return x, torch.randint(3, (samples,), generator=generator)


def step(batcher, model, batch=None, *, scaler=None, **options):
    parts = batcher.micro_batches(data() if batch is None else batch, model, **options)
    for micro in parts:
        with micro:
            x, y = micro.data
            micro.backward(nn.functional.cross_entropy(model(x), y), scaler=scaler)
    return parts


def loop(batcher, model, body):
    for micro in batcher.micro_batches(data(), model):
        with micro:
            body(micro.data)


def gradients(model):
    return [p.grad.clone() for p in model.parameters()]


def assert_same(ours, expected, **tolerance):
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, other, **tolerance)


def unlimited(**options):
    model = Network(**options)
    step(MicroBatcher(), model)
    return model


@pytest.mark.proves("functions (`run.micro_batches`)", "one GPU", "in the step")
@pytest.mark.parametrize(
    ("where", "most", "names_model"),
    [("forward", 11, True), ("forward", 1, False), ("backward", 1, True), ("backward", 11, False)],
)
def test_memory_running_out_leaves_the_gradient_of_the_whole_batch(where, most, names_model):
    model = Network(most, where)
    parts = MicroBatcher().micro_batches(data(), model if names_model else None)
    for micro in parts:
        with micro:
            x, y = micro.data
            micro.backward(nn.functional.cross_entropy(model(x), y))
    whole = unlimited()
    assert_same(gradients(model), gradients(whole))
    loss = nn.functional.cross_entropy(whole(data()[0]), data()[1])
    torch.testing.assert_close(parts.loss, loss.detach())
    assert parts.repeats >= 1


def test_the_size_that_fits_is_kept_for_the_following_steps():
    model = Network(most=4)
    batcher = MicroBatcher(12)
    step(batcher, model)
    assert model.sizes == [12, 6, 3, 3, 3, 3]
    assert batcher.size == 3
    model.sizes.clear()
    assert step(batcher, model).repeats == 0
    assert model.sizes == [3, 3, 3, 3]


def test_sizes_go_down_the_ladder_of_the_launcher():
    model = Network(most=1)
    events = []
    batcher = MicroBatcher(
        12, gradient_accumulation_steps=2, on_event=lambda event: events.append(event.as_json())
    )
    step(batcher, model)
    assert [(e["before"], e["after"]) for e in events] == [(12, 6), (6, 3), (3, 1)]


def test_a_change_is_recorded_with_its_reason(tmp_path):
    run_events = []
    run = Run(run_dir=tmp_path, report=lambda event: run_events.append(event.as_json()))
    run.micro_batch_plan = MicroBatchPlan(batch_size=12, min_batch_size=2)
    run.started(30)
    run.progress(39)
    model = Network(most=6)
    for micro in run.micro_batches(data(), model):
        with micro:
            x, y = micro.data
            micro.backward(nn.functional.cross_entropy(model(x), y))
    event = next(e for e in run_events if e["event"] == "micro_batch_changed")
    assert (event["step"], event["before"], event["after"]) == (40, 12, 6)
    assert (event["kind"], event["requested_bytes"]) == ("device_oom", 2 * 2**30)
    assert "out of memory" in event["reason"]
    assert run.last_micro_batch == event["last_micro_batch"] == 6


@pytest.mark.parametrize("micro_batch", [1, 5, 11])
def test_uneven_parts_are_weighted_by_their_samples(micro_batch):
    model = Network()
    step(MicroBatcher(micro_batch), model)
    assert_same(gradients(model), gradients(unlimited()))


def test_a_mean_over_tokens_is_weighted_by_tokens():
    x = torch.randn(6, 4, 6)
    y = torch.randint(3, (6, 4))
    y[0, 1:], y[1], y[5, :3] = -100, -100, -100

    def tokens(part):
        return (part["y"] != -100).sum()

    def loss_of(model, part):
        logits = model(part["x"].flatten(0, 1))
        return nn.functional.cross_entropy(logits, part["y"].flatten(), ignore_index=-100)

    whole, model = Network(), Network()
    loss_of(whole, {"x": x, "y": y}).backward()
    parts = MicroBatcher(1).micro_batches({"x": x, "y": y}, model, count=tokens)
    for micro in parts:
        with micro:
            # the part without any token has a loss that is no number
            micro.backward(loss_of(model, micro.data))
    assert_same(gradients(model), gradients(whole))
    assert torch.isfinite(parts.loss)


def test_a_sum_over_samples_is_not_weighted():
    whole, model = Network(), Network()
    x, y = data()
    nn.functional.cross_entropy(whole(x), y, reduction="sum").backward()
    for micro in MicroBatcher(5).micro_batches((x, y), model, count=lambda data: 1):
        with micro:
            x, y = micro.data
            micro.backward(nn.functional.cross_entropy(model(x), y, reduction="sum"))
    assert_same(gradients(model), gradients(whole))


def draws():
    return random.random(), float(numpy.random.rand()), float(torch.rand(()))


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_repeated_step_draws_the_same_random_numbers_again(where):
    def train(model, batcher):
        random.seed(1)
        numpy.random.seed(1)
        torch.manual_seed(1)
        drawn = []
        for micro in batcher.micro_batches(data(), model):
            with micro:
                drawn = drawn[-1:] if micro.start else []
                drawn.append(draws())
                x, y = micro.data
                micro.backward(nn.functional.cross_entropy(model(x), y))
        return drawn, gradients(model), draws()

    split = train(Network(dropout=0.5), MicroBatcher(6))
    recovered = train(Network(6, where, dropout=0.5), MicroBatcher(12))
    assert split[0] == recovered[0]
    assert split[2] == recovered[2]
    assert_same(split[1], recovered[1], rtol=0, atol=0)


@pytest.mark.parametrize(("where", "fails_in_step"), [("forward", 3), ("backward", 1)])
def test_batch_statistics_count_each_sample_once(fails_in_step, where):
    def train(model, size, fails=False):
        batcher = MicroBatcher(size)
        for number in (1, 2, 3):
            if fails and number == fails_in_step:
                model.most = 6
            step(batcher, model)
        return model

    expected = Network(norm=True)
    for number in (1, 2, 3):
        step(MicroBatcher(6 if number >= fails_in_step else 12), expected)
    model = train(Network(where=where, norm=True), 12, fails=True)
    assert model.norm.num_batches_tracked == expected.norm.num_batches_tracked
    assert_same(model.buffers(), expected.buffers(), rtol=0, atol=0)


class Codebook(nn.Module):
    """A buffer written through .data, which leaves no trace in its version, and a replaced one."""

    def __init__(self):
        super().__init__()
        self.inner = Network()
        self.register_buffer("written", torch.zeros(3))
        self.register_buffer("replaced", torch.zeros(3))
        self.register_buffer("constant", torch.arange(3.0))

    def forward(self, x):
        self.written.data.add_(1)
        self.replaced = self.replaced + self.constant
        return self.inner(x)


def test_buffers_that_are_written_around_autograd_or_replaced_are_restored_too():
    model = Codebook()
    batcher = MicroBatcher(12)
    step(batcher, model)
    model.inner.most = 6
    step(batcher, model)
    assert model.written.tolist() == [3, 3, 3]
    assert model.replaced.tolist() == [0, 3, 6]
    assert model.constant.tolist() == [0, 1, 2]


class BeginsToCount(nn.Module):
    """A buffer that the first steps leave alone, as statistics that are frozen at first."""

    def __init__(self):
        super().__init__()
        self.inner = Network()
        self.counts = False
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x):
        if self.counts:
            self.seen += len(x)
        return self.inner(x)


def test_a_buffer_that_changes_for_the_first_time_in_a_repeated_step_is_restored_too():
    model = BeginsToCount()
    batcher = MicroBatcher(12)
    step(batcher, model)
    model.counts, model.inner.most = True, 6
    step(batcher, model)
    assert model.seen.tolist() == [12]


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_gradients_of_earlier_batches_are_neither_lost_nor_counted_twice(where):
    def two_batches(model, batcher):
        step(batcher, model, data(8))
        held = model.last.weight.grad
        step(batcher, model, data(12))
        assert model.last.weight.grad is held, "others may have a view of it"
        return gradients(model)

    recovered = two_batches(Network(8, where), MicroBatcher())
    assert_same(recovered, two_batches(Network(), MicroBatcher()))


def test_an_error_that_is_not_about_memory_keeps_its_traceback_and_the_earlier_gradients():
    model = Network()
    step(MicroBatcher(), model)
    before = gradients(model)

    def has_a_bug(x):
        return {}["a key that is not there"]

    with pytest.raises(KeyError) as caught:
        loop(MicroBatcher(), model, has_a_bug)
    assert [entry.name for entry in caught.traceback][-2:] == ["loop", "has_a_bug"]
    assert not getattr(caught.value, "__notes__", [])
    assert "batcher.py" not in "".join(traceback.format_exception(caught.value))
    assert_same(gradients(model), before)


def test_at_the_smallest_size_the_error_is_raised_and_the_step_has_left_no_trace():
    events = []
    model = Network(most=1, where="backward", norm=True)
    batcher = MicroBatcher(
        12, min_batch_size=4, on_event=lambda event: events.append((event.name, event.as_json()))
    )
    buffers = [buffer.clone() for buffer in model.buffers()]
    state = torch.get_rng_state()
    with pytest.raises(torch.OutOfMemoryError) as caught:
        step(batcher, model)
    assert all(p.grad is None for p in model.parameters())
    assert_same(model.buffers(), buffers, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), state)
    event, fields = events[-1]
    assert event == "micro_batch_exhausted"
    assert fields["tried"] == [12, 6, 4]
    if hasattr(caught.value, "add_note"):
        assert "every micro-batch tried (12, 6, 4)" in caught.value.__notes__[0]


def test_a_smaller_last_batch_that_does_not_fit_is_split_as_well():
    model = Network(most=2)
    batcher = MicroBatcher(64)
    step(batcher, model, data(5))
    assert max(model.sizes[-3:]) <= 2
    assert_same(gradients(model), gradients_of(data(5)))


def gradients_of(batch):
    model = Network()
    step(MicroBatcher(), model, batch)
    return gradients(model)


def test_a_larger_size_is_tried_again_only_when_asked():
    model = Network(most=6)
    batcher = MicroBatcher(12)
    step(batcher, model)
    model.most = 100
    for _ in range(50):
        step(batcher, model)
    assert batcher.size == 6


def test_each_failure_of_a_size_doubles_the_wait_until_it_is_tried_again():
    model = Network(most=6)
    events = []
    batcher = MicroBatcher(
        12, regrow_after_steps=3, on_event=lambda event: events.append(event.as_json())
    )
    for _ in range(40):
        step(batcher, model)
    failed_in = [e["step"] for e in events if e["after"] < e["before"]]
    # after 3, 6 and 12 clean steps, the step with the failure itself being the first of them
    assert failed_in == [1, 4, 10, 22]
    assert batcher.size == 6


def test_a_size_that_fits_again_is_grown_up_to_the_one_asked_for():
    model = Network(most=3)
    batcher = MicroBatcher(12, regrow_after_steps=2)
    step(batcher, model)
    assert batcher.size == 3
    model.most = 100
    for _ in range(20):
        step(batcher, model)
    assert batcher.size == 12


def test_a_size_that_somebody_wished_for_is_not_outgrown_and_outlives_a_checkpoint():
    model, events = Network(), []
    batcher = MicroBatcher(
        12, regrow_after_steps=2, on_event=lambda event: events.append(event.as_json())
    )
    assert batcher.shrink("wished") == (12, 6)
    for _ in range(20):
        step(batcher, model)
    assert batcher.size == 6
    again = MicroBatcher(12, regrow_after_steps=2)
    again.restore(batcher.state())
    for _ in range(20):
        step(again, model)
    assert again.size == 6
    assert [(e["before"], e["after"], e["reason"]) for e in events] == [(12, 6, "wished")]


def test_below_the_wished_size_memory_still_decides():
    batcher = MicroBatcher(12, regrow_after_steps=2)
    batcher.shrink("wished")
    model = Network(most=3)
    step(batcher, model)
    assert batcher.size == 3
    model.most = 100
    for _ in range(20):
        step(batcher, model)
    assert batcher.size == 6


def test_a_wish_halves_what_is_really_in_use():
    batcher = MicroBatcher(64)
    step(batcher, Network(), data(5))
    before, after = batcher.shrink("wished")
    assert (before, after) == (5, 2)
    assert MicroBatcher().shrink("nothing was split yet") is None
    assert MicroBatcher(4, min_batch_size=4).shrink("as small as may be") is None


def test_a_resumed_run_goes_on_with_the_sizes_it_has_found():
    batcher = MicroBatcher(12)
    step(batcher, Network(most=4))
    again, other = MicroBatcher(12), MicroBatcher(8)
    again.restore(batcher.state())
    other.restore(batcher.state())
    assert again.size == 3
    assert other.size == 8, "somebody asked for another size since"


def test_validation_takes_each_sample_exactly_once_and_repeats_only_what_failed():
    model = Network(most=3)
    batcher = MicroBatcher(8)
    x = torch.arange(20.0).unsqueeze(1).expand(20, 6)
    ran, kept = [], []
    with torch.no_grad():
        for start in range(0, 20, 10):
            parts = batcher.micro_batches(x[start : start + 10], training=False)
            for micro in parts:
                with micro:
                    ran.append(len(micro))
                    # only what would be new memory may fail
                    if len(kept) or micro.start:
                        model(micro.data)
                    micro.keep(micro.data[:, 0].tolist())
            kept += [value for part in parts.kept for value in part]
    assert kept == list(range(20))
    assert ran[0] == 5, "the part that went through is not repeated"
    assert ran.count(5) == 2
    assert batcher.size == 8, "training needs memory of another kind"


@pytest.mark.parametrize(("where", "by_hand"), [("forward", True), ("backward", False)])
def test_a_gradient_scaler_s_gradients_are_exact(by_hand, where):
    def train(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for micro in MicroBatcher().micro_batches(data(), model):
            with micro:
                x, y = micro.data
                loss = nn.functional.cross_entropy(model(x), y)
                if by_hand:
                    scaler.scale(loss * micro.weight).backward()
                else:
                    micro.backward(loss, scaler=scaler)
        scaler.step(optimizer)
        scaler.update()
        return model.parameters()

    assert_same(train(Network(4, where)), train(Network()))


@pytest.mark.parametrize("around", ["the body", "the loop"])
def test_autocast_may_be_around_the_body_or_the_loop(around):
    def train(model, batcher):
        outside = torch.autocast("cpu", dtype=torch.bfloat16, enabled=around == "the loop")
        with outside:
            for micro in batcher.micro_batches(data(), model):
                with micro, torch.autocast("cpu", dtype=torch.bfloat16):
                    x, y = micro.data
                    logits = model(x)
                    assert logits.dtype == torch.bfloat16
                    micro.backward(nn.functional.cross_entropy(logits.float(), y))
        return gradients(model)

    recovered = train(Network(6, "backward"), MicroBatcher(12))
    assert_same(recovered, train(Network(), MicroBatcher(6)), rtol=0, atol=0)


class Checkpointed(Network):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class LateFailure(nn.Module):
    """Runs out of memory only when it is computed anew in the backward pass."""

    def __init__(self, most):
        super().__init__()
        self.inner, self.most, self.calls = Network(), most, 0

    def forward(self, x):
        return checkpoint(self._inside, x, use_reentrant=False)

    def _inside(self, x):
        self.calls += 1
        if len(x) > self.most and self.calls % 2 == 0:
            out_of_memory()
        return self.inner(x)


@pytest.mark.parametrize("kind", [lambda: Checkpointed(4), lambda: LateFailure(4)])
def test_gradient_checkpointing_is_repeated_like_anything_else(kind):
    model = kind()
    step(MicroBatcher(), model)
    assert_same(gradients(model), gradients(unlimited()))


@pytest.mark.parametrize("names_it", [False, True])
def test_a_failed_pass_is_freed_before_the_next_one_although_the_body_s_variables_live_on(names_it):
    """The user's frame is running: its variables still name the output and the loss."""
    activations: list[weakref.ref[torch.Tensor]] = []
    alive: list[bool] = []

    class Watched(Network):
        def forward(self, x):
            alive.append(any(ref() is not None for ref in activations))
            inside = self.first(x)
            activations.append(weakref.ref(inside))
            # the product's gradient needs its factors, so the graph holds them
            return self.last(OutOfMemoryInBackward.apply(inside * inside, len(x) > self.most))

    class SomebodysTrainer:
        output = None

    trainer = SomebodysTrainer()
    model = Watched(most=3)
    gc.disable()
    try:
        for micro in MicroBatcher().micro_batches(data(), model):
            with micro:
                x, y = micro.data
                logits = model(x)
                view = logits.view(-1, 3)
                if names_it:
                    trainer.output = {"logits": [view]}
                loss = nn.functional.cross_entropy(view, y)
                micro.backward(loss)
    finally:
        gc.enable()
    assert alive[:3] == [False, False, False]


def test_leaving_the_loop_early_gives_back_the_gradients_that_were_there():
    model = Network()
    step(MicroBatcher(), model)
    before = gradients(model)
    for micro in MicroBatcher(3).micro_batches(data(), model):
        with micro:
            break
    assert_same(gradients(model), before)

    def returns_early():
        for micro in MicroBatcher(3).micro_batches(data(), model):
            with micro:
                return

    returns_early()
    assert_same(gradients(model), before)

    def is_interrupted(batch):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        loop(MicroBatcher(3), model, is_interrupted)
    assert_same(gradients(model), before)


def test_a_loop_inside_of_another_recovers_on_its_own():
    outer, inner = Network(), Network(most=2)
    batcher = MicroBatcher()
    for micro in batcher.micro_batches(data(), outer):
        with micro:
            x, y = micro.data
            micro.backward(nn.functional.cross_entropy(outer(x), y))
            step(MicroBatcher(), inner, (x, y))
    assert outer.sizes == [12]
    assert_same(gradients(outer), gradients(unlimited()))
    assert_same(gradients(inner), gradients(unlimited()))


def test_several_models_learn_in_one_step():
    body, head = Network(most=5), nn.Linear(3, 3)
    for micro in MicroBatcher().micro_batches(data(), (m for m in [body, head])):
        with micro:
            x, y = micro.data
            micro.backward(nn.functional.cross_entropy(head(body(x)), y))
    whole = Network()
    x, y = data()
    for p in head.parameters():
        p.grad, p.recovered = None, p.grad
    nn.functional.cross_entropy(head(whole(x)), y).backward()
    assert_same(gradients(body), gradients(whole))
    assert_same([p.recovered for p in head.parameters()], gradients(head))


def test_what_the_body_keeps_is_kept_once():
    model = Network(most=4)
    parts = MicroBatcher(6).micro_batches(data(), model)
    seen = 0
    for micro in parts:
        with micro:
            x, y = micro.data
            micro.keep(x[:, 0].tolist())
            seen += 1
            micro.backward(nn.functional.cross_entropy(model(x), y))
    assert seen > len(parts.kept)
    assert [value for part in parts.kept for value in part] == data()[0][:, 0].tolist()


def test_a_backward_pass_without_weight_is_refused_before_it_can_go_wrong():
    model = Network()
    with pytest.raises(RuntimeError, match=r"use micro\.backward\(loss\)"):
        loop(
            MicroBatcher(),
            model,
            lambda batch: nn.functional.cross_entropy(model(batch[0]), batch[1]).backward(),
        )


def test_a_micro_batch_that_is_not_entered_is_refused():
    model = Network()
    with pytest.raises(RuntimeError, match="with micro:"):
        list(MicroBatcher(3).micro_batches(data(), model))


def test_a_step_may_be_skipped():
    model = Network()
    for micro in MicroBatcher().micro_batches(data(), model):
        with micro:
            continue
    assert all(p.grad is None for p in model.parameters())


def test_neither_a_model_nor_its_parameters_are_kept_alive():
    batcher = MicroBatcher()
    model = Network(norm=True)
    step(batcher, model)
    gone = weakref.ref(model), weakref.ref(model.first.weight)
    del model
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


@pytest.mark.slow
def test_a_compiled_model_is_recovered_as_well():
    model = Network(norm=True)
    compiled = torch.compile(model, backend="aot_eager", dynamic=True)
    batcher = MicroBatcher(12)

    def compiled_step(batch_size_that_fails):
        for micro in batcher.micro_batches(data(), compiled):
            with micro:
                x, y = micro.data
                logits = compiled(x)
                if len(x) > batch_size_that_fails:
                    out_of_memory()
                micro.backward(nn.functional.cross_entropy(logits, y))

    compiled_step(100)
    compiled_step(6)
    expected = Network(norm=True)
    for size in (12, 6):
        step(MicroBatcher(size), expected)
    assert_same(gradients(model), gradients(expected))
    assert_same(model.buffers(), expected.buffers())


@pytest.mark.parametrize(
    ("name", "value"),
    [("batch_size", 0), ("min_batch_size", 0), ("gradient_accumulation_steps", -1)],
)
def test_sizes_below_one_are_refused(name, value):
    with pytest.raises(ValueError, match=name):
        MicroBatcher(**{name: value})


class CountsCopies(TorchDispatchMode):
    """Notes the number formats in each call that copies lists of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.formats: list[set[torch.dtype]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten._foreach_copy_.default:
            self.formats.append({tensor.dtype for tensors in args[:2] for tensor in tensors})
        return function(*args, **(kwargs or {}))


def test_buffers_of_mixed_formats_are_copied_by_one_call_for_each_format():
    """A list of mixed formats takes torch's slow path: a kernel for each tensor."""
    model = nn.Sequential(*(nn.BatchNorm1d(3) for _ in range(5)))
    batcher, x = MicroBatcher(4), torch.randn(8, 3)
    for _ in range(3):
        with CountsCopies() as copies:
            for micro in batcher.micro_batches(x, model):
                with micro:
                    micro.backward(model(micro.data).sum())
    assert sorted(map(repr, copies.formats)) == ["{torch.float32}", "{torch.int64}"]


class Fault(RuntimeError):
    """As torch.AcceleratorError, from every call that reaches the device."""


def test_a_fault_of_the_device_is_raised_though_the_step_s_start_cannot_be_restored(caplog):
    model = nn.Linear(3, 1)
    model(torch.ones(1, 3)).sum().backward()
    fault = Fault("CUDA error: an illegal memory access was encountered")

    class Poisoned(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            raise Fault("CUDA error: an illegal memory access was encountered")

    poisoned = Poisoned()

    def train() -> None:
        for micro in MicroBatcher(4).micro_batches(torch.ones(8, 3), model):
            with micro:
                micro.backward(model(micro.data).sum())
                poisoned.__enter__()
                raise fault

    try:
        with pytest.raises(Fault) as raised:
            train()
    finally:
        poisoned.__exit__(None, None, None)
    assert raised.value is fault
    assert "the step's start cannot be restored: CUDA error" in caplog.text


def test_the_generators_of_all_gpus_go_back_to_the_steps_start(monkeypatch):
    """The model may be on another GPU than the current one."""
    states = [torch.tensor([1]), torch.tensor([2])]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: list(states))
    monkeypatch.setattr(
        torch.cuda, "set_rng_state_all", lambda now: states.__setitem__(slice(None), now)
    )
    kept = GeneratorStates()
    states[:] = [torch.tensor([3]), torch.tensor([4])]
    kept.restore()
    assert [int(state) for state in states] == [1, 2]


def test_a_bucket_is_put_together_while_the_one_before_is_on_its_way(monkeypatch):
    order = []

    def all_reduce(flat, group, async_op):
        assert async_op
        order.append("sent")
        return SimpleNamespace(wait=lambda: order.append("received"))

    monkeypatch.setattr(replicas.dist, "all_reduce", all_reduce)
    monkeypatch.setattr(replicas, "BUCKET_BYTES", 16)
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(4)]
    for parameter in parameters[:3]:
        parameter.grad = torch.ones(2)
    loss = replicas.sum_gradients(
        parameters, (True, True, True, False), 0.5, torch.tensor(4.0), SimpleNamespace()
    )
    assert order == ["sent", "sent", "received", "received"]
    assert [p.grad.tolist() for p in parameters[:3]] == [[0.5, 0.5]] * 3
    assert parameters[3].grad is None
    assert loss == 2


def test_a_closure_that_loops_over_the_same_parts_again_has_the_loss_of_one_loop():
    model, (x, y) = nn.Linear(6, 3), (torch.randn(8, 6), torch.randint(0, 3, (8,)))
    parts = MicroBatcher(4).micro_batches((x, y), model)
    expected = nn.functional.cross_entropy(model(x), y)
    for _ in range(2):
        for micro in parts:
            with micro:
                inputs, labels = micro.data
                micro.backward(nn.functional.cross_entropy(model(inputs), labels))
                micro.keep(len(micro))
        assert torch.allclose(parts.loss, expected)
        assert parts.kept == [4, 4]
