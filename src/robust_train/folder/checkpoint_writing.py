"""Writes a checkpoint completely or not at all.

:func:`save_checkpoint` is public, for trainers. Attempts and the integrations use the other
functions in the process that trains.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, cast

from robust_train.files import replacing

# The content of a checkpoint by name: state dicts, tensors and figures.
Content = dict[str, Any]


class CheckpointError(OSError):
    """A checkpoint cannot be written. The message names the file and the reason.

    Attributes:
        bytes: the size that the file would have, 0 if unknown.
    """

    bytes = 0


def save_checkpoint(content: Mapping[str, Any], path: str | Path) -> Path:
    """Save ``content`` as ``path``, completely or not at all, without a second copy on the GPU::

        save_checkpoint({"model": model, "optimizer": optimizer, "step": step}, "last.pt")

    Objects with a ``state_dict`` (modules, optimizers, schedulers, scalers) are saved as their
    state dict. ``torch.load(path, weights_only=True)`` reads the file. Storages are copied to the
    host one at a time while they are written, so the host needs room only for the largest storage.

    Args:
        content: the objects to save, by name.
        path: the file. Its folder is created.

    Raises:
        CheckpointError: the file could not be written. An earlier file at ``path`` is untouched.
    """
    states = {
        name: value.state_dict() if hasattr(value, "state_dict") else value
        for name, value in content.items()
    }
    return write_atomically(states, Path(path))


def write_atomically(content: Content, path: Path) -> Path:
    """Save ``content`` as ``path``, which never holds half a file, even after a power cut.

    Tensors on a GPU are copied to the host one at a time while they are written.

    Raises:
        CheckpointError: the file could not be written. No part of it stays on disk.
    """
    import torch  # imported here, because the launcher uses this module without torch

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, durable=True) as new, new.open("wb") as file, system_errors():
            torch.save(content, file)
    except OSError as error:
        failed = CheckpointError(f"cannot write {path}: {error.strerror or error}")
        failed.bytes = _bytes_written(content)
        raise failed from None
    return path


def _bytes_written(content: Content) -> int:
    """Return the size that a file with this content would have."""
    import torch

    size = _Size()
    torch.save(content, cast(IO[bytes], size))
    return size.bytes


class _Size:
    """A file object that only counts the bytes written to it."""

    def __init__(self) -> None:
        self.bytes = 0

    def write(self, data: memoryview) -> int:
        """Count these bytes."""
        written = len(data)
        self.bytes += written
        return written

    def flush(self) -> None:
        """Do nothing, because no bytes are kept."""


@contextlib.contextmanager
def system_errors() -> Iterator[None]:
    """Raise the system's error instead of the error with which torch's zip writer hides it."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise
