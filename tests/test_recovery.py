"""OOMHandler, retry_on_oom and adaptive_batch_training, and what an inline attempt leaves behind,
with real allocations that fail."""

import functools
import gc
import json
import os
import weakref

import pytest
import tenacity
import torch

import warm
from robust_train import (
    AttemptsExhaustedError,
    OOMHandler,
    adaptive_batch_training,
    launch,
    retry_on_oom,
)
from robust_train.memory.tensors import live_tensors
from robust_train.model.errors import TrainerFailedError


def out_of_memory():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")


def fits(batch_size, most):
    if batch_size > most:
        out_of_memory()
    return batch_size


def by_hand(handler, step):
    """A loop of one's own, which continues as long as the handler says."""
    while True:
        try:
            return step()
        except Exception as error:
            assert handler.handle(error)  # noqa: PT017


def test_adaptive_batch_training_halves_until_it_fits():
    """The effective batch stays."""
    tried = []

    def train(batch_size, gradient_accumulation_steps):
        tried.append((batch_size, gradient_accumulation_steps))
        fits(batch_size, 32)
        return "trained"

    assert adaptive_batch_training(train, initial_batch_size=128) == "trained"
    assert tried == [(128, 1), (64, 2), (32, 4)]
    # a function without named parameters gets the batch first
    assert adaptive_batch_training(lambda size: size, initial_batch_size=16) == 16


def test_what_is_not_memory_is_raised_at_once():
    calls = []
    with pytest.raises(IndexError):
        adaptive_batch_training(lambda batch_size: calls.append(batch_size) or [][1])
    assert calls == [128]


def test_retry_on_oom_changes_the_named_argument():
    """Functions and methods of any kind have one."""
    sizes = []

    class Experiment:
        @retry_on_oom(max_retries=3, batch_argument="size")
        def train(self, lr, size=64):
            """What it does."""
            sizes.append(size)
            fits(size, 16)
            return lr

        @classmethod
        @retry_on_oom()
        def validate(cls, batch_size=8):
            return fits(batch_size, 4)

        @staticmethod
        @retry_on_oom()
        def evaluate(*, batch_size):
            return fits(batch_size, 2)

    assert Experiment().train(0.1) == 0.1
    assert sizes == [64, 32, 16]
    assert Experiment.train.__doc__ == "What it does."
    assert Experiment.validate() == 4
    assert Experiment.evaluate(batch_size=8) == 2


def test_retry_on_oom_ends_after_max_retries():
    calls = []

    @retry_on_oom(max_retries=2)
    def train(batch_size):
        calls.append(batch_size)
        out_of_memory()

    with pytest.raises(AttemptsExhaustedError):
        train(64)
    assert calls == [64, 32, 16]


def test_what_cannot_be_repeated_is_refused_at_once():
    with pytest.raises(TypeError, match="no parameter 'batch_size'"):
        retry_on_oom()(lambda size: size)
    with pytest.raises(TypeError, match="belongs below"):
        retry_on_oom()(classmethod(lambda cls, batch_size: batch_size))
    with pytest.raises(ValueError, match="min_batch_size=8"):
        OOMHandler(initial_batch_size=4, min_batch_size=8)


class Passes:
    """Passes that allocate, and whether tensors of an earlier one are alive as each begins."""

    def __init__(self):
        self.held, self.alive = [], []

    def run(self, batch_size):
        self.alive.append(any(ref() is not None for ref in self.held))
        activations = torch.zeros(batch_size, 1000)
        self.held.append(weakref.ref(activations))
        fits(batch_size, 4)
        return "trained"


@pytest.fixture
def passes():
    gc.disable()  # nothing but the handler may free them
    yield Passes()
    gc.enable()


def test_a_failed_pass_is_freed_before_retrying(passes):
    """No tensor of it is left."""

    def train(batch_size):
        try:
            passes.run(batch_size)
        except RuntimeError as error:
            raise RuntimeError("CUDA out of memory while training") from error

    adaptive_batch_training(train, initial_batch_size=16)
    assert passes.alive == [False, False, False]


def test_a_kept_exception_keeps_no_memory(passes):
    """A retry state has it: tenacity holds the failed try's exception until the next one has
    ended.
    """
    handler, states = OOMHandler(initial_batch_size=16), []

    def recover(state):
        states.append(state)
        assert handler.handle(state.outcome.exception())

    retrying = tenacity.Retrying(before_sleep=recover, wait=tenacity.wait_none())
    assert retrying(lambda: passes.run(handler.batch_size)) == "trained"
    assert passes.alive == [False, False, False]
    assert states[0] is not None


def test_a_real_allocation_failure_is_recovered_from():
    code = """
import json, resource, torch
from robust_train import adaptive_batch_training
torch.zeros(8) @ torch.zeros(8)
used = int(open("/proc/self/statm").read().split()[5]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_DATA, (used + 200 * 2**20, -1))
tried = []
def train(batch_size):
    tried.append(batch_size)
    return torch.zeros(batch_size, 2**20).shape[0]  # 4 MiB a sample
result = adaptive_batch_training(train, initial_batch_size=256)
print(json.dumps([result, tried]))
"""
    process = warm.run(("-c", code), os.environ)
    assert process.returncode == 0, process.stderr
    result, tried = json.loads(process.stdout)
    assert tried[0] == 256
    assert len(tried) > 1
    assert result == tried[-1] < 64


HISTORY = []
"""Somebody's list of outputs."""


@pytest.mark.usefixtures("whole_heap")
@pytest.mark.parametrize("keeps", [True, False])
def test_memory_is_described_while_still_held(caplog, keeps):
    """The failed try holds it."""

    def train(batch_size):
        outputs = torch.zeros(batch_size, 2**14)
        if keeps and batch_size > 32:
            HISTORY.append(outputs)
        fits(batch_size, 32)

    adaptive_batch_training(train, initial_batch_size=64)
    HISTORY.clear()
    assert ("4.0 MiB more on cpu than before the first try" in caplog.text) is keeps
    assert ("the largest: 4.0 MiB float32 (64, 16384) on cpu" in caplog.text) is keeps


class OutOfMemoryWhileMakingState(torch.optim.Adam):
    """Memory runs out after it has made the state of the first parameter."""

    fails = True

    def _init_group(self, group, *args, **kwargs):
        if not self.fails:
            return super()._init_group(group, *args, **kwargs)
        first = group["params"][0]
        self.state[first]["step"] = torch.tensor(0.0)
        self.state[first]["exp_avg"] = torch.zeros_like(first)
        return out_of_memory()


def test_half_made_optimizer_state_is_removed():
    """The first step of the optimizer was making it."""
    model = torch.nn.Linear(4, 4)
    optimizer = OutOfMemoryWhileMakingState(model.parameters())

    def train(batch_size):
        optimizer.zero_grad()
        model(torch.ones(batch_size, 4)).sum().backward()
        optimizer.fails = batch_size > 32
        optimizer.step()

    adaptive_batch_training(train, initial_batch_size=64)
    assert [float(state["step"]) for state in optimizer.state.values()] == [1.0, 1.0]


class OutOfMemoryInAGroup(torch.optim.AdamW):
    """Runs out when it comes to its second group, and has updated the first one by then."""

    fails = False

    def _init_group(self, group, *args, **kwargs):
        if self.fails and group is self.param_groups[1]:
            out_of_memory()
        return super()._init_group(group, *args, **kwargs)


class OutOfMemoryAmidAStep(torch.optim.SGD):
    """Runs out when the momentum has changed and the weights have not."""

    fails = False

    @torch.no_grad()
    def step(self, closure=None):
        if not self.fails:
            return super().step(closure)
        for state in self.state.values():
            state["momentum_buffer"].mul_(0.9)
        return out_of_memory()


def optimizer_by_halves(model):
    return OutOfMemoryInAGroup(
        [{"params": [parameter]} for parameter in model.parameters()], lr=0.1
    )


def optimizer_with_momentum(model):
    return OutOfMemoryAmidAStep(model.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize("fails_at", [1, 3])
@pytest.mark.parametrize("kind", [optimizer_by_halves, optimizer_with_momentum])
def test_an_interrupted_update_is_not_made_twice(kind, fails_at):
    """Memory cuts it short."""
    model = torch.nn.Linear(3, 1)
    optimizer, calls = kind(model), []

    @retry_on_oom
    def step(batch_size=8):
        calls.append(batch_size)
        optimizer.zero_grad()
        step_over(model, torch.randn(8, 3), batch_size)
        optimizer.step()

    for _ in range(1, fails_at):
        step()
    optimizer.fails = True
    with pytest.raises(
        AttemptsExhaustedError, match=r"step after it, or use MicroBatcher\.backward"
    ):
        step()
    assert calls == [8] * fails_at


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.LBFGS])
def test_a_closure_repeats_while_weights_are_unchanged(kind):
    model, sizes = torch.nn.Linear(3, 1), []
    optimizer = kind(model.parameters(), lr=0.1)

    @retry_on_oom
    def step(batch_size=8, most=4):
        def closure():
            sizes.append(batch_size)
            optimizer.zero_grad()
            fits(batch_size, most if len(sizes) < 5 else 1)
            loss = model(torch.ones(batch_size, 3)).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)

    if kind is torch.optim.AdamW:
        step()
        assert sizes == [8, 4]
        return
    with pytest.raises(AttemptsExhaustedError, match=r"within optimizer\.step"):
        step()
    assert sizes[:2] == [8, 4]


def test_changed_weights_before_a_memory_error_are_reported(caplog):
    """The call has changed them."""
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @retry_on_oom
    def two_steps(batch_size=8):
        step_over(model, torch.randn(8, 3), batch_size)
        optimizer.step()
        fits(batch_size, 4)

    two_steps()
    assert "the call had changed weights before memory ran out" in caplog.text


def test_every_attempt_is_listed_when_none_fits():
    with pytest.raises(AttemptsExhaustedError) as ended:
        adaptive_batch_training(lambda batch_size: out_of_memory(), 16, min_batch_size=8)
    lines = str(ended.value).splitlines()
    assert "tried (16, 8)" in lines[0]
    assert lines[1].startswith("  attempt 1: micro-batch 16 × accumulation 1: ")
    assert lines[2].startswith("  attempt 2: micro-batch 8 × accumulation 2: ")
    assert "Tried to allocate 20.00 MiB" in lines[2]


async def coroutine(batch_size): ...
def generator(batch_size):
    yield batch_size


async def async_generator(batch_size):
    yield batch_size


class CalledGenerator:
    __call__ = generator


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (coroutine, "coroutine is an async function"),
        (async_generator, "async_generator is an async generator"),
        (generator, "generator is a generator"),
        (functools.partial(generator), "is a generator"),
        (CalledGenerator(), "is a generator"),
    ],
)
def test_what_does_not_run_is_refused_immediately(function, kind):
    """A generator, for example, does not run when it is called."""
    with pytest.raises(TypeError, match=f"{kind}; it must be a plain function"):
        retry_on_oom()(function)
    with pytest.raises(TypeError, match=kind):
        adaptive_batch_training(function)


def step_over(model, x, batch_size):
    """Add the gradient of the sum over ``x``; memory runs out in the second part of more than 4."""
    for start in range(0, len(x), batch_size):
        if start and batch_size > 4:
            out_of_memory()
        model(x[start : start + batch_size]).sum().backward()


def test_a_failed_trys_gradients_never_count():
    """Gradients add up over three calls, and the first try of each call fails half-way."""
    model, x = torch.nn.Linear(3, 1), torch.randn(16, 3)
    accumulate = retry_on_oom()(lambda batch_size: step_over(model, x, batch_size))
    step_over(model, x, 4)
    expected = model.weight.grad * 4
    held = model.weight.grad
    for _ in range(3):
        accumulate(8)
    torch.testing.assert_close(model.weight.grad, expected)
    assert model.weight.grad is held, "a view into a bucket of DDP's stays one"


@pytest.mark.parametrize("is_by_hand", [False, True])
def test_a_handler_returns_to_its_own_gradients(is_by_hand):
    """They are the gradients at the start of its try."""
    model, x, handler = torch.nn.Linear(3, 1), torch.randn(16, 3), OOMHandler(8, 1)
    for _ in range(2):
        if is_by_hand:
            handler.start_try(model)
            by_hand(handler, lambda: step_over(model, x, handler.batch_size))
        else:
            handler.run(lambda batch_size: step_over(model, x, batch_size))
    torch.testing.assert_close(model.weight.grad, 2 * x.sum(dim=0, keepdim=True))


def test_a_custom_loop_drops_only_failed_gradients():
    """Those of the failed try, and of no other model."""
    model, other, x = torch.nn.Linear(3, 1), torch.nn.Linear(3, 1), torch.randn(16, 3)
    other(x).sum().backward()
    before = other.weight.grad.clone()
    handler = OOMHandler(8, 1)
    by_hand(handler, lambda: step_over(model, x, handler.batch_size))
    torch.testing.assert_close(model.weight.grad, x.sum(dim=0, keepdim=True))
    assert torch.equal(other.weight.grad, before)
    assert (handler.batch_size, handler.gradient_accumulation_steps) == (4, 2)


def test_a_dropping_function_keeps_only_own_gradients():
    """It drops what it finds. The first call that finds some shows which kind of function it is."""
    model, alike = torch.nn.Linear(7, 1), []

    @retry_on_oom
    def train(batch_size):
        model.zero_grad()
        alike.append(sum(tensor.shape == (1, 7) for tensor in live_tensors()))
        step_over(model, torch.randn(4, 7), batch_size)

    for _ in range(4):
        train(4)
    # the second call finds gradients for the first time, and copies them to the host
    assert alike == [1, 2, 1, 1]


def test_uncopied_gradients_are_not_trained_on_silently():
    """Calls that dropped what they found, then one that adds to it and fails."""
    model, x = torch.nn.Linear(3, 1), torch.randn(16, 3)

    @retry_on_oom
    def train(batch_size, adds):
        if not adds:
            model.zero_grad()
        step_over(model, x, batch_size)

    for _ in range(3):
        train(4, False)
    with pytest.raises(AttemptsExhaustedError, match="added to existing gradients"):
        train(8, True)


def test_an_update_within_backward_is_not_repeated():
    """The optimizer of the call steps there."""
    layer, calls = torch.nn.Linear(1, 1), []
    layer.weight.register_post_accumulate_grad_hook(lambda parameter: None)

    def step(batch_size):
        calls.append(batch_size)
        layer(torch.ones(batch_size, 1)).sum().backward()
        out_of_memory()

    with pytest.raises(AttemptsExhaustedError, match="updates weights within the backward pass"):
        retry_on_oom(step)(8)
    assert calls == [8]


def test_a_zeroing_try_restarts_from_the_calls_gradients():
    model, x, seen = torch.nn.Linear(3, 1), torch.randn(16, 3), []
    step_over(model, x, 4)

    def train(batch_size):
        seen.append(model.weight.grad.clone())
        model.zero_grad(set_to_none=False)
        step_over(model, x, batch_size)

    retry_on_oom()(train)(8)
    assert len(seen) == 2
    assert torch.equal(*seen)


def test_a_message_names_the_full_gpu(caplog):
    """No launcher has chosen it, and it is not the CPU."""
    adaptive_batch_training(lambda batch_size: fits(batch_size, 4), 8, 1)
    assert "out of memory on the GPU: micro-batch 8 → 4" in caplog.text


# --- an attempt in the launcher's own process ---

INLINE = {"isolation": "none", "auto_device": False, "device": "cpu"}


@pytest.mark.usefixtures("whole_heap")
def test_leftover_memory_of_inline_attempts_is_reported(tmp_path, caplog):
    """The line says how much there is."""

    def train(cfg):
        outputs = torch.zeros(cfg.training.batch_size, 2**14)
        if cfg.training.batch_size > 32:
            HISTORY.append(outputs)
            raise MemoryError
        return "trained"

    training = {"batch_size": 64, "num_workers": 0}
    summary = launch(train, {**INLINE, "training": training}, run_dir=tmp_path)
    HISTORY.clear()
    assert summary.result == "trained"
    assert "4.0 MiB float32 (64, 16384) on cpu" in caplog.text
    events = [json.loads(line) for line in (tmp_path / "journal.jsonl").open()]
    (held,) = (event for event in events if event["event"] == "memory_held")
    assert "4.0 MiB more on cpu than before the first try" in held["description"]


def test_a_fault_on_a_silent_device_is_reported(tmp_path, monkeypatch):
    """It answers nothing after the fault."""
    message = "CUDA error: an illegal memory access was encountered"

    def fails(*arguments):
        raise RuntimeError(message)

    monkeypatch.setattr("robust_train.memory.clearing.StartingMemory.describe_rest", fails)
    with pytest.raises(TrainerFailedError, match="illegal memory access"):
        launch(fails, INLINE, run_dir=tmp_path)
    [attempt] = json.loads((tmp_path / "summary.json").read_text())["attempts"]
    assert attempt["outcome"] == "device_fault"
