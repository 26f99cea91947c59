"""Declares and checks the keys of the built-in trainer: ``model``, ``dataset`` and ``training``.

``just keys`` writes ``configs/robust/model/``, ``configs/robust/dataset/image_folder.yaml`` and the
tables of ``docs/built-in-trainer.md`` from these declarations. `register` runs in every process
that composes a config, so that Hydra checks the keys there. The attempt's process calls the other
functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import MISSING, DictConfig

from robust_train.config.checks import read
from robust_train.config.composition import store_group
from robust_train.config.schema import TrainingConfig
from robust_train.config.values import FROM_0, FROM_1, SHARE, Range, key, words_of_list
from robust_train.model.errors import ConfigError
from robust_train.readable import suggest

_FROM_2 = Range("2 or more", lambda value: value >= 2)
_BELOW_1 = Range("from 0 to less than 1", lambda value: 0 <= value < 1)
_BETWEEN = Range("more than 0 and less than 1", lambda value: 0 < value < 1)

AUGMENTATIONS = ("crop_flip", "shift", "none")
LOGGERS = ("tensorboard", "none")


def _read_layers(name: str, given: Any) -> tuple[str, ...]:
    """Return the layers that the key ``name`` lists.

    Raises:
        ConfigError: the list is empty, or the value is not a list of names.
    """
    layers = words_of_list(name, given)
    if not layers:
        raise ConfigError(f"{name}=[]: name at least one module, such as [attn.qkv]")
    return layers


@dataclass(frozen=True)
class CnnConfig:
    """``model=cnn``: a small network, trained from scratch."""

    name: str = key("cnn", "name of the model")
    width: int = key(
        32, "channels of the first stage; they double with each halving of the image", range=FROM_1
    )
    image_size: int | None = key(
        None, "side of the square images, pixels; `null`: the data set's", range=FROM_1
    )
    dropout: float = key(0.1, "dropout before the head", range=_BELOW_1)
    lr: float = key(3e-3, "recommended learning rate")
    weights: str | None = key(None, "local file with weights to start from")


@dataclass(frozen=True)
class BackboneConfig:
    """The keys that all models with a timm backbone have."""

    name: str = key(MISSING, "name of the model")
    backbone: str = key(MISSING, "name of the backbone in timm")
    pretrained: bool = key(True, "download pretrained weights")
    weights: str | None = key(None, "local file with weights instead of a download")
    image_size: int = key(
        224, "side of the square that images are resized to, pixels", range=FROM_1
    )
    dropout: float = key(0.0, "dropout before the head", range=_BELOW_1)
    lr: float = key(1e-3, "recommended learning rate")


@dataclass(frozen=True)
class LinearProbeConfig(BackboneConfig):
    """``model=linear_probe``: a frozen backbone and a trained linear layer."""

    name: str = key("linear_probe", "name of the model")
    backbone: str = key(
        "vit_small_patch14_dinov2.lvd142m", "its features separate the classes linearly"
    )


_VIT = "vit_small_patch16_224.augreg_in21k"


@dataclass(frozen=True)
class LoraModelConfig(BackboneConfig):
    """``model=lora``: low-rank adapters (peft) in a frozen backbone, and a trained classifier."""

    name: str = key("lora", "name of the model")
    backbone: str = key(_VIT, "name of the backbone in timm")
    lora_r: int = key(8, "rank of the adapters", range=FROM_1)
    lora_alpha: int = key(16, "adapters are scaled by lora_alpha / lora_r", range=FROM_1)
    lora_dropout: float = key(0.1, "dropout of the adapters", range=_BELOW_1)
    target_modules: tuple[str, ...] = key(
        ("attn.qkv", "attn.proj"),
        "layers that get adapters; `proj` alone would also match the patch embedding",
        accepts="list",
        read=_read_layers,
    )


@dataclass(frozen=True)
class FullFinetuneConfig(BackboneConfig):
    """``model=full_finetune``: every weight of the backbone is trained."""

    name: str = key("full_finetune", "name of the model")
    backbone: str = key(_VIT, "name of the backbone in timm")
    lr: float = key(5e-5, "learning rate that suits it")


@dataclass(frozen=True)
class DatasetConfig:
    """``dataset``: the keys that every data set has."""

    name: str = key(MISSING, "name of the data set")
    root: str = key("data", "folder of the data, relative to the working directory")
    download: bool = key(True, "download what is missing")
    num_classes: int | None = key(None, "number of classes; `null`: the data set's", range=_FROM_2)
    augment: str = key(
        "crop_flip",
        "random changes of the training images: `crop_flip`, `shift` or `none`",
        choices=AUGMENTATIONS,
    )
    num_workers: int = key(2, "recommended number of data-loader workers")
    epochs: int = key(10, "recommended number of epochs")


@dataclass(frozen=True)
class ImageFolderConfig(DatasetConfig):
    """``dataset=image_folder``: a folder of images per class."""

    name: str = key("image_folder", "name of the data set")
    root: str = key(MISSING, "folder of the data: `<root>/train/<class>/<image>`")
    train: str = key("train", "subfolder with the training images, one folder per class")
    test: str = key("test", "subfolder with the test images")
    test_fraction: float = key(
        0.2, "share of each class held out if there is no test folder", range=_BETWEEN
    )


@dataclass(frozen=True)
class ImageTrainingConfig(TrainingConfig):
    """``training`` with ``trainer=image_classification``."""

    weight_decay: float = key(0.01, "weight decay", range=FROM_0)
    warmup_fraction: float = key(
        0.05, "share of the steps with a rising learning rate", range=SHARE
    )
    label_smoothing: float = key(0.0, "label smoothing of the loss", range=SHARE)
    max_grad_norm: float = key(1.0, "gradient clipping; `0`: none", range=FROM_0)
    mixed_precision: bool = key(True, "bf16, or fp16 with a scaler, on GPUs")
    sharding: str = key(
        "ddp",
        "`fsdp`: each rank holds its share of weights, gradients and optimizer state",
        more="Needs `num_gpus` ([several GPUs](several-gpus.md#sharded-models))",
        choices=("ddp", "fsdp"),
    )


MODELS: Mapping[str, type] = {
    "cnn": CnnConfig,
    "linear_probe": LinearProbeConfig,
    "lora": LoraModelConfig,
    "full_finetune": FullFinetuneConfig,
}
DATASETS: Mapping[str, type] = {
    "digits": DatasetConfig,
    "flowers102": DatasetConfig,
    "cub200": DatasetConfig,
    "image_folder": ImageFolderConfig,
}


def check_config(cfg: DictConfig) -> None:
    """Check ``model``, ``dataset``, ``training`` and ``logger``, without touching data or device.

    Raises:
        ConfigError: a value is not accepted.
    """
    logger_of(cfg)
    read(ImageTrainingConfig, cfg.training, "training.")
    for group, options in (("model", MODELS), ("dataset", DATASETS)):
        name = cfg[group].get("name")
        if name not in options:
            raise ConfigError(f"{group}.name={name}: must be one of {', '.join(options)}")
        read(options[name], cfg[group], f"{group}.")


def logger_of(cfg: DictConfig) -> str:
    """Return the value of ``logger``, ``none`` if it is not set.

    Raises:
        ConfigError: there is no such logger.
    """
    name = str(cfg.get("logger") or "none")
    if name not in LOGGERS:
        raise ConfigError(f"logger={name}: {suggest(name, LOGGERS)}")
    return name


def preload_modules(cfg: DictConfig) -> list[str]:
    """Return the modules that an interpreter imports while the job waits for a GPU.

    None of these modules uses CUDA when it is imported.
    """
    check_config(cfg)
    # The first optimizer imports torch._dynamo, which takes more than a second.
    modules = ["numpy", "PIL.Image", "torch._dynamo", "torchvision.transforms.v2"]
    if cfg.dataset.name == "digits":
        modules.append("sklearn.datasets")
    if cfg.dataset.name == "flowers102":
        modules += ["scipy.io", "torchvision.datasets"]
    if logger_of(cfg) == "tensorboard":
        modules.append("torch.utils.tensorboard")
    if cfg.model.name != "cnn":
        modules += ["timm", "timm.data"]
    if cfg.model.name == "lora":
        modules.append("peft")
    return modules


def register() -> None:
    """Register the keys in Hydra's ConfigStore."""
    store_group("training", "image_classification", ImageTrainingConfig, base=TrainingConfig)
    for name, schema in MODELS.items():
        store_group("model", name, schema)
    store_group("dataset", "dataset", DatasetConfig)
    store_group("dataset", "image_folder", ImageFolderConfig)
