"""The job that every contestant of ``recovery.py`` does, and what is counted while it is done.

A residual network over sequences whose activations need far more memory than its weights. All is
deterministic: no dropout, data in the order of its index. Samples are padded to the longest of
their batch, and the padding is masked, so that a sample gives the same loss in any company.
"""

from __future__ import annotations

import json
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, Dataset, Subset

VOCABULARY = 256
CLASSES = 10
SEED = 0
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Job:
    """What is trained.

    Attributes:
        case: ``first``: all samples are equally long; ``late``: they grow longer in three stages,
            and the last one starts after two thirds of the steps.
        steps: optimizer steps of ``batch`` samples each.
        batch: the requested batch, which is to stay the effective one.
        length: of the samples, of the longest ones in the late case.
        width: of the network.
        depth: of the network.
        data_limit: bytes by which private memory may grow during training, None for any number.
        checkpoint_every_steps: for those who resume from checkpoints.
    """

    case: str
    steps: int = 60
    batch: int = 32
    length: int = 176
    width: int = 128
    depth: int = 4
    data_limit: int | None = None
    checkpoint_every_steps: int = 5

    @property
    def failing_step(self) -> int:
        """Number of the step, from 1, at which the requested batch does not fit."""
        return 1 if self.case == "first" else self.steps * 2 // 3

    @property
    def lengths(self) -> tuple[int, int, int]:
        """Of the samples in the three stages."""
        if self.case == "first":
            return self.length, self.length, self.length
        return self.length * 3 // 8, self.length // 2, self.length

    def length_at(self, step: int) -> int:
        """Of the samples of optimizer step ``step``, from 1."""
        if step >= self.failing_step:
            return self.lengths[2]
        return self.lengths[0] if step < self.failing_step // 2 else self.lengths[1]

    def as_json(self) -> str:
        """To be carried to another process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        """The inverse of :meth:`as_json`."""
        return cls(**json.loads(text))


class Samples(Dataset[tuple[Tensor, int]]):
    """Random tokens; the label is a function of the first one."""

    def __init__(self, job: Job) -> None:
        generator = torch.Generator().manual_seed(SEED)
        shape = (job.steps * job.batch, job.length)
        self._tokens = torch.randint(VOCABULARY, shape, generator=generator)
        self._job = job

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        length = self._job.length_at(1 + index // self._job.batch)
        tokens = self._tokens[index, :length]
        return tokens, int(tokens[0]) % CLASSES


def collate(samples: list[tuple[Tensor, int]]) -> Batch:
    """Pad to the longest sample."""
    longest = max(len(tokens) for tokens, _ in samples)
    tokens_BT = torch.zeros(len(samples), longest, dtype=torch.long)
    mask_BT = torch.zeros(len(samples), longest)
    for row, (tokens, _) in enumerate(samples):
        tokens_BT[row, : len(tokens)] = tokens
        mask_BT[row, : len(tokens)] = 1
    labels_B = torch.tensor([label for _, label in samples])
    return {"tokens": tokens_BT, "mask": mask_BT, "labels": labels_B}


def loader(job: Job, batch_size: int, *, first_step: int = 1) -> DataLoader[Any]:
    """The data in order, from the first sample of optimizer step ``first_step`` on."""
    samples = Samples(job)
    rest = Subset(samples, range((first_step - 1) * job.batch, len(samples)))
    return DataLoader(rest, batch_size=batch_size, collate_fn=collate)


class Network(nn.Module):
    """Embedding, residual blocks at every position, masked mean, classification."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, job.width)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(job.width),
                nn.Linear(job.width, 2 * job.width),
                nn.SiLU(),
                nn.Linear(2 * job.width, job.width),
            )
            for _ in range(job.depth)
        )
        self.head = nn.Linear(job.width, CLASSES)
        self._data_limit = job.data_limit
        METER.watch(self.embedding.weight)

    def forward(self, tokens: Tensor, mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        METER.arm(self._data_limit)
        METER.forward_begins(len(labels), self.embedding.weight)
        x_BTD = self.embedding(tokens)
        for block in self.blocks:
            x_BTD = x_BTD + block(x_BTD)
        mean_BD = (x_BTD * mask.unsqueeze(2)).sum(1) / mask.sum(1, keepdim=True)
        return {"loss": nn.functional.cross_entropy(self.head(mean_BD), labels)}


class Meter:
    """Counts what the network is asked to do in this process, however often it is built anew.

    Attributes:
        samples_begun: that went into a forward pass.
        step_samples: for each optimizer step, how many samples its gradient is of.
    """

    def __init__(self) -> None:
        self._is_armed = False
        self._resident_before = 0
        self.reset()

    def reset(self) -> None:
        """Count from zero."""
        self.samples_begun = 0
        self.step_samples: list[int] = []
        self._in_gradient = 0
        self._in_pass = 0

    def arm(self, data_limit: int | None) -> None:
        """At the first forward pass: all set-up is done, memory may grow by so much from now on."""
        if self._is_armed:
            return
        self._is_armed = True
        # 5 sets the peak of resident memory to what is resident now, see proc(5)
        Path("/proc/self/clear_refs").write_text("5")
        self._resident_before = _status("VmRSS")
        if data_limit is not None:
            _, hard = resource.getrlimit(resource.RLIMIT_DATA)
            resource.setrlimit(resource.RLIMIT_DATA, (data_bytes() + data_limit, hard))

    def disarm(self) -> None:
        """No limit any more, for what comes after training."""
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))

    def watch(self, weight: Tensor) -> None:
        """Learn when a backward pass has reached its end: ``weight`` gets its gradient last."""
        weight.register_hook(lambda _: self._backward_ended())

    def forward_begins(self, samples: int, weight: Tensor) -> None:
        """A forward pass of so many samples."""
        if weight.grad is None:
            self._in_gradient = 0
        self._in_pass = samples
        self.samples_begun += samples

    def _backward_ended(self) -> None:
        self._in_gradient += self._in_pass

    def step_ended(self) -> None:
        """An optimizer step was made."""
        self.step_samples.append(self._in_gradient)
        self._in_gradient = 0

    def figures(self) -> dict[str, Any]:
        """So far, in JSON's types."""
        return {
            "samples_begun": self.samples_begun,
            "step_samples": list(self.step_samples),
            "peak_bytes": _status("VmHWM") - self._resident_before,
        }


METER = Meter()
register_optimizer_step_post_hook(lambda *ignored: METER.step_ended())


def build(job: Job) -> tuple[Network, torch.optim.Optimizer]:
    """The network with its first weights, and its optimizer."""
    torch.manual_seed(SEED)
    network = Network(job)
    # Adam divides gradients by their size, and so makes much of the rounding errors of tiny ones:
    # the order in which samples are added up would be seen in the fifth digit
    return network, torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)


def train(job: Job, batch_size: int, accumulation: int) -> Network:
    """The plain loop, which knows nothing of memory."""
    network, optimizer = build(job)
    for number, batch in enumerate(loader(job, batch_size), start=1):
        (network(**batch)["loss"] / accumulation).backward()
        if number % accumulation == 0:
            optimizer.step()
            optimizer.zero_grad()
    return network


def warm_up() -> None:
    """Let the mathematics libraries make what they make once; no contestant is to pay for it."""
    network = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.SiLU())
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    network(torch.zeros(64, 8)).sum().backward()
    optimizer.step()
    METER.reset()


def measure_limit(job: Job) -> int:
    """Bytes between what half of the batch needs, and what the requested one would.

    In the late case the requested batch fits until the last stage. To be called in a fresh
    process, because the C library keeps some of what it was once given.
    """
    fits = [(job.batch // 2, job.length)]
    if job.case == "late":
        fits.append((job.batch, job.lengths[1]))
    fits.sort(key=lambda point: point[0] * point[1])
    needed = [_growth(job, *point) for point in (*fits, (job.batch, job.length))]
    return (needed[-2] + needed[-1]) // 2


def _growth(job: Job, batch_size: int, length: int) -> int:
    """Peak growth of private memory over three optimizer steps, since the process was set up."""
    short = Job("first", steps=3, batch=job.batch, length=length, width=job.width, depth=job.depth)
    with _watched_data() as grown:
        train(short, batch_size, job.batch // batch_size)
    return grown[0]


_before_any: list[int] = []


@contextmanager
def _watched_data() -> Iterator[list[int]]:
    """Yields a list of one number, which is the peak growth afterwards."""
    peak = [0]
    done = threading.Event()
    is_watching = threading.Event()

    def watch() -> None:
        is_watching.set()
        while not done.wait(0.0005):
            peak[0] = max(peak[0], data_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    is_watching.wait()
    # with the watcher's own stack, which is there in each call
    _before_any.append(data_bytes())
    try:
        yield peak
    finally:
        done.set()
        watcher.join()
        peak[0] -= _before_any[0]


def data_bytes() -> int:
    """Private writable memory of this process, which is what RLIMIT_DATA limits."""
    return _status("VmData")


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise LookupError(name)
