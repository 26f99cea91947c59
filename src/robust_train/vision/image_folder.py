"""``dataset=image_folder``: a folder of images a class, in ``root/train`` and ``root/test``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from robust_train.config.extras import require
from robust_train.errors import ConfigError
from robust_train.vision.images import ImageFiles
from robust_train.vision.splits import Shape, Splits, stratified_split

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")


def open_image_folder(cfg: Any) -> Splits:
    """The classes are the folders' names in alphabetical order.

    Without a test folder, ``test_fraction`` of every class is set aside for the test: the same
    images in every run.
    """
    require("PIL.Image", "dataset=image_folder")
    root = Path(cfg.root).expanduser()
    train_folder, test_folder = root / cfg.train, root / cfg.test
    classes = _classes(cfg, train_folder)
    everything = _read(train_folder, classes)
    if test_folder.is_dir():
        test = _read(test_folder, classes)
        return Splits(everything, test, test, num_classes=len(classes))
    train_part, test_part = (
        ImageFiles([everything.paths[i] for i in part], [everything.labels[i] for i in part])
        for part in stratified_split(everything.labels, cfg.test_fraction)
    )
    return Splits(train_part, test_part, test_part, num_classes=len(classes))


def image_folder_shape(cfg: Any) -> Shape:
    """What a model has to know of it; the number of classes is looked up, unless it is given.

    Raises:
        ConfigError: there is no such folder.
    """
    if cfg.num_classes is not None:
        return Shape(num_classes=cfg.num_classes)
    return Shape(num_classes=len(_classes(cfg, Path(cfg.root).expanduser() / cfg.train)))


def _classes(cfg: Any, train_folder: Path) -> list[str]:
    if not train_folder.is_dir():
        raise ConfigError(
            f"dataset.root={cfg.root}: there is no folder {train_folder}; expected are "
            f"{cfg.train}/<class>/<image>, see dataset.root and dataset.train"
        )
    classes = sorted(f.name for f in train_folder.iterdir() if _is_visible_folder(f))
    if len(classes) < 2:
        raise ConfigError(
            f"dataset.root={cfg.root}: {train_folder} has {len(classes)} class folders, "
            "at least 2 are needed"
        )
    return classes


def _read(folder: Path, classes: list[str]) -> ImageFiles:
    numbers = {name: number for number, name in enumerate(classes)}
    paths: list[Path] = []
    labels: list[int] = []
    for class_folder in sorted(f for f in folder.iterdir() if _is_visible_folder(f)):
        if class_folder.name not in numbers:
            raise ConfigError(
                f"dataset=image_folder: {class_folder} is of a class that has no training images"
            )
        found = sorted(f for f in class_folder.rglob("*") if f.suffix.lower() in SUFFIXES)
        if not found:
            raise ConfigError(
                f"dataset=image_folder: {class_folder} has no images ({', '.join(SUFFIXES)})"
            )
        paths += found
        labels += [numbers[class_folder.name]] * len(found)
    return ImageFiles(paths, labels)


def _is_visible_folder(path: Path) -> bool:
    return path.is_dir() and not path.name.startswith(".")
