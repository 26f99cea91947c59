"""Training, validation and test images; a fixed division for a data set that comes without one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from robust_train.vision.images import ImageSource

# not the job's seed: runs with different seeds are compared on the same test images
_SPLIT_SEED = 0


@dataclass(frozen=True)
class Shape:
    """What a model has to know of a data set; known without opening it.

    Attributes:
        num_classes: number of classes.
        size: rows and columns of every image, None where images differ.
        channels: of the images as they are stored.
    """

    num_classes: int
    size: int | None = None
    channels: int = 3


@dataclass(frozen=True)
class Splits:
    """A data set's parts.

    Attributes:
        train: trained on.
        validation: looked at after each epoch; the test images where there is no such split.
        test: for the accuracy at the end.
        num_classes: number of classes.
        size: rows and columns of every image, None where images differ.
        channels: of the images as they are stored.
    """

    train: ImageSource
    validation: ImageSource
    test: ImageSource
    num_classes: int
    size: int | None = None
    channels: int = 3


def stratified_split(labels: Sequence[int], test_fraction: float) -> tuple[list[int], list[int]]:
    """Indices for training and for testing, with the same share of every class in the test.

    A class keeps at least one image for training; a class of two or more gives at least one to the
    test. The division depends on the labels alone.
    """
    by_class: dict[int, list[int]] = {}
    for index, label in enumerate(labels):
        by_class.setdefault(label, []).append(index)
    generator = torch.Generator().manual_seed(_SPLIT_SEED)
    train: list[int] = []
    test: list[int] = []
    for label in sorted(by_class):
        members = by_class[label]
        order = torch.randperm(len(members), generator=generator).tolist()
        count = min(max(round(len(members) * test_fraction), 1), len(members) - 1)
        test += [members[position] for position in order[:count]]
        train += [members[position] for position in order[count:]]
    return sorted(train), sorted(test)
