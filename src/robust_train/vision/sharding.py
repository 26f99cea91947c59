"""The built-in trainer's model sharded over the ranks (FSDP2): ``training.sharding=fsdp``.

Checkpoints hold whole tensors, as those of one process do. So any number of ranks resumes them,
one on the CPU included.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from robust_train.compat import tree_map_only
from robust_train.errors import ConfigError
from robust_train.microbatch.replicas import broadcast


def shard(model: nn.Module) -> None:
    """Shard the weights of a model over all ranks, block by block."""
    from torch.distributed import fsdp
    from torch.distributed.device_mesh import init_device_mesh

    if not hasattr(getattr(fsdp, "FSDPModule", None), "reset_iter_state"):
        raise ConfigError(
            "training.sharding=fsdp: needs a torch that has FSDPModule.reset_iter_state; update "
            "torch, or write training.sharding=ddp"
        )
    device = next(model.parameters()).device
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in _blocks(model):
        fsdp.fully_shard(block, mesh=mesh)
    fsdp.fully_shard(model, mesh=mesh)


def share_buffers(model: nn.Module) -> None:
    """Give every rank the buffers (BatchNorm's statistics) of the first, which saves them."""
    with torch.no_grad():
        broadcast(list(model.buffers()), 0, dist.group.WORLD)


def _blocks(module: nn.Module) -> list[nn.Module]:
    """Return the outermost members of lists and sequences of modules that have weights."""
    if isinstance(module, (nn.ModuleList, nn.Sequential)):
        return [part for part in module if next(part.parameters(), None) is not None]
    return [block for child in module.children() for block in _blocks(child)]


def whole(value: Any, *, keeps: bool) -> Any:
    """Return ``value`` with whole tensors on the host in place of sharded ones, at any depth.

    Every rank has to call it. ``keeps``: this rank wants the result; others get the shape of it.
    """

    def gathered(tensor: Tensor) -> Any:
        if not hasattr(tensor, "full_tensor"):
            return tensor
        full = tensor.full_tensor()  # one at a time: a rank holds one whole tensor beside its share
        return full.cpu() if keeps else None

    return tree_map_only(Tensor, gathered, value)


def sharded_weights(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return each whole tensor of ``state`` as this model's shards of it; sends nothing."""
    mine = model.state_dict()
    return {name: _like(mine.get(name, value), value) for name, value in state.items()}


def sharded_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer's whole state as the shards that belong to its parameters."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def shards(index: int, values: Mapping[str, Any]) -> dict[str, Any]:
        parameter = parameters[index]
        return {
            key: _like(parameter, value) if _has_shape(value, parameter) else value
            for key, value in values.items()
        }

    return {**state, "state": {index: shards(index, v) for index, v in state["state"].items()}}


def _has_shape(value: Any, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape


def _like(mine: Any, value: Tensor) -> Tensor:
    if not hasattr(mine, "device_mesh"):
        return value
    from torch.distributed.tensor import distribute_tensor

    value = value.to(mine.device)
    return distribute_tensor(value, mine.device_mesh, mine.placements, src_data_rank=None)
