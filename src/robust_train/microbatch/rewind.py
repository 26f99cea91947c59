"""Going back to where an optimizer step began: gradients, buffers, generators, autograd graphs."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from robust_train.compat import copy_at_once, graph_number, tensors_of, version_of
from robust_train.memory.holders import live_objects
from robust_train.microbatch.rng import GeneratorStates

log = logging.getLogger("robust_train")

Models = nn.Module | Iterable[nn.Module] | None
"""What learns in a step; None for all modules and optimizers of the process."""


@dataclass(eq=False)
class _Buffer:
    """One buffer by its place, for a module may put another tensor there, and its last copy."""

    home: dict[str, Tensor | None]
    name: str
    tensor: Tensor | None = None
    version: int = -1
    values: Tensor | None = None
    changes: bool | None = None
    """Whether steps change it; None before the first one is complete."""

    @property
    def is_due(self) -> bool:
        """Whether it is copied at a step's start and restored: unless it never changes."""
        if self.changes is False:
            self.changes = self._has_changed()
        return self.changes is not False

    def learn(self) -> None:
        """Record after a complete step whether that has changed it."""
        if self.changes is None:
            # writing through .data leaves the version as it was
            self.changes = self._has_changed() or not (
                self.tensor is None
                or self.values is None
                or torch.equal(self.tensor.cpu(), self.values)
            )

    def _has_changed(self) -> bool:
        now = self.home.get(self.name)
        return now is not self.tensor or (now is not None and version_of(now) != self.version)


def _keep(buffers: Iterable[_Buffer]) -> None:
    """Copy what may change: on the host until that is known, then into the last copy's memory."""
    targets: list[Tensor] = []
    sources: list[Tensor] = []
    for buffer in buffers:
        if not buffer.is_due:
            continue
        buffer.tensor = now = buffer.home.get(buffer.name)
        if now is None:
            buffer.values = None
            continue
        buffer.version = version_of(now)
        if buffer.changes is None:
            buffer.values = now.detach().to("cpu", copy=True)
        elif buffer.values is None or _layout(buffer.values) != _layout(now):
            buffer.values = now.detach().clone()
        else:
            targets.append(buffer.values)
            sources.append(now)
    copy_all(targets, sources)


def _restore(buffers: Iterable[_Buffer]) -> None:
    """Put the tensors and values of the step's start back."""
    changed = [buffer for buffer in buffers if buffer.is_due]
    kept = [(b.tensor, b.values) for b in changed if b.tensor is not None and b.values is not None]
    copy_all([tensor for tensor, _ in kept], [values for _, values in kept])
    for buffer in changed:
        buffer.home[buffer.name] = buffer.tensor
        buffer.version = -1 if buffer.tensor is None else version_of(buffer.tensor)


class _Watched:
    """What a model has: its parameters, and its buffers with what is known of them."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = list(model.parameters())
        self.buffers = [
            _Buffer(buffers, name)
            for _, buffers in map(tensors_of, model.modules())
            for name, buffer in buffers.items()
            if buffer is not None
        ]


class Watch:
    """Remembers which buffers each model's forward pass changes, without keeping it alive."""

    def __init__(self) -> None:
        self._models: weakref.WeakKeyDictionary[nn.Module, _Watched] = weakref.WeakKeyDictionary()
        self._found: tuple[list[weakref.ref[nn.Module]], list[weakref.ref[Any]]] | None = None

    def of(self, model: nn.Module) -> _Watched:
        """Return what is known about ``model``."""
        watched = self._models.get(model)
        if watched is None:
            watched = self._models[model] = _Watched(model)
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
            children = {id(child) for module in modules for child in module.children()}
            roots = [weakref.ref(module) for module in modules if id(module) not in children]
            self._found = roots, [weakref.ref(optimizer) for optimizer in optimizers]
        found_modules, found_optimizers = self._found
        return _alive(found_modules), _alive(found_optimizers)


class StepStart:
    """The state at the start of an optimizer step.

    Gradients that are there already (of earlier batches) are laid aside, so that those of the step
    can be dropped; :meth:`end` adds them again. Without ``keeps_gradients`` they stay, for a
    framework that drops them itself once the step has begun.
    """

    def __init__(self, watch: Watch, models: Models, *, keeps_gradients: bool = True) -> None:
        self._watch = watch
        is_several = models is not None and not isinstance(models, nn.Module)
        self._wanted: Models = list(models) if is_several else models  # type: ignore[arg-type]
        self.models, self._optimizers = watch.resolve(self._wanted)
        self._watched = [watch.of(model) for model in self.models]
        self.is_open = True
        self._aside: list[tuple[Tensor, Tensor]] = []
        self._generators = GeneratorStates()
        self._buffers = [buffer for watched in self._watched for buffer in watched.buffers]
        _keep(self._buffers)
        # last: from here on somebody must call end()
        for parameter in self.parameters() if keeps_gradients else ():
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
        _restore(self._buffers)
        self._generators.restore()

    def end(self, *, is_complete: bool = False) -> None:
        """Add the gradients that were laid aside; a second call does nothing."""
        if not self.is_open:
            return
        self.is_open = False
        if is_complete:
            for buffer in self._buffers:
                buffer.learn()
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
            number = graph_number(item)
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
            try:
                tensor.detach_()
            except RuntimeError:  # of a view
                torch.utils.swap_tensors(  # type: ignore[no-untyped-call]
                    tensor, tensor.detach()
                )
        except RuntimeError:
            log.debug("a %s tensor of the failed pass keeps its graph", tuple(tensor.shape))


@torch.no_grad()
def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into its target: one kernel for all of a device and number format. A list of
    mixed formats would take torch's slow path, a kernel for each tensor."""
    groups: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        key = target.device, target.dtype, source.device, source.dtype
        group = groups.setdefault(key, ([], []))
        group[0].append(target)
        group[1].append(source)
    for group in groups.values():
        copy_at_once(torch, *group)


def _layout(tensor: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device


def _alive(references: Iterable[weakref.ref[Any]]) -> list[Any]:
    return [item for reference in references if (item := reference()) is not None]


def _in_optimizers(optimizers: Iterable[Any]) -> Iterator[Tensor]:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield from group["params"]
