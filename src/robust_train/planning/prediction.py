"""The memory of the built-in trainer's steps, from a run of them with fake tensors.

The trainer's own functions build the model and do the steps; only the tensors have no memory behind
them (torch's FakeTensorMode), so neither a GPU nor data nor weights are needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.module import register_module_parameter_registration_hook

from robust_train.config import ConfigError
from robust_train.planning.as_on_cuda import AsOnCuda, CudaTracker, answer_without_values
from robust_train.planning.fit import Peak
from robust_train.planning.tracker import (
    ACTIVATIONS,
    GRADIENTS,
    OPTIMIZER,
    WEIGHTS,
    StorageTracker,
)
from robust_train.training.batches import Batch
from robust_train.training.data import shape_of_data
from robust_train.training.images import ImageSpec
from robust_train.training.micro_batch import MicroBatcher
from robust_train.training.models import (
    BuiltModel,
    build_model,
    enable_gradient_checkpointing,
    set_train_mode,
)
from robust_train.training.precision import Precision
from robust_train.training.prepare import check_config
from robust_train.training.schedule import make_optimizer
from robust_train.training.step import accumulate_gradients, apply_gradients

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
        self._tracker: StorageTracker = CudaTracker() if self._on_cuda else _CpuTracker()
        built = _build(cfg)
        self._images, self._model = built.images, built.module
        training = cfg.training
        mixed = self._on_cuda and training.mixed_precision
        self._precision = Precision(
            _CPU, mixed=False, dtype=torch.bfloat16 if mixed else torch.float32
        )
        if training.gradient_checkpointing:
            enable_gradient_checkpointing(self._model)
        with self._fake, self._tracker:
            _replace_by_fakes(self._model)
            self._optimizer = make_optimizer(
                self._model.parameters(), lr=training.lr, weight_decay=training.weight_decay
            )
        self._tracker.label(self._model.state_dict(keep_vars=True).values(), WEIGHTS)
        self._tracker.label(self._model.buffers(), WEIGHTS)
        if self._on_cuda:
            for group in self._optimizer.param_groups:
                # torch's own choice on a GPU, which it does not make for fake tensors
                group["foreach"] = True
        self._watch()
        self._is_warm = False

    def predict(self, batch_size: int, *, accumulates: bool = False) -> Peak:
        """The peak of a step that others have gone before, so that the optimizer has its state.

        Args:
            batch_size: micro-batch, samples.
            accumulates: the step has several micro-batches, so that gradients are there already in
                the second one's backward pass.

        Raises:
            ConfigError: the model refuses such a batch.
        """
        if not self._is_warm:
            self._step(_WARM_UP, 1)
            state = self._optimizer.state.values()
            self._tracker.label((t for entry in state for t in _device_tensors(entry)), OPTIMIZER)
            self._is_warm = True
        self._tracker.reset_peak()
        try:
            self._step(batch_size, 2 if accumulates else 1)
        except ValueError as error:
            raise ConfigError(f"batch size {batch_size}: {str(error).splitlines()[0]}") from error
        return Peak(batch_size, accumulates, self._tracker.peak, dict(self._tracker.at_peak))

    def _step(self, batch_size: int, parts: int) -> None:
        training = self._cfg.training
        samples = _FakeSamples(batch_size * parts, self._images, self._tracker)
        with self._fake, self._tracker:
            set_train_mode(self._model)
            batcher = MicroBatcher(batch_size)
            accumulate_gradients(
                self._model,
                batcher.micro_batches(samples, self._model, length=len, split=_FakeSamples.part),
                device=_CPU,
                precision=self._precision,
                label_smoothing=training.label_smoothing,
            )
            apply_gradients(
                self._model,
                self._optimizer,
                precision=self._precision,
                max_grad_norm=training.max_grad_norm,
            )

    def _watch(self) -> None:
        """Tell activations and gradients apart from what only passes by, and let modules compute as
        on a GPU. Every module has to be watched, not the model alone: a backward pass recomputes
        single ones, and torch runs it with modes for functions put aside."""
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
                parameter.register_post_accumulate_grad_hook(note_gradient)


class _CpuTracker(StorageTracker):
    """Counts fake tensors as what they are, tensors of the CPU."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        answer = answer_without_values(func, args)
        return super().__torch_dispatch__(func, types, args, kwargs) if answer is None else answer


class _FakeSamples:
    """The samples of a step, which are on the device as soon as they are asked for."""

    def __init__(self, samples: int, images: ImageSpec, tracker: StorageTracker) -> None:
        self._samples = samples
        self._images = images
        self._tracker = tracker

    def __len__(self) -> int:
        return self._samples

    def part(self, start: int, stop: int) -> Batch:
        """Images and labels."""
        count, size = stop - start, self._images.size
        with self._tracker.taking_for(ACTIVATIONS):
            images_BCHW = torch.empty(count, self._images.channels, size, size)
            return images_BCHW, torch.empty(count, dtype=torch.long)


def _build(cfg: DictConfig) -> BuiltModel:
    """The trainer's model on the device ``meta``: no weights are made, read or fetched."""
    model = OmegaConf.merge(cfg.model, {"weights": None})
    if "pretrained" in model:
        model.pretrained = False
    shape = shape_of_data(cfg.dataset)
    with _parameters_on_meta():
        return build_model(
            model,
            num_classes=shape.num_classes,
            native_size=shape.size,
            native_channels=shape.channels,
        )


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Every parameter of a module that is made in this block goes to ``meta`` at once.

    Only parameters: models compute with small tensors of other kinds while they are built
    (depths of stochastic depth, positions), and these need their values.
    """

    def move(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.device.type == "meta":
            return None
        return nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)

    hook = register_module_parameter_registration_hook(move)
    try:
        yield
    finally:
        hook.remove()


def _replace_by_fakes(model: nn.Module) -> None:
    """Parameters and buffers as fake tensors of the CPU, one for each however often it is used."""
    made: dict[int, Tensor] = {}

    def fake(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            empty = torch.empty_strided(
                tensor.size(), tensor.stride(), dtype=tensor.dtype, device=_CPU
            )
            is_parameter = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
        return made[id(tensor)]

    for module in model.modules():
        for home in (module._parameters, module._buffers):
            for name, tensor in home.items():
                if tensor is not None:
                    home[name] = fake(tensor)  # type: ignore[assignment]


def _device_tensors(state: Mapping[str, Any]) -> Iterator[Tensor]:
    """An optimizer's state of one parameter, without the step's number, which is on the host."""
    return (item for item in state.values() if isinstance(item, Tensor) and item.ndim)
