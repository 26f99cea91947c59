"""``dataset=cub200``: Caltech-UCSD Birds-200-2011 (Wah et al. 2011) in its original archive format.

Text files with one line an image, ``<image id> <value>``, ids and classes counted from 1:
``images.txt`` (path under ``images/``), ``image_class_labels.txt``, ``train_test_split.txt``
(1 for training).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from robust_train.config.extras import require
from robust_train.errors import ConfigError
from robust_train.vision.download import fetch
from robust_train.vision.images import ImageFiles
from robust_train.vision.splits import Shape, Splits

_URL = "https://data.caltech.edu/records/65de6-vp158/files/CUB_200_2011.tgz"
_MD5 = "97eceeb196236b17998738112f37df78"
_LISTS = ("images.txt", "image_class_labels.txt", "train_test_split.txt")

SHAPE = Shape(num_classes=200)


def open_cub200(cfg: Any) -> Splits:
    """The official parts; the test images serve for validation too, there is no third part."""
    key = "dataset=cub200"
    require("PIL.Image", key)
    root = Path(cfg.root).expanduser()

    def get() -> None:
        tools = require("torchvision.datasets.utils", key)
        tools.download_and_extract_archive(_URL, str(root), md5=_MD5)

    fetch(cfg, url=_URL, is_present=lambda: _folder(root) is not None, get=get)
    folder = _folder(root)
    if folder is None:
        raise ConfigError(f"dataset.root={cfg.root}: cub200 was fetched but is not there")
    paths = _paths(folder)
    labels = _numbers(folder / "image_class_labels.txt", 1, SHAPE.num_classes)
    parts = _numbers(folder / "train_test_split.txt", 0, 1)
    for name, found in (("image_class_labels.txt", labels), ("train_test_split.txt", parts)):
        absent = next((image for image in paths if image not in found), None)
        if absent is not None:
            raise ConfigError(f"dataset=cub200: {folder / name} has no line for image {absent}")
    train, test = (
        ImageFiles(
            [path for image, path in paths.items() if parts[image] == part],
            [labels[image] - 1 for image in paths if parts[image] == part],
        )
        for part in (1, 0)
    )
    return Splits(train, test, test, num_classes=SHAPE.num_classes)


def _folder(root: Path) -> Path | None:
    for folder in (root / "CUB_200_2011", root):
        if (folder / "images").is_dir() and all((folder / name).is_file() for name in _LISTS):
            return folder
    return None


def _paths(folder: Path) -> dict[str, Path]:
    source = folder / "images.txt"
    paths = {}
    for line, image, name in _lines(source):
        path = folder / "images" / name
        if not path.is_file():
            raise ConfigError(f"dataset=cub200: {source}, line {line}: there is no {path}")
        paths[image] = path
    return paths


def _numbers(source: Path, low: int, high: int) -> dict[str, int]:
    numbers = {}
    for line, image, text in _lines(source):
        if not (text.isdecimal() and low <= int(text) <= high):
            raise ConfigError(
                f"dataset=cub200: {source}, line {line}: {text!r} is not from {low} to {high}"
            )
        numbers[image] = int(text)
    return numbers


def _lines(source: Path) -> Iterator[tuple[int, str, str]]:
    """Line number, image id and value."""
    with source.open(encoding="utf-8", errors="replace") as file:
        for line, text in enumerate(file, 1):
            parts = text.split(maxsplit=1)
            if not parts:
                continue
            if len(parts) != 2:
                raise ConfigError(
                    f"dataset=cub200: {source}, line {line}: {text.strip()!r} is not "
                    "'<image id> <value>'"
                )
            yield line, parts[0], parts[1].strip()
