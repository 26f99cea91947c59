"""``dataset=flowers102``: Oxford 102 Flowers (Nilsback & Zisserman 2008) in its original files.

``imagelabels.mat`` and ``setid.mat`` are MATLAB files that count classes and images from 1; images
lie in ``jpg/image_00001.jpg`` and so on. torchvision fetches them and verifies the checksums. They
are read here, as torchvision would insist on these checksums at every start, and so refuse a part
of the data set that somebody has cut out.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from robust_train.config.extras import require
from robust_train.errors import ConfigError
from robust_train.vision.download import fetch
from robust_train.vision.images import ImageFiles
from robust_train.vision.splits import Shape, Splits

_URL = "https://www.robots.ox.ac.uk/~vgg/data/flowers/102/"

SHAPE = Shape(num_classes=102)


def open_flowers102(cfg: Any) -> Splits:
    """The official parts: 10 images a class for training, 10 for validation, the rest for the
    test."""
    key = "dataset=flowers102"
    require("PIL.Image", key)
    root = Path(cfg.root).expanduser()

    def get() -> None:
        require("torchvision.datasets", key).Flowers102(str(root), download=True)

    fetch(cfg, url=_URL, is_present=lambda: _folder(root) is not None, get=get)
    folder = _folder(root)
    if folder is None:
        raise ConfigError(f"dataset.root={cfg.root}: flowers102 was fetched but is not there")
    labels = _values(folder / "imagelabels.mat", "labels")
    train, validation, test = (
        _part(folder, labels, set_id) for set_id in ("trnid", "valid", "tstid")
    )
    return Splits(train, validation, test, num_classes=SHAPE.num_classes)


def _folder(root: Path) -> Path | None:
    """Where the files are: torchvision puts them in a folder of their own, people often do not."""
    for folder in (root / "flowers-102", root):
        names = ("imagelabels.mat", "setid.mat")
        if (folder / "jpg").is_dir() and all((folder / name).is_file() for name in names):
            return folder
    return None


def _values(path: Path, key: str) -> list[int]:
    loadmat = require("scipy.io", "dataset=flowers102").loadmat
    try:
        content: Mapping[str, Any] = loadmat(path)
        return [int(value) for value in content[key].ravel()]
    except KeyError as error:
        raise ConfigError(f"dataset=flowers102: {path} has no variable {key!r}") from error
    except (ValueError, TypeError, NotImplementedError) as error:
        raise ConfigError(f"dataset=flowers102: {path} is no readable MATLAB file") from error


def _part(folder: Path, labels: list[int], set_id: str) -> ImageFiles:
    numbers = _values(folder / "setid.mat", set_id)
    paths = [folder / "jpg" / f"image_{number:05d}.jpg" for number in numbers]
    for number, path in zip(numbers, paths, strict=True):
        if not 1 <= number <= len(labels):
            raise ConfigError(
                f"dataset=flowers102: {folder / 'setid.mat'}, {set_id}: image {number} has no "
                "label in imagelabels.mat"
            )
        if not path.is_file():
            raise ConfigError(
                f"dataset=flowers102: {folder / 'setid.mat'}, {set_id}: there is no {path}"
            )
    return ImageFiles(paths, [labels[number - 1] - 1 for number in numbers])
