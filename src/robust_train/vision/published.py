"""Published data sets in their original files, fetched once: flowers102 and cub200."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from robust_train.config.trainers import require
from robust_train.model.errors import ConfigError
from robust_train.vision.images import ImageFiles, Shape, Splits, with_validation

FLOWERS102 = Shape(num_classes=102)
CUB200 = Shape(num_classes=200)

_FLOWERS102_URL = "https://www.robots.ox.ac.uk/~vgg/data/flowers/102/"
_CUB200_URL = "https://data.caltech.edu/records/65de6-vp158/files/CUB_200_2011.tgz"
_CUB200_MD5 = "97eceeb196236b17998738112f37df78"
_CUB200_LISTS = ("images.txt", "image_class_labels.txt", "train_test_split.txt")
# urllib waits for ever by default
SILENCE_SECONDS = 20.0


def open_flowers102(cfg: Any) -> Splits:
    """Open Oxford 102 Flowers (Nilsback & Zisserman 2008) with its official splits.

    ``imagelabels.mat`` and ``setid.mat`` are MATLAB files that count classes and images from 1;
    images are ``jpg/image_00001.jpg`` and so on. torchvision only fetches them: to open them it
    insists on the checksums, and so refuses a subset of the data set.
    """

    def get(root: Path) -> None:
        require("torchvision.datasets", "dataset=flowers102").Flowers102(
            str(root), download=True
        )

    names = ("jpg", "imagelabels.mat", "setid.mat")
    folder = _fetched(cfg, "flowers-102", names, url=_FLOWERS102_URL, get=get)
    labels = _matlab_values(folder / "imagelabels.mat", "labels")
    train, validation, test = (
        _flowers(folder, labels, set_id) for set_id in ("trnid", "valid", "tstid")
    )
    return Splits(train, validation, test, FLOWERS102)


def _matlab_values(path: Path, key: str) -> list[int]:
    loadmat = require("scipy.io", "dataset=flowers102").loadmat
    try:
        return [int(value) for value in loadmat(path)[key].ravel()]
    except (KeyError, ValueError, TypeError, NotImplementedError) as error:
        raise ConfigError(
            f"dataset=flowers102: {path} is no readable MATLAB file with {key!r}"
        ) from error


def _flowers(folder: Path, labels: list[int], set_id: str) -> ImageFiles:
    numbers = _matlab_values(folder / "setid.mat", set_id)
    if not all(1 <= number <= len(labels) for number in numbers):
        raise ConfigError(
            f"dataset=flowers102: {folder / 'setid.mat'}, {set_id}: an image has no label in "
            "imagelabels.mat"
        )
    paths = [folder / "jpg" / f"image_{number:05d}.jpg" for number in numbers]
    return _image_files(
        folder / "setid.mat", paths, [labels[number - 1] for number in numbers]
    )


def _image_files(
    source: Path, paths: Sequence[Path], labels: Sequence[int]
) -> ImageFiles:
    """Return images with their labels counted from 0."""
    missing = next((path for path in paths if not path.is_file()), None)
    if missing is not None:
        raise ConfigError(f"dataset: {source} names {missing}, which is not there")
    return ImageFiles(paths, [label - 1 for label in labels])


def open_cub200(cfg: Any) -> Splits:
    """Open Caltech-UCSD Birds-200-2011 (Wah et al. 2011) with its official splits.

    Its text files have one line an image, ``<image id> <value>``, ids and classes counted from 1:
    ``images.txt`` (path under ``images/``), ``image_class_labels.txt``, ``train_test_split.txt``
    (1 for training). A tenth of the training images is for validation.
    """

    def get(root: Path) -> None:
        tools = require("torchvision.datasets.utils", "dataset=cub200")
        tools.download_and_extract_archive(_CUB200_URL, str(root), md5=_CUB200_MD5)

    folder = _fetched(
        cfg, "CUB_200_2011", ("images", *_CUB200_LISTS), url=_CUB200_URL, get=get
    )
    names, labels, parts = (_bird_column(folder / name) for name in _CUB200_LISTS)
    try:
        train, test = (
            _image_files(
                folder / "images.txt",
                [
                    folder / "images" / name
                    for image, name in names.items()
                    if parts[image] == part
                ],
                [int(labels[image]) for image in names if parts[image] == part],
            )
            for part in ("1", "0")
        )
    except KeyError as error:
        raise ConfigError(
            f"dataset=cub200: {folder}: image {error} is not in all of {', '.join(_CUB200_LISTS)}"
        ) from error
    return with_validation(train, test, CUB200)


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
        values[image] = value
    values.pop("", None)
    return values


def _fetched(
    cfg: Any,
    name: str,
    expected: Sequence[str],
    *,
    url: str,
    get: Callable[[Path], None],
) -> Path:
    """Return the data set's folder, ``cfg.root / name`` or ``cfg.root``; fetch it if absent.
    ``get`` downloads from ``url`` into a root and verifies the checksum; ``expected`` are names in
    the folder."""
    require("PIL.Image", f"dataset={cfg.name}")
    root = Path(cfg.root).expanduser()

    def found() -> Path | None:
        folders = (root / name, root)
        return next(
            (f for f in folders if all((f / e).exists() for e in expected)), None
        )

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
        temporary.mkdir(parents=True)
        get(temporary)
        for path in temporary.iterdir():
            if path.is_dir():
                shutil.copytree(
                    path, root / path.name, copy_function=os.replace, dirs_exist_ok=True
                )
            else:
                path.replace(root / path.name)
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
