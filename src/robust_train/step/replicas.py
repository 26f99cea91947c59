"""Finds models that are the same on every rank, refuses models that cannot be split, and sends
tensors between ranks.

:mod:`.shared_step` uses them in each rank's process, and :mod:`.ranks` holds a
:class:`ReplicaFinder`. A model is replicated by DistributedDataParallel or by :class:`Replicated`.
"""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from robust_train.compat import copy_at_once, hook_and_delay
from robust_train.readable import MIB
from robust_train.step.reachable import modules_of
from robust_train.step.sharded import WITHOUT, refuse

BUCKET_BYTES = 25 * MIB
"""Size of a message, as in DistributedDataParallel: large enough to use the network's bandwidth,
small compared with the gradients."""


class Replicated(nn.Module):
    """A model that is the same on every rank, whose gradients ``run.backward`` sums.

    Rank 0 sends its weights and buffers once. Unlike DistributedDataParallel, it does not keep a
    copy of all gradients in buckets.
    """

    broadcast_buffers = True
    parameters_to_ignore: frozenset[str] = frozenset()

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.process_group: Any = dist.group.WORLD
        tensors = list(itertools.chain(module.parameters(), module.buffers()))
        broadcast(tensors, 0, self.process_group)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        return self.module(*args, **kwargs)


Replica = DistributedDataParallel | Replicated


class ReplicaFinder:
    """Finds the replicas in models, and refuses models that a rank cannot leave halfway."""

    def __init__(self) -> None:
        self._known = weakref.WeakKeyDictionary[nn.Module, list[weakref.ref[Any]]]()

    def find(self, models: Iterable[nn.Module], function: Any) -> list[Replica]:
        """Return the replicas in ``models`` at any depth, and the models' wrappers.

        A step may name the model and call its wrapper, so wrappers are looked for among the modules
        that ``function`` reaches.

        Raises:
            UserError: a model communicates in its passes in a way that cannot be deferred.
        """
        all_replicas: list[Replica] = []
        for model in models:
            replicas: list[Any] = [ref() for ref in self._known.get(model, ())]
            # A model without replicas may have been wrapped since the previous step.
            if not replicas or None in replicas:
                replicas = find_replicas(model, function)
                if replicas or model not in self._known:
                    _refuse(model)
                    for replica in replicas:
                        _refuse(replica)
                self._known[model] = list(map(weakref.ref, replicas))
            all_replicas += replicas
        return list(dict.fromkeys(all_replicas))


def replicas_in(model: nn.Module) -> list[Replica]:
    """Return the replicas among a model and the modules inside it."""
    return [part for part in model.modules() if isinstance(part, Replica)]


def find_replicas(model: nn.Module, function: Any) -> list[Replica]:
    """Return the replicas in a model, or else its wrappers that a function reaches."""
    inside = replicas_in(model)
    if inside:
        return inside
    ids = set(map(id, model.parameters()))
    wrappers: list[Replica] = []
    for module in modules_of(function):
        wrappers += [
            replica
            for replica in replicas_in(module)
            if not ids.isdisjoint(map(id, replica.parameters()))
        ]
    return wrappers


def _refuse(model: nn.Module) -> None:
    for name, part in model.named_modules():
        refuse(name, part, why_not_leave(part))


def why_not_leave(module: nn.Module) -> str | None:
    """Return why a rank cannot leave this module's pass halfway, or None if it can."""
    waiting = "from the other ranks, where a rank that runs out of memory would leave them waiting"
    names = {cls.__name__ for cls in type(module).__mro__}
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
        return f"has sparse gradients, which are not summed; use sparse=False, {WITHOUT}"
    if isinstance(module, nn.SyncBatchNorm):
        return f"gathers its statistics {waiting}; use BatchNorm, {WITHOUT}"
    is_split = any(
        cls.__name__ == "DTensor"
        for parameter in module.parameters(recurse=False)
        for cls in type(parameter).__mro__
    )
    if is_split or names & {"FSDPModule", "FullyShardedDataParallel", "DeepSpeedEngine"}:
        return f"gathers its weights {waiting}; use DistributedDataParallel, {WITHOUT}"
    if not isinstance(module, DistributedDataParallel):
        return None
    has_hook, delays = hook_and_delay(module)
    if has_hook:
        return f"has a communication hook, which would not run; remove the hook, {WITHOUT}"
    options = {
        "static_graph": getattr(module, "static_graph", None),
        "mixed_precision": getattr(module, "mixed_precision", None),
        "delay_all_reduce_params": delays,
    }
    for option, is_on in options.items():
        if is_on:
            return (
                f"has {option}, with which DistributedDataParallel communicates in "
                "every backward pass; do without it"
            )
    if dist.get_world_size(module.process_group) != dist.get_world_size():
        return f"shares its gradients with some of the ranks only; use one group, {WITHOUT}"
    return None


# --- messages ---


@torch.no_grad()
def broadcast(tensors: Sequence[Tensor], source: int, group: Any) -> None:
    """Give every rank the tensors of rank ``source``, in few messages."""
    for bucket in _group_into_buckets(tensors):
        flat = _flatten(bucket)
        dist.broadcast(flat, source, group=group)
        _copy_back(flat, bucket)


def all_reduce(tensors: Sequence[Tensor], share: float, group: Any) -> None:
    """Replace tensors by their sum over all ranks, each rank's multiplied by its ``share``."""
    for bucket in _group_into_buckets(tensors):
        flat = _flatten(bucket).mul_(share)
        dist.all_reduce(flat, group=group)
        _copy_back(flat, bucket)


def _copy_back(flat: Tensor, bucket: Sequence[Tensor]) -> None:
    """Copy the values of a flat tensor into the tensors that it was made from."""
    if flat.data_ptr() != bucket[0].data_ptr():
        parts = torch.split(flat, [tensor.numel() for tensor in bucket])
        pairs = zip(bucket, parts, strict=True)
        copy_at_once(torch, bucket, [part.view_as(tensor) for tensor, part in pairs])


def _group_into_buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Group tensors that can be sent together. A large tensor is alone, and is not copied."""
    buckets: dict[object, list[Tensor]] = {}
    sizes: Counter[object] = Counter()
    for tensor in tensors:
        kind = (tensor.dtype, tensor.device)
        if tensor.nbytes >= BUCKET_BYTES:
            yield [tensor]
            continue
        buckets.setdefault(kind, []).append(tensor)
        sizes[kind] += tensor.nbytes
        if sizes[kind] >= BUCKET_BYTES:
            del sizes[kind]
            yield buckets.pop(kind)
    yield from buckets.values()


def _flatten(bucket: Sequence[Tensor]) -> Tensor:
    """Return the tensors as a single flat tensor. A tensor that is alone is not copied."""
    if len(bucket) == 1 and bucket[0].is_contiguous():
        return bucket[0].view(-1)
    return torch.cat([tensor.reshape(-1) for tensor in bucket])
