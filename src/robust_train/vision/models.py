"""The models that ``model=…`` names, the part of each that is trained, and their weights.

:mod:`.trainer` builds and restores them, in the process that trains.
"""

from __future__ import annotations

import difflib
import logging
import math
import re
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from robust_train.config.trainers import require
from robust_train.model.errors import ConfigError
from robust_train.readable import first_line
from robust_train.vision.datasets import Shape
from robust_train.vision.images import ImageSpec

log = logging.getLogger("robust_train.vision")

_PROBE_SECONDS = 10.0
_WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
_CONTAINERS = ("state_dict", "model", "model_state_dict")
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)

# For `SmallCnn`: the image size if neither the config nor the data set has one, the least size of
# the last stage's map, and limits of depth and width.
_PHOTOGRAPH_SIZE = 64
_LEAST_MAP_SIZE = 4
_MOST_STAGES = 5
_WIDEST_FACTOR = 8


def build_model(cfg: Any, data: Shape) -> tuple[nn.Module, ImageSpec]:
    """Build a model on the CPU, with weights. Returns it and the format of images that it takes.
    ``requires_grad`` marks the trained part."""
    if cfg.name == "cnn":
        size = cfg.image_size or data.size or _PHOTOGRAPH_SIZE
        channels = data.channels
        module: nn.Module = SmallCnn(
            channels=channels,
            image_size=size,
            num_classes=data.num_classes,
            width=cfg.width,
            dropout=cfg.dropout,
        )
        _load_weights(module, cfg, heads=("head",))
        half = (0.5,) * channels
        return module, ImageSpec(size, channels, half, half)
    module = build_backbone(cfg, 0 if cfg.name == "linear_probe" else data.num_classes)
    data_config = require("timm.data", f"model={cfg.name}").resolve_model_data_config(module)
    mean = tuple(data_config["mean"])
    std = tuple(data_config["std"])
    images = ImageSpec(cfg.image_size, 3, mean, std, crop=data_config["crop_pct"])
    if cfg.name == "linear_probe":
        module = LinearProbe(module, data.num_classes, cfg.dropout)
    elif cfg.name == "lora":
        module = add_lora(module, cfg)
    return module, images


class SmallCnn(nn.Module):
    """``model=cnn``: stages of two 3×3 convolutions, ``width`` channels in the first.

    Each later stage halves the map and doubles the channels, until the map is about 4×4. GroupNorm
    instead of BatchNorm: any split of the effective batch trains the same.

    Shape suffixes: B samples, C channels, H rows, W columns, K classes.
    """

    def __init__(
        self, *, channels: int, image_size: int, num_classes: int, width: int, dropout: float
    ) -> None:
        super().__init__()
        halvings = max(1, math.floor(math.log2(max(image_size, 1) / _LEAST_MAP_SIZE)))
        stages: list[nn.Module] = []
        before = channels
        for index in range(min(halvings + 1, _MOST_STAGES)):
            after = width * min(2**index, _WIDEST_FACTOR)
            stages.append(_stage(before, after, halve=index > 0))
            before = after
        self.stages = nn.ModuleList(stages)
        self.pool = nn.AdaptiveAvgPool2d(2)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(before * 4, num_classes)
        self.is_checkpointing = False

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute each stage in the backward pass instead of keeping its activations."""
        self.is_checkpointing = enable

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Return logits B×K."""
        x_BCHW = images_BCHW
        for stage in self.stages:
            if self.is_checkpointing and self.training and torch.is_grad_enabled():
                x_BCHW = checkpoint(stage, x_BCHW, use_reentrant=False)
            else:
                x_BCHW = stage(x_BCHW)
        logits_BK: Tensor = self.head(self.dropout(self.pool(x_BCHW).flatten(1)))
        return logits_BK


def _stage(before: int, after: int, *, halve: bool) -> nn.Sequential:
    layers: list[nn.Module] = [nn.MaxPool2d(2, ceil_mode=True)] if halve else []
    for channels in (before, after):
        layers += [
            nn.Conv2d(channels, after, kernel_size=3, padding=1, bias=False),
            nn.GroupNorm(math.gcd(8, after), after),
            nn.ReLU(inplace=True),
        ]
    return nn.Sequential(*layers)


class LinearProbe(nn.Module):
    """A frozen backbone, in evaluation mode and outside autograd, and a trained linear layer."""

    def __init__(self, backbone: nn.Module, num_classes: int, dropout: float) -> None:
        super().__init__()
        self.backbone = backbone.requires_grad_(False)
        features: Any = getattr(backbone, "head_hidden_size", None) or backbone.num_features
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(features, num_classes)

    def train(self, mode: bool = True) -> LinearProbe:
        """Set the mode of all but the backbone."""
        super().train(mode)
        self.backbone.eval()
        return self

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Return logits B×K."""
        with torch.no_grad():
            features_BF = self.backbone(images_BCHW)
        logits_BK: Tensor = self.head(self.dropout(features_BF))
        return logits_BK


def add_lora(module: nn.Module, cfg: Any) -> nn.Module:
    """Add peft's low-rank adapters (Hu et al. 2021, arXiv:2106.09685) to ``cfg.target_modules``.
    The classifier is trained too, and everything else is frozen."""
    peft = require("peft", "model=lora")
    heads = classifier_names(module)
    layers = [
        name
        for name, layer in module.named_modules()
        if isinstance(layer, (nn.Linear, nn.Conv2d)) and name not in heads
    ]
    for target in cfg.target_modules:
        if not any(name == target or name.endswith("." + target) for name in layers):
            # Users write attn.qkv for blocks.0.attn.qkv.
            short = dict.fromkeys(re.sub(r"^(?:.*\.)?\d+\.(?=\D)", "", name) for name in layers)
            raise ConfigError(
                f"model.target_modules: {cfg.backbone} has no layer {target!r}; it has "
                f"{', '.join(short)}"
            )
    lora = peft.LoraConfig(
        r=cfg.lora_r,
        lora_alpha=cfg.lora_alpha,
        lora_dropout=cfg.lora_dropout,
        target_modules=list(cfg.target_modules),
        modules_to_save=list(heads),
    )
    adapted: nn.Module = peft.get_peft_model(module, lora)
    return adapted


def set_train_mode(module: nn.Module) -> None:
    """Set training mode, except for frozen BatchNorm layers: their statistics must not move."""
    module.train()
    for layer in module.modules():
        if isinstance(layer, _BATCH_NORMS):
            parameters = list(layer.parameters(recurse=False))
            if parameters and not any(p.requires_grad for p in parameters):
                layer.eval()


def enable_gradient_checkpointing(module: nn.Module) -> bool:
    """Recompute activations in the backward pass, and return whether the model supports it."""
    target: Any = module
    if not hasattr(target, "set_grad_checkpointing") and hasattr(target, "get_base_model"):
        target = target.get_base_model()  # peft's
    try:
        target.set_grad_checkpointing(True)
    except (AssertionError, AttributeError):  # timm's, of models that cannot
        return False
    return True


def trained_state(module: nn.Module) -> dict[str, Tensor]:
    """Return the part of the state dict that training changes, sharing its memory. With a frozen
    backbone, that is the adapters or the head. With a model trained as a whole, that is
    everything."""
    trained: set[str] = set()
    for prefix, layer in module.named_modules():
        parameters = dict(layer.named_parameters(prefix, recurse=False))
        # a BatchNorm without weights of its own still updates its statistics in training
        has_statistics = isinstance(layer, _BATCH_NORMS) and not parameters
        if has_statistics or any(p.requires_grad for p in parameters.values()):
            trained.update(name for name, p in parameters.items() if p.requires_grad)
            trained.update(name for name, _ in layer.named_buffers(prefix, recurse=False))
    state = module.state_dict()
    return {name: value for name, value in state.items() if name in trained}


def load_trained_state(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load what `trained_state` returned."""
    expected = trained_state(module)
    if state.keys() != expected.keys():
        odd = sorted(state.keys() ^ expected.keys())[0]
        raise ValueError(f"the weights do not belong to this model: {odd}")
    module.load_state_dict(state, strict=False)


def build_backbone(cfg: Any, num_classes: int) -> nn.Module:
    """Build the timm model ``cfg.backbone`` for square RGB images of ``cfg.image_size`` pixels.
    ``cfg.weights`` takes precedence over ``cfg.pretrained``. With 0 classes, it returns pooled
    features."""
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
        model: nn.Module = timm.create_model(cfg.backbone, pretrained=is_fetched, **options)
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
    _load_weights(model, cfg, heads=classifier_names(model))
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
    """Raise OSError within seconds if the hub is unreachable. Its own client (version 2.4) keeps
    trying for 46 s."""
    hub = require("huggingface_hub", f"model.backbone={backbone}")
    if repository is None or hub.constants.HF_HUB_OFFLINE:
        return
    for name in _WEIGHT_FILES:
        if isinstance(hub.try_to_load_from_cache(repository, name), str):
            return
    endpoint = hub.constants.ENDPOINT
    request = urllib.request.Request(endpoint, method="HEAD")
    try:
        urllib.request.urlopen(request, timeout=_PROBE_SECONDS).close()
    except OSError as error:
        # the hub client may trust certificates that urllib does not
        is_refused = "CERTIFICATE" in str(error)
        if not (is_refused or isinstance(error, urllib.error.HTTPError)):
            reason = getattr(error, "reason", error)
            raise OSError(f"{endpoint} cannot be reached: {reason}") from error


def _load_weights(model: nn.Module, cfg: Any, *, heads: tuple[str, ...]) -> None:
    """Load the file ``cfg.weights``, if it is set: ``.safetensors`` or a state dict by
    ``torch.save``, bare or under a key such as ``model`` (this trainer's own ``final.pt``),
    converted as timm does. A classifier (``heads``) for another number of classes is left out.
    Everything else must fit."""
    if cfg.weights is None:
        return
    path = Path(cfg.weights).expanduser()
    key = f"model.weights={path}"
    of_head = tuple(f"{head}." for head in heads)
    weights = _read(path, key)
    convert = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)
    if convert is not None:
        weights = convert(weights, model)
    expected = model.state_dict()
    fitting = {}
    for name, tensor in weights.items():
        if name not in expected or expected[name].shape == tensor.shape:
            fitting[name] = tensor
        elif name.startswith(of_head):
            log.info("model.weights: %s is for another number of classes, left out", name)
        else:
            raise ConfigError(
                f"{key}: {name} has shape {tuple(tensor.shape)}, this model "
                f"needs {tuple(expected[name].shape)}; choose the model that the file belongs to"
            )
    missing = [name for name in expected if name not in fitting and not name.startswith(of_head)]
    if missing:
        raise ConfigError(
            f"{key}: lacks {len(missing)} of this model's {len(expected)} tensors, "
            f"{missing[0]} is the first; choose the model that the file belongs to"
        )
    model.load_state_dict(fitting, strict=False)


def _read(path: Path, key: str) -> dict[str, Tensor]:
    if not path.is_file():
        raise ConfigError(f"{key}: no such file")
    load = partial(torch.load, map_location="cpu", weights_only=True)
    if path.suffix == ".safetensors":
        load = require("safetensors.torch", key).load_file
    try:
        content: Any = load(path)
    except (OSError, MemoryError):  # the fault of the disk or the host, not of the file
        raise
    except Exception as error:
        reason = first_line(error)[:120]
        raise ConfigError(f"{key}: cannot be read as weights ({reason})") from error
    for name in _CONTAINERS:
        if isinstance(content, dict) and isinstance(content.get(name), dict):
            content = content[name]
    if not isinstance(content, dict) or not all(isinstance(v, Tensor) for v in content.values()):
        raise ConfigError(f"{key}: holds no state dict (names to tensors)")
    return content
