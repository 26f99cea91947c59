"""The data sets by the name in ``dataset=…``, fetched once, opened and checked."""

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

_DIGITS_WHITE = 16
_DIGITS_SIZE = 8
_DIGITS_HELD_OUT = 0.2
_VALIDATION_FRACTION = 0.1
# not the job's seed: runs with different seeds are compared on the same test images
_SPLIT_SEED = 0
_FLOWERS102_URL = "https://www.robots.ox.ac.uk/~vgg/data/flowers/102/"
_CUB200_URL = "https://data.caltech.edu/records/65de6-vp158/files/CUB_200_2011.tgz"
_CUB200_MD5 = "97eceeb196236b17998738112f37df78"
_CUB200_LISTS = ("images.txt", "image_class_labels.txt", "train_test_split.txt")
# urllib waits for ever by default
SILENCE_SECONDS = 20.0


@dataclass(frozen=True)
class Images:
    """Some images of a data set and their classes, from 0. For digits, ``names`` are not files, and
    ``pixels`` has the images, rows × columns of 0 to 255."""

    names: Sequence[str]
    labels: Sequence[int]
    pixels: Mapping[str, bytes] = field(default_factory=dict)

    def image(self, index: int) -> Any:
        """Return an image of PIL's."""
        from PIL import Image

        if self.pixels:
            size = (_DIGITS_SIZE, _DIGITS_SIZE)
            return Image.frombytes("L", size, self.pixels[self.names[index]])
        return Image.open(self.names[index])

    def part(self, indices: Sequence[int]) -> Images:
        """Return some of them."""
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
    """A data set's parts, without an image in common."""

    train: Images
    validation: Images
    test: Images
    shape: Shape


def open_data(cfg: Any) -> Splits:
    """Open the data set of a checked ``cfg``, after fetching it if it is missing and may be
    fetched."""
    require("PIL.Image", f"dataset={cfg.name}")
    splits = _DATASETS[cfg.name](cfg)
    num_classes = splits.shape.num_classes
    for what in ("train", "validation", "test"):
        part: Images = getattr(splits, what)
        if not part.labels:
            raise ConfigError(f"dataset.root={cfg.root}: {cfg.name} has no {what} images there")
        for name, label in zip(part.names, part.labels, strict=True):
            if not 0 <= label < num_classes:
                raise ConfigError(
                    f"dataset.root={cfg.root}: {name} has label {label}; "
                    f"{cfg.name} has classes 0 to {num_classes - 1}"
                )
    wanted = cfg.num_classes or num_classes
    if wanted < num_classes:
        raise ConfigError(f"dataset.num_classes={wanted}: {cfg.name} has {num_classes} classes")
    return replace(splits, shape=replace(splits.shape, num_classes=wanted))


def stratified_split(source: Images, fraction: float) -> tuple[Images, Images]:
    """Split images into two parts, the second with the same share of every class. A class keeps at
    least 1 image in the first part. A class of 2 or more images has at least 1 in the second. The
    split depends on the labels alone."""
    generator = torch.Generator().manual_seed(_SPLIT_SEED)
    first: list[int] = []
    second: list[int] = []
    for label in sorted(set(source.labels)):
        members = [
            index for index, label_of_image in enumerate(source.labels) if label_of_image == label
        ]
        order = torch.randperm(len(members), generator=generator).tolist()
        count = min(max(round(len(members) * fraction), 1), len(members) - 1)
        second += [members[position] for position in order[:count]]
        first += [members[position] for position in order[count:]]
    return source.part(sorted(first)), source.part(sorted(second))


def _with_validation(train: Images, test: Images, num_classes: int) -> Splits:
    """Return the parts of a data set with a held-out split, which is for the test alone. A tenth of
    the training images is for validation."""
    train, validation = stratified_split(train, _VALIDATION_FRACTION)
    return Splits(train, validation, test, Shape(num_classes))


def _open_digits(cfg: Any) -> Splits:
    """Open the 1,797 scanned digits of 8×8 pixels inside scikit-learn. Four fifths are for
    training, a tenth for validation, a tenth for the test, with the same share of every digit."""
    bunch = require("sklearn.datasets", "dataset=digits").load_digits()
    scaled = (bunch.images * (255 / _DIGITS_WHITE)).round().astype("uint8")
    pixels = {
        f"digit {number} of scikit-learn": image.tobytes() for number, image in enumerate(scaled)
    }
    digits = Images(list(pixels), bunch.target.tolist(), pixels)
    train, held_out = stratified_split(digits, _DIGITS_HELD_OUT)
    validation, test = stratified_split(held_out, 0.5)
    shape = Shape(num_classes=10, size=_DIGITS_SIZE, channels=1)
    return Splits(train, validation, test, shape)


def _open_image_folder(cfg: Any) -> Splits:
    """Open a folder of images a class, in ``root/train`` and ``root/test``.

    The classes are the folders' names in alphabetical order. Without a test folder,
    ``test_fraction`` of every class is set aside for the test: the same images in every run. A
    tenth of the training images is for validation.
    """
    root = Path(cfg.root).expanduser()
    folder = root / cfg.train
    test_folder = root / cfg.test
    if not folder.is_dir():
        raise ConfigError(
            f"dataset.root={cfg.root}: there is no folder {folder}; expected are "
            f"{cfg.train}/<class>/<image>, see dataset.root and dataset.train"
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
    return sorted(path.name for path in folder.iterdir() if path.is_dir() and path.name[0] != ".")


def _read_classes(folder: Path, classes: Sequence[str]) -> Images:
    torchvision = require("torchvision.datasets.folder", "dataset=image_folder")
    classes_here = _classes_in(folder)
    unknown = sorted(set(classes_here) - set(classes))
    if unknown:
        raise ConfigError(
            f"dataset=image_folder: {folder / unknown[0]} is of a class that has no training images"
        )
    try:
        samples = torchvision.make_dataset(
            folder,
            {name: classes.index(name) for name in classes_here},
            (*torchvision.IMG_EXTENSIONS, ".gif"),
        )
    except (FileNotFoundError, ValueError) as error:  # a class, or all, without an image
        raise ConfigError(f"dataset=image_folder: {folder}: {error}") from None
    return Images([name for name, _ in samples], [label for _, label in samples])


def _open_flowers102(cfg: Any) -> Splits:
    """Open Oxford 102 Flowers (Nilsback & Zisserman 2008) with its official splits.

    ``imagelabels.mat`` and ``setid.mat`` are MATLAB files that count classes and images from 1.
    Images are ``jpg/image_00001.jpg`` and so on. torchvision only fetches them, because it checks
    checksums when it opens a data set, and so refuses a subset of it.
    """
    folder = _fetched(
        cfg,
        "flowers-102",
        ("jpg", "imagelabels.mat", "setid.mat"),
        _FLOWERS102_URL,
        lambda torchvision, root: torchvision.Flowers102(root, download=True),
    )
    labels = _matlab_values(folder / "imagelabels.mat", "labels")
    source = folder / "setid.mat"

    def split(set_id: str) -> Images:
        numbers = _matlab_values(source, set_id)
        if not all(1 <= number <= len(labels) for number in numbers):
            raise ConfigError(
                f"dataset=flowers102: {source}, {set_id}: an image has no label in imagelabels.mat"
            )
        paths = [folder / "jpg" / f"image_{number:05d}.jpg" for number in numbers]
        return _image_files(source, paths, [labels[number - 1] for number in numbers])

    return Splits(split("trnid"), split("valid"), split("tstid"), Shape(102))


def _matlab_values(path: Path, key: str) -> list[int]:
    loadmat = require("scipy.io", "dataset=flowers102").loadmat
    try:
        return [int(value) for value in loadmat(path)[key].ravel()]
    except (KeyError, ValueError, TypeError, NotImplementedError) as error:
        raise ConfigError(
            f"dataset=flowers102: {path} is not a readable MATLAB file with {key!r}"
        ) from error


def _open_cub200(cfg: Any) -> Splits:
    """Open Caltech-UCSD Birds-200-2011 (Wah et al. 2011) with its official splits.

    Its text files have a line per image, ``<image id> <value>``, ids and classes counted from 1:
    ``images.txt`` (path under ``images/``), ``image_class_labels.txt``, ``train_test_split.txt`` (1
    for training). A tenth of the training images is for validation.
    """
    folder = _fetched(
        cfg,
        "CUB_200_2011",
        ("images", *_CUB200_LISTS),
        _CUB200_URL,
        lambda torchvision, root: torchvision.utils.download_and_extract_archive(
            _CUB200_URL, root, md5=_CUB200_MD5
        ),
    )
    names, labels, parts = (_bird_column(folder / name) for name in _CUB200_LISTS)

    def split(part: str) -> Images:
        members = [image for image in names if parts[image] == part]
        return _image_files(
            folder / "images.txt",
            [folder / "images" / names[image] for image in members],
            [int(labels[image]) for image in members],
        )

    try:
        return _with_validation(split("1"), split("0"), num_classes=200)
    except KeyError as error:
        raise ConfigError(
            f"dataset=cub200: {folder}: image {error} is not in all of {', '.join(_CUB200_LISTS)}"
        ) from error


def _bird_column(source: Path) -> dict[str, str]:
    """Return the value of each image id."""
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
    """Return images with their labels counted from 0."""
    missing = next((path for path in paths if not path.is_file()), None)
    if missing is not None:
        raise ConfigError(f"dataset: {source} names {missing}, which is not there")
    return Images([str(path) for path in paths], [label - 1 for label in labels])


_DATASETS: Mapping[str, Callable[[Any], Splits]] = {
    "digits": _open_digits,
    "flowers102": _open_flowers102,
    "cub200": _open_cub200,
    "image_folder": _open_image_folder,
}


def _fetched(
    cfg: Any,
    name: str,
    expected: Sequence[str],  # names in the folder
    url: str,
    # A function of torchvision.datasets that fetches into a root.
    fetch: Callable[[Any, Path], object],
) -> Path:
    """Return the data set's folder, ``cfg.root / name`` or ``cfg.root``, after fetching it if it is
    missing."""
    root = Path(cfg.root).expanduser()
    folders = (root / name, root)

    def is_there(folder: Path) -> bool:
        return all((folder / name).exists() for name in expected)

    if not any(map(is_there, folders)):
        way_out = f"use dataset.root=<folder that has {name}/ with {', '.join(expected)}>"
        if not cfg.download:
            raise ConfigError(
                f"dataset.root={cfg.root}: {cfg.name} is not there and dataset.download=false; "
                f"{way_out} or dataset.download=true (from {url})"
            )
        torchvision = require("torchvision.datasets", f"dataset={cfg.name}")
        try:
            _fetch_whole(partial(fetch, torchvision), root, name)
        except (OSError, RuntimeError, EOFError) as error:
            # urllib's errors are OSErrors; torchvision reports a wrong checksum as RuntimeError
            reason = str(getattr(error, "reason", error)) or type(error).__name__
            raise ConfigError(
                f"dataset={cfg.name}: could not be fetched from {url} ({reason.splitlines()[0]}); "
                f"{way_out}"
            ) from error
    return next(filter(is_there, folders))


def _fetch_whole(fetch: Callable[[Path], object], root: Path, name: str) -> None:
    """Fetch ``root / name`` through a temporary folder, so that a failure half-way leaves no files,
    and jobs that fetch at the same time replace each other's files by equal files."""
    before = socket.getdefaulttimeout()
    root.mkdir(parents=True, exist_ok=True)
    socket.setdefaulttimeout(SILENCE_SECONDS)
    try:
        with TemporaryDirectory(dir=root, prefix=".download-") as temporary:
            fetch(Path(temporary))
            shutil.copytree(
                Path(temporary, name), root / name, copy_function=os.replace, dirs_exist_ok=True
            )
    finally:
        socket.setdefaulttimeout(before)
        with suppress(OSError):  # only if nothing is there
            root.rmdir()
