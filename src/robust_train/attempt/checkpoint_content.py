"""The content of a checkpoint: a dictionary of state dicts, tensors and plain values.

``run.save`` builds it with :func:`build_content`, and ``run.load`` puts it back with
:func:`restore_state`. Both run in the process that trains. Everything that copies, writes or loads
a content changes its tensors with :func:`map_tensors`.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from pickle import PickleError
from typing import Any

import torch
from torch import Tensor

from robust_train.compat import keep_versions, tree_map_with_path
from robust_train.folder.checkpoint_writing import Content
from robust_train.model.errors import UserError

STEP = "step"
"""The key of the step in a checkpoint of ``run.save``."""

METRIC = "saved_with_metric"
"""The key of the metric's value and mode in a checkpoint of ``run.save``, if it was called with a
metric."""

TensorChange = Callable[[str, Tensor], Any]
"""Takes a tensor's name and the tensor, and returns the value that replaces it."""


def build_content(
    state: Mapping[str, Any], step: int, metric: float | None = None, mode: str = "max"
) -> Content:
    """Return the content to save for ``state``. Objects that have a state dict are replaced by it,
    and numpy's numbers by Python's.

    Raises:
        UserError: a tensor is sharded over the ranks, a value could not be loaded again, or
            ``mode`` is unknown.
    """
    if mode not in ("max", "min"):
        raise UserError(f"run.save(mode={mode!r}): must be 'max' or 'min'")
    content: Content = {}
    for name, value in state.items():
        if hasattr(value, "state_dict"):
            value = value.state_dict()
        part = map_tensors(_refuse_sharded, {name: value}, _convert_number)
        _check_is_loadable(name, part)
        content |= part
    content[STEP] = step
    if metric is not None:
        content[METRIC] = [float(metric), mode]
    return content


def _refuse_sharded(_: str, tensor: Tensor) -> Tensor:
    if hasattr(tensor, "to_local"):
        raise UserError(
            "run.save: the state has sharded tensors; save them with "
            "torch.distributed.checkpoint, then call run.checkpoint_saved"
        )
    return tensor


def _convert_number(value: Any) -> Any:
    """Return a number of numpy as a number of Python, and any other value unchanged."""
    return value.item() if getattr(value, "ndim", 1) == 0 else value


def _check_is_loadable(name: str, part: Content) -> None:
    """Save and load a part without its tensors."""
    file = io.BytesIO()
    try:
        torch.save(map_tensors(lambda *_: 0, part), file)
        torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    except PickleError:
        raise UserError(
            f"run.save: {name!r} has an object that torch.load(weights_only=True) refuses, so no "
            "attempt could resume from this checkpoint; save tensors, numbers, text, lists and "
            "dictionaries"
        ) from None


def restore_state(state: MutableMapping[str, Any], content: Content) -> int:
    """Load the content that :func:`build_content` returned into ``state``, and return its step."""
    for name, value in list(state.items()):
        if hasattr(value, "load_state_dict"):
            value.load_state_dict(content[name])
        else:
            state[name] = content[name]
    return int(content[STEP])


def map_tensors(
    change: TensorChange, content: Content, change_other: Callable[[Any], Any] = lambda value: value
) -> Content:
    """Return ``content`` with tensors replaced by ``change(name, tensor)``, and each other value
    by ``change_other(value)``. A tensor's name is unique, for example ``model.head.weight``."""
    names = set[str]()

    def change_leaf(keys: Sequence[Any], leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return change_other(leaf)
        name = ".".join(str(getattr(key, "key", key)) for key in keys)
        # "net" with "ema.weight" and "net.ema" with "weight" would have the same name.
        while name in names:
            name += "'"
        names.add(name)
        return change(name, leaf)

    new = dict(tree_map_with_path(change_leaf, content))
    for name, part in content.items():
        keep_versions(new[name], part)
    return new
