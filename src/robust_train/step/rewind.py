"""Going back to where an optimizer step began: gradients, buffers, random generators."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from robust_train.compat import copy_at_once, tensors_of, version_of
from robust_train.memory.tensors import leaves_of
from robust_train.step.rng import GeneratorStates

Models = nn.Module | Iterable[nn.Module] | None
"""What learns in a step; None: the modules that the function of the step closes over."""


@dataclass(eq=False)
class _Buffer:
    """One buffer by its place, since a module may put another tensor there, and its last copy."""

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
        """Record after a complete step whether the step has changed it."""
        if self.changes is not None:
            return
        # writing through .data leaves the version as it was
        self.changes = self._has_changed() or not (
            self.tensor is None
            or self.values is None
            or torch.equal(self.tensor.cpu(), self.values)
        )

    def _has_changed(self) -> bool:
        now = self.home.get(self.name)
        return now is not self.tensor or (
            now is not None and version_of(now) != self.version
        )


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
    kept = [
        (b.tensor, b.values)
        for b in changed
        if b.tensor is not None and b.values is not None
    ]
    copy_all([tensor for tensor, _ in kept], [values for _, values in kept])
    for buffer in changed:
        buffer.home[buffer.name] = buffer.tensor
        buffer.version = -1 if buffer.tensor is None else version_of(buffer.tensor)


class _Watched:
    """The parameters of a model, and its buffers with what is known of them."""

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
        self._models: weakref.WeakKeyDictionary[nn.Module, _Watched] = (
            weakref.WeakKeyDictionary()
        )

    def of(self, model: nn.Module) -> _Watched:
        """Return what is known about ``model``."""
        watched = self._models.get(model)
        if watched is None:
            watched = self._models[model] = _Watched(model)
        return watched


class StepStart:
    """The state at the start of an optimizer step.

    Gradients that are there already (of earlier batches) are laid aside, so that those of the step
    can be dropped; :meth:`end` adds them again. Without ``keeps_gradients`` they stay, for a
    framework that drops them itself once the step has begun.
    """

    def __init__(
        self, watch: Watch, models: Sequence[nn.Module], *, keeps_gradients: bool = True
    ) -> None:
        self.models = models
        self._watched = [watch.of(model) for model in models]
        self._known: dict[int, Tensor] = {
            id(p): p for watched in self._watched for p in watched.parameters
        }
        self.is_open = True
        self._keeps_gradients = keeps_gradients
        self._aside: list[tuple[Tensor, Tensor]] = []
        self._generators = GeneratorStates()
        self._buffers = [
            buffer for watched in self._watched for buffer in watched.buffers
        ]
        _keep(self._buffers)
        # last: from here on end() has to be called
        self._lay_aside(self._known.values())

    def _lay_aside(self, parameters: Iterable[Tensor]) -> None:
        for parameter in parameters if self._keeps_gradients else ():
            if parameter.grad is not None:
                self._aside.append((parameter, parameter.grad))
                parameter.grad = None

    def notice(self, loss: Tensor) -> None:
        """Take the parameters of ``loss``, whose gradients it is going to change, as the step's."""
        new = [leaf for leaf in leaves_of(loss) if id(leaf) not in self._known]
        self._known |= {id(leaf): leaf for leaf in new}
        self._lay_aside(new)

    def parameters(self) -> Iterator[Tensor]:
        """Yield what the step is known to train."""
        return iter(self._known.values())

    def make_gradients(self) -> None:
        """Give every parameter a gradient of zeros, as in all parts of a step but the first."""
        for parameter in self.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def rewind(self) -> None:
        """Drop the step's gradients; give buffers and generators their values of the start."""
        # looked up again: the pass may have made parameters, whose gradients would count twice
        made = (parameter for model in self.models for parameter in model.parameters())
        for parameter in (*made, *self.parameters()):
            parameter.grad = None
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
        with torch.no_grad():
            for parameter, before in self._aside:
                new = parameter.grad
                # the same tensor as before: it may be a view into another's buffer
                parameter.grad = before
                if new is not None and before.is_sparse == new.is_sparse:
                    before.add_(new)
                elif new is not None:
                    parameter.grad = before + new
        self._aside = []


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
