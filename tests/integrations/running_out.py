"""Memory that runs out at a pass that a test chooses, and what a trainer's run leaves."""

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from framework_config import framework_config
from memory_limit import limited_growth
from noted import Noted
from robust_train.attempt.run import live_of
from robust_train.config.checks import unchecked
from robust_train.config.training_plans import MicroBatchPlan
from robust_train.failures import classify_failure
from robust_train.model.failure import MEMORY_FAILURES
from robust_train.model.spec import AttemptSpec
from watched_run import WatchedRun

SAMPLE_BYTES = 64 << 20
"""Of one sample in a pass; nobody writes to it, so that it takes no memory of the machine."""

RUN_OUT = "can't allocate memory"

CFG = framework_config(4, 2, checkpoint_every_steps=None, keep_checkpoints=2)


def allocate(samples, fits):
    """Take memory for ``samples`` samples under a limit that has room for ``fits`` samples.

    The limit holds during this call alone, so that memory really runs out, here and nowhere else.
    """
    with limited_growth(fits * SAMPLE_BYTES + SAMPLE_BYTES // 2):
        torch.empty(samples * SAMPLE_BYTES, dtype=torch.uint8)


class _Fuse(torch.autograd.Function):
    @staticmethod
    def forward(context, x, fits):
        context.fits = fits
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        if context.fits is not None:
            allocate(len(gradient), context.fits)
        return gradient, None


class Fuse(nn.Module):
    """From pass ``at`` on (counted from 1, in training or not), more than ``fits`` samples do not.

    Attributes:
        packed: positions of a sample, where a batch is one row.
        sizes: samples in each pass, failed ones included.
    """

    def __init__(self, where="never", at=1, fits=2, *, training=True, packed=0):
        super().__init__()
        self.where, self.at, self.fits, self.is_for_training = where, at, fits, training
        self.packed = packed
        self.sizes: list[int] = Noted()

    def forward(self, x):
        if self.training is not self.is_for_training:
            return x
        samples = x.shape[1] // self.packed if self.packed else len(x)
        self.sizes.append(samples)
        is_limited = len(self.sizes) >= self.at
        if is_limited and self.where == "forward":
            allocate(samples, self.fits)
        return _Fuse.apply(x, self.fits if is_limited and self.where == "backward" else None)

    def of_a_split_check(self, samples):
        """The passes that check a split, without a backward pass: a part, its halves, and a quarter
        and the rest; of a part of two, which has no quarter, the same of other samples."""
        if self.where == "backward":
            first = samples // 4
            return [samples, samples // 2, samples // 2, first, samples - first]
        part = self.fits
        return [samples, *[part, part // 2, part // 2] * 2]


class Fitted:
    """What a run of a framework's trainer leaves: its events and the model's weights.

    ``first_size`` is the micro-batch of the job's first attempt.
    """

    def __init__(self, folder, model, batch_size, first_size=None):
        self.cfg = OmegaConf.merge(CFG)
        self.cfg.training.batch_size = batch_size
        self.cfg.training.gradient_accumulation_steps = 8 // batch_size
        self.model = model
        self.run = WatchedRun(folder)
        if first_size is not None:
            live_of(self.run).parts.set_asked(AttemptSpec((), first_size, 8 // first_size))
        live_of(self.run).parts.split_by(MicroBatchPlan.of(unchecked(self.cfg)))

    @property
    def weights(self):
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])

    def changed(self, *, training):
        return [
            (e["step"], e["before"], e["after"])
            for e in self.run.of("micro_batch_changed")
            if e["training"] is training
        ]


def differ_by_rounding_alone(actual, expected):
    assert (actual - expected).norm() <= 1e-5 * expected.norm()


def recorded(run, name):
    """The fields of the trainer's own events called ``name``."""
    return [event["fields"] for event in run.of("user") if event["event_name"] == name]


def ends_the_attempt(fit, caplog):
    """Assert that memory that runs out is said to end the attempt in one line, which is returned,
    that it does, and that the next one goes through with half the micro-batch."""
    with pytest.raises((RuntimeError, MemoryError)) as raised:
        fit(4)
    assert classify_failure(raised.value).kind in MEMORY_FAILURES
    lines = [r.getMessage() for r in caplog.records if "no step is repeated" in r.getMessage()]
    assert len(lines) == 1
    assert fit(2).run.last_step == 3
    return lines[0]
