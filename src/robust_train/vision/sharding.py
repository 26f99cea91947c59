"""The built-in trainer's model sharded over the ranks (FSDP2): ``training.sharding=fsdp``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from robust_train.attempt.checkpoints import Share, named_map
from robust_train.folder.checkpoints import Content
from robust_train.model.errors import ConfigError
from robust_train.step.replicas import broadcast


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


def folder_writer() -> Callable[[Content, Path], Path]:
    """Return what writes a checkpoint of all ranks' shards, also while training goes on. Every rank
    has to call it."""
    from robust_train.attempt.shards import write_shards

    group: Any = dist.new_group(backend="gloo")  # of its own
    return partial(write_shards, group)


def whole(weights: dict[str, Tensor], *, keeps: bool) -> dict[str, Any]:
    """Return whole tensors on the host in place of sharded ones. Every rank has to call it;
    ``keeps``: this rank wants them, others get None."""

    def gathered(_: str, tensor: Any) -> Any:
        # one at a time: a rank holds one whole tensor beside its share
        full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        return full.cpu() if keeps else None

    return named_map(gathered, weights)


def shares(model: nn.Module, optimizer: torch.optim.Optimizer) -> Share:
    """Return what gives this rank's share of a tensor of a checkpoint; see ``read_newest``."""
    from torch.distributed.tensor import distribute_tensor

    parameters = [
        parameter for group in optimizer.param_groups for parameter in group["params"]
    ]
    own = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    own |= {
        f"optimizer.state.{index}": parameter
        for index, parameter in enumerate(parameters)
    }

    def share(name: str, tensor: Tensor) -> Tensor:
        mine: Any = own.get(name, own.get(name.rpartition(".")[0]))
        if not hasattr(mine, "device_mesh") or mine.shape != tensor.shape:
            return tensor.clone()
        if tensor.is_meta:
            return torch.empty_like(mine, dtype=tensor.dtype, requires_grad=False)
        tensor = tensor.to(mine.device)
        return distribute_tensor(
            tensor, mine.device_mesh, mine.placements, src_data_rank=None
        )

    return share
