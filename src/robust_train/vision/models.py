"""The models by the name in ``model=…``: which part is trained, which images they take."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from robust_train.config.extras import require
from robust_train.errors import ConfigError
from robust_train.vision.backbones import build_backbone, classifier_names
from robust_train.vision.cnn import SmallCnn
from robust_train.vision.images import ImageSpec
from robust_train.vision.weights import load_weights

log = logging.getLogger("robust_train.vision")

MODELS = ("cnn", "linear_probe", "lora", "full_finetune")
_PHOTOGRAPH_SIZE = 64


@dataclass(frozen=True)
class BuiltModel:
    """A model on the CPU and the images it takes."""

    module: nn.Module
    images: ImageSpec


def check_model(cfg: Any) -> None:
    """Check the ranges that types cannot express.

    Raises:
        ConfigError: one line with the key, its value and what is accepted.
    """
    name = cfg.get("name")
    if name not in MODELS:
        raise ConfigError(f"model.name={name}: accepted are {', '.join(MODELS)}")
    for key, least in (("width", 1), ("image_size", 1), ("lora_r", 1), ("lora_alpha", 1)):
        value = cfg.get(key)
        if value is not None and value < least:
            raise ConfigError(f"model.{key}={value}: must be {least} or more")
    for key in ("dropout", "lora_dropout"):
        value = cfg.get(key)
        if value is not None and not 0 <= value < 1:
            raise ConfigError(f"model.{key}={value:g}: must be from 0 to less than 1")
    if "target_modules" in cfg and not cfg.target_modules:
        raise ConfigError("model.target_modules=[]: name at least one module, e.g. [attn.qkv]")


def build_model(
    cfg: Any, *, num_classes: int, native_size: int | None, native_channels: int
) -> BuiltModel:
    """The model that ``cfg`` describes, on the CPU, with weights and the trained part marked by
    ``requires_grad``.

    Args:
        cfg: the config group ``model``.
        num_classes: of the data set.
        native_size: the data set's one image size, None where images differ.
        native_channels: of the data set's images.

    Raises:
        ConfigError: it cannot be built as configured.
    """
    if cfg.name == "cnn":
        return _cnn(cfg, num_classes, native_size, native_channels)
    if cfg.name == "linear_probe":
        backbone = build_backbone(cfg, num_classes=0)
        return BuiltModel(
            LinearProbe(backbone, num_classes, cfg.dropout), _image_spec(cfg, backbone)
        )
    module = build_backbone(cfg, num_classes)
    images = _image_spec(cfg, module)
    return BuiltModel(add_lora(module, cfg) if cfg.name == "lora" else module, images)


def _cnn(cfg: Any, num_classes: int, native_size: int | None, channels: int) -> BuiltModel:
    size = cfg.image_size or native_size or _PHOTOGRAPH_SIZE
    module = SmallCnn(
        channels=channels,
        image_size=size,
        num_classes=num_classes,
        width=cfg.width,
        dropout=cfg.dropout,
    )
    if cfg.weights is not None:
        load_weights(module, Path(cfg.weights).expanduser(), heads=("head",))
    return BuiltModel(module, ImageSpec(size, channels, (0.5,) * channels, (0.5,) * channels))


def _image_spec(cfg: Any, backbone: nn.Module) -> ImageSpec:
    data = require("timm.data", f"model={cfg.name}").resolve_model_data_config(backbone)
    return ImageSpec(
        size=cfg.image_size,
        channels=3,
        mean=tuple(data["mean"]),
        std=tuple(data["std"]),
        crop=data["crop_pct"],
    )


class LinearProbe(nn.Module):
    """A frozen backbone and one trained linear layer.

    The backbone stays in evaluation mode and outside autograd: no activation is kept, and its
    BatchNorm statistics and dropout are those of its pretraining.
    """

    def __init__(self, backbone: nn.Module, num_classes: int, dropout: float) -> None:
        super().__init__()
        self.backbone = backbone.requires_grad_(False)
        features: Any = getattr(backbone, "head_hidden_size", None) or backbone.num_features
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(features, num_classes)

    def train(self, mode: bool = True) -> LinearProbe:
        """As in torch, but for the backbone."""
        super().train(mode)
        self.backbone.eval()
        return self

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Logits, samples × classes."""
        with torch.no_grad():
            features_BF = self.backbone(images_BCHW)
        logits_BK: Tensor = self.head(self.dropout(features_BF))
        return logits_BK


def add_lora(module: nn.Module, cfg: Any) -> nn.Module:
    """Low-rank adapters (Hu et al. 2021, arXiv:2106.09685) by peft in ``cfg.target_modules``, and
    a trained classifier; all else is frozen.

    Raises:
        ConfigError: a target names no layer of the backbone.
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
            raise ConfigError(
                f"model.target_modules: {cfg.backbone} has no layer {target!r}; it has "
                f"{', '.join(_without_numbers(layers))}"
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


def _without_numbers(layers: Iterable[str]) -> list[str]:
    """``blocks.0.attn.qkv``, ``blocks.1.attn.qkv`` … → ``attn.qkv``: what a user would type."""
    short: dict[str, None] = {}
    for name in layers:
        parts = name.split(".")
        numbers = [index for index, part in enumerate(parts) if part.isdigit()]
        short[".".join(parts[numbers[-1] + 1 :] if numbers else parts) or name] = None
    return list(short)


def set_train_mode(module: nn.Module) -> None:
    """Training mode, but for frozen BatchNorm layers: their statistics must not move either."""
    module.train()
    for layer in module.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            parameters = list(layer.parameters(recurse=False))
            if parameters and not any(p.requires_grad for p in parameters):
                layer.eval()


def enable_gradient_checkpointing(module: nn.Module) -> bool:
    """Recompute activations in the backward pass; False where the model has nothing to gain."""
    target: Any = module
    if isinstance(module, LinearProbe):
        return False
    if not hasattr(target, "set_grad_checkpointing") and hasattr(target, "get_base_model"):
        target = target.get_base_model()
    try:
        target.set_grad_checkpointing(True)
    except (AssertionError, AttributeError):  # timm's answer of the models that cannot
        return False
    return True


def count_parameters(module: nn.Module) -> tuple[int, int]:
    """Trained parameters and all of them."""
    sizes = [(p.numel(), p.requires_grad) for p in module.parameters()]
    return sum(n for n, is_trained in sizes if is_trained), sum(n for n, _ in sizes)


def trained_state(module: nn.Module) -> dict[str, Tensor]:
    """The part of the state dict that training changes: for a frozen backbone with an adapter or a
    head, just these; for a model that is trained as a whole, all of it. Shares memory with it.
    """
    trained: set[str] = set()
    for prefix, layer in module.named_modules():
        own = dict(layer.named_parameters(prefix, recurse=False))
        # statistics without weights beside them move in training as well
        has_statistics = isinstance(layer, nn.modules.batchnorm._BatchNorm) and not own
        if has_statistics or any(p.requires_grad for p in own.values()):
            trained.update(name for name, p in own.items() if p.requires_grad)
            trained.update(name for name, _ in layer.named_buffers(prefix, recurse=False))
    return {name: value for name, value in module.state_dict().items() if name in trained}


def load_trained_state(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """The inverse of :func:`trained_state`.

    Raises:
        ValueError: ``state`` is not of this model.
    """
    expected = trained_state(module)
    if state.keys() != expected.keys():
        odd = sorted(state.keys() ^ expected.keys())[0]
        raise ValueError(f"the weights do not belong to this model: {odd}")
    module.load_state_dict(state, strict=False)
