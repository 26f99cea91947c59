"""The ranks (processes) that train a model together, and the messages by which they agree.

:func:`here` returns this process's :class:`Ranks`, in the process that trains. The parts of a step
run without collectives, so a rank that runs out of memory can repeat its share in smaller parts
without leaving other ranks waiting in a backward pass. Afterwards the ranks exchange a
:class:`RankReport` each, and continue with the combined report, for example with the smallest size.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from robust_train.compat import collectives_begun, groups_of_process
from robust_train.model.failure import Failure
from robust_train.step import sharded
from robust_train.step.replicas import ReplicaFinder

T = TypeVar("T")


@dataclass(frozen=True)
class RanOut:
    """Memory ran out on a rank."""

    failure: Failure
    size: int  # of the parts
    is_exhausted: bool = False  # no smaller size may be tried
    rank: int = 0


@dataclass(frozen=True)
class RankReport:
    """A rank's report after its parts, or the combined report of all ranks."""

    ran_out: RanOut | None
    size: int | None  # maximum number of samples in a part from now on. None: the whole batch
    items: float  # the number of items that its loss averages over
    has_gradient: tuple[bool, ...] = ()  # for each shared parameter
    returns_more: bool = False  # its function returned more than a loss


def agree(reports: Sequence[RankReport]) -> RankReport:
    """Combine the reports of all ranks.

    The shortage is that of the first rank that can try no smaller size, or else of the first rank
    that ran out. The size is the smallest, a flag is set if any rank set it, and items are summed.
    """
    shortages = [report.ran_out for report in reports if report.ran_out is not None]
    exhausted = [ran_out for ran_out in shortages if ran_out.is_exhausted]
    ran_out = None
    if shortages:
        ran_out = (exhausted or shortages)[0]
    sizes = [report.size for report in reports if report.size is not None]
    flags_by_parameter = zip(*(report.has_gradient for report in reports), strict=True)
    return RankReport(
        ran_out=ran_out,
        size=min(sizes, default=None),
        items=sum(report.items for report in reports),
        has_gradient=tuple(any(flags) for flags in flags_by_parameter),
        returns_more=any(report.returns_more for report in reports),
    )


class OtherGroups:
    """Detects messages over process groups other than the default, in the first two parts.

    Later parts are not examined, because a thread that saves a checkpoint has a group as well, and
    the sender of a message is unknown. No checkpoint is saved before the first parts are done.
    """

    _PARTS = 2

    def __init__(self) -> None:
        self._parts = 0
        self._begun: dict[Any, int] = {}

    def begin_part(self, groups: Iterable[Any]) -> None:
        """Count the messages that the groups of this process have begun so far."""
        if self._parts < self._PARTS:
            self._begun = {group: collectives_begun(group) for group in groups}

    def end_part(self, groups: Iterable[Any], ours: Container[Any]) -> bool:
        """Return whether this is the second part, and both parts sent over a user's group.

        Args:
            groups: all process groups of this process.
            ours: the groups that this package and FSDP2 send over.
        """
        if self._parts >= self._PARTS:
            return False
        others = [group for group in groups if group not in ours]
        talks = any(collectives_begun(group) > self._begun.get(group, 0) for group in others)
        self._parts = self._parts + 1 if talks else self._PARTS
        return talks and self._parts == self._PARTS


class Ranks:
    """This process among those of torch's default process group."""

    def __init__(self) -> None:
        self.world: Any = dist.group.WORLD
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        # A group on the host, because a message over the GPU would wait for all work that is queued
        # there. It is not the default group, whose counter shows the user's collectives.
        self._group: Any = dist.new_group(backend="gloo")
        start_nccl()
        self.replicas = ReplicaFinder()
        self.ledger = sharded.Ledger(self._vote)
        self.other_groups = OtherGroups()
        self._reported: RankReport | None = None  # this rank's latest report, without the items
        self._agreed: RankReport | None = None  # the latest combined report

    def _vote(self, ran_out: bool) -> bool:
        """Return whether memory ran out on any rank. All ranks have to call it."""
        return bool(self.exchange_figures([ran_out]).any())

    def count_user_collectives(self) -> int:
        """Return the number of collectives that neither this class nor FSDP2 has started.

        It counts the default group alone, because another group may belong to a thread that saves
        checkpoints. The number is too low, even negative, if the group does not count all.
        """
        return collectives_begun(self.world) - self.ledger.sent

    def uses_other_groups(self) -> bool:
        """Return whether the parts send over the user's groups."""
        ours = {self.world, self._group, *self.ledger.groups}
        return self.other_groups.end_part(groups_of_process(dist), ours)

    def exchange_figures(self, mine: Sequence[float]) -> Tensor:
        """Return the figures of all ranks, a row for each rank. All ranks have to call it."""
        # A user may have changed torch's default device.
        with torch.device("cpu"):
            rows = torch.zeros(self.size, len(mine), dtype=torch.float64)
            rows[self.rank] = torch.tensor(mine, dtype=torch.float64)
        dist.all_reduce(rows, group=self._group)
        return rows

    def exchange(self, report: RankReport) -> RankReport:
        """Return the combined report of all ranks. All ranks have to call it.

        Whole reports are sent only if a rank has news. Otherwise the latest agreement holds, and
        only the numbers of items are summed.
        """
        without_items = replace(report, items=0.0)
        has_news = report.ran_out is not None or without_items != self._reported
        wants_reports = has_news or self._agreed is None
        rows = self.exchange_figures([wants_reports, report.items])
        self._reported = without_items
        if self._agreed is None or rows[:, 0].any():
            self._agreed = agree(self.gather(report))
            return self._agreed
        return replace(self._agreed, ran_out=None, items=float(rows[:, 1].sum()))

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in their order. All ranks have to call it."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values


def start_nccl() -> None:
    """Make NCCL allocate its memory now, if the default group uses NCCL.

    If that ran out of memory later, in a part of a step, the micro-batch would be blamed. All ranks
    have to call it.
    """
    if "nccl" not in str(dist.get_backend()):
        return
    dist.all_reduce(torch.zeros(1, device="cuda"))


_here: Ranks | None = None


def here() -> Ranks | None:
    """Return this process's ranks, or None if it trains alone."""
    global _here
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    if _here is None or _here.world is not dist.group.WORLD:
        _here = Ranks()
    return _here


def of_all_ranks(value: Any) -> list[Any]:
    """Return the values of all ranks, in their order. All ranks have to call it.

    A process that trains alone gets its own value.
    """
    group = here()
    return [value] if group is None else group.gather(value)


def is_sharded(model: nn.Module) -> bool:
    """Return whether FSDP2 has sharded the model over several ranks."""
    group = here()
    return group is not None and bool(group.ledger.roots_in([model]))
