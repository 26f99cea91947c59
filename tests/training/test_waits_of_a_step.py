"""What the end of a step reads of the device, and its kernels over all gradients.

A read of a scalar waits for all kernels that were queued before it.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from robust_train.step.update import update
from robust_train.vision.step import LossAverage, make_optimizer, with_kernels_of

READ = "aten._local_scalar_dense.default"
OVER_GRADIENTS = ("_foreach_mul_.Tensor", "_foreach_norm")
UPDATES = ("_fused_", "_foreach_addcdiv_", "addcdiv_", "_foreach_add_", "add_.Tensor")


class Operations(TorchDispatchMode):
    """Lists what is called on the device. The counters of steps are on the host, always."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        name = str(function)
        is_counter = name == READ and arguments[0].dtype == torch.float32 and is_step(arguments[0])
        if not is_counter:
            self.names.append(name)
        return function(*arguments, **(options or {}))

    @property
    def reads(self):
        return self.names.count(READ)

    @property
    def reads_after_update(self):
        """Reads that wait for the optimizer's own kernels."""
        updates = [
            n for n, name in enumerate(self.names) if any(update in name for update in UPDATES)
        ]
        return self.names[updates[0] :].count(READ) if updates else 0

    def count(self, part):
        return sum(part in name for name in self.names)


COUNTERS = []


def is_step(tensor):
    return any(tensor is counter for counter in COUNTERS)


def sgd(weights, **options):
    return torch.optim.SGD(weights, lr=0.1, **options)


def adamw(weights, **options):
    return torch.optim.AdamW(weights, lr=0.1, **options)


def wrapped(weights):
    class Wrapper:
        def __init__(self, inner):
            self.inner = inner

        def __getattr__(self, name):
            return getattr(self.inner, name)

    return Wrapper(adamw(weights, fused=True))


def loaded(weights):
    optimizer = adamw(weights, fused=True)
    optimizer.load_state_dict(adamw(weights, foreach=True).state_dict())
    return optimizer


KINDS = {
    "foreach": lambda weights: adamw(weights, foreach=True),
    "fused": lambda weights: adamw(weights, fused=True),
    "for loop": lambda weights: adamw(weights, foreach=False),
    "wrapped": wrapped,
    "loaded unfused": loaded,
    "SGD, foreach": lambda weights: sgd(weights, foreach=True),
    "SGD, for loop": lambda weights: sgd(weights, foreach=False),
    "SGD, fused": lambda weights: sgd(weights, fused=True),
    "SGD, fused, momentum": lambda weights: sgd(weights, momentum=0.9, fused=True),
    "SGD, foreach, momentum": lambda weights: sgd(weights, momentum=0.9, foreach=True),
    "Adam, fused": lambda weights: torch.optim.Adam(weights, fused=True),
    "Adam, foreach": lambda weights: torch.optim.Adam(weights, foreach=True),
    "Adam, for loop": lambda weights: torch.optim.Adam(weights, foreach=False),
    "Adagrad, fused": lambda weights: torch.optim.Adagrad(weights, fused=True),
    "RMSprop, foreach": lambda weights: torch.optim.RMSprop(weights, foreach=True),
}
# of an optimizer, without and with a scaler: reads in a step
READS = {
    "foreach": (1, 2),
    "fused": (0, 0),
    "for loop": (1, 2),
    "wrapped": (1, 2),
    "loaded unfused": (1, 2),
    "SGD, foreach": (1, 2),
    "SGD, for loop": (1, 2),
    "SGD, fused": (0, 0),
    "SGD, fused, momentum": (0, 0),
    "SGD, foreach, momentum": (1, 2),
    "Adam, fused": (0, 0),
    "Adam, foreach": (1, 2),
    "Adam, for loop": (1, 2),
    "Adagrad, fused": (0, 0),
    "RMSprop, foreach": (1, 2),
}


@pytest.mark.parametrize("has_scaler", [False, True], ids=["plain", "scaler"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_reads_as_little_as_possible(kind, has_scaler):
    """As its optimizer allows. A second read right behind the first one waits for nothing."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
    optimizer = KINDS[kind]([*model.parameters()])
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0) if has_scaler else None
    for step in (1, 2):
        loss = model(torch.ones(2, 8)).sum()
        (loss if scaler is None else scaler.scale(loss)).backward()
        COUNTERS[:] = [state["step"] for state in optimizer.state.values() if "step" in state]
        with Operations() as seen:
            done = update(optimizer, loss.detach(), scaler)
        assert done.moved, f"step {step}"
    assert seen.reads == READS[kind][has_scaler], seen.names
    assert seen.reads_after_update == 0
    assert [seen.count(part) for part in OVER_GRADIENTS] == [0, 0 if has_scaler else 1]


@pytest.mark.parametrize("kind", ["foreach", "wrapped"])
def test_a_host_optimizer_knows_overflows_at_once(kind):
    weights = [torch.nn.Parameter(torch.ones(4))]
    optimizer = KINDS[kind](weights)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=1)
    moved = []
    for gradient in (1.0, float("inf"), 1.0):
        scaler.scale(torch.ones(()))
        weights[0].grad = torch.full((4,), gradient)
        moved.append(update(optimizer, torch.ones(()), scaler).moved)
    assert moved == [True, False, True]
    assert torch.isfinite(weights[0]).all()


def test_the_optimizer_is_fused_only_on_gpus():
    """This is the optimizer of the built-in trainer."""
    model = torch.nn.Linear(2, 2)
    on_gpu = make_optimizer(model.parameters(), lr=0.1, weight_decay=0.0, fused=True)
    on_host = make_optimizer(model.parameters(), lr=0.1, weight_decay=0.0)
    for saved, resumed in ((on_gpu, on_host), (on_host, on_gpu)):
        resumed.load_state_dict(with_kernels_of(saved.state_dict(), resumed))
    fused = [
        {group["fused"] for group in optimizer.param_groups} for optimizer in (on_gpu, on_host)
    ]
    assert fused == [{True}, {None}]


def test_a_mean_loss_ignores_skipped_steps():
    mean = LossAverage()
    assert mean.value() == 0
    mean.add(torch.tensor(float("nan")), 8, finite=True)
    assert str(mean.value()) == "nan"
    mean.add(torch.tensor(2.0), 4, finite=True)
    mean.add(torch.tensor(5.0), 8, finite=True)
    assert mean.state() == (48.0, 12)
    assert mean.value() == 4
