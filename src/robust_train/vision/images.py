"""Images as batches of tensors: decoded and augmented, in the order of an epoch, read ahead.

The position in an epoch is a number of samples, and their order depends on seed and epoch alone: a
run resumes at exactly the sample where it stopped, even with smaller micro-batches.
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

# torchvision's own default is 8 % and more of the area, for ImageNet; small data sets of similar
# classes lose the decisive detail that way
_CROP_AREAS = (0.35, 1.0)
_LARGEST_SHIFT = 1 / 8
_READ_AT_MOST = 64


@dataclass(frozen=True)
class ImageSpec:
    """The images that a model takes."""

    size: int  # rows and columns, in pixels
    channels: int
    # mean, std: of each channel, for values from 0 to 1
    mean: tuple[float, ...]
    std: tuple[float, ...]
    crop: float = 1.0  # fraction of a test photograph's shorter side to keep


class ImageDataset(Dataset[Any]):
    """A split as the tensors a model takes. Keys are (epoch, index): a sample's augmentation
    depends on these and the seed alone, not on workers or micro-batches. ``augment`` is a value of
    ``dataset.augment``."""

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
            changes: list[Any] = [
                v2.RandomResizedCrop(spec.size, scale=_CROP_AREAS, interpolation=bicubic),
                v2.RandomHorizontalFlip(),
            ]
        else:
            changes = [self._centre]
        if augment == "shift":
            shift = (_LARGEST_SHIFT, _LARGEST_SHIFT)
            changes.insert(0, v2.RandomAffine(0, translate=shift))
        changes += [
            v2.PILToTensor(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(spec.mean, spec.std),
        ]
        self._transform = v2.Compose(changes)

    def __len__(self) -> int:
        return len(self.source.labels)

    def __getitem__(self, key: tuple[int, int]) -> tuple[Tensor, int]:
        """Return the image C×H×W and its label."""
        epoch, index = key
        image = self._decode(index)
        # A hash of integers is the same in every process.
        seed = hash((self.seed, epoch, index))
        with torch.random.fork_rng(devices=()):
            torch.default_generator.manual_seed(seed)
            return self._transform(image), int(self.source.labels[index])

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
        except (Image.DecompressionBombError, SyntaxError, ValueError, OSError) as error:
            # PIL's own OSErrors have no number; others than "no such file" are the disk's
            if getattr(error, "errno", None) not in (None, errno.ENOENT):
                raise
            name = self.source.names[index]
            raise ConfigError(
                f"dataset: cannot read the image {name}: {first_line(error)}"
            ) from error

    def _centre(self, image: Any) -> Any:
        """Cut out the middle square, ``spec.crop`` of the shorter side."""
        side = min(image.size)
        if side > self.spec.size:  # a tiny image has no margin to lose
            side = round(side * self.spec.crop)
        return self._resize(self._v2.center_crop(image, [side, side]))


def collate(samples: Sequence[Any]) -> Batch | ConfigError:
    """Stack samples into a batch, and pass on an error of the data set."""
    if isinstance(samples[0], ConfigError):
        return samples[0]
    return (
        torch.stack([image for image, _ in samples]),
        torch.tensor([label for _, label in samples]),
    )


@dataclass(frozen=True)
class BatchPlan:
    """How samples are grouped. An optimizer step has ``effective_batch`` samples of all ranks, or
    fewer at the end of an epoch. Each rank reads its share ``at_once`` samples at a time. ``seed``
    fixes each epoch's order."""

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
        """Yield what this rank reads of each optimizer step from sample ``start`` on. A step's
        samples and their order depend on the effective batch alone. In an epoch's last step a rank
        may have none."""
        for step in in_order(self.order(epoch)[start:], self.effective_batch):
            yield in_order(share_of(step, self.rank, self.ranks), self.at_once)

    def samples_in_step(self, start: int) -> int:
        """Return how many samples of all ranks the step that begins at ``start`` has."""
        return min(self.effective_batch, self.num_samples - start)

    def steps_left(self, start: int) -> int:
        """Return the optimizer steps from sample ``start`` to the end of its epoch."""
        return -(-(self.num_samples - start) // self.effective_batch)


def in_order(samples: Sequence[int], size: int) -> list[Sequence[int]]:
    """Split samples into batches without shuffling."""
    return [samples[first : first + size] for first in range(0, len(samples), size)]


def read_at_once(effective_batch: int) -> int:
    """Return the samples to read at once while the micro-batch size is unknown. Workers read ahead
    in such parts, so a large effective batch must not be a single part."""
    samples = max(n for n in range(1, _READ_AT_MOST + 1) if effective_batch % n == 0)
    too_few = 4 * samples < min(_READ_AT_MOST, effective_batch)
    return effective_batch if too_few else samples


def read_batches(
    dataset: ImageDataset,
    chunks: Sequence[Sequence[int]],
    epoch: int,
    training: Any,
    *,
    pinned: bool = False,
) -> Iterator[Batch]:
    """Yield a batch on the host for each of ``chunks``, in order, with the workers that the group
    ``training`` asks for. Workers end with the iterator, so those of training and of validation
    never hold memory at the same time. ``pinned``: into memory from which a GPU copies at once."""
    batches = []
    for chunk in chunks:
        batch = [(epoch, index) for index in chunk]
        batches.append(batch)
    loader: DataLoader[Any] = DataLoader(
        dataset,
        batch_sampler=batches,
        num_workers=training.num_workers,
        prefetch_factor=training.prefetch_factor if training.num_workers else None,
        pin_memory=pinned,
        collate_fn=collate,
        # drawing the loader's seed from dropout's generator would change a resumed epoch
        generator=torch.Generator(),
        worker_init_fn=_prepare_worker,
    )
    for batch in loader:
        if isinstance(batch, ConfigError):
            raise batch
        yield batch


def _prepare_worker(worker: int) -> None:
    # the run handles a terminal's Ctrl-C; the loader sends SIGTERM to end a worker that is stuck
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)


def joined(batches: Sequence[Batch]) -> Batch:
    """Join the samples of all ``batches``. A lone batch stays in pinned memory."""
    if len(batches) == 1:
        return batches[0]
    return (
        torch.cat([images for images, _ in batches]),
        torch.cat([labels for _, labels in batches]),
    )
