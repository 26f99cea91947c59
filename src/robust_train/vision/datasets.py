"""The data sets by the name in ``dataset=…``, opened and checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from robust_train.config.trainers import require
from robust_train.model.errors import ConfigError
from robust_train.vision.images import (
    ImageFiles,
    Shape,
    Splits,
    stratified_split,
    with_validation,
)
from robust_train.vision.published import open_cub200, open_flowers102

_DIGITS = Shape(num_classes=10, size=8, channels=1)
_DIGITS_WHITE = 16
_DIGITS_HELD_OUT = 0.2
_SUFFIXES = (
    ".jpg",
    ".jpeg",
    ".png",
    ".webp",
    ".bmp",
    ".gif",
    ".tif",
    ".tiff",
    ".ppm",
    ".pgm",
)


@dataclass(frozen=True)
class DigitImages:
    """The digits. ``pixels`` are rows × columns of 0 to 255, one ``bytes`` an image."""

    pixels: Sequence[bytes]
    labels: Sequence[int]

    def image(self, index: int) -> Any:
        from PIL import Image

        return Image.frombytes("L", (8, 8), self.pixels[index])

    def describe(self, index: int) -> str:
        return f"digit {index} of scikit-learn"


def open_digits(cfg: Any) -> Splits:
    """Open the 1,797 scanned digits of 8×8 pixels inside scikit-learn. Four fifths are for
    training, a tenth for validation, a tenth for the test, with the same share of every digit."""
    require("PIL.Image", "dataset=digits")
    bunch = require("sklearn.datasets", "dataset=digits").load_digits()
    scaled = (bunch.images * (255 / _DIGITS_WHITE)).round().astype("uint8")
    digits = DigitImages([image.tobytes() for image in scaled], bunch.target.tolist())
    train, held_out = stratified_split(digits, _DIGITS_HELD_OUT)
    return Splits(train, *stratified_split(held_out, 0.5), _DIGITS)


def open_image_folder(cfg: Any) -> Splits:
    """Open a folder of images a class, in ``root/train`` and ``root/test``.

    The classes are the folders' names in alphabetical order. Without a test folder,
    ``test_fraction`` of every class is set aside for the test: the same images in every run. A
    tenth of the training images is for validation.
    """
    require("PIL.Image", "dataset=image_folder")
    root = Path(cfg.root).expanduser()
    classes = _classes(cfg)
    shape = Shape(num_classes=len(classes))
    everything = _read(root / cfg.train, classes)
    if (root / cfg.test).is_dir():
        return with_validation(everything, _read(root / cfg.test, classes), shape)
    return with_validation(*stratified_split(everything, cfg.test_fraction), shape)


def _classes(cfg: Any) -> list[str]:
    folder = Path(cfg.root).expanduser() / cfg.train
    if not folder.is_dir():
        raise ConfigError(
            f"dataset.root={cfg.root}: there is no folder {folder}; expected are "
            f"{cfg.train}/<class>/<image>, see dataset.root and dataset.train"
        )
    classes = [f.name for f in _class_folders(folder)]
    if len(classes) < 2:
        raise ConfigError(
            f"dataset.root={cfg.root}: {folder} has {len(classes)} class folders, "
            "at least 2 are needed"
        )
    return classes


def _read(folder: Path, classes: list[str]) -> ImageFiles:
    paths: list[Path] = []
    labels: list[int] = []
    for class_folder in _class_folders(folder):
        if class_folder.name not in classes:
            raise ConfigError(
                f"dataset=image_folder: {class_folder} is of a class that has no training images"
            )
        found = sorted(
            f for f in class_folder.rglob("*") if f.suffix.lower() in _SUFFIXES
        )
        if not found:
            raise ConfigError(
                f"dataset=image_folder: {class_folder} has no images ({', '.join(_SUFFIXES)})"
            )
        paths += found
        labels += [classes.index(class_folder.name)] * len(found)
    return ImageFiles(paths, labels)


def _class_folders(folder: Path) -> list[Path]:
    return sorted(
        f for f in folder.iterdir() if f.is_dir() and not f.name.startswith(".")
    )


_DATASETS: Mapping[str, Callable[[Any], Splits]] = {
    "digits": open_digits,
    "flowers102": open_flowers102,
    "cub200": open_cub200,
    "image_folder": open_image_folder,
}


def open_data(cfg: Any) -> Splits:
    """Open the data set of a checked ``cfg``; fetch it first if it is absent and may be fetched."""
    splits = _DATASETS[cfg.name](cfg)
    known = splits.shape.num_classes
    for what in ("training", "validation", "test"):
        source = splits.train if what == "training" else getattr(splits, what)
        if not len(source.labels):
            raise ConfigError(
                f"dataset.root={cfg.root}: {cfg.name} has no {what} images there"
            )
        for index, label in enumerate(source.labels):
            if not 0 <= label < known:
                raise ConfigError(
                    f"dataset.root={cfg.root}: {source.describe(index)} has label {label}; "
                    f"{cfg.name} has classes 0 to {known - 1}"
                )
    if cfg.num_classes is None:
        return splits
    if cfg.num_classes < known:
        raise ConfigError(
            f"dataset.num_classes={cfg.num_classes}: {cfg.name} has {known} classes"
        )
    return replace(splits, shape=replace(splits.shape, num_classes=cfg.num_classes))
