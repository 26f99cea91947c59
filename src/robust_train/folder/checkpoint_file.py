"""One file of a checkpoint: written whole or not at all."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from robust_train.files import replacing

Content = dict[
    str, Any
]  # What a checkpoint holds, by name: state dictionaries, tensors, figures


class CheckpointError(OSError):
    """A checkpoint cannot be written. The message names file and reason."""


def save_checkpoint(content: Mapping[str, Any], path: str | Path) -> Path:
    """Save ``content`` as ``path``, whole or not at all, without a second copy on the GPU::

        save_checkpoint({"model": model, "optimizer": optimizer, "step": step}, "last.pt")

    Whatever has a ``state_dict`` (modules, optimizers, schedulers, scalers) is saved as that;
    ``torch.load(path, weights_only=True)`` reads the file. Storages are copied to the host one at a
    time as they are written, so the host needs room for the largest one only.

    Args:
        content: what to save, by name.
        path: the file; its folder is made.

    Raises:
        CheckpointError: it could not be written; a file that was there is untouched.
    """
    states = {
        name: value.state_dict() if hasattr(value, "state_dict") else value
        for name, value in content.items()
    }
    return write_atomically(states, Path(path))


def write_atomically(content: Content, path: Path) -> Path:
    """Save such that ``path`` is at every moment absent, the old file or the new one,
    also after a power cut.

    Tensors on a GPU are copied to the host one at a time while they are written. Raises
    CheckpointError: no space, no permission, too large …; nothing of the attempt is left.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with (
            replacing(path, durable=True) as new,
            new.open("wb") as file,
            system_errors(),
        ):
            torch.save(content, file)
    except OSError as error:
        raise CheckpointError(
            f"cannot write {path}: {error.strerror or error}"
        ) from None
    return path


@contextlib.contextmanager
def system_errors() -> Iterator[None]:
    """Raise the system's error where torch's zip writer has one of its own in place of it."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise
