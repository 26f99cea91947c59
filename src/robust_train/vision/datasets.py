"""The data sets by the name in ``dataset=…``, fetched once, opened and checked."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
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
# fmt: off
_SUFFIXES = (
    ".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm",
)
# fmt: on
_FLOWERS102_URL = "https://www.robots.ox.ac.uk/~vgg/data/flowers/102/"
_CUB200_URL = "https://data.caltech.edu/records/65de6-vp158/files/CUB_200_2011.tgz"
_CUB200_MD5 = "97eceeb196236b17998738112f37df78"
_CUB200_LISTS = ("images.txt", "image_class_labels.txt", "train_test_split.txt")
# urllib waits for ever by default
SILENCE_SECONDS = 20.0


@dataclass(frozen=True)
class Images:
    """Some images of a data set and their classes, from 0; ``pixels`` are those of digits, rows ×
    columns of 0 to 255, where ``names`` are no files."""

    names: Sequence[str]
    labels: Sequence[int]
    pixels: Sequence[bytes] = ()

    def image(self, index: int) -> Any:
        """Return an image of PIL's."""
        from PIL import Image

        if self.pixels:
            size = (_DIGITS_SIZE, _DIGITS_SIZE)
            return Image.frombytes("L", size, self.pixels[index])
        return Image.open(self.names[index])

    def part(self, indices: Sequence[int]) -> Images:
        """Return some of them."""
        return Images(
            [self.names[index] for index in indices],
            [self.labels[index] for index in indices],
            [self.pixels[index] for index in indices] if self.pixels else (),
        )


@dataclass(frozen=True)
class Shape:
    """What a model needs to know of a data set; ``size`` is None if image sizes differ."""

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
    """Open the data set of a checked ``cfg``; fetch it first if it is absent and may be fetched."""
    require("PIL.Image", f"dataset={cfg.name}")
    splits = _DATASETS[cfg.name](cfg)
    known = splits.shape.num_classes
    parts = {
        "training": splits.train,
        "validation": splits.validation,
        "test": splits.test,
    }
    for what, source in parts.items():
        if not source.labels:
            raise ConfigError(
                f"dataset.root={cfg.root}: {cfg.name} has no {what} images there"
            )
        for name, label in zip(source.names, source.labels, strict=True):
            if not 0 <= label < known:
                raise ConfigError(
                    f"dataset.root={cfg.root}: {name} has label {label}; "
                    f"{cfg.name} has classes 0 to {known - 1}"
                )
    if cfg.num_classes is None:
        return splits
    if cfg.num_classes < known:
        raise ConfigError(
            f"dataset.num_classes={cfg.num_classes}: {cfg.name} has {known} classes"
        )
    return replace(splits, shape=replace(splits.shape, num_classes=cfg.num_classes))


def stratified_split(source: Images, fraction: float) -> tuple[Images, Images]:
    """Split images into two parts, the second with the same share of every class. A class keeps at
    least one image in the first part; a class of two or more gives at least one to the second. The
    split depends on the labels alone."""
    generator = torch.Generator().manual_seed(_SPLIT_SEED)
    first: list[int] = []
    second: list[int] = []
    for label in sorted(set(source.labels)):
        members = [index for index, own in enumerate(source.labels) if own == label]
        order = torch.randperm(len(members), generator=generator).tolist()
        count = min(max(round(len(members) * fraction), 1), len(members) - 1)
        second += [members[position] for position in order[:count]]
        first += [members[position] for position in order[count:]]
    return source.part(sorted(first)), source.part(sorted(second))


def _with_validation(
    train: Images,
    test: Images,
    num_classes: int,
) -> Splits:
    """Return the parts of a data set with one held-out split: it is for the test alone, and a tenth
    of the training images is for validation."""
    parts = stratified_split(train, _VALIDATION_FRACTION)
    return Splits(*parts, test, Shape(num_classes))


def _open_digits(cfg: Any) -> Splits:
    """Open the 1,797 scanned digits of 8×8 pixels inside scikit-learn. Four fifths are for
    training, a tenth for validation, a tenth for the test, with the same share of every digit."""
    bunch = require("sklearn.datasets", "dataset=digits").load_digits()
    scaled = (bunch.images * (255 / _DIGITS_WHITE)).round().astype("uint8")
    digits = Images(
        [f"digit {number} of scikit-learn" for number in range(len(scaled))],
        bunch.target.tolist(),
        [image.tobytes() for image in scaled],
    )
    train, held_out = stratified_split(digits, _DIGITS_HELD_OUT)
    shape = Shape(
        num_classes=10,
        size=_DIGITS_SIZE,
        channels=1,
    )
    return Splits(
        train,
        *stratified_split(held_out, 0.5),
        shape,
    )


def _open_image_folder(cfg: Any) -> Splits:
    """Open a folder of images a class, in ``root/train`` and ``root/test``.

    The classes are the folders' names in alphabetical order. Without a test folder,
    ``test_fraction`` of every class is set aside for the test: the same images in every run. A
    tenth of the training images is for validation.
    """
    root = Path(cfg.root).expanduser()
    folder, test_folder = root / cfg.train, root / cfg.test
    if not folder.is_dir():
        raise ConfigError(
            f"dataset.root={cfg.root}: there is no folder {folder}; expected are "
            f"{cfg.train}/<class>/<image>, see dataset.root and dataset.train"
        )
    classes = [one.name for one in _subfolders(folder)]
    if len(classes) < 2:
        raise ConfigError(
            f"dataset.root={cfg.root}: {folder} has {len(classes)} class folders, "
            "at least 2 are needed"
        )
    everything = _read_classes(folder, classes)
    if test_folder.is_dir():
        test = _read_classes(test_folder, classes)
        return _with_validation(
            everything,
            test,
            len(classes),
        )
    parts = stratified_split(everything, cfg.test_fraction)
    return _with_validation(*parts, len(classes))


def _read_classes(folder: Path, classes: Sequence[str]) -> Images:
    names: list[str] = []
    labels: list[int] = []
    for own in _subfolders(folder):
        if own.name not in classes:
            raise ConfigError(
                f"dataset=image_folder: {own} is of a class that has no training images"
            )
        found = sorted(
            str(file) for file in own.rglob("*") if file.suffix.lower() in _SUFFIXES
        )
        if not found:
            raise ConfigError(
                f"dataset=image_folder: {own} has no images ({', '.join(_SUFFIXES)})"
            )
        names += found
        labels += [classes.index(own.name)] * len(found)
    return Images(names, labels)


def _subfolders(folder: Path) -> list[Path]:
    return sorted(
        one for one in folder.iterdir() if one.is_dir() and one.name[0] != "."
    )


def _open_flowers102(cfg: Any) -> Splits:
    """Open Oxford 102 Flowers (Nilsback & Zisserman 2008) with its official splits.

    ``imagelabels.mat`` and ``setid.mat`` are MATLAB files that count classes and images from 1;
    images are ``jpg/image_00001.jpg`` and so on. torchvision only fetches them: to open them it
    insists on the checksums, and so refuses a subset of the data set.
    """

    def get(root: Path) -> None:
        torchvision = require("torchvision.datasets", "dataset=flowers102")
        torchvision.Flowers102(str(root), download=True)

    names = ("jpg", "imagelabels.mat", "setid.mat")
    folder = _fetched(
        cfg,
        "flowers-102",
        names,
        url=_FLOWERS102_URL,
        get=get,
    )
    labels = _matlab_values(folder / "imagelabels.mat", "labels")
    source = folder / "setid.mat"

    def split(set_id: str) -> Images:
        numbers = _matlab_values(source, set_id)
        if not all(1 <= number <= len(labels) for number in numbers):
            raise ConfigError(
                f"dataset=flowers102: {source}, {set_id}: an image has no label in "
                "imagelabels.mat"
            )
        paths = [folder / "jpg" / f"image_{number:05d}.jpg" for number in numbers]
        return _image_files(
            source,
            paths,
            [labels[number - 1] for number in numbers],
        )

    return Splits(
        split("trnid"),
        split("valid"),
        split("tstid"),
        Shape(102),
    )


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

    Its text files have one line an image, ``<image id> <value>``, ids and classes counted from 1:
    ``images.txt`` (path under ``images/``), ``image_class_labels.txt``, ``train_test_split.txt``
    (1 for training). A tenth of the training images is for validation.
    """

    def get(root: Path) -> None:
        tools = require("torchvision.datasets.utils", "dataset=cub200")
        tools.download_and_extract_archive(
            _CUB200_URL,
            str(root),
            md5=_CUB200_MD5,
        )

    expected = ("images", *_CUB200_LISTS)
    folder = _fetched(
        cfg,
        "CUB_200_2011",
        expected,
        url=_CUB200_URL,
        get=get,
    )
    names, labels, parts = (_bird_column(folder / name) for name in _CUB200_LISTS)

    def split(part: str) -> Images:
        own = [image for image in names if parts[image] == part]
        paths = [folder / "images" / names[image] for image in own]
        return _image_files(
            folder / "images.txt",
            paths,
            [int(labels[image]) for image in own],
        )

    try:
        return _with_validation(
            split("1"),
            split("0"),
            num_classes=200,
        )
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


def _image_files(
    source: Path,
    paths: Sequence[Path],
    labels: Sequence[int],
) -> Images:
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
    *,
    url: str,
    get: Callable[[Path], None],  # downloads into a root and verifies the checksum
) -> Path:
    """Return the data set's folder, ``cfg.root / name`` or ``cfg.root``; fetch it if absent."""
    root = Path(cfg.root).expanduser()

    def found() -> Path | None:
        for folder in (root / name, root):
            if all((folder / one).exists() for one in expected):
                return folder
        return None

    folder = found()
    ways_out = "use dataset.root=<folder that has it>"
    if folder is None and not cfg.download:
        raise ConfigError(
            f"dataset.root={cfg.root}: {cfg.name} is not there and dataset.download=false; "
            f"{ways_out} or dataset.download=true (from {url})"
        )
    if folder is None:
        try:
            with _alone(root):
                if found() is None:
                    _fetch_whole(get, root)
        except (OSError, RuntimeError, EOFError) as error:
            # urllib's errors are OSErrors; torchvision reports a wrong checksum as RuntimeError
            reason = str(getattr(error, "reason", error)) or type(error).__name__
            raise ConfigError(
                f"dataset={cfg.name}: could not be fetched from {url} ({reason.splitlines()[0]}); "
                f"{ways_out}"
            ) from error
        folder = found()
    if folder is None:
        raise ConfigError(
            f"dataset.root={cfg.root}: {cfg.name} was fetched but is not there"
        )
    return folder


def _fetch_whole(get: Callable[[Path], None], root: Path) -> None:
    """Fetch into a folder of our own in ``root``: what fails half-way leaves nothing there."""
    temporary = root / ".download"
    shutil.rmtree(temporary, ignore_errors=True)  # of a process that was killed
    try:
        temporary.mkdir()
        get(temporary)
        for path in temporary.iterdir():
            to = root / path.name
            if path.is_dir():
                shutil.copytree(
                    path,
                    to,
                    copy_function=os.replace,
                    dirs_exist_ok=True,
                )
            else:
                path.replace(to)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def _alone(root: Path) -> Iterator[None]:
    """Let one process of this host fetch at a time, and end a fetch from a silent server."""
    is_new = not root.exists()
    root.mkdir(parents=True, exist_ok=True)
    before = socket.getdefaulttimeout()
    path = root / ".download.lock"
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        socket.setdefaulttimeout(SILENCE_SECONDS)
        try:
            yield
        except BaseException:
            if is_new:  # and no one else has put anything there
                path.unlink(missing_ok=True)
                with suppress(OSError):
                    root.rmdir()
            raise
        finally:
            socket.setdefaulttimeout(before)
