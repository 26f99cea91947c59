"""Opens the data sets that ``dataset=…`` names, and downloads them if they are missing.

`vision.trainer` calls `open_data` in the attempt's process, on every rank.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from robust_train.config.trainers import require
from robust_train.model.errors import ConfigError

_DIGITS_WHITE = 16  # the value of a white pixel
_DIGITS_SIZE = 8  # rows and columns
_DIGITS_HELD_OUT = 0.2  # for validation and test together
_VALIDATION_FRACTION = 0.1  # of the training images
# The split does not depend on the job's seed, so that runs with different seeds have the same test
# images.
_SPLIT_SEED = 0
_FLOWERS102_URL = "https://www.robots.ox.ac.uk/~vgg/data/flowers/102/"
_CUB200_URL = "https://data.caltech.edu/records/65de6-vp158/files/CUB_200_2011.tgz"
_CUB200_MD5 = "97eceeb196236b17998738112f37df78"
_CUB200_LISTS = ("images.txt", "image_class_labels.txt", "train_test_split.txt")
SILENCE_SECONDS = 20.0
"""How long a download waits for data. By default, urllib waits forever."""


@dataclass(frozen=True)
class Images:
    """Some images of a data set, with their classes.

    Attributes:
        names: the images' files. The digits have no files, only names.
        labels: the images' classes, counted from 0.
        pixels: the digits by name, as rows × columns of values from 0 to 255.
    """

    names: Sequence[str]
    labels: Sequence[int]
    pixels: Mapping[str, bytes] = field(default_factory=dict)

    def image(self, index: int) -> Any:
        """Return an image as a PIL image."""
        from PIL import Image

        if self.pixels:
            size = (_DIGITS_SIZE, _DIGITS_SIZE)
            return Image.frombytes("L", size, self.pixels[self.names[index]])
        return Image.open(self.names[index])

    def part(self, indices: Sequence[int]) -> Images:
        """Return the images with these indices."""
        return replace(
            self,
            names=[self.names[index] for index in indices],
            labels=[self.labels[index] for index in indices],
        )


@dataclass(frozen=True)
class Shape:
    """The facts about a data set that a model needs. ``size`` is None if image sizes differ."""

    num_classes: int
    size: int | None = None
    channels: int = 3


@dataclass(frozen=True)
class Splits:
    """The parts of a data set. No image is in two parts."""

    train: Images
    validation: Images
    test: Images
    shape: Shape


def open_data(cfg: Any) -> Splits:
    """Open the data set of a checked config. Download it if it is missing and may be downloaded.

    Raises:
        ConfigError: the data set is missing, incomplete, or does not fit the config.
    """
    require("PIL.Image", f"dataset={cfg.name}")
    splits = _DATASETS[cfg.name](cfg)
    num_classes = splits.shape.num_classes
    for part_name in ("train", "validation", "test"):
        part: Images = getattr(splits, part_name)
        if not part.labels:
            raise ConfigError(
                f"dataset.root={cfg.root}: {cfg.name} has no {part_name} images there"
            )
        for name, label in zip(part.names, part.labels, strict=True):
            if not 0 <= label < num_classes:
                raise ConfigError(
                    f"dataset.root={cfg.root}: {name} has label {label}; "
                    f"{cfg.name} has classes 0 to {num_classes - 1}"
                )
    configured = cfg.num_classes or num_classes
    if configured < num_classes:
        raise ConfigError(f"dataset.num_classes={configured}: {cfg.name} has {num_classes} classes")
    return replace(splits, shape=replace(splits.shape, num_classes=configured))


def stratified_split(source: Images, fraction: float) -> tuple[Images, Images]:
    """Split images into two parts. The second part has ``fraction`` of every class.

    A class has at least 1 image in the first part. A class of 2 or more images also has at least 1
    image in the second part. The split depends on the labels alone.
    """
    generator = torch.Generator().manual_seed(_SPLIT_SEED)
    first: list[int] = []
    second: list[int] = []
    for label in sorted(set(source.labels)):
        members = [index for index, each in enumerate(source.labels) if each == label]
        order = torch.randperm(len(members), generator=generator).tolist()
        count = min(max(round(len(members) * fraction), 1), len(members) - 1)
        second += [members[position] for position in order[:count]]
        first += [members[position] for position in order[count:]]
    return source.part(sorted(first)), source.part(sorted(second))


def _with_validation(train: Images, test: Images, num_classes: int) -> Splits:
    """Return the parts of a data set that has no validation images.

    A tenth of the training images is used for validation.
    """
    train, validation = stratified_split(train, _VALIDATION_FRACTION)
    return Splits(train, validation, test, Shape(num_classes))


def _open_digits(cfg: Any) -> Splits:
    """Open the 1,797 scanned digits of 8×8 pixels that scikit-learn includes.

    Four fifths are for training, a tenth for validation and a tenth for the test, with the same
    share of every digit.
    """
    data = require("sklearn.datasets", "dataset=digits").load_digits()
    scaled = (data.images * (255 / _DIGITS_WHITE)).round().astype("uint8")
    pixels = {}
    for number, image in enumerate(scaled):
        pixels[f"digit {number} of scikit-learn"] = image.tobytes()
    digits = Images(list(pixels), data.target.tolist(), pixels)
    train, held_out = stratified_split(digits, _DIGITS_HELD_OUT)
    validation, test = stratified_split(held_out, 0.5)
    shape = Shape(num_classes=10, size=_DIGITS_SIZE, channels=1)
    return Splits(train, validation, test, shape)


def _open_image_folder(cfg: Any) -> Splits:
    """Open ``root/train`` and ``root/test``, each with one folder of images per class.

    The classes are the folders' names in alphabetical order. Without a test folder,
    ``test_fraction`` of every class is used for the test, with the same images in every run.
    """
    root = Path(cfg.root).expanduser()
    folder = root / cfg.train
    test_folder = root / cfg.test
    if not folder.is_dir():
        raise ConfigError(
            f"dataset.root={cfg.root}: there is no folder {folder}; put the images at "
            f"{cfg.train}/<class>/<image>, or change dataset.root or dataset.train"
        )
    classes = _classes_in(folder)
    if len(classes) < 2:
        raise ConfigError(
            f"dataset.root={cfg.root}: {folder} has {len(classes)} class folders, "
            "at least 2 are needed"
        )
    train = _read_classes(folder, classes)
    if test_folder.is_dir():
        test = _read_classes(test_folder, classes)
    else:
        train, test = stratified_split(train, cfg.test_fraction)
    return _with_validation(train, test, len(classes))


def _classes_in(folder: Path) -> list[str]:
    """Return the names of a folder's subfolders that are not hidden."""
    return sorted(path.name for path in folder.iterdir() if path.is_dir() and path.name[0] != ".")


def _read_classes(folder: Path, classes: Sequence[str]) -> Images:
    """Return the images in a folder's subfolders, whose names must be among ``classes``."""
    torchvision = require("torchvision.datasets.folder", "dataset=image_folder")
    classes_here = _classes_in(folder)
    unknown = sorted(set(classes_here) - set(classes))
    if unknown:
        raise ConfigError(
            f"dataset=image_folder: {folder / unknown[0]}: this class has no training images"
        )
    labels = {name: classes.index(name) for name in classes_here}
    extensions = (*torchvision.IMG_EXTENSIONS, ".gif")
    try:
        samples = torchvision.make_dataset(folder, labels, extensions)
    except (FileNotFoundError, ValueError) as error:  # A class has no image, or there is no class.
        raise ConfigError(f"dataset=image_folder: {folder}: {error}") from None
    return Images([name for name, _ in samples], [label for _, label in samples])


def _open_flowers102(cfg: Any) -> Splits:
    """Open Oxford 102 Flowers (Nilsback & Zisserman 2008) with its official splits.

    ``imagelabels.mat`` and ``setid.mat`` are MATLAB files that count classes and images from 1.
    Images are ``jpg/image_00001.jpg`` and so on. torchvision only downloads the files. It would
    refuse to open a subset of them, because it verifies checksums.
    """
    folder = _find_or_download(
        cfg,
        "flowers-102",
        ("jpg", "imagelabels.mat", "setid.mat"),
        _FLOWERS102_URL,
        lambda torchvision, root: torchvision.Flowers102(root, download=True),
    )
    labels = _matlab_values(folder / "imagelabels.mat", "labels")
    source = folder / "setid.mat"

    def read_split(set_id: str) -> Images:
        numbers = _matlab_values(source, set_id)
        if not all(1 <= number <= len(labels) for number in numbers):
            raise ConfigError(
                f"dataset=flowers102: {source}, {set_id}: an image has no label in imagelabels.mat"
            )
        paths = [folder / "jpg" / f"image_{number:05d}.jpg" for number in numbers]
        return _image_files(source, paths, [labels[number - 1] for number in numbers])

    return Splits(read_split("trnid"), read_split("valid"), read_split("tstid"), Shape(102))


def _matlab_values(path: Path, key: str) -> list[int]:
    """Return the integers of an array in a MATLAB file."""
    loadmat = require("scipy.io", "dataset=flowers102").loadmat
    try:
        return [int(value) for value in loadmat(path)[key].ravel()]
    except (KeyError, ValueError, TypeError, NotImplementedError) as error:
        raise ConfigError(
            f"dataset=flowers102: {path} is not a readable MATLAB file with {key!r}"
        ) from error


def _open_cub200(cfg: Any) -> Splits:
    """Open Caltech-UCSD Birds-200-2011 (Wah et al. 2011) with its official splits.

    Three text files have a line ``<image id> <value>`` for each image. The value is the path under
    ``images/`` in ``images.txt``, the class, counted from 1, in ``image_class_labels.txt``, and 1
    for training images in ``train_test_split.txt``.
    """
    folder = _find_or_download(
        cfg,
        "CUB_200_2011",
        ("images", *_CUB200_LISTS),
        _CUB200_URL,
        lambda torchvision, root: torchvision.utils.download_and_extract_archive(
            _CUB200_URL, root, md5=_CUB200_MD5
        ),
    )
    names, labels, parts = (_read_bird_values(folder / name) for name in _CUB200_LISTS)

    def read_split(part: str) -> Images:
        members = [image for image in names if parts[image] == part]
        return _image_files(
            folder / "images.txt",
            [folder / "images" / names[image] for image in members],
            [int(labels[image]) for image in members],
        )

    try:
        return _with_validation(read_split("1"), read_split("0"), num_classes=200)
    except KeyError as error:
        raise ConfigError(
            f"dataset=cub200: {folder}: image {error} is not in all of {', '.join(_CUB200_LISTS)}"
        ) from error


def _read_bird_values(source: Path) -> dict[str, str]:
    """Return the values in a text file of the birds, by the image's id."""
    lines = source.read_text(encoding="utf-8", errors="replace").split("\n")
    values = {}
    for number, line in enumerate(lines, 1):
        image, _, value = line.strip().partition(" ")
        is_number = value.isdecimal() or source.name == "images.txt"
        if image and not (value and is_number):
            raise ConfigError(
                f"dataset=cub200: {source}, line {number}: {line!r} is not '<image id> <value>'"
            )
        if image:
            values[image] = value
    return values


def _image_files(source: Path, paths: Sequence[Path], labels: Sequence[int]) -> Images:
    """Return images that ``source`` lists. ``labels`` are counted from 1."""
    for path in paths:
        if not path.is_file():
            raise ConfigError(f"dataset: {source} lists {path}, which does not exist")
    return Images([str(path) for path in paths], [label - 1 for label in labels])


_DATASETS: Mapping[str, Callable[[Any], Splits]] = {
    "digits": _open_digits,
    "flowers102": _open_flowers102,
    "cub200": _open_cub200,
    "image_folder": _open_image_folder,
}


def _find_or_download(
    cfg: Any, name: str, expected: Sequence[str], url: str, download: Callable[[Any, Path], object]
) -> Path:
    """Return the folder of a data set, which is downloaded if it is missing.

    Args:
        cfg: the config group ``dataset``. The folder is ``cfg.root / name`` or ``cfg.root``.
        name: the name of the folder in the downloaded archive.
        expected: the files and folders that the folder must have.
        url: the source of the download, for messages.
        download: downloads into a root folder, with the module ``torchvision.datasets``.

    Raises:
        ConfigError: the data set is missing and cannot be downloaded.
    """
    root = Path(cfg.root).expanduser()
    folder = _find_folder(root, name, expected)
    if folder is not None:
        return folder
    hint = f"use dataset.root=<folder that has {name}/ with {', '.join(expected)}>"
    if not cfg.download:
        raise ConfigError(
            f"dataset.root={cfg.root}: {cfg.name} is missing there and dataset.download=false; "
            f"{hint} or dataset.download=true (from {url})"
        )
    torchvision = require("torchvision.datasets", f"dataset={cfg.name}")
    try:
        _download_atomically(partial(download, torchvision), root, name)
    except (OSError, RuntimeError, EOFError) as error:
        # urllib's errors are OSErrors. torchvision raises RuntimeError for a wrong checksum.
        reason = str(getattr(error, "reason", error)) or type(error).__name__
        raise ConfigError(
            f"dataset={cfg.name}: could not be downloaded from {url} "
            f"({reason.splitlines()[0]}); {hint}"
        ) from error
    return root / name


def _find_folder(root: Path, name: str, expected: Sequence[str]) -> Path | None:
    """Return ``root / name`` or ``root``, whichever has all expected files, or None."""
    for folder in (root / name, root):
        if all((folder / each).exists() for each in expected):
            return folder
    return None


def _download_atomically(download: Callable[[Path], object], root: Path, name: str) -> None:
    """Download ``root / name`` through a temporary folder.

    A failed download leaves no files. Jobs that download at the same time replace each other's
    files by equal files.
    """
    timeout = socket.getdefaulttimeout()
    root.mkdir(parents=True, exist_ok=True)
    socket.setdefaulttimeout(SILENCE_SECONDS)
    try:
        with TemporaryDirectory(dir=root, prefix=".download-") as temporary:
            download(Path(temporary))
            shutil.copytree(
                Path(temporary, name), root / name, copy_function=os.replace, dirs_exist_ok=True
            )
    finally:
        socket.setdefaulttimeout(timeout)
        with suppress(OSError):  # The folder stays if it has files.
            root.rmdir()
