"""Builds the models that ``model=…`` names, and loads and saves their trained weights.

`vision.trainer` uses it in the attempt's process, on every rank. In a model with a frozen backbone,
only a part is trained, and only that part is in checkpoints.
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

_HUB_SECONDS = 10.0  # that the hub has to answer
_WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")  # of a repository on the hub
_CONTAINERS = ("state_dict", "model", "model_state_dict")  # keys of a file that hold a state dict
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)

# The sizes of `SmallCnn`.
_PHOTOGRAPH_SIZE = 64  # of images, if neither the config nor the data set has a size
_LEAST_MAP_SIZE = 4  # rows and columns after the last stage
_MOST_STAGES = 5
_WIDEST_FACTOR = 8  # channels of the widest stage, as a multiple of the first stage's


def build_model(cfg: Any, data: Shape) -> tuple[nn.Module, ImageSpec]:
    """Build a model with its weights, on the CPU.

    Args:
        cfg: the config group ``model``.
        data: the classes and images of the data set.

    Returns:
        The model and the format of the images that it takes. Only the parameters that are trained
        have ``requires_grad``.

    Raises:
        ConfigError: the model cannot be built, or its weights cannot be loaded.
    """
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
    backbone_classes = 0 if cfg.name == "linear_probe" else data.num_classes
    module = build_backbone(cfg, backbone_classes)
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
    """``model=cnn``: a network of stages with two 3×3 convolutions each.

    The first stage has ``width`` channels. Each later stage halves the map and doubles the
    channels, until the map is about 4×4. With GroupNorm instead of BatchNorm, every split of the
    effective batch trains the same.

    Shape suffixes: B samples, C channels, H rows, W columns, K classes.
    """

    def __init__(
        self, *, channels: int, image_size: int, num_classes: int, width: int, dropout: float
    ) -> None:
        super().__init__()
        halvings = max(1, math.floor(math.log2(max(image_size, 1) / _LEAST_MAP_SIZE)))
        stages: list[nn.Module] = []
        channels_in = channels
        for index in range(min(halvings + 1, _MOST_STAGES)):
            channels_out = width * min(2**index, _WIDEST_FACTOR)
            stages.append(_build_stage(channels_in, channels_out, halves_map=index > 0))
            channels_in = channels_out
        self.stages = nn.ModuleList(stages)
        self.pool = nn.AdaptiveAvgPool2d(2)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(channels_in * 4, num_classes)
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


def _build_stage(channels_in: int, channels_out: int, *, halves_map: bool) -> nn.Sequential:
    """Return a stage of `SmallCnn`."""
    layers: list[nn.Module] = []
    if halves_map:
        layers.append(nn.MaxPool2d(2, ceil_mode=True))
    for channels in (channels_in, channels_out):
        layers += [
            nn.Conv2d(channels, channels_out, kernel_size=3, padding=1, bias=False),
            nn.GroupNorm(math.gcd(8, channels_out), channels_out),
            nn.ReLU(inplace=True),
        ]
    return nn.Sequential(*layers)


class LinearProbe(nn.Module):
    """A trained linear layer on the features of a frozen backbone."""

    def __init__(self, backbone: nn.Module, num_classes: int, dropout: float) -> None:
        super().__init__()
        self.backbone = backbone.requires_grad_(False)
        features: Any = getattr(backbone, "head_hidden_size", None) or backbone.num_features
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(features, num_classes)

    def train(self, mode: bool = True) -> LinearProbe:
        """Set the mode of the linear layer. The backbone stays in evaluation mode."""
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

    The adapters and the classifier are trained, and everything else is frozen.

    Raises:
        ConfigError: the model has no layer with such a name.
    """
    peft = require("peft", "model=lora")
    heads = classifier_names(module)
    layers = [
        name
        for name, layer in module.named_modules()
        if isinstance(layer, (nn.Linear, nn.Conv2d)) and name not in heads
    ]
    for target in cfg.target_modules:
        if not any(name == target or name.endswith("." + target) for name in layers):
            # The message lists attn.qkv instead of blocks.0.attn.qkv, blocks.1.attn.qkv and so on.
            short_names = [re.sub(r"^(?:.*\.)?\d+\.(?=\D)", "", name) for name in layers]
            raise ConfigError(
                f"model.target_modules: {cfg.backbone} has no layer {target!r}; it has "
                f"{', '.join(dict.fromkeys(short_names))}"
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
    """Set training mode, except for frozen BatchNorm layers, whose statistics must not change."""
    module.train()
    for layer in module.modules():
        if isinstance(layer, _BATCH_NORMS):
            parameters = list(layer.parameters(recurse=False))
            if parameters and not any(p.requires_grad for p in parameters):
                layer.eval()


def enable_gradient_checkpointing(module: nn.Module) -> bool:
    """Recompute activations in the backward pass. Return whether the model supports that."""
    target: Any = module
    if not hasattr(target, "set_grad_checkpointing") and hasattr(target, "get_base_model"):
        target = target.get_base_model()  # The module is peft's wrapper.
    try:
        target.set_grad_checkpointing(True)
    except (AssertionError, AttributeError):  # timm asserts that the model supports it.
        return False
    return True


def trained_state(module: nn.Module) -> dict[str, Tensor]:
    """Return the part of the state dict that training changes. The tensors are not copied.

    With a frozen backbone, these are the adapters or the head. If the whole model is trained, it
    is the whole state dict.
    """
    trained: set[str] = set()
    for prefix, layer in module.named_modules():
        parameters = dict(layer.named_parameters(prefix, recurse=False))
        # A BatchNorm without parameters still updates its statistics in training.
        has_only_statistics = isinstance(layer, _BATCH_NORMS) and not parameters
        if has_only_statistics or any(p.requires_grad for p in parameters.values()):
            trained.update(name for name, p in parameters.items() if p.requires_grad)
            trained.update(name for name, _ in layer.named_buffers(prefix, recurse=False))
    state = module.state_dict()
    return {name: value for name, value in state.items() if name in trained}


def load_trained_state(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load a state that `trained_state` returned.

    Raises:
        ValueError: the state belongs to another model.
    """
    expected = trained_state(module)
    if state.keys() != expected.keys():
        differing = sorted(state.keys() ^ expected.keys())
        raise ValueError(f"the weights do not belong to this model: {differing[0]}")
    module.load_state_dict(state, strict=False)


def build_backbone(cfg: Any, num_classes: int) -> nn.Module:
    """Build the timm model ``cfg.backbone`` for square RGB images of ``cfg.image_size`` pixels.

    ``cfg.weights`` takes precedence over ``cfg.pretrained``. With 0 classes, the model returns
    pooled features.

    Raises:
        ConfigError: timm cannot build the model, or its weights cannot be loaded.
    """
    timm = require("timm", f"model={cfg.name}")
    pretrained_cfg = _find_pretrained_cfg(timm, cfg.backbone)
    options = {"num_classes": num_classes, "drop_rate": cfg.dropout}
    if pretrained_cfg.fixed_input_size:
        options["img_size"] = cfg.image_size
    downloads = cfg.pretrained and cfg.weights is None
    if downloads and not pretrained_cfg.has_weights:
        raise ConfigError(
            f"model.backbone={cfg.backbone}: timm has no pretrained weights for it; "
            "use model.weights=<file> or model.pretrained=false"
        )
    try:
        if downloads:
            _check_hub(cfg.backbone, pretrained_cfg.hf_hub_id)
        model: nn.Module = timm.create_model(cfg.backbone, pretrained=downloads, **options)
    except OSError as error:
        raise ConfigError(
            f"model.backbone={cfg.backbone}: its pretrained weights could not be downloaded "
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
    """Return the names of the classifier's modules in a timm model, such as ``("head.fc",)``."""
    names: Any = model.pretrained_cfg["classifier"]  # type: ignore[index]
    return (names,) if isinstance(names, str) else tuple(names)


def _find_pretrained_cfg(timm: Any, backbone: str) -> Any:
    """Return timm's record of a backbone and its published weights, without building it.

    Raises:
        ConfigError: timm has no such model or weights.
    """
    name = backbone.partition(".")[0]
    if not timm.is_model(name):
        similar = difflib.get_close_matches(name, timm.list_models(), n=3)
        hint = ""
        if similar:
            hint = f"; similar names are {', '.join(similar)}"
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
    """Raise ConfigError if the image size is not a multiple of a vision transformer's patch size.

    Otherwise the first step would fail.
    """
    patch = getattr(getattr(model, "patch_embed", None), "patch_size", None)
    if isinstance(patch, tuple):
        patch = max(patch)
    if isinstance(patch, int) and cfg.image_size % patch:
        raise ConfigError(
            f"model.image_size={cfg.image_size}: {cfg.backbone} needs a multiple of its patch "
            f"size {patch}"
        )


def _check_hub(backbone: str, repository: str | None) -> None:
    """Raise OSError within seconds if the hub is unreachable.

    The hub's own client (version 2.4) would try for 46 seconds.
    """
    hub = require("huggingface_hub", f"model.backbone={backbone}")
    if repository is None or hub.constants.HF_HUB_OFFLINE:
        return
    for name in _WEIGHT_FILES:
        if isinstance(hub.try_to_load_from_cache(repository, name), str):
            return
    endpoint = hub.constants.ENDPOINT
    request = urllib.request.Request(endpoint, method="HEAD")
    try:
        urllib.request.urlopen(request, timeout=_HUB_SECONDS).close()
    except OSError as error:
        # The hub answers with an HTTP error, or with a certificate that urllib does not trust but
        # the hub's client may trust.
        is_reachable = isinstance(error, urllib.error.HTTPError) or "CERTIFICATE" in str(error)
        if not is_reachable:
            reason = getattr(error, "reason", error)
            raise OSError(f"{endpoint} cannot be reached: {reason}") from error


def _load_weights(model: nn.Module, cfg: Any, *, heads: tuple[str, ...]) -> None:
    """Load the file ``cfg.weights`` if it is set.

    The file is a ``.safetensors`` file, or a state dict that ``torch.save`` wrote, which may be
    under a key such as ``model``, as in this trainer's own ``final.pt``. A classifier for another
    number of classes is left out.

    Args:
        model: the model that gets the weights.
        cfg: the config group ``model``.
        heads: the names of the classifier's modules.

    Raises:
        ConfigError: the file cannot be read, or does not fit the model.
    """
    if cfg.weights is None:
        return
    path = Path(cfg.weights).expanduser()
    key = f"model.weights={path}"
    head_prefixes = tuple(f"{head}." for head in heads)
    weights = _read_weights(path, key)
    # timm's models convert the names of other publishers.
    convert = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)
    if convert is not None:
        weights = convert(weights, model)
    expected = model.state_dict()
    fitting = {}
    for name, tensor in weights.items():
        if name not in expected or expected[name].shape == tensor.shape:
            fitting[name] = tensor
        elif name.startswith(head_prefixes):
            log.info("model.weights: %s is for another number of classes, left out", name)
        else:
            raise ConfigError(
                f"{key}: {name} has shape {tuple(tensor.shape)}, this model "
                f"needs {tuple(expected[name].shape)}; choose the model that the file belongs to"
            )
    body = [name for name in expected if not name.startswith(head_prefixes)]
    missing = [name for name in body if name not in fitting]
    if missing:
        raise ConfigError(
            f"{key}: lacks {len(missing)} of this model's {len(expected)} tensors, "
            f"such as {missing[0]}; choose the model that the file belongs to"
        )
    model.load_state_dict(fitting, strict=False)


def _read_weights(path: Path, key: str) -> dict[str, Tensor]:
    """Return the state dict in a file. ``key`` names the file in messages."""
    if not path.is_file():
        raise ConfigError(f"{key}: no such file")
    load = partial(torch.load, map_location="cpu", weights_only=True)
    if path.suffix == ".safetensors":
        load = require("safetensors.torch", key).load_file
    try:
        content: Any = load(path)
    except (OSError, MemoryError):  # These are faults of the disk or the host, not of the file.
        raise
    except Exception as error:
        reason = first_line(error)[:120]
        raise ConfigError(f"{key}: cannot be read as weights ({reason})") from error
    for name in _CONTAINERS:
        if isinstance(content, dict) and isinstance(content.get(name), dict):
            content = content[name]
    if not isinstance(content, dict) or not all(isinstance(v, Tensor) for v in content.values()):
        raise ConfigError(f"{key}: does not contain a state dict (names to tensors)")
    return content
