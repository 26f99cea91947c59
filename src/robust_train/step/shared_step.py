"""Shares an optimizer step among several ranks, which agree on its parts and sum the gradients.

The engine calls a :class:`SharedStep` in each rank's process. The parts of a replicated model run
without collectives, and the gradients are summed after the last part. The passes of a model that
FSDP2 has sharded communicate: :mod:`.sharded` keeps the ranks together.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from operator import attrgetter, is_not
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from robust_train.compat import groups_of_process, preserve_version_counter, settle_buckets
from robust_train.memory.clearing import clear_frames
from robust_train.model.errors import UserError
from robust_train.step import sharded
from robust_train.step.ranks import RankReport, here
from robust_train.step.replicas import (
    Replica,
    all_reduce,
    broadcast,
    find_replicas,
    replicas_in,
    why_not_leave,
)
from robust_train.step.sharded import WITHOUT, RanOutElsewhereError


class SharedStep:
    """An optimizer step of all ranks, or of this process alone.

    Args:
        models: the modules that learn.
        function: the function of the step, which may call a model's wrapper.

    Raises:
        UserError: the step of a model cannot be split on several ranks.
    """

    def __init__(self, models: Iterable[nn.Module], function: Any = None) -> None:
        models = list(models)
        self._group = here()
        self._replicas: list[Replica] = []
        self._roots: tuple[Any, ...] = ()
        if self._group is not None:
            self._roots = self._group.ledger.roots_in(models)
            if not self._roots:
                self._replicas = self._group.replicas.find(models, function)
            elif any(map(replicas_in, models)):
                raise UserError(
                    "run.backward: a model in DistributedDataParallel beside a sharded model "
                    f"would leave ranks waiting; shard both, {WITHOUT}"
                )
        elif dist.is_available() and dist.is_initialized():
            # A model may be wrapped or sharded although the process trains alone.
            self._find_in_one_process(models, function)
        trained = (
            parameter
            for replica in self._replicas
            for name, parameter in replica.module.named_parameters()
            if parameter.requires_grad and name not in replica.parameters_to_ignore
        )
        # Each parameter once, in the same order on every rank.
        self._parameters = list(dict.fromkeys(trained))
        self._collectives_before = 0  # number of user collectives before the current part

    def _find_in_one_process(self, models: Sequence[nn.Module], function: Any) -> None:
        for model in models:
            for replica in find_replicas(model, function):
                # Any other replica needs no change, because it cannot leave another rank waiting.
                if why_not_leave(replica) is None:
                    self._replicas.append(replica)
        self._roots = sharded.roots_in_one_process(models)

    @property
    def rank(self) -> int:
        """The number of this process among the ranks."""
        return 0 if self._group is None else self._group.rank

    @property
    def is_shared(self) -> bool:
        """Whether other ranks exist."""
        return self._group is not None

    @property
    def is_sharded(self) -> bool:
        """Whether the passes gather weights, so that no rank may leave a part halfway."""
        return self._group is not None and bool(self._roots)

    def plan(self, parts: int, items: float, wants_check: bool) -> tuple[int, float, bool]:
        """Agree with the other ranks of a sharded model how to run a batch.

        Args:
            parts: the number of parts on this rank.
            items: the number of items that this rank's loss averages over.
            wants_check: whether this rank wants to check that splitting keeps the loss.

        Returns:
            The number of parts that every rank runs, the factor of their weights on this rank, and
            whether any rank wants the check.
        """
        assert self._group is not None
        rows = self._group.exchange_figures([parts, items, wants_check])
        most_parts = int(rows[:, 0].max())
        all_items = float(rows[:, 1].sum())
        # FSDP averages the ranks' gradients with equal weights, so this rank's share goes here.
        factor = items * self._group.size / all_items if all_items else 0.0
        return most_parts, factor, bool(rows[:, 2].any())

    def exchange_figures(self, mine: Sequence[float]) -> list[list[float]]:
        """Return the figures of all ranks that run the same passes. All of them have to call it."""
        if self._group is None or not self._roots:
            return [list(mine)]
        rows: list[list[float]] = self._group.exchange_figures(mine).tolist()
        return rows

    @contextlib.contextmanager
    def extra_pass(self) -> Iterator[None]:
        """Wrap a pass that is not one of the parts. All ranks of a sharded model run it together.

        Afterwards, sharded models are reset on every rank. Otherwise only some ranks may have freed
        their gathered weights, and the ranks' next passes would differ.
        """
        if self._group is None:
            yield
            return
        self._collectives_before = self._group.count_user_collectives()
        if self._roots:
            self._group.ledger.begin_extra_pass()
        try:
            yield
        except RanOutElsewhereError as error:
            clear_frames(error)
            raise
        except Exception as error:
            clear_frames(error)
            self.end_part(ran_out=True)
            raise
        else:
            self.end_part(ran_out=False, is_extra=True)
        finally:
            self.reset()

    def begin_part(self, *, training: bool, has_weight: bool) -> None:
        """Begin a part, in which only sharded models may communicate."""
        if self._group is not None:
            self._collectives_before = self._group.count_user_collectives()
            self._group.other_groups.begin_part(groups_of_process(dist))
            if self._roots:
                self._group.ledger.begin_part(self._roots, training=training, has_weight=has_weight)

    def end_part(self, *, ran_out: bool, is_extra: bool = False) -> None:
        """End a part, together with the other ranks if the model is sharded.

        Args:
            ran_out: whether memory ran out in the part on this rank.
            is_extra: whether the pass was not a part of the step.

        Raises:
            UserError: the user's program sent a message in the part, or sharded passes differ.
        """
        if self._group is None:
            return
        if not ran_out and self._group.count_user_collectives() > self._collectives_before:
            raise UserError(
                "run.backward: a collective of your own, send or recv, or a collective of a model "
                "in DistributedDataParallel that is not named, runs inside the function, where a "
                "rank that runs out of memory would leave the others waiting; call it after "
                f"run.backward, name the model as in [model, other], {WITHOUT}"
            )
        if not ran_out and not is_extra and self._group.uses_other_groups():
            raise UserError(
                "run.backward: messages over a process group of your own (a collective, send or "
                "recv) run inside the function, where a rank that runs out of memory would leave "
                f"the others waiting; send them after run.backward, {WITHOUT}"
            )
        if self._roots:
            self._group.ledger.end_part(ran_out=ran_out)

    def reset(self) -> None:
        """Reset sharded models after a part that was left halfway."""
        sharded.reset(self._roots)

    @contextlib.contextmanager
    def without_collectives(self) -> Iterator[None]:
        """Keep DistributedDataParallel from communicating within this block."""
        ddp = DistributedDataParallel
        wrappers = [replica for replica in self._replicas if isinstance(replica, ddp)]
        with contextlib.ExitStack() as stack:
            for wrapper in wrappers:
                settle_buckets(wrapper)
                stack.enter_context(wrapper.no_sync())
                wrapper.require_forward_param_sync = False  # sends no buffers either
            try:
                yield
            finally:
                for wrapper in wrappers:
                    wrapper.require_forward_param_sync = True

    def agree(self, report: RankReport) -> RankReport | None:
        """Return the combined report of all ranks, or None if there are no other ranks."""
        if self._group is None:
            return None
        # No Python code runs per parameter, because there may be ten thousand parameters.
        gradients = map(attrgetter("grad"), self._parameters)
        present = tuple(map(is_not, gradients, itertools.repeat(None)))
        return self._group.exchange(replace(report, has_gradient=present))

    @torch.no_grad()
    def sum_gradients(
        self, agreed: RankReport | None, loss: Tensor | None, items: float
    ) -> Tensor | None:
        """Sum the ranks' gradients, weighted by their items, and return the mean loss of all ranks.

        A parameter that has no gradient on any rank gets none, so that optimizers skip it.
        """
        if self.is_sharded:  # FSDP has summed the gradients.
            return sharded.mean_loss(self._roots, loss)
        if agreed is None or not self._parameters or not agreed.items:
            return loss
        for parameter, is_needed in zip(self._parameters, agreed.has_gradient, strict=True):
            if is_needed and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        total = torch.zeros((), dtype=torch.float32, device=self._parameters[0].device)
        if loss is not None:
            # The last layer of a model on several GPUs is on another GPU than the first layer.
            total += loss.to(total.device)
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        share = items / agreed.items
        all_reduce([*gradients, total], share, self._replicas[0].process_group)
        return total

    @torch.no_grad()
    def share_buffers(self) -> None:
        """Give every rank the buffers (BatchNorm's statistics) of rank 0, as DDP does."""
        if self._group is None:
            return
        for replica in self._replicas:
            if not replica.broadcast_buffers:
                continue
            buffers = [
                buffer
                for name, buffer in replica.module.named_buffers()
                if name not in replica.parameters_to_ignore
            ]
            source = dist.get_global_rank(replica.process_group, 0)
            with contextlib.ExitStack() as stack:
                for buffer in buffers:
                    # Autograd, and a step that is rewound, would treat a new version as a change.
                    stack.enter_context(preserve_version_counter(torch, buffer))
                broadcast(buffers, source, replica.process_group)
