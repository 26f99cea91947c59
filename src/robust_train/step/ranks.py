"""Several ranks that share an optimizer step: they agree how it went, and make one gradient of it.

The parts run without collectives, so a rank that runs out of memory repeats its own in smaller
parts and leaves no other rank waiting in the middle of a backward pass. After them the ranks
exchange one short message. The passes of a sharded model communicate: see :mod:`.sharded`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from robust_train.compat import collectives_begun
from robust_train.model.errors import UserError
from robust_train.model.failure import Failure
from robust_train.step import replicas, sharded
from robust_train.step.replicas import Replica, ReplicaFinder


@dataclass(frozen=True)
class RanOut:
    """Memory ran out in a pass over parts of this size; exhausted: no smaller one may be tried."""

    failure: Failure
    size: int
    is_exhausted: bool = False


@dataclass(frozen=True)
class RankReport:
    """What one rank reports after its parts."""

    ran_out: RanOut | None  # None: it did not
    size: int | None  # most samples in a part from now on; None: the whole batch
    has_gradient: tuple[
        bool, ...
    ] = ()  # for each shared parameter whether it has a gradient
    returns_more: bool = False  # its function returned more than a loss


@dataclass(frozen=True)
class Agreement:
    """What follows from all ranks' reports: the same on each.

    ``rank`` is the first one that ran out of memory, exhausted ones first, ``ran_out`` its own
    report; None without any. ``has_gradient``: for each parameter, whether any rank has a gradient
    of it. ``items``: of how many the loss of all ranks is a mean.
    """

    rank: int
    ran_out: RanOut | None
    size: int | None
    has_gradient: tuple[bool, ...]
    returns_more: bool
    items: float


def agree(reports: Sequence[RankReport], items: float) -> Agreement:
    """Split finer on all ranks if one must; one that cannot go on ends the step for all."""
    failed = [
        (rank, r.ran_out) for rank, r in enumerate(reports) if r.ran_out is not None
    ]
    worst = max(failed, key=lambda pair: pair[1].is_exhausted, default=None)
    sizes = [report.size for report in reports if report.size is not None]
    return Agreement(
        rank=0 if worst is None else worst[0],
        ran_out=None if worst is None else worst[1],
        size=min(sizes, default=None),
        has_gradient=tuple(
            map(any, zip(*(r.has_gradient for r in reports), strict=True))
        ),
        returns_more=any(report.returns_more for report in reports),
        items=items,
    )


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
        self._reported: RankReport | None = None
        self._agreed: Agreement | None = None

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
        rows[self.rank] = torch.tensor(
            [parts, items], dtype=torch.float64, device="cpu"
        )
        dist.all_reduce(rows, group=self._group)
        return int(rows[:, 0].max()), float(rows[:, 1].sum())

    def exchange(self, report: RankReport, items: float) -> Agreement:
        """Send this rank's report and receive the others'. All ranks have to call it.

        Reports go around only if one of them has news; else the last agreement holds.
        """
        has_news = (
            self._agreed is None
            or report.ran_out is not None
            or report != self._reported
        )
        # on the host whatever the default device is
        sums = torch.tensor([float(has_news), items], dtype=torch.float64, device="cpu")
        dist.all_reduce(sums, group=self._group)
        news, of_all = sums.tolist()
        self._reported = report
        if news or self._agreed is None:
            self._agreed = agree(self.gather(report), of_all)
            return self._agreed
        return replace(self._agreed, rank=0, ran_out=None, items=of_all)

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, by rank. All ranks have to call it."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values


_here: Ranks | None = None


def here() -> Ranks | None:
    """Return this process's ranks; None if it trains alone."""
    global _here
    if (
        not dist.is_available()
        or not dist.is_initialized()
        or dist.get_world_size() == 1
    ):
        return None
    if _here is None or _here.world is not dist.group.WORLD:
        _here = Ranks()
    return _here


def of_all_ranks(value: Any) -> list[Any]:
    """Return every rank's value, by rank, when all have called this; without ranks its own."""
    group = here()
    return [value] if group is None else group.gather(value)


def is_sharded(model: nn.Module) -> bool:
    """Return whether FSDP2 has sharded the model over several ranks."""
    group = here()
    return group is not None and bool(group.ledger.roots_in([model]))


class SharedStep:
    """One optimizer step of all ranks; of this process alone if there are no others.

    Raises:
        UserError: a model that cannot be split here.
    """

    def __init__(
        self, models: Iterable[nn.Module], beside: Iterable[nn.Module] = ()
    ) -> None:
        """Find what ranks share in ``models``, which learn; ``beside`` may hold their wrappers."""
        self._group = here()
        self._replicas: list[Replica] = []
        self._roots: tuple[Any, ...] = ()
        if self._group is not None:
            models = list(models)
            self._roots = self._group.ledger.roots_in(models)
            if not self._roots:
                self._replicas = self._group.replicas.of(models, beside)
            elif any(map(replicas.replicas_in, models)):
                raise UserError(
                    "run.backward: a model in DistributedDataParallel beside a sharded one "
                    f"would leave ranks waiting; shard both, {sharded.WITHOUT}"
                )
        self._parameters = replicas.shared_parameters(self._replicas)
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

    def begin_part(self, *, training: bool) -> None:
        """Begin a part, in which sharded models alone may communicate."""
        if self._group is not None:
            self._foreign = self._group.foreign()
            if self._roots:
                self._group.ledger.begin_part(self._roots, training=training)

    def end_part(self, *, ran_out: bool) -> None:
        """Reach its end, with a sharded model together with the other ranks.

        Raises:
            UserError: a collective of the user's was in it, or sharded passes differ.
        """
        if self._group is None:
            return
        if not ran_out and self._group.foreign() > self._foreign:
            raise UserError(
                "run.backward: a collective of your own (torch.distributed) runs inside the "
                "function, where a rank that runs out of memory would leave the others waiting; "
                f"call it after run.backward, {sharded.WITHOUT}"
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
        self, size: int | None, items: float, ran_out: RanOut | None, returns_more: bool
    ) -> Agreement | None:
        """Exchange with the other ranks how the parts went; None if there are none."""
        if self._group is None:
            return None
        self._items = items
        present = tuple(parameter.grad is not None for parameter in self._parameters)
        return self._group.exchange(
            RankReport(ran_out, size, present, returns_more), items
        )

    def sum_gradients(
        self, agreed: Agreement | None, loss: Tensor | None
    ) -> Tensor | None:
        """Make one gradient for all; return the mean loss over all ranks' items."""
        if self._roots:  # the gradients are summed already
            return sharded.mean_loss(self._roots, loss)
        if agreed is None or not self._parameters or not agreed.items:
            return loss
        share, group = self._items / agreed.items, self._replicas[0].process_group
        return replicas.sum_gradients(
            self._parameters, agreed.has_gradient, share, loss, group
        )

    def share_buffers(self) -> None:
        """Give every rank the buffers of the first."""
        replicas.share_buffers(self._replicas)
