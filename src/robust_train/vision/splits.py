"""The parts of a data set: training, validation and test images with their labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

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

    @property
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
