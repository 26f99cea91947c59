"""Restores plain attributes of modules before a pass is repeated.

:mod:`.step_start` and :mod:`.pass_state` use :class:`Attributes` in the process that trains.
Without it, a repeated pass that counts its calls with ``self.calls += 1`` would count twice.

Numbers, text, None and tensors that are not buffers are restored, as well as lists, deques,
dictionaries, sets and small arrays of these. Such attributes are counters, hidden states, queues
with their pointers, and the states of torchmetrics objects. Other objects are ignored. Large
tensors and long containers are not copied. If one of these was changed in place, a warning names
it, unless it has only grown.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from robust_train.compat import has_made
from robust_train.step.attribute_plan import AttributePlan, is_user_attribute
from robust_train.step.copies import Copies
from robust_train.step.kept_values import ValueKeeper, can_restore, restore_value

log = logging.getLogger("robust_train")

# After this many steps, all attributes are examined again in case the plan missed a change.
_MAX_STEPS_OF_A_PLAN = 50


class Attributes:
    """The attributes of modules with their values, kept to restore them later."""

    def __init__(self, reported: set[str] | None = None) -> None:
        # The attributes for which a warning was already logged.
        self._reported = set() if reported is None else reported
        self._plan = AttributePlan()
        self._steps_of_plan = 0
        self._copies = Copies()
        self._modules: list[nn.Module] = []
        self._immutable: list[tuple[Any, ...]] = []
        self._mutable: dict[int, dict[str, Any]] = {}  # keys are positions in the list of modules
        self._keeper = ValueKeeper(self._copies)

    def keep(self, modules: Sequence[nn.Module]) -> list[nn.Module]:
        """Keep the current values of the attributes of ``modules``.

        Returns:
            The modules that the attributes contain in lists and dictionaries.
        """
        homes = [module.__dict__ for module in modules]
        self._immutable = self._read_immutable(modules, homes)
        self._modules = list(modules)
        self._keeper = ValueKeeper(self._copies)
        mutable = {}
        for position, names in self._plan.mutable:
            home = homes[position]
            mutable[position] = {name: self._keeper.keep(home[name]) for name in names}
        self._mutable = mutable
        self._keeper.copy_tensors()
        return self._keeper.modules

    def _read_immutable(
        self, modules: Sequence[nn.Module], homes: Sequence[dict[str, Any]]
    ) -> list[tuple[Any, ...]]:
        """Return the values that cannot change in place. Renew the plan if it is out of date."""
        self._steps_of_plan += 1
        if self._steps_of_plan <= _MAX_STEPS_OF_A_PLAN:
            values = self._plan.read_immutable(modules, homes)
            if values is not None:
                return values
        self._plan = AttributePlan.of(modules, homes)
        self._steps_of_plan = 0
        values = self._plan.read_immutable(modules, homes)
        assert values is not None
        return values

    def drop(self) -> None:
        """Release the modules and values at the end of the step."""
        self._modules = []
        self._immutable = []
        self._mutable = {}
        self._keeper = ValueKeeper(self._copies)

    def restore(self) -> None:
        """Restore the values, and warn once about each attribute that cannot be restored."""
        self._keeper.restore_tensors()
        immutable = self._plan.name_immutable(self._immutable)
        for position, module in enumerate(self._modules):
            if position in self._plan.ignored_modules:
                continue
            before = immutable.get(position, {}) | self._mutable.get(position, {})
            for name in _restore_module(module, before):
                if name not in self._reported:
                    self._reported.add(name)
                    log.warning(
                        "%s was changed by a pass that is undone, for example after running out of "
                        "memory, and cannot be restored",
                        name,
                    )


def _restore_module(module: nn.Module, before: dict[str, Any]) -> Iterator[str]:
    """Restore a module's attributes, and yield the name of each that cannot be restored."""
    home = vars(module)
    kind = type(module)
    for name in home.keys() - before.keys():
        if is_user_attribute(kind, name):
            del home[name]
    for name, kept in before.items():
        is_same = name in home and home[name] is kept
        if is_same or not (can_restore(kept) and is_user_attribute(kind, name)):
            continue
        # The pass turned the attribute into a parameter, a buffer or a module.
        if name not in home and has_made(module, name):
            continue
        is_whole = True
        try:
            value, is_whole = restore_value(kept, home.get(name))
            if name not in home or home[name] is not value:
                home[name] = value
        # A value may no longer exist, or a subclass of tuple may not accept its items.
        except Exception:
            is_whole = False
        if not is_whole:
            yield f"{kind.__name__}.{name}"
