"""Real steps of the built-in trainer, and the most memory that they take: what predictions are
compared with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from omegaconf import DictConfig
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from robust_train.microbatch.batcher import MicroBatcher
from robust_train.vision.batches import Batch
from robust_train.vision.datasets import shape_of_data
from robust_train.vision.models import build_model, enable_gradient_checkpointing, set_train_mode
from robust_train.vision.step import (
    Precision,
    accumulate_gradients,
    apply_gradients,
    make_optimizer,
)


class RealSteps:
    """The job's model and optimizer on ``device``, with random weights and images."""

    def __init__(self, cfg: DictConfig, device: str) -> None:
        self.cfg, self.device = cfg, torch.device(device)
        shape = shape_of_data(cfg.dataset)
        built = build_model(cfg.model, shape)
        if cfg.training.gradient_checkpointing:
            enable_gradient_checkpointing(built.module)
        self.images, self.classes = built.images, shape.num_classes
        self.model = built.module.to(self.device)
        self.optimizer = make_optimizer(self.model.parameters(), lr=1e-4, weight_decay=0.01)
        self.precision = Precision(self.device, mixed=cfg.training.mixed_precision)

    def step(self, batch_size: int, *, accumulates: bool = False) -> None:
        """An optimizer step of one micro-batch, or of two."""
        training = self.cfg.training
        samples = batch_size * (2 if accumulates else 1)
        set_train_mode(self.model)
        accumulate_gradients(
            self.model,
            MicroBatcher(batch_size).micro_batches(
                _Samples(samples, self), self.model, length=len, split=_Samples.part
            ),
            device=self.device,
            precision=self.precision,
            label_smoothing=training.label_smoothing,
        )
        apply_gradients(
            self.model,
            self.optimizer,
            precision=self.precision,
            max_grad_norm=training.max_grad_norm,
        )

    def peak_bytes(self, batch_size: int, *, accumulates: bool = False) -> int:
        """The most that tensors take in a step, once the optimizer has its state."""
        self.step(2)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self.step(batch_size, accumulates=accumulates)
            return torch.cuda.max_memory_allocated(self.device)
        before = storage_bytes(self._kept())
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
            self.step(batch_size, accumulates=accumulates)
        return before + _highest(
            event.nbytes()
            for event in watched.profiler.kineto_results.events()
            if event.name() == "[memory]"
        )

    def _kept(self) -> Iterator[Tensor]:
        yield from self.model.state_dict(keep_vars=True).values()
        yield from self.model.buffers()
        for state in self.optimizer.state.values():
            yield from (item for item in state.values() if isinstance(item, Tensor))


class _Samples:
    """Images and labels that come into being when they are asked for, on the host."""

    def __init__(self, samples: int, steps: RealSteps) -> None:
        self.samples, self.steps = samples, steps

    def __len__(self) -> int:
        return self.samples

    def part(self, start: int, stop: int) -> Batch:
        images = self.steps.images
        images_BCHW = torch.rand(stop - start, images.channels, images.size, images.size)
        return images_BCHW, torch.randint(self.steps.classes, (stop - start,))


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind ``tensors``, each once."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _highest(changes: Iterable[int]) -> int:
    total = highest = 0
    for change in changes:
        total += change
        highest = max(highest, total)
    return highest
