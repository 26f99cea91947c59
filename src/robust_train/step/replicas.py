"""Models whose gradients several ranks share: find them, silence their passes, sum gradients."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from robust_train.compat import (
    copy_at_once,
    hook_and_delay,
    preserve_version_counter,
    settle_buckets,
)
from robust_train.readable import MIB
from robust_train.step.sharded import WITHOUT, refuse

BUCKET_BYTES = 25 * MIB
"""As DistributedDataParallel's: large enough for the network, small beside the gradients."""


class Replicated(nn.Module):
    """A model that is the same on every rank; ``run.backward`` sums its gradients. Weights and
    buffers of rank 0 are sent once. Beside DistributedDataParallel it needs no buckets, which are a
    copy of all gradients."""

    broadcast_buffers = True
    parameters_to_ignore: frozenset[str] = frozenset()

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.process_group: Any = dist.group.WORLD
        with torch.no_grad():
            broadcast([*module.parameters(), *module.buffers()], 0, self.process_group)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Call the model."""
        return self.module(*inputs, **named)


Replica = DistributedDataParallel | Replicated


class ReplicaFinder:
    """Finds the replicas in models, and refuses models that a rank cannot leave half-way."""

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[nn.Module, list[weakref.ref[Any]]] = (
            weakref.WeakKeyDictionary()
        )

    def of(
        self, models: Iterable[nn.Module], beside: Iterable[nn.Module] = ()
    ) -> list[Replica]:
        """Return the replicas in ``models`` at any depth, and those ``beside`` that wrap one.

        Raises:
            UserError: a model communicates in its passes in a way that cannot be put off.
        """
        found: dict[int, Replica] = {}
        for model in models:
            known = self._known.get(model)
            if known is None or None in [ref() for ref in known]:
                replicas = replicas_in(model) or _replicas_around(model, beside)
                for module in (model, *replicas):
                    for name, part in module.named_modules():
                        refuse(name, part, _why_not(part))
                self._known[model] = known = [
                    weakref.ref(replica) for replica in replicas
                ]
            found |= {
                id(replica): replica for ref in known if (replica := ref()) is not None
            }
        return list(found.values())


def shared_parameters(replicas: Iterable[Replica]) -> list[nn.Parameter]:
    """Return what is trained in them, in an order that is the same on every rank."""
    found = {
        id(parameter): parameter
        for replica in replicas
        for name, parameter in replica.module.named_parameters()
        if parameter.requires_grad and name not in replica.parameters_to_ignore
    }
    return list(found.values())


@contextlib.contextmanager
def without_collectives(replicas: Sequence[Replica]) -> Iterator[None]:
    """Let their passes send nothing within this block."""
    wrappers = [
        replica for replica in replicas if isinstance(replica, DistributedDataParallel)
    ]
    with contextlib.ExitStack() as stack:
        for wrapper in wrappers:
            settle_buckets(wrapper)
            stack.enter_context(wrapper.no_sync())
            wrapper.require_forward_param_sync = False  # nor their buffers
        try:
            yield
        finally:
            for wrapper in wrappers:
                wrapper.require_forward_param_sync = True


@torch.no_grad()
def sum_gradients(
    parameters: Sequence[nn.Parameter],  # one or more, the same on all ranks
    has_gradient: Sequence[bool],  # for each of them whether any rank has one
    share: float,  # of this rank in the items of all
    loss: Tensor | None,  # this rank's mean loss, None without one
    group: dist.ProcessGroup,  # the ranks
) -> Tensor:
    """Sum the ranks' gradients, each by its share in the items of all. A parameter without a
    gradient on any rank keeps none, so that optimizers pass it over. Returns the mean loss over all
    ranks' items."""
    for parameter, is_wanted in zip(parameters, has_gradient, strict=True):
        if is_wanted and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    total = torch.zeros((), dtype=torch.float32, device=parameters[0].device)
    if loss is not None:
        # a model on several GPUs ends on another one than it begins on
        total += loss.to(total.device)
    # last: the gradients are there in the order of their layers
    tensors = [p.grad for p in parameters if p.grad is not None] + [total]
    sent: tuple[Any, Tensor, list[Tensor]] | None = None
    for bucket in _buckets(tensors):
        flat = _flattened(bucket).mul_(share)
        work = dist.all_reduce(flat, group=group, async_op=True)
        if sent is not None:
            _receive(*sent)
        sent = work, flat, bucket
    if sent is not None:
        _receive(*sent)
    return total


@torch.no_grad()
def share_buffers(replicas: Sequence[Replica]) -> None:
    """Give every rank the buffers (BatchNorm's statistics) of rank 0, as DDP does."""
    for replica in replicas:
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
                # the same as far as autograd and the rewinding of steps are concerned
                stack.enter_context(preserve_version_counter(torch, buffer))
            broadcast(buffers, source, replica.process_group)


def broadcast(tensors: Sequence[Tensor], source: int, group: Any) -> None:
    """Give every rank the tensors of ``source``, in few messages."""
    for bucket in _buckets(tensors):
        flat = _flattened(bucket)
        _receive(dist.broadcast(flat, source, group=group, async_op=True), flat, bucket)


def _receive(work: Any, flat: Tensor, bucket: list[Tensor]) -> None:
    work.wait()
    if flat.data_ptr() != bucket[0].data_ptr():
        parts = torch.split(flat, [tensor.numel() for tensor in bucket])
        views = [
            part.view_as(tensor) for tensor, part in zip(bucket, parts, strict=True)
        ]
        copy_at_once(torch, bucket, views)


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Group tensors that can be sent as one."""
    filling: dict[Any, tuple[list[Tensor], int]] = {}
    for tensor in tensors:
        key, size = (
            (tensor.dtype, tensor.device),
            tensor.numel() * tensor.element_size(),
        )
        if size >= BUCKET_BYTES:
            yield [tensor]
            continue
        bucket, filled = filling.get(key, ([], 0))
        bucket.append(tensor)
        filled += size
        filling[key] = bucket, filled
        if filled >= BUCKET_BYTES:
            yield bucket
            del filling[key]
    yield from (bucket for bucket, _ in filling.values())


def _flattened(bucket: Sequence[Tensor]) -> Tensor:
    """Return them as one tensor; a single one as it is where possible, for it may be large."""
    if len(bucket) == 1 and bucket[0].is_contiguous():
        return bucket[0].view(-1)
    return torch.cat([tensor.reshape(-1) for tensor in bucket])


def replicas_in(model: nn.Module) -> list[Replica]:
    """Find the model itself, inside ``torch.compile``'s module, or deeper."""
    return [part for part in model.modules() if isinstance(part, Replica)]


def _replicas_around(model: nn.Module, beside: Iterable[nn.Module]) -> list[Replica]:
    """Find wrappers of ``model``: a step may name the model and call its wrapper."""
    own = set(map(id, model.parameters()))
    found = [replica for other in beside for replica in replicas_in(other)]
    return [replica for replica in found if own & set(map(id, replica.parameters()))]


def _why_not(module: nn.Module) -> str | None:
    """Return why this module's pass cannot be left half-way on one rank; None if it can."""
    waiting = "from the other ranks, where one that runs out of memory would leave them waiting"
    names = {cls.__name__ for cls in type(module).__mro__}
    if isinstance(module, nn.SyncBatchNorm):
        return f"gathers its statistics {waiting}; use BatchNorm, {WITHOUT}"
    is_split = any(
        cls.__name__ == "DTensor"
        for parameter in module.parameters(recurse=False)
        for cls in type(parameter).__mro__
    )
    if is_split or names & {
        "FSDPModule",
        "FullyShardedDataParallel",
        "DeepSpeedEngine",
    }:
        return f"gathers its weights {waiting}; use DistributedDataParallel, {WITHOUT}"
    if not isinstance(module, DistributedDataParallel):
        return None
    has_hook, delays = hook_and_delay(module)
    if has_hook:
        return "has a communication hook, which would be passed over; do without one of the two"
    options = {
        name: getattr(module, name, None)
        for name in ("static_graph", "mixed_precision")
    }
    for option, is_on in {**options, "delay_all_reduce_params": delays}.items():
        if is_on:
            return (
                f"has {option}, with which DistributedDataParallel communicates in "
                "every backward pass; do without it"
            )
    if dist.get_world_size(module.process_group) != dist.get_world_size():
        return f"shares its gradients with some of the ranks only; use one group, {WITHOUT}"
    return None
