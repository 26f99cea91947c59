"""The memory of the built-in trainer's steps: its own functions, run with fake tensors.

Fake tensors (torch's FakeTensorMode) have no memory behind them, so neither a GPU nor data nor
weights are needed.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn

from robust_train.compat import FakeTensorMode, tensors_of
from robust_train.errors import ConfigError
from robust_train.microbatch.batcher import MicroBatcher
from robust_train.planning.fit import Peak
from robust_train.planning.tracker import (
    ACTIVATIONS,
    GRADIENTS,
    OPTIMIZER,
    WEIGHTS,
    AsOnCuda,
    StorageTracker,
)
from robust_train.readable import first_line
from robust_train.vision import models
from robust_train.vision.batches import Batch
from robust_train.vision.datasets import shape_of_data
from robust_train.vision.images import ImageSpec
from robust_train.vision.prepare import check_config
from robust_train.vision.step import (
    Precision,
    accumulate_gradients,
    apply_gradients,
    make_optimizer,
)

_CPU = torch.device("cpu")
_WARM_UP = 2  # samples; BatchNorm may refuse a single one


class StepPredictor:
    """Steps of the job that ``cfg`` describes, with tensors that take no memory.

    Args:
        cfg: a validated config of the built-in trainer.
        device: ``cuda``, for a GPU of compute capability 8.0 or higher, or ``cpu``.

    Raises:
        ConfigError: the model cannot be built as configured.
    """

    def __init__(self, cfg: DictConfig, device: str = "cuda") -> None:
        check_config(cfg)
        self._cfg = cfg
        self._on_cuda = device == "cuda"
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._tracker = StorageTracker(on_cuda=self._on_cuda)
        built = _build(cfg)
        self._images, self._model = built.images, built.module
        training = cfg.training
        mixed = self._on_cuda and training.mixed_precision
        dtype = torch.bfloat16 if mixed else torch.float32
        self._precision = Precision(_CPU, mixed=False, dtype=dtype)
        if training.gradient_checkpointing:
            models.enable_gradient_checkpointing(self._model)
        with self._fake, self._tracker:
            _replace_by_fakes(self._model, self._fake)
            self._optimizer = make_optimizer(
                self._model.parameters(), lr=training.lr, weight_decay=training.weight_decay
            )
        weights = (*self._model.state_dict(keep_vars=True).values(), *self._model.buffers())
        self._tracker.label(weights, WEIGHTS)
        if self._on_cuda:
            for group in self._optimizer.param_groups:
                # torch's own choice on a GPU, which it does not make for fake tensors
                group["foreach"] = True
        self._watch()
        self._is_warm = False

    def predict(self, batch_size: int, *, accumulates: bool = False) -> Peak:
        """Return the peak of a step after the first, so that the optimizer has its state.

        Args:
            batch_size: micro-batch, samples.
            accumulates: the step has several micro-batches, so that gradients are there already in
                the second one's backward pass.

        Raises:
            ConfigError: the model refuses such a batch, or its steps depend on values.
        """
        try:
            if not self._is_warm:
                # the optimizer makes its state; the step's number in it is on the host
                self._step(_WARM_UP, 1)
                states = (t for s in self._optimizer.state.values() for t in s.values())
                tensors = [t for t in states if isinstance(t, Tensor) and t.ndim]
                self._tracker.label(tensors, OPTIMIZER)
                self._is_warm = True
            self._tracker.reset_peak()
            self._step(batch_size, 2 if accumulates else 1)
        except (ValueError, RuntimeError) as error:
            raise ConfigError(
                f"model.name={self._cfg.model.name}: a step with {batch_size} samples cannot be "
                f"done with fake tensors ({first_line(error)})"
            ) from error
        return Peak(batch_size, accumulates, self._tracker.peak, dict(self._tracker.at_peak))

    def _step(self, batch_size: int, parts: int) -> None:
        model, training = self._model, self._cfg.training
        samples = _FakeSamples(batch_size * parts, self._images, self._tracker)
        with self._fake, self._tracker:
            models.set_train_mode(model)
            micro_batches = MicroBatcher(batch_size).micro_batches(
                samples, model, length=len, split=_FakeSamples.part
            )
            accumulate_gradients(
                model,
                micro_batches,
                device=_CPU,
                precision=self._precision,
                label_smoothing=training.label_smoothing,
            )
            clip, precision = training.max_grad_norm, self._precision
            apply_gradients(model, self._optimizer, precision=precision, max_grad_norm=clip)

    def _watch(self) -> None:
        """Label activations and gradients, and let modules compute as on a GPU. Every module has
        its hooks, not the model alone: a backward pass recomputes single modules, and torch runs it
        without the modes for functions."""
        tracker = self._tracker
        open_modes: list[ExitStack] = []

        def enter(module: nn.Module, inputs: Any) -> None:
            stack = ExitStack()
            if not open_modes:
                stack.enter_context(tracker.taking_for(ACTIVATIONS))
                if self._on_cuda:
                    stack.enter_context(AsOnCuda())
            open_modes.append(stack)

        def leave(module: nn.Module, inputs: Any, output: Any) -> None:
            open_modes.pop().close()

        def note_gradient(parameter: Tensor) -> None:
            tracker.label([parameter.grad], GRADIENTS)

        for module in self._model.modules():
            module.register_forward_pre_hook(enter)
            module.register_forward_hook(leave, always_call=True)
        for parameter in self._model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(note_gradient)  # type: ignore[no-untyped-call]


class _FakeSamples:
    """The samples of a step, which are on the device once they are read."""

    def __init__(self, samples: int, images: ImageSpec, tracker: StorageTracker) -> None:
        self._samples = samples
        self._images = images
        self._tracker = tracker

    def __len__(self) -> int:
        return self._samples

    def part(self, start: int, stop: int) -> Batch:
        count, size = stop - start, self._images.size
        with self._tracker.taking_for(ACTIVATIONS):
            images_BCHW = torch.empty(count, self._images.channels, size, size)
            return images_BCHW, torch.empty(count, dtype=torch.long)


def _build(cfg: DictConfig) -> models.BuiltModel:
    """Build the trainer's model with random weights: none are read or fetched."""
    model = OmegaConf.merge(cfg.model, {"weights": None})
    if "pretrained" in model:
        model.pretrained = False
    return models.build_model(model, shape_of_data(cfg.dataset))


def _replace_by_fakes(model: nn.Module, mode: FakeTensorMode) -> None:
    """Replace parameters and buffers by fake tensors, shared ones by one."""
    for module in model.modules():
        for home in tensors_of(module):
            for name, tensor in home.items():
                if tensor is not None:
                    home[name] = mode.from_tensor(tensor)
