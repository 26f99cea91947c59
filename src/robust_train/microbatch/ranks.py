"""Several ranks that share an optimizer step: all repeat it with smaller parts, or all go on.

The parts run without collectives, so a rank that runs out of memory leaves no other rank waiting
in the middle of a backward pass. After them the ranks exchange one message of a few numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from robust_train.compat import collectives_begun
from robust_train.errors import UserError
from robust_train.microbatch import replicas, sharded
from robust_train.microbatch.replicas import Replica, ReplicaFinder
from robust_train.microbatch.rewind import Models, Watch
from robust_train.microbatch.size import MicroBatchSize
from robust_train.values import Failure, FailureKind

_BITS = 48  # Bits of a double that hold an integer exactly, with room to spare
_FIXED = 4


class State(IntEnum):
    """How a rank's parts went; exhausted: no smaller part may be tried."""

    THROUGH = 0
    DEVICE_FULL = 1
    HOST_FULL = 2
    DEVICE_EXHAUSTED = 3
    HOST_EXHAUSTED = 4

    @property
    def is_exhausted(self) -> bool:
        """Whether no smaller part may be tried."""
        return self >= State.DEVICE_EXHAUSTED


@dataclass(frozen=True)
class RankReport:
    """What one rank reports after its parts."""

    state: State  # how they went
    failed_size: int  # the size at which memory ran out, 0 if it did not
    size: int  # most samples in a part from now on; 0: the whole batch
    items: float  # of how many items (samples) its loss is a mean
    has_gradient: tuple[bool, ...] = ()  # for each parameter whether it got a gradient

    def row(self) -> list[float]:
        """Return it as numbers that a double holds exactly."""
        chunks = [self.has_gradient[i : i + _BITS] for i in range(0, len(self.has_gradient), _BITS)]
        bits = [float(sum(bit << place for place, bit in enumerate(chunk))) for chunk in chunks]
        return [float(self.state), float(self.failed_size), float(self.size), self.items, *bits]

    @classmethod
    def from_row(cls, row: Sequence[float], parameters: int) -> RankReport:
        """Invert :meth:`row`."""
        words = [int(word) for word in row[_FIXED:]]
        bits = (bool(words[i // _BITS] >> i % _BITS & 1) for i in range(parameters))
        return cls(State(int(row[0])), int(row[1]), int(row[2]), row[3], tuple(bits))


@dataclass(frozen=True)
class Agreement:
    """What follows from all ranks' reports: the same on each.

    ``rank`` is the first one that ran out of memory, exhausted ones first, ``state`` and
    ``failed_size`` are its own; None and 0 without any. ``has_gradient``: for each parameter,
    whether any rank has a gradient of it; ``size`` is None for the whole batch.
    """

    rank: int | None
    state: State
    failed_size: int
    size: int | None
    items: float
    has_gradient: tuple[bool, ...]


def agree(reports: Sequence[RankReport]) -> Agreement:
    """Split on all ranks if one must; one that cannot go on ends the step for all."""
    worst = max((r for r in reports if r.state), key=lambda r: r.state.is_exhausted, default=None)
    sizes = [report.size for report in reports if report.size]
    return Agreement(
        rank=None if worst is None else reports.index(worst),
        state=State.THROUGH if worst is None else worst.state,
        failed_size=0 if worst is None else worst.failed_size,
        size=min(sizes, default=None),
        items=sum(report.items for report in reports),
        has_gradient=tuple(map(any, zip(*(r.has_gradient for r in reports), strict=True))),
    )


def ran_out_elsewhere(agreement: Agreement) -> Exception:
    """Return what a rank raises because another one cannot go on: of the same kind as there."""
    message = f"out of memory on rank {agreement.rank} at every micro-batch that may be tried"
    is_hosts = agreement.state is State.HOST_EXHAUSTED
    error = MemoryError(message) if is_hosts else torch.OutOfMemoryError(message)
    error.heard_of_rank = agreement.rank  # type: ignore[union-attr]
    error.others_know = True  # type: ignore[union-attr]
    return error


class Ranks:
    """This process among those of torch's default process group."""

    def __init__(self) -> None:
        self.world: Any = dist.group.WORLD
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        # on the host: a message over the GPU would have to wait for all that is queued there
        is_on_host = dist.get_backend() == "gloo"
        self._group: Any = None if is_on_host else dist.new_group(backend="gloo")
        self.replicas = ReplicaFinder()
        self.ledger = sharded.Ledger(self.vote)
        self._votes = 0

    def vote(self, ran_out: bool) -> bool:
        """Return whether memory ran out on any rank. All ranks have to call it."""
        vote = torch.tensor([float(ran_out)], device="cpu")
        dist.all_reduce(vote, dist.ReduceOp.MAX, group=self._group)
        self._votes += self._group is None
        return bool(vote.item())

    def foreign(self) -> int:
        """Return how many collectives were begun that neither this class nor FSDP2 knows of.

        It falls where the group counts none, or only those of its default backend."""
        return collectives_begun(self.world) - self._votes - self.ledger.sent

    def most_and_sum(self, parts: int, items: float) -> tuple[int, float]:
        """Return the most parts of any rank and the items of all. All ranks have to call it."""
        rows = torch.zeros(self.size, 2, dtype=torch.float64, device="cpu")
        rows[self.rank] = torch.tensor([parts, items], dtype=torch.float64, device="cpu")
        dist.all_reduce(rows, group=self._group)
        return int(rows[:, 0].max()), float(rows[:, 1].sum())

    def exchange(self, report: RankReport) -> Agreement:
        """Send this rank's report and receive the others'. All ranks have to call it."""
        row = report.row()
        # on the host whatever the default device is
        rows = torch.zeros(self.size, len(row), dtype=torch.float64, device="cpu")
        rows[self.rank] = torch.tensor(row, dtype=torch.float64, device="cpu")
        dist.all_reduce(rows, group=self._group)
        parameters = len(report.has_gradient)
        return agree([RankReport.from_row(row, parameters) for row in rows.tolist()])

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, by rank. All ranks have to call it."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values


_here: Ranks | None = None


def here() -> Ranks | None:
    """Return this process's ranks; None where it trains alone."""
    global _here
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    if _here is None or _here.world is not dist.group.WORLD:
        _here = Ranks()
    return _here


def of_all_ranks(value: Any) -> list[Any]:
    """Return every rank's value, by rank, when all have called this; without ranks its own."""
    group = here()
    return [value] if group is None else group.gather(value)


def is_sharded(watch: Watch, models: Models) -> bool:
    """Return whether FSDP2 has sharded one of the models over several ranks."""
    group = here()
    return group is not None and bool(group.ledger.roots_in(watch.resolve(models)[0]))


class SharedStep:
    """One optimizer step of all ranks; of this process alone where there are no others. Raises
    UserError: a model that cannot be split here."""

    def __init__(self, models: Iterable[nn.Module] = ()) -> None:
        self._group = here()
        self._replicas: list[Replica] = []
        self._roots: tuple[Any, ...] = ()
        if self._group is not None:
            models = list(models)
            self._roots = self._group.ledger.roots_in(models)
            if not self._roots:
                self._replicas = self._group.replicas.of(models)
            elif any(map(replicas.replicas_in, models)):
                raise UserError(
                    "run.micro_batches: a model in DistributedDataParallel beside a sharded one "
                    f"would leave ranks waiting; shard both, {sharded.WITHOUT}"
                )
        self._parameters = replicas.shared_parameters(self._replicas)
        self._agreement: Agreement | None = None
        self._items = 0.0
        self._foreign = 0

    @property
    def is_sharded(self) -> bool:
        """Whether the passes gather weights, so that no rank may leave a part half-way."""
        return bool(self._roots)

    def plan(self, parts: int, items: float) -> tuple[int, float]:
        """Return how many parts all ranks of a sharded model run, and what their weights are times.

        FSDP takes the mean of the ranks' gradients, whatever their shares in the items are.
        """
        assert self._group is not None
        most, of_all = self._group.most_and_sum(parts, items)
        return most, items * self._group.size / of_all if of_all else 0.0

    def begin_part(self, *, training: bool = True) -> None:
        """Begin a part, in which sharded models alone may communicate."""
        if self._group is not None:
            self._foreign = self._group.foreign()
            if self._roots:
                self._group.ledger.begin_part(self._roots, training=training)

    def end_part(self, *, ran_out: bool) -> None:
        """Reach its end, with a sharded model together with the other ranks. Raises UserError: a
        collective of the user's was in it, or sharded passes differ."""
        if self._group is None:
            return
        if not ran_out and self._group.foreign() > self._foreign:
            raise UserError(
                "run.micro_batches: a collective of your own (torch.distributed) runs inside a "
                "micro-batch, where a rank that runs out of memory would leave the others waiting; "
                f"call it after the loop over the micro-batches, {sharded.WITHOUT}"
            )
        if self._roots:
            self._group.ledger.end_part(ran_out=ran_out)

    def reset(self) -> None:
        """Put sharded models in order after a part that was left half-way."""
        sharded.reset(self._roots)

    def without_collectives(self) -> AbstractContextManager[None]:
        """Let the models' passes send nothing within this block."""
        if not self._replicas:
            return contextlib.nullcontext()
        return replicas.without_collectives(self._replicas)

    def agree(
        self,
        size: MicroBatchSize,
        items: float,
        failure: Failure | None,
        failed_size: int,
        *,
        is_exhausted: bool = False,
    ) -> Agreement | None:
        """Exchange with the other ranks how the parts went; None where there are none."""
        if self._group is None:
            return None
        state = State.THROUGH
        if failure is not None:
            is_hosts = failure.kind is FailureKind.HOST_OOM
            state = State(1 + is_hosts + 2 * is_exhausted)
        present = tuple(parameter.grad is not None for parameter in self._parameters)
        self._items = items
        report = RankReport(state, failed_size, size.current or 0, items, present)
        self._agreement = self._group.exchange(report)
        return self._agreement

    def sum_gradients(self, loss: Tensor | None) -> Tensor | None:
        """Make one gradient for all; return the mean loss over all ranks' samples."""
        agreed = self._agreement
        if self._roots:  # the gradients are summed already
            return sharded.mean_loss(self._roots, loss)
        if agreed is None or not self._parameters or not agreed.items:
            return loss
        share, group = self._items / agreed.items, self._replicas[0].process_group
        return replicas.sum_gradients(self._parameters, agreed.has_gradient, share, loss, group)

    def share_buffers(self) -> None:
        """Give every rank the buffers of the first."""
        replicas.share_buffers(self._replicas)
