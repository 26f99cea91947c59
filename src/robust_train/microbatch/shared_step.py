"""One optimizer step as far as other ranks have a part in it; nothing where there are none."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from robust_train.microbatch import ranks
from robust_train.microbatch.ranks import Ranks, State, Told, Verdict
from robust_train.microbatch.size import MicroBatchSize
from robust_train.values import Failure


@dataclass
class SharedStep:
    """The step of several ranks, or of one alone.

    Attributes:
        group: the ranks, None for one alone.
        models: those whose gradients are shared.
        parameters: what is trained in them.
        verdict: the last one that was agreed on.
        items: this rank's.
    """

    group: Ranks | None = None
    models: Sequence[DistributedDataParallel] = ()
    parameters: Sequence[nn.Parameter] = ()
    verdict: Verdict | None = None
    items: float = 0.0

    @classmethod
    def begin(cls, models: Iterable[nn.Module]) -> SharedStep:
        """The step of this process, with the others if there are any.

        Raises:
            UserError: a model that cannot be split here.
        """
        group = ranks.here()
        if group is None:
            return cls()
        models = list(models)
        group.check(models)
        replicas = ranks.replicas(models)
        return cls(group, replicas, ranks.shared_parameters(replicas))

    @contextlib.contextmanager
    def without_collectives(self) -> Iterator[None]:
        """Within this block the models' passes send nothing."""
        if not self.models:
            yield
            return
        with ranks.without_collectives(self.models):
            yield

    def agree(
        self, size: MicroBatchSize, items: float, failure: Failure | None, failed_size: int
    ) -> Verdict | None:
        """Tell the other ranks how this one's parts went, and hear from them; None where there are
        none."""
        state = State.THROUGH if failure is None else State.of(failure.kind, is_exhausted=False)
        return self._agree(size, items, state, failed_size)

    def exhausted(
        self,
        size: MicroBatchSize,
        items: float,
        failure: Failure,
        failed_size: int,
        error: Exception,
    ) -> None:
        """Tell them that this one cannot go on: they end as well, and may save before that."""
        state = State.of(failure.kind, is_exhausted=True)
        if self._agree(size, items, state, failed_size) is not None:
            error.others_know = True  # type: ignore[attr-defined]

    def sum_gradients(self, loss: Tensor | None) -> Tensor | None:
        """One gradient for all; the mean loss over all ranks' samples."""
        verdict = self.verdict
        if verdict is None or not self.parameters or not verdict.items:
            return loss
        share, group = self.items / verdict.items, self.models[0].process_group
        return ranks.sum_gradients(self.parameters, verdict.has_gradient, share, loss, group)

    def share_buffers(self) -> None:
        """Every rank goes on with the buffers of the first."""
        ranks.share_buffers(self.models)

    def _agree(
        self, size: MicroBatchSize, items: float, state: State, failed_size: int
    ) -> Verdict | None:
        if self.group is None:
            return None
        present = tuple(parameter.grad is not None for parameter in self.parameters)
        self.items = items
        told = Told(state, failed_size, size.current or 0, items, present)
        self.verdict = self.group.agree(told)
        return self.verdict
