"""The data sets by the name in ``dataset=…``, opened and checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from omegaconf import OmegaConf

from robust_train.errors import ConfigError
from robust_train.vision import cub200, digits, flowers102, image_folder
from robust_train.vision.images import AUGMENTATIONS, ImageSource
from robust_train.vision.splits import Shape, Splits

DATASETS: Mapping[str, Callable[[Any], Splits]] = {
    "digits": digits.open_digits,
    "flowers102": flowers102.open_flowers102,
    "cub200": cub200.open_cub200,
    "image_folder": image_folder.open_image_folder,
}


_SHAPES = {
    "digits": digits.SHAPE,
    "flowers102": flowers102.SHAPE,
    "cub200": cub200.SHAPE,
}


@dataclass(frozen=True)
class Data:
    """An opened data set.

    Attributes:
        splits: its images.
        num_classes: outputs that a model needs.
    """

    splits: Splits
    num_classes: int


def check_data(cfg: Any) -> None:
    """Check the ranges that types cannot express.

    Raises:
        ConfigError: one line with the key, its value and what is accepted.
    """
    name = cfg.get("name")
    if name not in DATASETS:
        raise ConfigError(f"dataset.name={name}: accepted are {', '.join(DATASETS)}")
    if OmegaConf.is_missing(cfg, "root"):
        raise ConfigError(f"dataset.root: {name} needs it; dataset.root=<folder>")
    if cfg.augment not in AUGMENTATIONS:
        raise ConfigError(f"dataset.augment={cfg.augment}: accepted are {', '.join(AUGMENTATIONS)}")
    if cfg.num_classes is not None and cfg.num_classes < 2:
        raise ConfigError(f"dataset.num_classes={cfg.num_classes}: must be 2 or more")
    fraction = cfg.get("test_fraction", 0.5)
    if not 0 < fraction < 1:
        raise ConfigError(
            f"dataset.test_fraction={fraction:g}: must be more than 0 and less than 1"
        )


def shape_of_data(cfg: Any) -> Shape:
    """What a model has to know of the data set that ``cfg`` names, without fetching or opening it.

    Args:
        cfg: the config group ``dataset``, checked by :func:`check_data`.

    Raises:
        ConfigError: only its files could tell, and they are not there.
    """
    shape = _SHAPES.get(cfg.name)
    if shape is None:
        return image_folder.image_folder_shape(cfg)
    return shape if cfg.num_classes is None else replace(shape, num_classes=cfg.num_classes)


def open_data(cfg: Any) -> Data:
    """Open the data set that ``cfg`` names; fetch it first where it is absent and may be.

    Args:
        cfg: the config group ``dataset``, checked by :func:`check_data`.

    Raises:
        ConfigError: it cannot be had, or its files contradict each other.
    """
    splits = DATASETS[cfg.name](cfg)
    for what, source in (
        ("training", splits.train),
        ("validation", splits.validation),
        ("test", splits.test),
    ):
        _check_split(cfg, what, source, splits.num_classes)
    num_classes = splits.num_classes if cfg.num_classes is None else cfg.num_classes
    if num_classes < splits.num_classes:
        raise ConfigError(
            f"dataset.num_classes={num_classes}: {cfg.name} has {splits.num_classes} classes"
        )
    return Data(splits, num_classes)


def _check_split(cfg: Any, what: str, source: ImageSource, num_classes: int) -> None:
    if not len(source.labels):
        raise ConfigError(f"dataset.root={cfg.root}: {cfg.name} has no {what} images there")
    for index, label in enumerate(source.labels):
        if not 0 <= label < num_classes:
            raise ConfigError(
                f"dataset.root={cfg.root}: {source.describe(index)} has label {label}; "
                f"{cfg.name} has classes 0 to {num_classes - 1}"
            )
