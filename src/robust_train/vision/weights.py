"""Weights from a local file into a model."""

from __future__ import annotations

import logging
import pickle
import sys
import zipfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from robust_train.config.extras import require
from robust_train.errors import ConfigError

log = logging.getLogger("robust_train.vision")

_CONTAINERS = ("state_dict", "model", "model_state_dict")


def load_weights(model: nn.Module, path: Path, *, heads: Collection[str]) -> None:
    """Load ``path`` into ``model``.

    A classifier for another number of classes is left out; everything else must fit. timm's own
    conversion of the architecture's published formats applies, positions of a ViT are resampled.

    Args:
        model: on the CPU.
        path: a ``.safetensors`` file, or a state dict by ``torch.save``, bare or under the key
            ``state_dict`` or ``model`` (this trainer's own ``final.pt``).
        heads: names of the classifier's modules.

    Raises:
        ConfigError: the file is missing, unreadable, or belongs to another model.
    """
    found = _read(path)
    convert = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)
    if convert is not None:
        found = convert(found, model)
    expected = model.state_dict()
    wanted = {}
    for name, tensor in found.items():
        if name in expected and expected[name].shape != tensor.shape:
            if not _is_of_head(name, heads):
                raise ConfigError(
                    f"model.weights={path}: {name} has shape {tuple(tensor.shape)}, this model "
                    f"needs {tuple(expected[name].shape)}; choose the model that the file is of"
                )
            log.info("model.weights: %s is for another number of classes, left out", name)
            continue
        wanted[name] = tensor
    missing = [name for name in expected if name not in wanted and not _is_of_head(name, heads)]
    if missing:
        raise ConfigError(
            f"model.weights={path}: lacks {len(missing)} of this model's {len(expected)} tensors, "
            f"{missing[0]} is the first; choose the model that the file is of"
        )
    model.load_state_dict(wanted, strict=False)


def _is_of_head(name: str, heads: Collection[str]) -> bool:
    return any(name.startswith(head + ".") for head in heads)


def _read(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise ConfigError(f"model.weights={path}: no such file")
    try:
        if path.suffix == ".safetensors":
            content: Any = require("safetensors.torch", f"model.weights={path}").load_file(path)
        else:
            content = torch.load(path, map_location="cpu", weights_only=True)
    except (
        RuntimeError,
        ValueError,
        EOFError,
        pickle.UnpicklingError,
        zipfile.BadZipFile,
    ) as error:
        raise _unreadable(path, error) from error
    except Exception as error:
        # safetensors has an exception class of its own, derived from Exception itself
        if type(error).__module__.startswith("safetensors"):
            raise _unreadable(path, error) from error
        raise
    for key in _CONTAINERS:
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    if not isinstance(content, dict) or not all(isinstance(v, Tensor) for v in content.values()):
        raise ConfigError(f"model.weights={path}: holds no state dict (names to tensors)")
    return content


def _unreadable(path: Path, error: Exception) -> ConfigError:
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return ConfigError(f"model.weights={path}: cannot be read as weights ({reason[:120]})")
