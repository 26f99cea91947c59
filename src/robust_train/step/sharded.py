"""Models sharded by FSDP2 (``fully_shard``): a rank that runs out does not leave others waiting.

The passes of a sharded model gather weights and scatter gradients, so a rank that leaves a part
half-way would leave the others waiting. Instead it takes part in the rest of the part's collectives
with empty buffers. Every rank discards the result of that part.
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
    """One message of a sharded model's pass: what a rank needs to play its role in it."""

    is_gathered: bool  # else its gradients are reduced and scattered
    output: int  # numbers that come out
    input: int  # numbers that go in
    dtype: torch.dtype
    device: torch.device
    group: Any = field(compare=False)
    op: Any = field(compare=False)

    def play(self) -> None:
        """Take part in it with nothing to send."""
        output = torch.empty(self.output, dtype=self.dtype, device=self.device)
        nothing = torch.zeros(self.input, dtype=self.dtype, device=self.device)
        if self.is_gathered:
            dist.all_gather_into_tensor(output, nothing, group=self.group)
        else:
            dist.reduce_scatter_tensor(output, nothing, group=self.group, op=self.op)


class Ledger:
    """The collectives of a step's parts, the same on every rank and in every part of a kind.

    The first part that succeeds on all ranks is the record that a rank follows after it runs out.
    Until then, a vote precedes each collective.

    Args:
        vote: sends all ranks whether this rank ran out, and returns whether any did.
    """

    def __init__(self, vote: Callable[[bool], bool]) -> None:
        self._vote = vote
        self._roots = weakref.WeakKeyDictionary[nn.Module, tuple[Any, ...]]()
        self._records: dict[object, list[Collective]] = {}
        self._part: object = None  # None during a pass that is not a part
        self._has_weight = True
        self._now: list[Collective] | None = None
        # The error of a collective on this rank.
        self._failed: BaseException | None = None
        self.sent = 0  # collectives of sharded models over the default group
        self.groups: set[Any] = set()  # over which sharded models send

    def roots_in(self, models: Iterable[nn.Module]) -> tuple[Any, ...]:
        """Return the outermost sharded modules in ``models``, whose collectives are noted from now.
        Raises UserError: a way of sharding in which a step cannot be repeated."""
        roots: list[Any] = []
        for model in models:
            if model not in self._roots:
                self._roots[model] = self._watch(model)
            roots += self._roots[model]
        return tuple(dict.fromkeys(roots))

    def begin_part(
        self,
        roots: Sequence[Any],
        *,
        training: bool,
        has_weight: bool,  # else its gradients are zeros, whatever its loss
    ) -> None:
        """Begin to note the collectives of a part."""
        self._has_weight = has_weight
        # modules that were left unsharded gather nothing: the next part may have another list
        parameters = (parameter for root in roots for parameter in root.parameters())
        is_gathered = tuple(not hasattr(parameter, "device_mesh") for parameter in parameters)
        self._part = (tuple(map(id, roots)), training, is_gathered)
        self._now = []

    def begin_extra_pass(self) -> None:
        """Start a pass that is not a part. It has no record, so the ranks vote."""
        self._has_weight = True
        self._part = None
        self._now = []

    def end_part(self, *, ran_out: bool) -> None:
        """Reach the part's end together with the other ranks.

        Args:
            ran_out: memory ran out in the part on this rank, and its pass has released its memory.

        Raises:
            UserError: the part's collectives differ from those of the parts before it.
            BaseException: the error of a collective that failed under way. The progress of the
                others is unknown, so the step cannot be repeated and the attempt ends.
        """
        failed = self._failed
        if failed is not None:
            self._failed = None
            raise failed
        now = self._now
        self._now = None
        if now is None:
            return
        record = self._records.get(self._part)
        if record is None:
            # the end counts as one more collective
            is_whole = not self._vote(ran_out)
            if is_whole and self._part is not None:
                self._records[self._part] = now
        elif ran_out:
            for collective in record[len(now) :]:
                collective.play()
        elif now != record:
            raise UserError(
                "run.backward: the passes of this model differ in what its ranks send each "
                f"other, so that no step can be repeated; send the same in each, {WITHOUT}"
            )

    def _watch(self, model: nn.Module) -> tuple[Any, ...]:
        modules = _sharded_in(model)
        if not modules:
            return ()
        for module in modules:
            module.reshard()
        _refuse(model, modules)
        for module in modules:
            gather, scatter = wrap_collectives(self._noted)
            module.set_custom_all_gather(gather)
            module.set_custom_reduce_scatter(scatter)
        self._records.clear()
        return _outermost(modules)

    @contextlib.contextmanager
    def _noted(
        self, is_gathered: bool, output: Tensor, given: Tensor, group: Any, op: Any
    ) -> Iterator[None]:
        """Record a collective once it has been sent, or its error if sending failed."""
        if self._now is not None and self._part not in self._records and self._vote(False):
            self._now = None
            raise RanOutElsewhereError
        if not (self._has_weight or is_gathered):
            given.zero_()  # the mean of a part without items is NaN
        self.sent += group is dist.group.WORLD
        self.groups.add(group)
        begun = collectives_begun(group)
        try:
            yield
        except BaseException as error:
            # else it was not sent, and is owed
            if collectives_begun(group) != begun:
                self._failed = error
            raise
        if self._now is None:  # outside of parts
            return
        self._now.append(
            Collective(
                is_gathered, output.numel(), given.numel(), output.dtype, output.device, group, op
            )
        )


def reset(roots: Iterable[Any]) -> None:
    """Reset sharded models after an abandoned part, and drop their gradients."""
    for root in roots:
        if sharding_has_begun(root):
            reset_sharding(root)


def mean_loss(roots: Sequence[Any], loss: Tensor | None) -> Tensor:
    """Return the mean of the ranks' losses, None counting as 0."""
    total = torch.zeros((), device=next(roots[0].parameters()).device)
    if loss is not None:
        total += loss.to(total.device)
    dist.all_reduce(total)
    return total / dist.get_world_size()


def roots_in_one_process(models: Iterable[nn.Module]) -> tuple[Any, ...]:
    """Return the outermost sharded modules in a single process, whose collectives reach no other
    rank. Raises UserError if they cannot be reset after an abandoned part."""
    roots = _outermost([module for model in models for module in _sharded_in(model)])
    for root in roots:
        refuse("", root, _why_not_reset(root))
    return roots


def _outermost(modules: Sequence[Any]) -> tuple[Any, ...]:
    inner = {part for module in modules for part in module.modules() if part is not module}
    return tuple(module for module in modules if module not in inner)


def _sharded_in(model: nn.Module) -> list[Any]:
    # without a class, as where it was not imported, there are none
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    return [part for part in model.modules() if isinstance(part, kind)]


def refuse(name: str, module: nn.Module, reason: str | None) -> None:
    """Raise UserError if there is a reason why steps with this module cannot be repeated."""
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
