"""Turn an image file into a tensor: decode, augment, resize, normalise."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from robust_train.model.errors import ConfigError
from robust_train.readable import first_line

# torchvision's RandomResizedCrop takes 8 % and more of the area, for ImageNet; small data sets of
# similar classes lose the decisive detail that way
_LEAST_CROP_AREA = 0.35
_CROP_RATIOS = (3 / 4, 4 / 3)
_CROP_TRIES = 10


@dataclass(frozen=True)
class ImageSpec:
    """The images that a model takes."""

    size: int  # rows and columns, in pixels
    channels: int
    mean: tuple[float, ...]  # mean, std: of each channel, for values from 0 to 1
    std: tuple[float, ...]
    crop: float = 1.0  # fraction of a test photograph's shorter side to keep


class ImageDataset(torch.utils.data.Dataset[Any]):
    """A split as the tensors a model takes. Keys are (epoch, index): a sample's augmentation
    depends on these and the seed alone, not on workers or micro-batches. ``augment`` is one of
    ``dataset.augment``."""

    def __init__(
        self,
        source: ImageSource,
        spec: ImageSpec,
        *,
        augment: str = "none",
        seed: int = 0,
    ) -> None:
        self.source = source
        self.spec = spec
        self.augment = augment
        self.seed = seed
        self._mean_C11 = torch.tensor(spec.mean).view(-1, 1, 1)
        self._std_C11 = torch.tensor(spec.std).view(-1, 1, 1)

    def __len__(self) -> int:
        return len(self.source.labels)

    def __getitem__(self, key: tuple[int, int]) -> tuple[Tensor, int]:
        """Return the image C×H×W and its label."""
        epoch, index = key
        image = self._decode(index)
        # 32 bits each for epoch and index: no two samples share a generator
        rng = random.Random((self.seed << 64) | (epoch << 32) | index)
        if self.augment == "crop_flip":
            image = _crop_and_flip(image, self.spec.size, rng)
        else:
            image = self._centre(
                _shift(image, rng) if self.augment == "shift" else image
            )
        return self._tensor(image), int(self.source.labels[index])

    def __getitems__(self, keys: Sequence[tuple[int, int]]) -> list[Any]:
        """Return the samples, or a single ConfigError, which torch would wrap in a traceback."""
        try:
            return [self[key] for key in keys]
        except ConfigError as error:
            return [error]

    def _decode(self, index: int) -> Any:
        from PIL import Image

        try:
            with self.source.image(index) as image:
                return image.convert("L" if self.spec.channels == 1 else "RGB")
        except (
            Image.DecompressionBombError,
            SyntaxError,
            ValueError,
            OSError,
        ) as error:
            # PIL's own OSErrors have no number; others than "no such file" are the disk's
            is_of_the_disk = getattr(error, "errno", None) is not None
            if is_of_the_disk and not isinstance(error, FileNotFoundError):
                raise
            name = self.source.describe(index)
            reason = first_line(error)
            raise ConfigError(
                f"dataset: cannot read the image {name}: {reason}"
            ) from error

    def _centre(self, image: Any) -> Any:
        """Cut out the middle square, ``spec.crop`` of the shorter side."""
        width, height = image.size
        if image.size == (self.spec.size, self.spec.size):
            return image
        # a tiny image has no margin to lose
        is_photograph = min(width, height) > self.spec.size
        side = min(width, height) * (self.spec.crop if is_photograph else 1.0)
        left, top = (width - side) / 2, (height - side) / 2
        return _resize(image, self.spec.size, (left, top, left + side, top + side))

    def _tensor(self, image: Any) -> Tensor:
        size, channels = self.spec.size, self.spec.channels
        pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
        image_CHW = pixels.view(size, size, channels).permute(2, 0, 1).float() / 255
        normal_CHW: Tensor = (image_CHW - self._mean_C11) / self._std_C11
        return normal_CHW.contiguous()


def collate(samples: Sequence[Any]) -> tuple[Tensor, Tensor] | ConfigError:
    """Stack samples to images B×C×H×W and labels B; pass an error of the data set through."""
    if isinstance(samples[0], ConfigError):
        return samples[0]
    images, labels = zip(*samples, strict=True)
    return torch.stack(images), torch.tensor(labels)


def _resize(image: Any, size: int, box: tuple[float, float, float, float]) -> Any:
    from PIL import Image

    return image.resize((size, size), Image.Resampling.BICUBIC, box=box)


def _shift(image: Any, rng: random.Random) -> Any:
    """Move by up to an eighth of the size; zeros move in."""
    width, height = image.size
    dx = rng.randint(-width // 8, width // 8)
    dy = rng.randint(-height // 8, height // 8)
    return image.crop((dx, dy, dx + width, dy + height))


def _crop_and_flip(image: Any, size: int, rng: random.Random) -> Any:
    """Crop a random area and aspect ratio (Szegedy et al. 2014, arXiv:1409.4842), flip half."""
    from PIL import Image

    width, height = image.size
    box = (0.0, 0.0, float(width), float(height))
    for _ in range(_CROP_TRIES):
        area = width * height * rng.uniform(_LEAST_CROP_AREA, 1.0)
        ratio = math.exp(
            rng.uniform(math.log(_CROP_RATIOS[0]), math.log(_CROP_RATIOS[1]))
        )
        w, h = math.sqrt(area * ratio), math.sqrt(area / ratio)
        if w <= width and h <= height:
            left, top = rng.uniform(0, width - w), rng.uniform(0, height - h)
            box = (left, top, left + w, top + h)
            break
    image = _resize(image, size, box)
    return (
        image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        if rng.random() < 0.5
        else image
    )


# not the job's seed: runs with different seeds are compared on the same test images
_SPLIT_SEED = 0
VALIDATION_FRACTION = 0.1


class ImageSource(Protocol):
    """One split of a data set: PIL images, their classes from 0, and their origin for messages."""

    @property
    def labels(self) -> Sequence[int]: ...

    def image(self, index: int) -> Any: ...

    def describe(self, index: int) -> str: ...


@dataclass(frozen=True)
class ImageFiles:
    """A split whose images are files."""

    paths: Sequence[Path]
    labels: Sequence[int]

    def image(self, index: int) -> Any:
        from PIL import Image

        return Image.open(self.paths[index])

    def describe(self, index: int) -> str:
        return str(self.paths[index])


@dataclass(frozen=True)
class Part:
    """Some images of a split."""

    source: ImageSource
    indices: Sequence[int]

    @cached_property  # asked for with every sample
    def labels(self) -> Sequence[int]:
        return [self.source.labels[index] for index in self.indices]

    def image(self, index: int) -> Any:
        return self.source.image(self.indices[index])

    def describe(self, index: int) -> str:
        return self.source.describe(self.indices[index])


@dataclass(frozen=True)
class Shape:
    """What a model needs to know of a data set; ``size`` is None if image sizes differ."""

    num_classes: int
    size: int | None = None
    channels: int = 3


@dataclass(frozen=True)
class Splits:
    """A data set's parts, without an image in common."""

    train: ImageSource
    validation: ImageSource
    test: ImageSource
    shape: Shape


def with_validation(train: ImageSource, test: ImageSource, shape: Shape) -> Splits:
    """Return the parts of a data set with one held-out split: it is for the test alone, and a tenth
    of the training images is for validation."""
    return Splits(*stratified_split(train, VALIDATION_FRACTION), test, shape)


def stratified_split(source: ImageSource, fraction: float) -> tuple[Part, Part]:
    """Split images into two parts, the second with the same share of every class. A class keeps at
    least one image in the first part; a class of two or more gives at least one to the second. The
    split depends on the labels alone."""
    labels = source.labels
    generator = torch.Generator().manual_seed(_SPLIT_SEED)
    first: list[int] = []
    second: list[int] = []
    for label in sorted(set(labels)):
        members = [index for index, own in enumerate(labels) if own == label]
        order = torch.randperm(len(members), generator=generator).tolist()
        count = min(max(round(len(members) * fraction), 1), len(members) - 1)
        second += [members[position] for position in order[:count]]
        first += [members[position] for position in order[count:]]
    return Part(source, sorted(first)), Part(source, sorted(second))
