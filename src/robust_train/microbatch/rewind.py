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


@dataclass(eq=False)
class _Buffer:
    """One buffer by its place, for a module may put another tensor there."""

    home: dict[str, Tensor | None]
    name: str
    label: str
    version: int = 0

    def now(self) -> Tensor | None:
        return self.home.get(self.name)


@dataclass
class _FirstCopy:
    """A buffer before a model's first step: its tensor, that one's version, and its values."""

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


@dataclass
class _Watched:
    """What is known about one model: in its first step nothing, later which buffers change."""

    parameters: list[nn.Parameter]
    buffers: list[_Buffer]
    is_known: bool = False
    changing: list[_Buffer] = field(default_factory=list)
    steady: list[_Buffer] = field(default_factory=list)
    copies: list[Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, model: nn.Module) -> _Watched:
        buffers = [
            _Buffer(module._buffers, name, f"{prefix}.{name}" if prefix else name)
            for prefix, module in model.named_modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        return cls(list(model.parameters()), buffers)

    def first_copies(self) -> list[_FirstCopy]:
        """Copy all buffers to the host, in the first step only."""
        if self.is_known:
            return []
        return [
            _FirstCopy(buffer, tensor, tensor._version, tensor.detach().to("cpu", copy=True))
            for buffer in self.buffers
            if (tensor := buffer.now()) is not None
        ]

    def copy_changing(self) -> None:
        """Copy the buffers that are known to change, into the memory of the last copies."""
        sources, copies = _present(self.changing), self.copies
        if [_layout(copy) for copy in copies] == [_layout(source) for source in sources]:
            copy_all(copies, sources)
        else:
            self.copies = [source.detach().clone() for source in sources]

    def learn_changes(self, first: list[_FirstCopy]) -> None:
        """After a complete step: which buffers its forward pass has changed."""
        if not self.is_known:
            self.is_known = True
            self.changing = [copy.buffer for copy in first if copy.has_changed()]
            changing = set(map(id, self.changing))
            self.steady = [buffer for buffer in self.buffers if id(buffer) not in changing]
            for buffer in self.steady:
                tensor = buffer.now()
                buffer.version = 0 if tensor is None else tensor._version
        # such as statistics that were frozen at first
        moved = self.newly_changed()
        self.changing += moved
        self.steady = [buffer for buffer in self.steady if buffer not in moved]

    def newly_changed(self) -> list[_Buffer]:
        """Buffers that were steady in all steps before this one."""
        return [
            buffer
            for buffer in self.steady
            if (tensor := buffer.now()) is not None and tensor._version != buffer.version
        ]

    def restore(self, first: list[_FirstCopy]) -> None:
        for copy in first:
            copy.restore()
        copy_all(_present(self.changing), self.copies)
        for buffer in self.newly_changed():
            log.warning(
                "the buffer %s changed for the first time in the step that is repeated; its change "
                "cannot be taken back",
                buffer.label,
            )


class Watch:
    """Remembers which buffers each model's forward pass changes, without keeping it alive."""

    def __init__(self) -> None:
        self._models: weakref.WeakKeyDictionary[nn.Module, _Watched] = weakref.WeakKeyDictionary()
        self._found: tuple[list[weakref.ref[nn.Module]], list[weakref.ref[Any]]] | None = None

    def of(self, model: nn.Module) -> _Watched:
        """Return what is known about ``model``."""
        watched = self._models.get(model)
        if watched is None:
            watched = self._models[model] = _Watched.of(model)
        return watched

    def forget(self) -> None:
        """Search again at the next step: parameters or models may have come or gone."""
        self._models.clear()
        self._found = None

    def resolve(self, models: Models) -> tuple[list[nn.Module], list[Any]]:
        """Return the modules, and the optimizers that were found where no model was named."""
        if isinstance(models, nn.Module):
            return [models], []
        if models is not None:
            return list(models), []
        if self._found is None:
            modules, optimizers = live_objects(nn.Module), live_objects(torch.optim.Optimizer)
            children = {id(child) for module in modules for child in module._modules.values()}
            roots = [weakref.ref(module) for module in modules if id(module) not in children]
            self._found = roots, [weakref.ref(optimizer) for optimizer in optimizers]
        found_modules, found_optimizers = self._found
        return _alive(found_modules), _alive(found_optimizers)


class StepStart:
    """The state at the start of an optimizer step.

    Gradients that are there already (of earlier batches) are laid aside, so that those of the step
    can be dropped; :meth:`end` adds them again.
    """

    def __init__(self, watch: Watch, models: Models) -> None:
        self._watch = watch
        is_several = models is not None and not isinstance(models, nn.Module)
        self._wanted: Models = list(models) if is_several else models  # type: ignore[arg-type]
        self.models, self._optimizers = watch.resolve(self._wanted)
        self._watched = [watch.of(model) for model in self.models]
        self.is_open = True
        self._aside: list[tuple[Tensor, Tensor]] = []
        self._generators = GeneratorStates()
        self._first_copies = [watched.first_copies() for watched in self._watched]
        for watched in self._watched:
            watched.copy_changing()
        # last: from here on somebody must call end()
        for parameter in self.parameters():
            if parameter.grad is not None:
                self._aside.append((parameter, parameter.grad))
                parameter.grad = None

    def parameters(self) -> Iterator[Tensor]:
        """Yield those of the models, and of the optimizers that were found without any."""
        for watched in self._watched:
            yield from watched.parameters
        yield from _in_optimizers(self._optimizers)

    def make_gradients(self) -> None:
        """Give every parameter a gradient of zeros, as in all micro-batches but the first."""
        for parameter in self.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def has_gradients(self) -> bool:
        """Return whether any parameter has a gradient of this step."""
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
                watched.restore(first)
        self._generators.restore()

    def end(self, *, is_complete: bool = False) -> None:
        """Add the gradients that were laid aside; a second call does nothing.

        Args:
            is_complete: every part of the batch went through.
        """
        if not self.is_open:
            return
        self.is_open = False
        if is_complete:
            for watched, first in zip(self._watched, self._first_copies, strict=True):
                watched.learn_changes(first)
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


def _graph_number(tensor: Tensor) -> int:
    try:
        node = tensor.grad_fn
        return -1 if node is None else int(node._sequence_nr())
    except (RuntimeError, AttributeError):
        return -1


def _present(buffers: Iterable[_Buffer]) -> list[Tensor]:
    return [tensor for buffer in buffers if (tensor := buffer.now()) is not None]


def _layout(tensor: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device


def _alive(references: Iterable[weakref.ref[Any]]) -> list[Any]:
    return [item for reference in references if (item := reference()) is not None]


def _in_optimizers(optimizers: Iterable[Any]) -> Iterator[Tensor]:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield from group["params"]
