"""One optimizer step as far as other ranks have a part in it; nothing where there are none."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from torch import Tensor, nn

from robust_train.microbatch import ranks, replicas
from robust_train.microbatch.ranks import Agreement, RankReport, Ranks, State
from robust_train.microbatch.replicas import Replica
from robust_train.microbatch.size import MicroBatchSize
from robust_train.values import Failure


@dataclass
class SharedStep:
    """The step of several ranks, or of one alone.

    Attributes:
        group: the ranks, None for one alone.
        replicas: the models whose gradients are shared.
        parameters: what is trained in them.
        agreement: the last one.
        items: this rank's.
    """

    group: Ranks | None = None
    replicas: Sequence[Replica] = ()
    parameters: Sequence[nn.Parameter] = ()
    agreement: Agreement | None = None
    items: float = 0.0

    @classmethod
    def begin(cls, models: Iterable[nn.Module]) -> SharedStep:
        """Return the step of this process, with the other ranks if there are any.

        Raises:
            UserError: a model that cannot be split here.
        """
        group = ranks.here()
        if group is None:
            return cls()
        found = group.replicas.of(models)
        return cls(group, found, replicas.shared_parameters(found))

    def without_collectives(self) -> AbstractContextManager[None]:
        """Let the models' passes send nothing within this block."""
        if not self.replicas:
            return contextlib.nullcontext()
        return replicas.without_collectives(self.replicas)

    def agree(
        self, size: MicroBatchSize, items: float, failure: Failure | None, failed_size: int
    ) -> Agreement | None:
        """Exchange with the other ranks how the parts went; None where there are none."""
        state = State.THROUGH if failure is None else State.of(failure.kind, is_exhausted=False)
        return self._exchange(size, items, state, failed_size)

    def exhausted(
        self,
        size: MicroBatchSize,
        items: float,
        failure: Failure,
        failed_size: int,
        error: Exception,
    ) -> None:
        """Report that this rank cannot go on: the others end as well, and may save before that."""
        state = State.of(failure.kind, is_exhausted=True)
        if self._exchange(size, items, state, failed_size) is not None:
            error.others_know = True  # type: ignore[attr-defined]

    def sum_gradients(self, loss: Tensor | None) -> Tensor | None:
        """Make one gradient for all; return the mean loss over all ranks' samples."""
        agreed = self.agreement
        if agreed is None or not self.parameters or not agreed.items:
            return loss
        share, group = self.items / agreed.items, self.replicas[0].process_group
        return replicas.sum_gradients(self.parameters, agreed.has_gradient, share, loss, group)

    def share_buffers(self) -> None:
        """Give every rank the buffers of the first."""
        replicas.share_buffers(self.replicas)

    def _exchange(
        self, size: MicroBatchSize, items: float, state: State, failed_size: int
    ) -> Agreement | None:
        if self.group is None:
            return None
        present = tuple(parameter.grad is not None for parameter in self.parameters)
        self.items = items
        report = RankReport(state, failed_size, size.current or 0, items, present)
        self.agreement = self.group.exchange(report)
        return self.agreement
