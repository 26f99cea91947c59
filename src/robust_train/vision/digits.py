"""``dataset=digits``: the 1,797 scanned digits of 8×8 pixels inside scikit-learn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from robust_train.config.extras import require
from robust_train.vision.splits import Shape, Splits, stratified_split

_SIZE = 8
_WHITE = 16
_TEST_FRACTION = 0.2

SHAPE = Shape(num_classes=10, size=_SIZE, channels=1)


@dataclass(frozen=True)
class DigitImages:
    """Some of the digits. ``pixels`` are rows × columns of 0 to 255, one ``bytes`` an image."""

    pixels: Sequence[bytes]
    labels: Sequence[int]
    numbers: Sequence[int]

    def image(self, index: int) -> Any:
        from PIL import Image

        return Image.frombytes("L", (_SIZE, _SIZE), self.pixels[index])

    def describe(self, index: int) -> str:
        return f"digit {self.numbers[index]} of scikit-learn"


def open_digits(cfg: Any) -> Splits:
    """Four fifths for training, one fifth for the test, every digit alike in both."""
    require("PIL.Image", "dataset=digits")
    bunch = require("sklearn.datasets", "dataset=digits").load_digits()
    scaled = (bunch.images * (255 / _WHITE)).round().astype("uint8")
    pixels = [image.tobytes() for image in scaled]
    labels = bunch.target.tolist()

    def part(numbers: list[int]) -> DigitImages:
        return DigitImages(
            [pixels[n] for n in numbers], [labels[n] for n in numbers], tuple(numbers)
        )

    train, test = (part(numbers) for numbers in stratified_split(labels, _TEST_FRACTION))
    return Splits(
        train,
        test,
        test,
        num_classes=SHAPE.num_classes,
        size=SHAPE.size,
        channels=SHAPE.channels,
    )
