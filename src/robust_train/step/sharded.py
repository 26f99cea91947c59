"""Keeps the ranks of a model sharded by FSDP2 (``fully_shard``) together if one runs out of memory.

The passes of a sharded model gather weights and scatter gradients, so a rank that leaves a part
halfway would leave the other ranks waiting. Instead it takes part in the remaining collectives of
that part with empty buffers, and every rank discards the result. :mod:`.ranks` holds a
:class:`Ledger` of the collectives, in each rank's process.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from robust_train.compat import (
    collectives_begun,
    has_own_collectives,
    reset_sharding,
    sharding_has_begun,
    wrap_collectives,
)
from robust_train.model.errors import UserError

WITHOUT = "or do without run.backward: then an attempt is repeated in place of a step"


class RanOutElsewhereError(Exception):
    """Memory ran out on another rank in the current part."""


@dataclass(frozen=True)
class Collective:
    """A collective in the pass of a sharded model, with everything needed to take part in it."""

    is_gathered: bool  # True: weights are gathered. False: gradients are reduced and scattered
    output: int  # number of output elements
    input: int  # number of input elements
    dtype: torch.dtype
    device: torch.device
    group: Any = field(compare=False)
    op: Any = field(compare=False)

    def play(self) -> None:
        """Take part in the collective, and send zeros."""
        output = torch.empty(self.output, dtype=self.dtype, device=self.device)
        zeros = torch.zeros(self.input, dtype=self.dtype, device=self.device)
        if self.is_gathered:
            dist.all_gather_into_tensor(output, zeros, group=self.group)
        else:
            dist.reduce_scatter_tensor(output, zeros, group=self.group, op=self.op)


class Ledger:
    """Records the collectives of a part, so that a rank that runs out can complete them.

    All parts of a kind have the same collectives, on every rank. The collectives of the first part
    that succeeds on all ranks become the record. Until there is a record, the ranks vote before
    each collective whether one of them has run out.

    Args:
        vote: sends all ranks whether this rank ran out, and returns whether any rank did.
    """

    def __init__(self, vote: Callable[[bool], bool]) -> None:
        self._vote = vote
        self._roots = weakref.WeakKeyDictionary[nn.Module, tuple[Any, ...]]()
        self._records: dict[object, list[Collective]] = {}
        self._kind: object = None  # the kind of the current part. None: a pass that is not a part
        self._has_weight = True
        # The collectives of the current part so far. None outside of parts.
        self._so_far: list[Collective] | None = None
        # The error of a collective on this rank.
        self._failed: BaseException | None = None
        self.sent = 0  # number of collectives of sharded models over the default group
        self.groups: set[Any] = set()  # the groups over which sharded models send

    def roots_in(self, models: Iterable[nn.Module]) -> tuple[Any, ...]:
        """Return the outermost sharded modules in ``models``, and record their collectives.

        Raises:
            UserError: a step cannot be repeated with this way of sharding.
        """
        roots: list[Any] = []
        for model in models:
            if model not in self._roots:
                self._roots[model] = self._watch(model)
            roots += self._roots[model]
        return tuple(dict.fromkeys(roots))

    def begin_part(self, roots: Sequence[Any], *, training: bool, has_weight: bool) -> None:
        """Start recording the collectives of a part.

        Args:
            roots: the outermost sharded modules.
            training: whether the part has a backward pass.
            has_weight: whether the part has weight. If not, its gradients count as zeros.
        """
        self._has_weight = has_weight
        # A module whose weights are still gathered gathers nothing. That is another kind of part.
        parameters = (parameter for root in roots for parameter in root.parameters())
        is_gathered = tuple(not hasattr(parameter, "device_mesh") for parameter in parameters)
        self._kind = (tuple(map(id, roots)), training, is_gathered)
        self._so_far = []

    def begin_extra_pass(self) -> None:
        """Begin a pass that is not a part. It has no record, so the ranks vote."""
        self._has_weight = True
        self._kind = None
        self._so_far = []

    def end_part(self, *, ran_out: bool) -> None:
        """End the part together with the other ranks.

        Args:
            ran_out: memory ran out in the part on this rank, and its pass has released its memory.

        Raises:
            UserError: the part's collectives differ from those of the parts before it.
            BaseException: the error of a collective that failed after it was sent. The progress of
                the other ranks is unknown, so the step cannot be repeated and the attempt ends.
        """
        failed = self._failed
        if failed is not None:
            self._failed = None
            raise failed
        so_far = self._so_far
        self._so_far = None
        if so_far is None:
            return
        record = self._records.get(self._kind)
        if record is None:
            # Without a record, the ranks vote at the end as before each collective.
            is_whole = not self._vote(ran_out)
            if is_whole and self._kind is not None:
                self._records[self._kind] = so_far
        elif ran_out:
            for collective in record[len(so_far) :]:
                collective.play()
        elif so_far != record:
            raise UserError(
                "run.backward: the passes of this model send different messages between its "
                f"ranks, so that no step can be repeated; send the same in each pass, {WITHOUT}"
            )

    def _watch(self, model: nn.Module) -> tuple[Any, ...]:
        modules = _sharded_in(model)
        if not modules:
            return ()
        for module in modules:
            module.reshard()
        _refuse(model, modules)
        for module in modules:
            gather, scatter = wrap_collectives(self._record)
            module.set_custom_all_gather(gather)
            module.set_custom_reduce_scatter(scatter)
        self._records.clear()
        return _outermost(modules)

    @contextlib.contextmanager
    def _record(
        self, is_gathered: bool, output: Tensor, given: Tensor, group: Any, op: Any
    ) -> Iterator[None]:
        """Record a collective once it has been sent, or its error if sending failed."""
        if self._so_far is not None and self._kind not in self._records and self._vote(False):
            self._so_far = None
            raise RanOutElsewhereError
        if not (self._has_weight or is_gathered):
            given.zero_()  # The mean loss of a part without items is NaN.
        if group is dist.group.WORLD:
            self.sent += 1
        self.groups.add(group)
        begun = collectives_begun(group)
        try:
            yield
        except BaseException as error:
            # If nothing was sent, this rank still has to take part in the collective.
            if collectives_begun(group) != begun:
                self._failed = error
            raise
        if self._so_far is None:  # Not in a part.
            return
        collective = Collective(
            is_gathered, output.numel(), given.numel(), output.dtype, output.device, group, op
        )
        self._so_far.append(collective)


def reset(roots: Iterable[Any]) -> None:
    """Reset sharded models after an abandoned part, and drop their gradients."""
    for root in roots:
        if sharding_has_begun(root):
            reset_sharding(root)


def mean_loss(roots: Sequence[Any], loss: Tensor | None) -> Tensor:
    """Return the mean of the ranks' losses. None counts as 0."""
    total = torch.zeros((), device=next(roots[0].parameters()).device)
    if loss is not None:
        total += loss.to(total.device)
    dist.all_reduce(total)
    return total / dist.get_world_size()


def roots_in_one_process(models: Iterable[nn.Module]) -> tuple[Any, ...]:
    """Return the outermost sharded modules of a process that trains alone.

    Raises:
        UserError: the modules cannot be reset after an abandoned part.
    """
    roots = _outermost([module for model in models for module in _sharded_in(model)])
    for root in roots:
        refuse("", root, _why_not_reset(root))
    return roots


def _outermost(modules: Sequence[Any]) -> tuple[Any, ...]:
    inner = {part for module in modules for part in module.modules() if part is not module}
    return tuple(module for module in modules if module not in inner)


def _sharded_in(model: nn.Module) -> list[Any]:
    # If FSDP2 was not imported, no module is sharded.
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    return [part for part in model.modules() if isinstance(part, kind)]


def refuse(name: str, module: nn.Module, reason: str | None) -> None:
    """Raise UserError if ``reason`` says why steps with this module cannot be repeated."""
    if reason is not None:
        where = f"{name or 'the model'} ({type(module).__name__})"
        raise UserError(f"run.backward: {where} {reason}")


def _refuse(model: nn.Module, modules: Sequence[Any]) -> None:
    for name, part in model.named_modules():
        if part in modules:
            refuse(name, part, _why_not(part))
    for name, parameter in model.named_parameters():
        mesh = getattr(parameter, "device_mesh", None)
        if mesh is None and parameter.requires_grad:
            raise UserError(
                f"run.backward: {name} is not sharded, beside parameters that are; apply "
                f"fully_shard to the whole model, {WITHOUT}"
            )
        if mesh is not None and (mesh.ndim > 1 or mesh.size() != dist.get_world_size()):
            raise UserError(
                "run.backward: the model has hybrid sharding or tensor parallelism, whose messages"
                f" no one can send for a rank that runs out; shard it over all ranks, {WITHOUT}"
            )


def _why_not(module: Any) -> str | None:
    """Return what makes it impossible to repeat a step of a sharded module, if anything."""
    if has_own_collectives(module):
        return f"has collectives of its own (set_custom_all_gather); do without them, {WITHOUT}"
    return _why_not_reset(module)


def _why_not_reset(module: Any) -> str | None:
    if hasattr(module, "reset_iter_state"):
        return None
    return f"needs a torch that has FSDPModule.reset_iter_state; update torch, {WITHOUT}"
