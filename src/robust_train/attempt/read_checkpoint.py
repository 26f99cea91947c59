"""Loads the checkpoint that an attempt resumes from, or an earlier checkpoint if it is damaged.

``run.load`` and the built-in trainer call :func:`read_newest` in the process that trains, on all
ranks together. The ranks agree on one file: rank 0 lists the candidates, and a candidate that one
rank cannot use is skipped by all.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from errno import EINVAL, ENOENT, ESTALE
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from robust_train.attempt.checkpoint_content import TensorChange, map_tensors
from robust_train.attempt.checkpoint_errors import RefusedError, UnusableError, run_on_all_ranks
from robust_train.compat import load_shards
from robust_train.failures import classify_failure
from robust_train.folder.checkpoint_files import damage_in, is_readable, size_of
from robust_train.folder.checkpoint_writing import Content
from robust_train.folder.checkpoints import USELESS, read_manifests
from robust_train.folder.identity import wait_until_readable
from robust_train.model.errors import UserError
from robust_train.readable import first_line

log = logging.getLogger("robust_train")

# Files in a folder of shards: the index says in which file each shard is, and all values that are
# not sharded are in the other file.
INDEX = "index.pt"
VALUES = "values.pt"


def read_newest(
    path: Path,
    required: Collection[str] = (),
    *,
    share: TensorChange | None = None,
    gather: Callable[[Any], list[Any]] = lambda value: [value],
) -> tuple[Path, Content] | None:
    """Return the path and the content of the checkpoint ``path``. If it is damaged, return those of
    the newest intact checkpoint before it in the same folder, or None if no checkpoint is intact.

    Args:
        path: a file, or a folder of shards. The launcher has already compared its checksums.
        required: the keys of the content. A file without them belongs to another program.
        share: returns the part of a tensor that this rank keeps. The tensors of a folder of shards
            are meta tensors at that time. For a meta tensor it returns the tensor to fill.
        gather: returns the values of all ranks that read together.

    Raises:
        UserError: all intact checkpoints were saved by another trainer or another version of
            torch. Training from the beginning would remove them.
        ConfigError: a file cannot be read, even after a while.
        MemoryError, RuntimeError: there is not enough memory to read the checkpoint.
    """
    names = [path.name, *_names_before(path)]
    # A network disk shows a new file to some hosts later.
    wait_until_readable(partial(_check_is_same_on_all_ranks, path, gather))
    refusal = None
    for name in gather(names)[0]:
        # On this node `path` may name another checkpoint than on rank 0's.
        candidate = path.parent / name
        read = partial(_read, candidate, required, share, is_compared=candidate == path)
        try:
            return candidate, wait_until_readable(partial(run_on_all_ranks, read, gather))
        except UnusableError as fault:
            log.warning(
                "checkpoint %s cannot be used (%s); trying the checkpoint before it",
                candidate,
                fault,
            )
            if isinstance(fault, RefusedError) and refusal is None:
                refusal = f"{candidate} is whole, but {fault}"
    if refusal is not None:
        raise UserError(
            f"checkpoint {refusal}; resume with the trainer and the torch that saved it, or "
            "start over with resume=false, which sets it aside"
        )
    log.warning("no checkpoint is intact: training starts from the beginning")
    return None


def _names_before(path: Path) -> list[str]:
    """Return the names of the usable checkpoints before ``path`` in the same folder, newest
    first."""
    manifests = wait_until_readable(lambda: read_manifests(path.parent))
    for wanted in manifests:
        if wanted.path == path.absolute():
            manifests = [
                manifest
                for manifest in manifests
                if manifest.job == wanted.job and manifest.order < wanted.order
            ]
            break
    folder = path.parent.absolute()
    return [
        manifest.path.name
        for manifest in sorted(manifests, key=lambda manifest: manifest.order, reverse=True)
        if manifest.path.parent == folder and manifest.loss not in USELESS
    ]


def _check_is_same_on_all_ranks(path: Path, gather: Callable[[Any], list[Any]]) -> None:
    """Compare the size of the checkpoint on all ranks.

    Raises:
        OSError: the ranks see different checkpoints.
    """
    size = wait_until_readable(lambda: size_of(path) if path.exists() else 0)
    if len(set(gather(size))) > 1:
        why = "the ranks find different checkpoints; all nodes must share one folder"
        raise OSError(ESTALE, why, str(path.parent))


def _read(
    path: Path,
    required: Collection[str],
    share: TensorChange | None,
    *,
    is_compared: bool,  # whether the launcher has compared its checksums, which torch does not do
) -> Content:
    """Return the content of a complete checkpoint.

    Raises:
        UnusableError: no attempt can ever read it.
        OSError: it is unreadable now.
    """
    try:
        file = path / VALUES if path.is_dir() else path
        file.open("rb").close()
        if not is_compared and (damage := damage_in(path, reads=True)):
            raise UnusableError(damage)
        # weights_only, because a file from elsewhere must not run code here. mmap, because a share
        # is less than the whole file.
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=bool(share))
        _check_keys(content, required)
        return _take_share(path, content, share)
    except UnusableError:
        raise
    except Exception as error:
        # Damaged files make zip and pickle readers raise nearly anything, and EINVAL for a bad
        # offset.
        errors_of_damage = (None, EINVAL, ENOENT)
        is_away = isinstance(error, OSError) and error.errno not in errors_of_damage
        if is_away or classify_failure(error).kind.is_memory:
            raise
        if isinstance(error, UnpicklingError) and is_readable(path):
            raise RefusedError(first_line(error)) from None
        raise UnusableError(first_line(error)) from None


def _check_keys(content: object, required: Collection[str]) -> None:
    """Check that a loaded object is a checkpoint of this trainer.

    Raises:
        RefusedError: it is something else.
    """
    if not isinstance(content, dict):
        raise RefusedError(f"it holds a {type(content).__name__} and is not a checkpoint")
    missing = sorted(set(required) - content.keys())
    if missing:
        raise RefusedError(f"it has no {missing[0]!r} and is not a checkpoint of this trainer")


def _take_share(path: Path, content: Content, share: TensorChange | None) -> Content:
    """Return the part of a content that this rank keeps, and read its shards."""
    shards: dict[str, Tensor] = {}

    def keep(name: str, tensor: Tensor) -> Tensor:
        kept = share(name, tensor) if share else tensor
        if tensor.is_meta:
            if kept.is_meta:
                kept = torch.empty_like(kept, device="cpu")
            shards[name] = kept
        return kept

    content = map_tensors(keep, content)
    if shards:
        load_shards(path, path / INDEX, shards)
    return content
