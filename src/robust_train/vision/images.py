"""Reads images as batches of tensors: decodes and augments them, in the order of an epoch.

`vision.trainer` uses this module in the attempt's process, and `ImageDataset` also runs in the data
loader's workers. The order of samples depends only on the seed and the epoch, and the position in
an epoch is a number of samples. So a run resumes at exactly the sample at which it stopped, even
with smaller micro-batches.
"""

from __future__ import annotations

import errno
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from robust_train.config.trainers import require
from robust_train.model.errors import ConfigError
from robust_train.readable import first_line
from robust_train.step.splitting import share_of
from robust_train.vision.datasets import Images

Batch = tuple[Tensor, Tensor]  # Images B×C×H×W and labels B

# The smallest and largest share of an image's area that a crop keeps. torchvision's default for
# ImageNet starts at 0.08, which would often cut off the detail that distinguishes similar classes.
_CROP_AREAS = (0.35, 1.0)
_LARGEST_SHIFT = 1 / 8  # of the image's side
_MOST_SAMPLES_READ = 64  # the largest divisor that `choose_read_size` tries


@dataclass(frozen=True)
class ImageSpec:
    """The format of the images that a model takes.

    Attributes:
        size: rows and columns, in pixels.
        channels: 1 for greyscale images, 3 for colour images.
        mean: the mean of each channel, for values from 0 to 1.
        std: the standard deviation of each channel.
        crop: the share of the shorter side that is kept when an image is not augmented.
    """

    size: int
    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    crop: float = 1.0


class ImageDataset(Dataset[Any]):
    """The images of a split as tensors. The key of a sample is (epoch, index).

    A sample's augmentation depends only on its key and the seed, not on workers or micro-batches.

    Args:
        source: the images.
        spec: the format of the tensors.
        augment: a value of ``dataset.augment``.
        seed: the job's seed.
    """

    def __init__(
        self, source: Images, spec: ImageSpec, *, augment: str = "none", seed: int = 0
    ) -> None:
        self.source = source
        self.spec = spec
        self.seed = seed
        v2 = require("torchvision.transforms.v2", f"dataset.augment={augment}")
        self._v2 = v2.functional
        bicubic = v2.InterpolationMode.BICUBIC
        self._resize = v2.Resize((spec.size, spec.size), bicubic)
        if augment == "crop_flip":
            transforms: list[Any] = [
                v2.RandomResizedCrop(spec.size, scale=_CROP_AREAS, interpolation=bicubic),
                v2.RandomHorizontalFlip(),
            ]
        else:
            transforms = [self._crop_centre]
        if augment == "shift":
            shift = (_LARGEST_SHIFT, _LARGEST_SHIFT)
            transforms.insert(0, v2.RandomAffine(0, translate=shift))
        transforms += [
            v2.PILToTensor(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(spec.mean, spec.std),
        ]
        self._transform = v2.Compose(transforms)

    def __len__(self) -> int:
        return len(self.source.labels)

    def __getitem__(self, key: tuple[int, int]) -> tuple[Tensor, int]:
        """Return the image C×H×W and its label."""
        epoch, index = key
        image = self._decode(index)
        # Hashes of integers are the same in every process.
        seed = hash((self.seed, epoch, index))
        with torch.random.fork_rng(devices=()):
            torch.default_generator.manual_seed(seed)
            return self._transform(image), int(self.source.labels[index])

    def __getitems__(self, keys: Sequence[tuple[int, int]]) -> list[Any]:
        """Return the samples of a batch, or a list with only a ConfigError.

        The error is returned because torch would wrap an error that a worker raises in a traceback.
        """
        try:
            return [self[key] for key in keys]
        except ConfigError as error:
            return [error]

    def _decode(self, index: int) -> Any:
        """Return an image as a PIL image with the right channels."""
        from PIL import Image

        mode = "L" if self.spec.channels == 1 else "RGB"
        try:
            with self.source.image(index) as image:
                return image.convert(mode)
        except (Image.DecompressionBombError, SyntaxError, ValueError, OSError) as error:
            # An OSError raised by PIL has no errno. Any errno except "no such file" is a fault of
            # the disk, not of the data set.
            if getattr(error, "errno", None) not in (None, errno.ENOENT):
                raise
            name = self.source.names[index]
            raise ConfigError(
                f"dataset: cannot read the image {name}: {first_line(error)}"
            ) from error

    def _crop_centre(self, image: Any) -> Any:
        """Return the central square, resized. Its side is ``spec.crop`` times the shorter side.

        An image that is smaller than the model's images keeps its whole shorter side.
        """
        side = min(image.size)
        if side > self.spec.size:
            side = round(side * self.spec.crop)
        return self._resize(self._v2.center_crop(image, [side, side]))


def collate(samples: Sequence[Any]) -> Batch | ConfigError:
    """Stack samples into a batch, or return the error that `ImageDataset` returned instead."""
    if isinstance(samples[0], ConfigError):
        return samples[0]
    images = torch.stack([image for image, _ in samples])
    labels = torch.tensor([label for _, label in samples])
    return images, labels


@dataclass(frozen=True)
class BatchPlan:
    """Groups the samples of an epoch into optimizer steps, and divides a step among the ranks.

    Attributes:
        num_samples: the samples of an epoch.
        effective_batch: the samples of an optimizer step, on all ranks together. The last step of
            an epoch may have fewer.
        at_once: the samples that a rank reads at once.
        seed: the seed from which each epoch's order is drawn.
        ranks: the number of ranks.
        rank: this rank.
    """

    num_samples: int
    effective_batch: int
    at_once: int
    seed: int
    ranks: int = 1
    rank: int = 0

    def order(self, epoch: int) -> list[int]:
        """Return the shuffled sample indices of an epoch."""
        seed = (self.seed * 1_000_003 + epoch) % 2**63
        generator = torch.Generator().manual_seed(seed)
        return torch.randperm(self.num_samples, generator=generator).tolist()

    def steps(self, epoch: int, start: int = 0) -> Iterator[list[Sequence[int]]]:
        """Yield this rank's chunks for each optimizer step, starting at sample ``start``.

        A step's samples and their order depend only on the effective batch. In an epoch's last
        step, a rank may have no samples.
        """
        for step in split_into_chunks(self.order(epoch)[start:], self.effective_batch):
            share = share_of(step, self.rank, self.ranks)
            yield split_into_chunks(share, self.at_once)

    def samples_in_step(self, start: int) -> int:
        """Return how many samples the step at ``start`` has, on all ranks together."""
        return min(self.effective_batch, self.num_samples - start)

    def steps_left(self, start: int) -> int:
        """Return the number of optimizer steps from sample ``start`` to the end of the epoch."""
        return -(-(self.num_samples - start) // self.effective_batch)


def split_into_chunks(samples: Sequence[int], size: int) -> list[Sequence[int]]:
    """Split samples into chunks of ``size`` samples, in order. The last chunk may be smaller."""
    return [samples[first : first + size] for first in range(0, len(samples), size)]


def choose_read_size(effective_batch: int) -> int:
    """Return how many samples to read at once while the micro-batch size is unknown.

    Workers read ahead in chunks of this size, which divides the effective batch. A large effective
    batch is read whole only if all its usable divisors are very small.
    """
    divisors = [n for n in range(1, _MOST_SAMPLES_READ + 1) if effective_batch % n == 0]
    size = max(divisors)
    is_too_small = 4 * size < min(_MOST_SAMPLES_READ, effective_batch)
    return effective_batch if is_too_small else size


def read_batches(
    dataset: ImageDataset,
    chunks: Sequence[Sequence[int]],
    epoch: int,
    training: Any,
    *,
    pinned: bool = False,
) -> Iterator[Batch]:
    """Yield a batch on the host for each of ``chunks``, in order.

    The workers end with the iterator, so training and validation workers never hold memory at the
    same time.

    Args:
        dataset: the images.
        chunks: the samples of each batch.
        epoch: the epoch, which decides the augmentation.
        training: the config group ``training``, with the number of workers.
        pinned: whether batches are in pinned memory, from which copies to a GPU do not block.

    Raises:
        ConfigError: an image cannot be read.
    """
    keys = []
    for chunk in chunks:
        keys_of_chunk = [(epoch, index) for index in chunk]
        keys.append(keys_of_chunk)
    prefetch_factor = training.prefetch_factor if training.num_workers else None
    loader: DataLoader[Any] = DataLoader(
        dataset,
        batch_sampler=keys,
        num_workers=training.num_workers,
        prefetch_factor=prefetch_factor,
        pin_memory=pinned,
        collate_fn=collate,
        # Otherwise the loader would draw its seed from the generator that dropout uses, and dropout
        # in a resumed epoch would differ from an uninterrupted epoch.
        generator=torch.Generator(),
        worker_init_fn=_prepare_worker,
    )
    for batch in loader:
        if isinstance(batch, ConfigError):
            raise batch
        yield batch


def _prepare_worker(worker: int) -> None:
    """Set up a worker's process.

    A worker ignores Ctrl-C, because the run handles it. SIGTERM must kill the worker, because the
    loader uses it to end a worker that is stuck.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)


def join_batches(batches: Sequence[Batch]) -> Batch:
    """Return one batch with the samples of all ``batches``. A single batch stays pinned."""
    if len(batches) == 1:
        return batches[0]
    images = torch.cat([images for images, _ in batches])
    labels = torch.cat([labels for _, labels in batches])
    return images, labels
