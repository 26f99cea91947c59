"""Records the state at the start of a step, or of a part in validation, and restores it.

In the process that trains, the batcher creates a :class:`StepStart` before the first pass, and the
engine restores it before it repeats the step. A search for the batch size restores it after each
probe. The state consists of gradients, buffers, plain attributes of modules and random generators.
Weights need no copy, because they change only after the last pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from robust_train.compat import modules_below, versions_of
from robust_train.host.memory import read_available_bytes
from robust_train.memory.tensors import leaves_of
from robust_train.model.errors import UserError
from robust_train.step.attributes import Attributes
from robust_train.step.buffers import Buffers
from robust_train.step.gradients import LaidAside, are_zeros
from robust_train.step.reachable import (
    find_participants,
    keep_attributes,
    parameters_of,
    why_not_again,
)
from robust_train.step.rng import GeneratorStates

# Gradients may take this share of the host's free memory, which other processes need too.
_MAX_SHARE_OF_HOST = 0.5
# The key of the attributes in validation, in place of the number of a batch of the step. Validation
# may begin in the middle of a step.
_VALIDATION = -1


class Watch:
    """Keeps data about models from step to step, without keeping the models alive."""

    def __init__(self) -> None:
        self._buffers = weakref.WeakKeyDictionary[nn.Module, Buffers]()
        self._attributes = weakref.WeakKeyDictionary[nn.Module, dict[int, Attributes]]()
        # Attributes that a log line has named as impossible to restore.
        self.reported: set[str] = set()
        self._checked = weakref.WeakSet[nn.Module]()
        # Whether each step moves the gradients of earlier batches to the host, because memory ran
        # out before.
        self.keeps_aside_on_host = False

    def check(self, model: nn.Module) -> None:
        """Raise UserError if a step of ``model`` cannot start over. Each model is checked once."""
        if model in self._checked:
            return
        reason = why_not_again(model)
        if reason is not None:
            raise UserError(
                f"run.backward: {reason}, so a step cannot start over if memory runs out; "
                "step after run.backward, or call loss.backward() yourself"
            )
        self._checked.add(model)

    def buffers_with(self, models: Sequence[nn.Module]) -> Buffers:
        """Return the buffers of the previous step that began with these models."""
        new = Buffers()
        if not models:
            return new
        return self._buffers.setdefault(models[0], new)

    def attributes_with(self, models: Sequence[nn.Module], batch: int = 0) -> Attributes:
        """Return the attributes of this batch in the previous step that began with these models."""
        if not models:
            return Attributes(self.reported)
        by_batch = self._attributes.setdefault(models[0], {})
        if batch not in by_batch:
            by_batch[batch] = Attributes(self.reported)
        return by_batch[batch]


class PartStart:
    """The state at the start of an independent part, for example in validation.

    It consists of the generators, the attributes of modules, and the buffers of modules in training
    mode, in which BatchNorm collects statistics.
    """

    def __init__(
        self, models: Iterable[nn.Module] = (), function: Any = None, *, watch: Watch | None = None
    ) -> None:
        models = list(models)
        modules, generators = find_participants(models, function)
        self._generators = GeneratorStates(generators)
        self._attributes = Attributes()
        if watch is not None:
            self._attributes = watch.attributes_with(models, _VALIDATION)
        modules = keep_attributes(self._attributes, modules)
        self._buffers = Buffers()
        self._buffers.keep(module for module in modules if module.training)

    def restore(self) -> None:
        """Restore the state."""
        self._attributes.restore()
        self._buffers.restore()
        self._generators.restore()


class StepStart:
    """The state at the start of an optimizer step.

    Gradients of earlier batches are kept aside, so that the step's own gradients can be dropped. If
    both were added at once, they could not be separated again without rounding, so `end` adds them.
    If memory is short, the earlier gradients move to the host until then. The step then needs no
    more GPU memory than a step that adds to them in place. Gradients that are all zeros stay in
    place, because they are easily restored.

    Args:
        watch: the data that is kept from step to step.
        models: the modules that the step trains.
        function: the function of the step, which may use other modules as well.
        keeps_gradients: False leaves all gradients in place, for a framework that drops them itself
            once the step has started.
    """

    def __init__(
        self,
        watch: Watch,
        models: Sequence[nn.Module],
        function: Any = None,
        *,
        keeps_gradients: bool = True,
    ) -> None:
        self.models = models
        for model in models:
            watch.check(model)
        modules, generators = find_participants(models, function)
        self._watch = watch
        self._attributes = [watch.attributes_with(models)]
        self.modules = keep_attributes(self._attributes[0], modules)
        parameters = parameters_of(self.modules)
        # By id, so that each parameter occurs once.
        self._known = dict(zip(map(id, parameters), parameters, strict=True))
        self._versions = versions_of(list(self._known.values()))
        self.is_open = True
        self._keeps_gradients = keeps_gradients
        self._aside: list[LaidAside] = []
        self._zeros: list[tuple[Tensor, Tensor]] = []
        self._generators = GeneratorStates(generators)
        self._buffers = watch.buffers_with(models)
        self._buffers.keep(self.modules)
        # This must come last: an error above would leave the gradients aside.
        self._lay_aside(self._known.values())

    def _lay_aside(self, parameters: Iterable[Tensor]) -> None:
        """Take the gradients from parameters, so that the step begins without gradients."""
        if not self._keeps_gradients:
            return
        gradients = [
            (parameter, parameter.grad) for parameter in parameters if parameter.grad is not None
        ]
        if are_zeros([gradient for _, gradient in gradients]):
            self._zeros += gradients
            return
        for parameter, gradient in gradients:
            self._aside.append(LaidAside(parameter, gradient))
            parameter.grad = None
        if self._watch.keeps_aside_on_host:
            self.move_aside_to_host()

    def move_aside_to_host(self) -> bool:
        """Move the gradients that are kept aside to the host for this step, if they fit there.

        Returns:
            Whether that freed memory.
        """
        leaving = [gradient for gradient in self._aside if gradient.can_leave]
        size = sum(gradient.gradient.nbytes for gradient in leaving)
        if not leaving or size > _MAX_SHARE_OF_HOST * read_available_bytes():
            return False
        for gradient in leaving:
            gradient.leave()
        return True

    def make_room(self) -> bool:
        """Free memory as `move_aside_to_host` does, now and at the start of each later step.

        Returns:
            Whether that freed memory.
        """
        has_freed = self.move_aside_to_host()
        if has_freed:
            self._watch.keeps_aside_on_host = True
        return has_freed

    def notice(self, loss: Tensor) -> None:
        """Add the parameters that ``loss`` depends on to the step, before its backward pass."""
        new = [parameter for parameter in leaves_of(loss) if id(parameter) not in self._known]
        self._known.update(zip(map(id, new), new, strict=True))
        self._versions += versions_of(new)
        self._lay_aside(new)

    @property
    def reported(self) -> set[str]:
        """The attributes that a log line has named as impossible to restore."""
        return self._watch.reported

    def parameters(self) -> list[Tensor]:
        """Return the parameters that the step trains, each once."""
        parameters = (parameter for model in self.models for parameter in model.parameters())
        return list(dict.fromkeys(parameters))

    def make_gradients(self) -> None:
        """Give every parameter a gradient, as in all parts of a step except the first."""
        for parameter in self.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    @property
    def has_changed_weights(self) -> bool:
        """Whether the step has changed weights. They have no copy, so they stay changed."""
        return versions_of(list(self._known.values())) != self._versions

    @property
    def is_lost(self) -> bool:
        """Whether the step has changed values without a copy, so that it cannot be undone."""
        return self._buffers.is_lost

    def rewind(self) -> None:
        """Drop the step's gradients, and restore buffers, attributes and generators."""
        # The pass may have created parameters, whose gradients would count twice in the next pass.
        now = parameters_of(modules_below(self.modules))
        for parameter in (*now, *self._known.values()):
            parameter.grad = None
        for parameter, zeros in self._zeros:
            parameter.grad = zeros.zero_()
        self.enter_batch(0)
        self._buffers.restore()
        self._generators.restore()

    def begin_batch(self) -> None:
        """Record the attributes at the start of the step's next batch.

        Hooks of a framework may have changed attributes since the previous batch, and do not run
        again if the step is repeated.
        """
        number = len(self._attributes)
        attributes = self._watch.attributes_with(self.models, number)
        attributes.keep(self.modules)
        self._attributes.append(attributes)

    def enter_batch(self, number: int) -> None:
        """Restore the attributes that were recorded at the start of a batch of the step."""
        self._attributes[number].restore()

    def end(self) -> None:
        """Add the gradients that were kept aside to the step's own. A second call does nothing."""
        if not self.is_open:
            return
        self.is_open = False
        with torch.no_grad():
            for gradient in self._aside:
                gradient.add()
        self._aside = []
        self._zeros = []
        for attributes in self._attributes:
            attributes.drop()
