"""The built-in trainer's model sharded over the ranks (FSDP2): ``training.sharding=fsdp``.

Its checkpoint is a folder with each rank's shards, which ``torch.distributed.checkpoint`` writes,
and all other values. ``read_checkpoint.read_newest`` reads it.
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
from robust_train.folder.checkpoints import (
    CheckpointError,
    Content,
    system_errors,
    write_atomically,
)
from robust_train.model.errors import ConfigError, RankFailure
from robust_train.step.replicas import broadcast


def shard(model: nn.Module) -> None:
    """Shard the weights of a model over all ranks, block by block."""
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
    """Return a function that writes a checkpoint of all ranks' shards, also while training
    continues. Every rank has to call it."""
    group: Any = dist.new_group(backend="gloo")  # a separate group
    return partial(write_shards, group)


def whole(weights: dict[str, Tensor], *, keeps: bool) -> dict[str, Any]:
    """Return whole tensors on the host instead of sharded tensors. Every rank has to call it. A
    rank with ``keeps`` gets them, others get None."""

    def gathered(_: str, tensor: Any) -> Any:
        # one at a time: a rank holds only one whole tensor in addition to its share
        full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        return full.cpu() if keeps else None

    return map_tensors(gathered, weights)


def shares(model: nn.Module, optimizer: torch.optim.Optimizer) -> TensorChange:
    """Return a function that loads this rank's shard of a checkpoint's tensor, for
    ``read_newest``."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    tensors |= {f"optimizer.state.{index}": parameter for index, parameter in enumerate(parameters)}

    def share(name: str, tensor: Tensor) -> Tensor:
        mine: Any = tensors.get(name, tensors.get(name.rpartition(".")[0]))
        if not hasattr(mine, "device_mesh") or mine.shape != tensor.shape:
            return tensor.clone()
        if tensor.is_meta:
            return torch.empty_like(mine, dtype=tensor.dtype, requires_grad=False)
        tensor = tensor.to(mine.device)
        return distribute_tensor(tensor, mine.device_mesh, mine.placements, src_data_rank=None)

    return share


def write_shards(group: dist.ProcessGroup, content: Content, path: Path) -> Path:
    """Write all ranks' shards into a folder, which appears once all of them have written.

    Every rank of ``group`` has to call this.

    Returns:
        the folder's path. Only the first rank's is right: if ``path`` exists, it is ``path-again``.

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
            # Its text names a part of the folder.
            why = error.strerror
            if not why:
                why = str(error).rpartition(": ")[2]
            raise CheckpointError(f"cannot write {path}, rank {rank}: {why}") from None
        if rank != dist.get_rank(group):
            raise RankFailure(rank, classify_failure(error), is_elsewhere=True) from failure
        raise error from failure  # which has the stack
    return writer.final


class _FolderWriter(FileSystemWriter):
    def __init__(self, path: Path, values: Content) -> None:
        # Copying ahead would use the writer thread's current stream, which is the first GPU's.
        temporary = path.with_name(f".{path.name}.tmp")
        super().__init__(temporary, per_thread_copy_ahead=0, sync_files=False)
        self.final = path
        self._values = values

    def write_data(self, plan: Any, planner: Any) -> Any:
        """Write this rank's shards."""
        with system_errors():
            written = super().write_data(plan, planner)
        for name in {result.storage_data.relative_path for result in written.wait()}:
            # torch's own sync_files would fail on file systems that cannot sync.
            sync(Path(self.path, name))
        return written

    def finish(self, metadata: Any, results: Any) -> None:
        """Complete the folder, on the first rank, once all have written."""
        super().finish(metadata, results)
        # some versions complete a copy
        metadata = FileSystemReader(self.path).read_metadata()
        metadata.storage_meta = None
        write_atomically(metadata, Path(self.path, INDEX))
        write_atomically(self._values, Path(self.path, VALUES))
        # An earlier folder of the same step stays until this folder has a manifest.
        while self.final.exists():
            self.final = self.final.with_name(f"{self.final.name}-again")
        Path(self.path).rename(self.final)
