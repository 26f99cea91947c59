"""The checkpoint of a sharded model: a folder with each rank's shards, which
``torch.distributed.checkpoint`` writes, and all else; ``checkpoints.read_newest`` reads it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from robust_train.attempt import checkpoints
from robust_train.failures import classify_failure
from robust_train.files import sync
from robust_train.folder.checkpoints import (
    CheckpointError,
    Content,
    system_errors,
    write_atomically,
)
from robust_train.model.errors import RankFailure


def write_shards(group: dist.ProcessGroup, content: Content, path: Path) -> Path:
    """Write a folder that is there once all ranks of ``group`` have written; they all call it.
    Return its path, which the first rank knows: ``path-again`` if ``path`` is there already. Raises
    CheckpointError on all ranks if one cannot write; nothing of the attempt is left."""
    shards: dict[str, Tensor] = {}

    def set_apart(name: str, tensor: Tensor) -> Tensor:
        if hasattr(tensor, "to_local"):
            shards[name] = tensor
            tensor = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        return tensor

    writer = _FolderWriter(path, checkpoints.named_map(set_apart, content))
    try:
        save(shards, storage_writer=writer, process_group=group)
    except CheckpointException as failure:
        shutil.rmtree(writer.path, ignore_errors=True)
        rank, (error, _) = next(iter(failure.failures.items()))
        if isinstance(error, OSError):
            why = (
                error.strerror or str(error).rpartition(": ")[2]
            )  # of one about a part
            raise CheckpointError(f"cannot write {path}, rank {rank}: {why}") from None
        if rank != dist.get_rank(group):
            raise RankFailure(
                rank, classify_failure(error), is_elsewhere=True
            ) from failure
        raise error from failure  # which has the stack
    return writer.final


class _FolderWriter(FileSystemWriter):
    def __init__(self, path: Path, values: Content) -> None:
        # copies ahead begin in the current stream, so in a thread on the first GPU
        temporary = path.with_name(f".{path.name}.tmp")
        super().__init__(temporary, per_thread_copy_ahead=0, sync_files=False)
        self.final = path
        self._values = values

    def write_data(self, plan: Any, planner: Any) -> Any:
        """Write this rank's shards."""
        with system_errors():
            written = super().write_data(plan, planner)
        for name in {result.storage_data.relative_path for result in written.wait()}:
            sync(Path(self.path, name))  # not every disk can; torch would fail there
        return written

    def finish(self, metadata: Any, results: Any) -> None:
        """Complete the folder, on the first rank, once all have written."""
        super().finish(metadata, results)
        metadata = FileSystemReader(
            self.path
        ).read_metadata()  # some versions complete a copy
        metadata.storage_meta = None
        write_atomically(metadata, Path(self.path, checkpoints.INDEX))
        write_atomically(self._values, Path(self.path, checkpoints.VALUES))
        while (
            self.final.exists()
        ):  # of the same step; it stays until this one has a manifest
            self.final = self.final.with_name(f"{self.final.name}-again")
        Path(self.path).rename(self.final)
