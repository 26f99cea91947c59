"""Decides which jobs need the same memory, by giving them the same fingerprint. Pure.

:mod:`.recall` calls it in the launcher and in the command ``need``. Two runs of ``train.py --lr 1``
and ``train.py --lr 2`` have the same fingerprint, because the learning rate does not change memory.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_CHANGES_NO_MEMORY = re.compile(
    r"(?:\w*[_-])?(?:seed|lr|learning[_-]?rate)|"
    r"(?:out|output|log|logging|save|run)(?:[_-]?(?:dir|path|folder))?|"
    r"(?:checkpoint|ckpt)[_-]?(?:dir|folder)|"
    r"(?:job|run|exp|experiment|project|group|sweep|trial|wandb|mlflow|display)[_-]?"
    r"(?:name|id|title|tags?|notes?|group|project)",
    re.IGNORECASE,
)
"""Keys that distinguish jobs and say nothing about their memory.

In doubt a key counts: a job that is measured once more loses little, and one that starts with the
figure of another model, as ``--model_name`` chooses it, runs out of memory.
"""

_LABEL = re.compile(r"name|title|tags?|notes?|comment", re.IGNORECASE)
_LABELLED = re.compile(
    r"\w*(?:log|logger|logging|wandb|mlflow|comet|neptune|tensorboard|job|run|exp|experiment|project)",
    re.IGNORECASE,
)
"""A key such as ``name`` labels a job at the root of a config, and in these groups. In other groups
it may choose a model or an optimizer."""


def fingerprint(job: str, keys: Mapping[str, Any], versions: Sequence[str] = ()) -> str:
    """Return a digest that all jobs with the same memory at the same micro-batch share.

    Only this digest is kept, so that no value of a key is in the file.

    Args:
        job: the program or trainer.
        keys: the keys of the job that may change its memory, nested.
        versions: versions of the libraries that allocate memory, such as torch.
    """
    named = {".".join(path): value for path, value in _list_leaves(keys)}
    content = json.dumps([job, named, list(versions)], sort_keys=True, default=str)
    return hashlib.sha256(content.encode()).hexdigest()[:32]


def _list_leaves(keys: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the values that may change memory, with their paths."""
    if isinstance(keys, Mapping):
        for key, value in keys.items():
            yield from _list_leaves(value, (*path, str(key)))
    elif not path or not _changes_no_memory(path):
        yield path, keys


def _changes_no_memory(path: Sequence[str]) -> bool:
    """Return whether the key at this path is only a label of the job."""
    key = path[-1]
    if _LABEL.fullmatch(key):
        return len(path) == 1 or _LABELLED.fullmatch(path[-2]) is not None
    return _CHANGES_NO_MEMORY.fullmatch(key) is not None


def drop_labels(argv: Sequence[str]) -> list[str]:
    """Return a command line without its seeds, names and learning rates."""
    kept = []
    is_skipped = False
    for word in argv:
        if is_skipped and not word.startswith("-"):
            is_skipped = False
            continue
        is_skipped = False
        name, equals, _ = word.partition("=")
        is_option = word.startswith("-") or bool(equals)
        if is_option and _changes_no_memory(name.lstrip("-+").split(".")):
            is_skipped = not equals
            continue
        kept.append(word)
    return kept


def locate_program(argv: Sequence[str], folder: str) -> list[str]:
    """Return a command line whose files are known wherever it is run.

    If no word of the command line leads to the program, as in ``python -m train``, the same words
    mean another program in another folder.
    """
    words = [
        os.path.realpath(os.path.join(folder, word))
        if word.endswith((".py", ".sh")) or word.startswith(("./", "../"))
        else word
        for word in argv
    ]
    return words if words != list(argv) or any(map(_is_script, argv)) else [folder, *words]


def _is_script(word: str) -> bool:
    return os.path.isabs(word) and word.endswith((".py", ".sh"))
