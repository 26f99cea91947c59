"""Going back to where an optimizer step began: gradients, buffers, generators, autograd graphs."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from robust_train.memory.holders import live_objects
from robust_train.microbatch.rng import GeneratorStates

log = logging.getLogger("robust_train")

Models = nn.Module | Iterable[nn.Module] | None
"""What learns in a step; None for all modules and optimizers of the process."""


@dataclass
class _Buffer:
    """One buffer by its place, for a module may put another tensor there."""

    home: dict[str, Tensor | None]
    name: str
    label: str

    def now(self) -> Tensor | None:
        return self.home.get(self.name)


@dataclass
class _Watched:
    """What is known about one model from its earlier steps."""

    parameters: list[nn.Parameter]
    buffers: list[_Buffer]
    changing: list[_Buffer] | None = None
    steady: list[tuple[_Buffer, int]] = field(default_factory=list)
    copies: list[Tensor] = field(default_factory=list)


@dataclass
class _FirstCopy:
    """A buffer before the first step: its tensor, that one's version, and its values."""

    buffer: _Buffer
    tensor: Tensor
    version: int
    values: Tensor

    def has_changed(self) -> bool:
        now = self.buffer.now()
        if now is not self.tensor or now._version != self.version:
            return True
        # writing through .data leaves the version as it was
        return not torch.equal(now.cpu(), self.values)

    def restore(self) -> None:
        self.tensor.copy_(self.values)
        self.version = self.tensor._version
        self.buffer.home[self.buffer.name] = self.tensor


class Watch:
    """Remembers which buffers each model's forward pass changes, without keeping it alive."""

    def __init__(self) -> None:
        self._models: weakref.WeakKeyDictionary[nn.Module, _Watched] = weakref.WeakKeyDictionary()
        self._found: tuple[list[weakref.ref[nn.Module]], list[weakref.ref[Any]]] | None = None

    def begin(self, models: Models) -> StepStart:
        """The state at the start of a step."""
        return StepStart(self, models)

    def of(self, model: nn.Module) -> _Watched:
        """What is known about ``model``."""
        watched = self._models.get(model)
        if watched is None:
            watched = self._models[model] = _Watched(list(model.parameters()), _buffers(model))
        return watched

    def forget(self) -> None:
        """Look again at the next step: parameters or models may have come or gone."""
        self._models.clear()
        self._found = None

    def resolve(self, models: Models) -> tuple[list[nn.Module], list[Any]]:
        """Modules, and the optimizers that were found where no model was named."""
        if isinstance(models, nn.Module):
            return [models], []
        if models is not None:
            return list(models), []
        if self._found is None:
            self._found = _everything_that_learns()
        modules, optimizers = self._found
        return _alive(modules), _alive(optimizers)


class StepStart:
    """The state at the start of an optimizer step.

    Gradients that are there already (of earlier batches) are laid aside, so that those of the step
    can be dropped; :meth:`end` adds them again.
    """

    def __init__(self, watch: Watch, models: Models) -> None:
        self._watch = watch
        if models is not None and not isinstance(models, nn.Module):
            models = list(models)
        self._wanted = models
        found, self._optimizers = watch.resolve(self._wanted)
        self._watched = [watch.of(model) for model in found]
        self._is_open = True
        self._aside: list[tuple[Tensor, Tensor]] = []
        self._generators = GeneratorStates()
        self._first_copies = [_first_copies(w) for w in self._watched]
        for watched in self._watched:
            _copy_changing(watched)
        # last: from here on somebody must call end()
        for parameter in self.parameters():
            if parameter.grad is not None:
                self._aside.append((parameter, parameter.grad))
                parameter.grad = None

    @property
    def is_open(self) -> bool:
        """Whether :meth:`end` was not called yet."""
        return self._is_open

    def make_gradients(self) -> None:
        """Give every parameter a gradient of zeros, as in all micro-batches but the first."""
        for parameter in self.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def has_gradients(self) -> bool:
        """Whether any parameter has a gradient of this step."""
        return any(parameter.grad is not None for parameter in self.parameters())

    def rewind(self) -> None:
        """Drop the step's gradients; give buffers and generators their values of the start."""
        if self._wanted is None:
            self._watch.forget()
        models, optimizers = self._watch.resolve(self._wanted)
        # looked up afresh: an unknown parameter's gradient would count twice
        for tensor in (*(p for m in models for p in m.parameters()), *_in_optimizers(optimizers)):
            tensor.grad = None
        with torch.no_grad():
            for watched, first in zip(self._watched, self._first_copies, strict=True):
                _restore(watched, first)
        self._generators.restore()

    def end(self, *, is_complete: bool = False) -> None:
        """Add the gradients that were laid aside. May be called again.

        Args:
            is_complete: every part of the batch went through.
        """
        if not self._is_open:
            return
        self._is_open = False
        if is_complete:
            for watched, first in zip(self._watched, self._first_copies, strict=True):
                _learn_changes(watched, first)
            if self._wanted is None and not self.has_gradients():
                # what learns here is not what was found
                self._watch.forget()
        with torch.no_grad():
            for parameter, before in self._aside:
                new = parameter.grad
                # the same tensor as before: it may be a view into a buffer of somebody's
                parameter.grad = before
                if new is not None and before.is_sparse == new.is_sparse:
                    before.add_(new)
                elif new is not None:
                    parameter.grad = before + new
        self._aside = []

    def parameters(self) -> Iterator[Tensor]:
        """Those of the models, and what the optimizers hold that were found without any."""
        for watched in self._watched:
            yield from watched.parameters
        yield from _in_optimizers(self._optimizers)


def cut_graphs(since: int | None) -> None:
    """Detach every tensor that was computed since an :func:`autograd_sequence_number`.

    A user's variables (the loss, the model's output) outlive a failed pass and hold its graph and
    so all its activations, which are of no use any more.
    """
    if since is None:
        return
    computed = []
    try:
        everything = gc.get_objects()
    except MemoryError:  # the list itself is some megabytes: smaller parts may fit all the same
        return
    for item in everything:
        # type(), not isinstance(): proxies may compute their __class__
        if issubclass(type(item), Tensor):
            number = _graph_number(item)
            if number >= since:
                computed.append((number, item))
    everything = []
    # the last result first: earlier ones are free to go once no graph above refers to them
    computed.sort(key=lambda pair: -pair[0])
    tensors = [item for _, item in computed]
    computed.clear()
    item = None
    for tensor in tensors:
        try:
            if tensor._is_view():
                # detach_() refuses views
                torch.utils.swap_tensors(  # type: ignore[no-untyped-call]
                    tensor, tensor.detach()
                )
            else:
                tensor.detach_()
        except RuntimeError:
            log.debug("a %s tensor of the failed pass keeps its graph", tuple(tensor.shape))


def _graph_number(tensor: Tensor) -> int:
    try:
        node = tensor.grad_fn
        return -1 if node is None else int(node._sequence_nr())
    except (RuntimeError, AttributeError):
        return -1


def _buffers(model: nn.Module) -> list[_Buffer]:
    return [
        _Buffer(module._buffers, name, f"{prefix}.{name}" if prefix else name)
        for prefix, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]


def _first_copies(watched: _Watched) -> list[_FirstCopy] | None:
    """Copies of all buffers: only in the first step, and on the host."""
    if watched.changing is not None:
        return None
    return [
        _FirstCopy(buffer, tensor, tensor._version, tensor.detach().to("cpu", copy=True))
        for buffer in watched.buffers
        if (tensor := buffer.now()) is not None
    ]


def _learn_changes(watched: _Watched, first: list[_FirstCopy] | None) -> None:
    """After a complete step: which buffers its forward pass has changed."""
    if watched.changing is None:
        watched.changing = [copy.buffer for copy in first or () if copy.has_changed()]
        changing = set(map(id, watched.changing))
        watched.steady = [
            (buffer, tensor._version)
            for buffer in watched.buffers
            if id(buffer) not in changing and (tensor := buffer.now()) is not None
        ]
    for buffer, version in watched.steady:
        tensor = buffer.now()
        if tensor is not None and tensor._version != version:
            # statistics that were frozen at first, for example
            watched.changing.append(buffer)
            watched.steady = [entry for entry in watched.steady if entry[0] is not buffer]


def _copy_changing(watched: _Watched) -> None:
    """Copy the buffers that are known to change, into the memory of the last copies."""
    sources = [tensor for b in watched.changing or () if (tensor := b.now()) is not None]
    copies = watched.copies
    is_same = len(copies) == len(sources) and all(
        copy.shape == source.shape and copy.dtype == source.dtype and copy.device == source.device
        for copy, source in zip(copies, sources, strict=True)
    )
    if is_same:
        copy_all(copies, sources)
    else:
        watched.copies = [source.detach().clone() for source in sources]


@torch.no_grad()
def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into its target: one kernel for all of a device and number format.

    A list of mixed formats would take torch's slow path, a kernel for each tensor.
    """
    groups: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        key = target.device, target.dtype, source.device, source.dtype
        group = groups.setdefault(key, ([], []))
        group[0].append(target)
        group[1].append(source)
    for group in groups.values():
        torch._foreach_copy_(*group)


def _restore(watched: _Watched, first: list[_FirstCopy] | None) -> None:
    for copy in first or ():
        copy.restore()
    changing = [tensor for b in watched.changing or () if (tensor := b.now()) is not None]
    copy_all(changing, watched.copies)
    for buffer, version in watched.steady:
        tensor = buffer.now()
        if tensor is not None and tensor._version != version:
            log.warning(
                "the buffer %s changed for the first time in the step that is repeated; its change "
                "cannot be taken back",
                buffer.label,
            )


def _everything_that_learns() -> tuple[list[weakref.ref[nn.Module]], list[weakref.ref[Any]]]:
    modules, optimizers = live_objects(nn.Module), live_objects(torch.optim.Optimizer)
    children = {id(child) for module in modules for child in module._modules.values()}
    roots = [weakref.ref(module) for module in modules if id(module) not in children]
    return roots, [weakref.ref(optimizer) for optimizer in optimizers]


def _alive(references: Iterable[weakref.ref[Any]]) -> list[Any]:
    return [item for reference in references if (item := reference()) is not None]


def _in_optimizers(optimizers: Iterable[Any]) -> Iterator[Tensor]:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield from group["params"]
