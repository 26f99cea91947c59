"""Redirects functions that save tensors, and reads files of ``torch.distributed.checkpoint``.

``attempt.checkpoints`` and ``attempt.read_checkpoint`` use it in the process that trains.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import threading
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# The functions that are redirected: libraries import safetensors' function under other names.
_SAVERS = (
    ("torch", "save"),
    ("safetensors.torch", "save_file"),
    ("transformers.modeling_utils", "safe_save_file"),
    ("accelerate.utils.other", "safe_save_file"),
    ("peft.peft_model", "safe_save_file"),
)


@contextlib.contextmanager
def redirect_savers(take: Callable[[Callable[[Any], None], Any, Path], None]) -> Iterator[None]:
    """Redirect ``torch.save`` and safetensors' ``save_file`` within the block, in this thread.

    Instead of saving, they call ``take(save, content, path)``. A later call of ``save(content)``
    writes the content, or a copy of it, to the path. Other ways of saving write at once.
    """
    thread = threading.get_ident()

    def redirect(save: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: Any, **options: Any) -> None:
            is_file = len(arguments) > 1 and isinstance(arguments[1], (str, os.PathLike))
            if not is_file or threading.get_ident() != thread:
                save(*arguments, **options)
                return
            content, path, *more = arguments

            def save_content(copied: Any) -> None:
                save(copied, path, *more, **options)

            take(save_content, content, Path(path))

        return call

    with contextlib.ExitStack() as stack:
        for module, name in _SAVERS:
            home = sys.modules.get(module)
            save = getattr(home, name, None)
            if save is not None:
                stack.callback(setattr, home, name, save)
                setattr(home, name, redirect(save))
        yield


def load_shards(folder: Path, index: Path, wanted: dict[str, Any]) -> None:
    """Fill the tensors ``wanted`` from files of ``torch.distributed.checkpoint``, whose metadata
    are in the file ``index``.

    Unlike torch's own function, it compares checksums and runs no code from a file. A damaged file
    may raise almost any exception.
    """
    from torch.distributed.checkpoint import api, filesystem, metadata, state_dict_loader
    from torch.serialization import _get_layout, load, safe_globals

    def check(data: Any, name: str) -> None:
        with zipfile.ZipFile(data) as archive:
            if archive.testzip() is not None:
                raise zipfile.BadZipFile(f"a checksum in {name} is wrong")

    class CheckingReader(filesystem.FileSystemReader):
        def read_metadata(self, *args: Any, **named: Any) -> Any:
            return content

        def read_data(self, plan: Any, planner: Any) -> Any:
            for key in {item.storage_index for item in plan.items}:
                piece = self.storage_data[key]
                with (folder / piece.relative_path).open("rb") as file:
                    file.seek(piece.offset)
                    check(io.BytesIO(file.read(piece.length)), piece.relative_path)
            return super().read_data(plan, planner)

    names = "Metadata MetadataIndex ChunkStorageMetadata TensorStorageMetadata TensorProperties"
    allowed = [getattr(metadata, name) for name in (*names.split(), "_MEM_FORMAT_ENCODING")]
    check(index, index.name)
    with safe_globals([*allowed, filesystem._StorageInfo, _get_layout]), warnings.catch_warnings():
        # torch warns that this rank reads without the other ranks.
        warnings.simplefilter("ignore")
        content = load(index, weights_only=True)
        try:
            state_dict_loader.load(wanted, storage_reader=CheckingReader(folder), no_dist=True)
        except api.CheckpointException as failure:
            raise next(iter(failure.failures.values()))[0] from None
