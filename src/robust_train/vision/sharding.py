"""Shards the built-in trainer's model over the ranks (``training.sharding=fsdp``, FSDP2).

`vision.trainer` calls this module in the attempt's process, on every rank. A sharded model's
checkpoint is a folder. ``torch.distributed.checkpoint`` writes the shards of all ranks into it, and
another file has all other values. ``checkpoints.read_newest`` reads the folder.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from robust_train.attempt.checkpoint_content import TensorChange, map_tensors
from robust_train.attempt.read_checkpoint import INDEX, VALUES
from robust_train.failures import classify_failure
from robust_train.files import sync
from robust_train.folder.checkpoint_writing import (
    CheckpointError,
    Content,
    system_errors,
    write_atomically,
)
from robust_train.model.errors import ConfigError, RankFailure
from robust_train.step.replicas import broadcast


def shard(model: nn.Module) -> None:
    """Shard the weights of a model over all ranks, block by block.

    Raises:
        ConfigError: this torch is too old.
    """
    if not hasattr(getattr(fsdp, "FSDPModule", None), "reset_iter_state"):
        raise ConfigError(
            "training.sharding=fsdp: this torch has no FSDPModule.reset_iter_state; update torch, "
            "or set training.sharding=ddp"
        )
    device = next(model.parameters()).device
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in _blocks(model):
        fsdp.fully_shard(block, mesh=mesh)
    fsdp.fully_shard(model, mesh=mesh)


def share_buffers(model: nn.Module) -> None:
    """Copy rank 0's buffers (BatchNorm's statistics), which the checkpoint has, to every rank."""
    with torch.no_grad():
        broadcast(list(model.buffers()), 0, dist.group.WORLD)


def _blocks(module: nn.Module) -> list[nn.Module]:
    """Return the blocks of a model: the members of its outermost module lists that have weights."""
    if isinstance(module, (nn.ModuleList, nn.Sequential)):
        return [part for part in module if next(part.parameters(), None) is not None]
    return [block for child in module.children() for block in _blocks(child)]


def create_folder_writer() -> Callable[[Content, Path], Path]:
    """Return a function that writes a checkpoint with the shards of all ranks.

    Every rank must call this function and the returned function. The returned function has its own
    process group, so it can run in a thread while training continues.
    """
    group: Any = dist.new_group(backend="gloo")
    return partial(write_shards, group)


def gather_weights(weights: dict[str, Tensor], *, keeps: bool) -> dict[str, Any]:
    """Return whole tensors on the host in place of sharded tensors. Every rank must call this.

    A rank with ``keeps=False`` takes part too, but gets None in place of each tensor.
    """

    def gather(_: str, tensor: Any) -> Any:
        # Tensors are gathered one by one, so a rank holds one whole tensor on its device at a time.
        if hasattr(tensor, "full_tensor"):
            tensor = tensor.full_tensor()
        return tensor.cpu() if keeps else None

    return map_tensors(gather, weights)


def create_shard_loader(model: nn.Module, optimizer: torch.optim.Optimizer) -> TensorChange:
    """Return a function for ``read_newest`` that turns a saved tensor into this rank's shard."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    targets = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for index, parameter in enumerate(parameters):
        targets[f"optimizer.state.{index}"] = parameter

    def load_shard(name: str, tensor: Tensor) -> Tensor:
        # For example, optimizer.state.0.exp_avg is sharded like parameter 0.
        owner = name.rpartition(".")[0]
        target: Any = targets.get(name, targets.get(owner))
        is_sharded = hasattr(target, "device_mesh") and target.shape == tensor.shape
        if not is_sharded:
            return tensor.clone()
        if tensor.is_meta:
            # The checkpoint stores this tensor in shards, which are read into it later.
            return torch.empty_like(target, dtype=tensor.dtype, requires_grad=False)
        tensor = tensor.to(target.device)
        return distribute_tensor(tensor, target.device_mesh, target.placements, src_data_rank=None)

    return load_shard


def write_shards(group: dist.ProcessGroup, content: Content, path: Path) -> Path:
    """Write the shards of all ranks into a folder. Every rank of ``group`` must call this.

    The folder gets its final name after all ranks have written.

    Args:
        group: the process group of the ranks.
        content: the values to save. Each rank saves its own shards, and rank 0 saves the values
            that are not sharded.
        path: the folder. If it exists, the new folder is named ``path-again``.

    Returns:
        On rank 0, the path of the new folder. On other ranks, always ``path``.

    Raises:
        CheckpointError: a rank cannot write. All ranks raise it, and no files are left.
        RankFailure: another rank failed for another reason.
    """
    shards: dict[str, Tensor] = {}

    def set_apart(name: str, tensor: Tensor) -> Tensor:
        if hasattr(tensor, "to_local"):
            shards[name] = tensor
            tensor = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        return tensor

    writer = _FolderWriter(path, map_tensors(set_apart, content))
    try:
        save(shards, storage_writer=writer, process_group=group)
    except CheckpointException as failure:
        shutil.rmtree(writer.path, ignore_errors=True)
        rank, (error, _) = next(iter(failure.failures.items()))
        if isinstance(error, OSError):
            # The whole message would also name a file in the temporary folder.
            reason = error.strerror
            if not reason:
                reason = str(error).rpartition(": ")[2]
            raise CheckpointError(f"cannot write {path}, rank {rank}: {reason}") from None
        if rank != dist.get_rank(group):
            raise RankFailure(rank, classify_failure(error), is_elsewhere=True) from failure
        raise error from failure  # `failure` has the stack.
    return writer.final


class _FolderWriter(FileSystemWriter):
    """Writes shards into a temporary folder, and renames it to ``final`` once it is complete."""

    def __init__(self, path: Path, values: Content) -> None:
        # If torch copied ahead of writing, it would use the current stream of the writer's thread,
        # which belongs to the first GPU.
        temporary = path.with_name(f".{path.name}.tmp")
        super().__init__(temporary, per_thread_copy_ahead=0, sync_files=False)
        self.final = path
        self._values = values

    def write_data(self, plan: Any, planner: Any) -> Any:
        """Write this rank's shards."""
        with system_errors():
            written = super().write_data(plan, planner)
        for name in {result.storage_data.relative_path for result in written.wait()}:
            # torch's own option sync_files fails on file systems that cannot sync.
            sync(Path(self.path, name))
        return written

    def finish(self, metadata: Any, results: Any) -> None:
        """Complete the folder on rank 0, after all ranks have written."""
        super().finish(metadata, results)
        # Some versions of torch complete a copy of `metadata`, so it is read from the file.
        metadata = FileSystemReader(self.path).read_metadata()
        metadata.storage_meta = None
        write_atomically(metadata, Path(self.path, INDEX))
        write_atomically(self._values, Path(self.path, VALUES))
        # An earlier folder of the same step stays until this folder has a manifest.
        while self.final.exists():
            self.final = self.final.with_name(f"{self.final.name}-again")
        Path(self.path).rename(self.final)
