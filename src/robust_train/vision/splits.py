"""The parts of a data set: training, validation and test images with their labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

# not the job's seed: runs with different seeds are compared on the same test images
_SPLIT_SEED = 0


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
class Shape:
    """What a model needs to know of a data set; ``size`` is None if image sizes differ."""

    num_classes: int
    size: int | None = None
    channels: int = 3


@dataclass(frozen=True)
class Splits:
    """A data set's parts; ``validation`` is ``test`` if the data set has no such split."""

    train: ImageSource
    validation: ImageSource
    test: ImageSource
    shape: Shape


def stratified_split(labels: Sequence[int], test_fraction: float) -> tuple[list[int], list[int]]:
    """Split indices into training and test, with the same share of every class in the test.

    A class keeps at least one image for training; a class of two or more gives at least one to the
    test. The split depends on the labels alone.
    """
    generator = torch.Generator().manual_seed(_SPLIT_SEED)
    train: list[int] = []
    test: list[int] = []
    for label in sorted(set(labels)):
        members = [index for index, own in enumerate(labels) if own == label]
        order = torch.randperm(len(members), generator=generator).tolist()
        count = min(max(round(len(members) * test_fraction), 1), len(members) - 1)
        test += [members[position] for position in order[:count]]
        train += [members[position] for position in order[count:]]
    return sorted(train), sorted(test)
