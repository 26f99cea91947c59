"""Several ranks that share an optimizer step: whether all their parts went through, and then one
gradient.

The parts run without collectives, so that a rank whose memory runs out leaves nobody waiting in the
middle of a backward pass. After them all ranks tell each other how they fared, in one message of a
few numbers. Either all repeat the step with the same smaller parts, or the gradients are summed.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn.parallel import DistributedDataParallel

from robust_train.errors import UserError
from robust_train.values import MIB, FailureKind

_BUCKET_BYTES = 25 * MIB
"""As DistributedDataParallel's: large enough for the network, small beside the gradients."""

_BITS = 48
"""Of a double that hold a whole number exactly, with room to spare."""

_FIXED = 4


class State(IntEnum):
    """How a rank's parts went."""

    THROUGH = 0
    DEVICE_FULL = 1
    HOST_FULL = 2
    DEVICE_EXHAUSTED = 3
    HOST_EXHAUSTED = 4

    @classmethod
    def of(cls, kind: FailureKind, *, is_exhausted: bool) -> State:
        """The state after a failure; exhausted: no smaller part may be tried."""
        if kind is FailureKind.HOST_OOM:
            return cls.HOST_EXHAUSTED if is_exhausted else cls.HOST_FULL
        return cls.DEVICE_EXHAUSTED if is_exhausted else cls.DEVICE_FULL

    @property
    def is_exhausted(self) -> bool:
        """No smaller part may be tried."""
        return self >= State.DEVICE_EXHAUSTED


@dataclass(frozen=True)
class Told:
    """What one rank tells the others after its parts.

    Attributes:
        state: how they went.
        failed_size: the size at which memory ran out, 0 if it did not.
        size: most samples in a part from now on; 0: the whole batch.
        items: of how many items (samples) its loss is a mean.
        has_gradient: for each parameter whether it got a gradient.
    """

    state: State
    failed_size: int
    size: int
    items: float
    has_gradient: tuple[bool, ...] = ()

    def row(self) -> list[float]:
        """As numbers that a double holds exactly."""
        chunks = [self.has_gradient[i : i + _BITS] for i in range(0, len(self.has_gradient), _BITS)]
        bits = [float(sum(bit << place for place, bit in enumerate(chunk))) for chunk in chunks]
        return [float(self.state), float(self.failed_size), float(self.size), self.items, *bits]

    @classmethod
    def from_row(cls, row: Sequence[float], parameters: int) -> Told:
        """The inverse of :meth:`row`."""
        words = [int(word) for word in row[_FIXED:]]
        bits = (bool(words[i // _BITS] >> i % _BITS & 1) for i in range(parameters))
        return cls(State(int(row[0])), int(row[1]), int(row[2]), row[3], tuple(bits))


@dataclass(frozen=True)
class Verdict:
    """What all ranks make of what they have told each other: the same on each.

    Attributes:
        rank: the first one whose memory ran out, worst first; None where all went through.
        state: of that rank.
        failed_size: the size at which it did.
        size: most samples in a part from now on; None: the whole batch.
        items: of all ranks.
        has_gradient: for each parameter whether any rank has a gradient of it.
    """

    rank: int | None
    state: State
    failed_size: int
    size: int | None
    items: float
    has_gradient: tuple[bool, ...]


def verdict(told: Sequence[Told]) -> Verdict:
    """All split if one must; one that cannot go on ends the step for all."""
    worst = max((t for t in told if t.state), key=lambda t: t.state.is_exhausted, default=None)
    sizes = [t.size for t in told if t.size]
    return Verdict(
        rank=None if worst is None else told.index(worst),
        state=State.THROUGH if worst is None else worst.state,
        failed_size=0 if worst is None else worst.failed_size,
        size=min(sizes, default=None),
        items=sum(t.items for t in told),
        has_gradient=tuple(map(any, zip(*(t.has_gradient for t in told), strict=True))),
    )


def ran_out_elsewhere(verdict: Verdict) -> Exception:
    """What a rank raises because another one cannot go on: of the same kind as over there."""
    message = f"out of memory on rank {verdict.rank} at every micro-batch that may be tried"
    is_hosts = verdict.state is State.HOST_EXHAUSTED
    error = MemoryError(message) if is_hosts else torch.OutOfMemoryError(message)
    error.heard_of_rank = verdict.rank  # type: ignore[union-attr]
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
        self._checked: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def agree(self, told: Told) -> Verdict:
        """Tell the others, and hear from them. All ranks have to come here."""
        row = told.row()
        rows = torch.zeros(self.size, len(row), dtype=torch.float64)
        rows[self.rank] = torch.tensor(row, dtype=torch.float64)
        dist.all_reduce(rows, group=self._group)
        parameters = len(told.has_gradient)
        return verdict([Told.from_row(row, parameters) for row in rows.tolist()])

    def check(self, models: Iterable[nn.Module]) -> None:
        """Refuse models that a rank cannot leave in the middle of.

        Raises:
            UserError: such a model.
        """
        for model in models:
            if model in self._checked:
                continue
            for name, module in model.named_modules():
                _refuse_collectives(name, module)
            self._checked.add(model)


_here: Ranks | None = None


def here() -> Ranks | None:
    """This process's ranks; None where it trains alone."""
    global _here
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    if _here is None or _here.world is not dist.group.WORLD:
        _here = Ranks()
    return _here


def replicas(models: Iterable[nn.Module]) -> list[DistributedDataParallel]:
    """Those of ``models`` whose gradients are shared by all ranks."""
    return [model for model in models if isinstance(model, DistributedDataParallel)]


def shared_parameters(models: Iterable[DistributedDataParallel]) -> list[nn.Parameter]:
    """What is trained in them, in an order that is the same on every rank."""
    return [
        parameter
        for model in models
        for name, parameter in model.module.named_parameters()
        if parameter.requires_grad and name not in model.parameters_to_ignore
    ]


@contextlib.contextmanager
def without_collectives(models: Sequence[DistributedDataParallel]) -> Iterator[None]:
    """Within this block their passes send nothing."""
    with contextlib.ExitStack() as stack:
        for model in models:
            stack.enter_context(model.no_sync())
            model.require_forward_param_sync = False  # nor their buffers
        try:
            yield
        finally:
            for model in models:
                model.require_forward_param_sync = True


@torch.no_grad()
def sum_gradients(
    parameters: Sequence[nn.Parameter],
    has_gradient: Sequence[bool],
    share: float,
    loss: Tensor | None,
    group: dist.ProcessGroup,
) -> Tensor:
    """Sum the ranks' gradients, each by its share in the items of all.

    A parameter without a gradient on any rank keeps none, so that optimizers pass it over.

    Args:
        parameters: one or more, the same on all ranks.
        has_gradient: for each of them whether any rank has one.
        share: of this rank in the items of all.
        loss: this rank's mean loss, None without one.
        group: the ranks.

    Returns:
        The mean loss over all ranks' items.
    """
    for parameter, is_wanted in zip(parameters, has_gradient, strict=True):
        if is_wanted and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    total = torch.zeros((), dtype=torch.float32, device=parameters[0].device)
    if loss is not None:
        total += loss
    # last: the gradients are there in the order of their layers
    tensors = [p.grad for p in parameters if p.grad is not None] + [total]
    for bucket in _buckets(tensors):
        flat = _flattened(bucket).mul_(share)
        dist.all_reduce(flat, group=group)
        _spread(flat, bucket)
    return total


@torch.no_grad()
def share_buffers(models: Sequence[DistributedDataParallel]) -> None:
    """Give every rank the buffers (BatchNorm's statistics) of rank 0, as the wrapper does."""
    for model in models:
        if not model.broadcast_buffers:
            continue
        buffers = [
            buffer
            for name, buffer in model.module.named_buffers()
            if name not in model.parameters_to_ignore
        ]
        source = dist.get_global_rank(model.process_group, 0)
        with contextlib.ExitStack() as stack:
            for buffer in buffers:
                # the same as far as autograd and the rewinding of steps are concerned
                stack.enter_context(_unsafe_preserve_version_counter(buffer))
            for bucket in _buckets(buffers):
                flat = _flattened(bucket)
                dist.broadcast(flat, source, group=model.process_group)
                _spread(flat, bucket)


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors that can be sent as one."""
    filling: dict[Any, tuple[list[Tensor], int]] = {}
    for tensor in tensors:
        key, size = (tensor.dtype, tensor.device), tensor.numel() * tensor.element_size()
        if size >= _BUCKET_BYTES:
            yield [tensor]
            continue
        bucket, filled = filling.get(key, ([], 0))
        bucket.append(tensor)
        filled += size
        filling[key] = bucket, filled
        if filled >= _BUCKET_BYTES:
            yield bucket
            del filling[key]
    yield from (bucket for bucket, _ in filling.values())


def _flattened(bucket: Sequence[Tensor]) -> Tensor:
    """As one tensor; a single one as it is where that goes, for it may be large."""
    if len(bucket) == 1 and bucket[0].is_contiguous():
        return bucket[0].view(-1)
    return torch.cat([tensor.reshape(-1) for tensor in bucket])


def _spread(flat: Tensor, bucket: Sequence[Tensor]) -> None:
    if flat.data_ptr() == bucket[0].data_ptr():
        return
    parts = torch.split(flat, [tensor.numel() for tensor in bucket])
    for tensor, part in zip(bucket, parts, strict=True):
        tensor.copy_(part.view_as(tensor))


def _refuse_collectives(name: str, module: nn.Module) -> None:
    where = f"{name or 'the model'} ({type(module).__name__})"
    if isinstance(module, nn.SyncBatchNorm):
        raise UserError(
            f"run.micro_batches: {where} talks to the other ranks in its forward pass, where one "
            "whose memory runs out would leave them waiting; use BatchNorm, or do without "
            "run.micro_batches"
        )
    names = {cls.__name__ for cls in type(module).__mro__}
    if names & {"FSDPModule", "FullyShardedDataParallel"}:
        raise UserError(
            f"run.micro_batches: {where} gathers its weights from the other ranks, where one whose "
            "memory runs out would leave them waiting; use DistributedDataParallel, or do without "
            "run.micro_batches: then an attempt is repeated in place of a step"
        )
    if getattr(module, "_comm_hooks", None):
        raise UserError(
            f"run.micro_batches: {where} has a communication hook, which would be passed over; do "
            "without one of the two"
        )
