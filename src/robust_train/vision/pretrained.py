"""timm backbones by name, and weights from the hub or from a local file."""

from __future__ import annotations

import difflib
import logging
import pickle
import sys
import urllib.error
import urllib.request
import zipfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from robust_train.config.trainers import require
from robust_train.model.errors import ConfigError
from robust_train.readable import first_line

log = logging.getLogger("robust_train.vision")

_PROBE_SECONDS = 10.0
_WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
_CONTAINERS = ("state_dict", "model", "model_state_dict")


def build_backbone(cfg: Any, num_classes: int) -> nn.Module:
    """Build the timm model ``cfg.backbone`` for square RGB images of ``cfg.image_size`` pixels.
    ``cfg.weights`` takes precedence over ``cfg.pretrained``; 0 classes give pooled features."""
    timm = require("timm", f"model={cfg.name}")
    published = _published(timm, cfg.backbone)
    options = {"num_classes": num_classes, "drop_rate": cfg.dropout}
    if published.fixed_input_size:
        options["img_size"] = cfg.image_size
    is_fetched = cfg.pretrained and cfg.weights is None
    if is_fetched and not published.has_weights:
        raise ConfigError(
            f"model.backbone={cfg.backbone}: timm has no pretrained weights for it; "
            "use model.weights=<file> or model.pretrained=false"
        )
    try:
        if is_fetched:
            _check_hub(cfg.backbone, published.hf_hub_id)
        model: nn.Module = timm.create_model(
            cfg.backbone, pretrained=is_fetched, **options
        )
    except OSError as error:
        raise ConfigError(
            f"model.backbone={cfg.backbone}: its pretrained weights could not be fetched "
            f"({first_line(error)}); use model.weights=<file> or model.pretrained=false"
        ) from error
    except (AssertionError, TypeError, ValueError, KeyError) as error:
        raise ConfigError(
            f"model.backbone={cfg.backbone}, model.image_size={cfg.image_size}: "
            f"timm cannot build it ({first_line(error)})"
        ) from error
    _check_patches(cfg, model)
    if cfg.weights is not None:
        load_weights(
            model, Path(cfg.weights).expanduser(), heads=classifier_names(model)
        )
    return model


def classifier_names(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the classifier's modules in a timm model, e.g. ``("head.fc",)``."""
    names: Any = model.pretrained_cfg["classifier"]  # type: ignore[index]
    return (names,) if isinstance(names, str) else tuple(names)


def _published(timm: Any, backbone: str) -> Any:
    """Return timm's pretrained config of a backbone without building it."""
    name = backbone.partition(".")[0]
    if not timm.is_model(name):
        close = difflib.get_close_matches(name, timm.list_models(), n=3)
        hint = f"; close are {', '.join(close)}" if close else ""
        raise ConfigError(
            f"model.backbone={backbone}: timm has no such model{hint}; "
            "timm.list_models() lists all of them"
        )
    try:
        return timm.get_pretrained_cfg(backbone)
    except RuntimeError as error:
        tags = timm.list_pretrained(name + ".*")
        raise ConfigError(
            f"model.backbone={backbone}: no such pretrained variant; timm has {', '.join(tags)}"
        ) from error


def _check_patches(cfg: Any, model: nn.Module) -> None:
    """Refuse an image size that a ViT's patches do not fill: it would fail in the first step."""
    patch_size = getattr(getattr(model, "patch_embed", None), "patch_size", None)
    patch = max(patch_size) if isinstance(patch_size, tuple) else patch_size
    if isinstance(patch, int) and cfg.image_size % patch:
        raise ConfigError(
            f"model.image_size={cfg.image_size}: {cfg.backbone} needs a multiple of its patch "
            f"size {patch}"
        )


def _check_hub(backbone: str, repository: str | None) -> None:
    """Notice in seconds that the hub cannot be reached; its client tries for 46 s (version 2.4)."""
    hub = require("huggingface_hub", f"model.backbone={backbone}")
    if repository is None or hub.constants.HF_HUB_OFFLINE:
        return
    if any(
        isinstance(hub.try_to_load_from_cache(repository, name), str)
        for name in _WEIGHT_FILES
    ):
        return
    endpoint = hub.constants.ENDPOINT
    request = urllib.request.Request(endpoint, method="HEAD")
    try:
        urllib.request.urlopen(request, timeout=_PROBE_SECONDS).close()
    except OSError as error:
        # the hub client may trust certificates that urllib does not
        if not isinstance(error, urllib.error.HTTPError) and "CERTIFICATE" not in str(
            error
        ):
            reason = getattr(error, "reason", error)
            raise OSError(f"{endpoint} cannot be reached: {reason}") from error


def load_weights(model: nn.Module, path: Path, *, heads: Collection[str]) -> None:
    """Load a ``.safetensors`` file or a state dict by ``torch.save``, bare or under a key such as
    ``model`` (this trainer's own ``final.pt``), converted as timm does. A classifier (``heads``)
    for another number of classes is left out; everything else must fit."""
    key = f"model.weights={path}"
    found = _read(path)
    convert = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)
    if convert is not None:
        found = convert(found, model)
    expected = model.state_dict()
    fitting = {}
    for name, tensor in found.items():
        if name not in expected or expected[name].shape == tensor.shape:
            fitting[name] = tensor
        elif _is_of_head(name, heads):
            log.info(
                "model.weights: %s is for another number of classes, left out", name
            )
        else:
            raise ConfigError(
                f"{key}: {name} has shape {tuple(tensor.shape)}, this model "
                f"needs {tuple(expected[name].shape)}; choose the model that the file is of"
            )
    missing = [
        name
        for name in expected
        if name not in fitting and not _is_of_head(name, heads)
    ]
    if missing:
        raise ConfigError(
            f"{key}: lacks {len(missing)} of this model's {len(expected)} tensors, "
            f"{missing[0]} is the first; choose the model that the file is of"
        )
    model.load_state_dict(fitting, strict=False)


def _is_of_head(name: str, heads: Collection[str]) -> bool:
    return any(name.startswith(head + ".") for head in heads)


def _read(path: Path) -> dict[str, Tensor]:
    key = f"model.weights={path}"
    if not path.is_file():
        raise ConfigError(f"{key}: no such file")
    try:
        if path.suffix == ".safetensors":
            content: Any = require("safetensors.torch", key).load_file(path)
        else:
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        damaged = (
            RuntimeError,
            ValueError,
            EOFError,
            pickle.UnpicklingError,
            zipfile.BadZipFile,
        )
        # safetensors' own exception class derives from Exception itself
        if isinstance(error, ConfigError) or not (
            isinstance(error, damaged)
            or type(error).__module__.startswith("safetensors")
        ):
            raise
        reason = first_line(error)[:120]
        raise ConfigError(f"{key}: cannot be read as weights ({reason})") from error
    for name in _CONTAINERS:
        if isinstance(content, dict) and isinstance(content.get(name), dict):
            content = content[name]
    if not isinstance(content, dict) or not all(
        isinstance(v, Tensor) for v in content.values()
    ):
        raise ConfigError(f"{key}: holds no state dict (names to tensors)")
    return content
