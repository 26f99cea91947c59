"""Remembers which splits have been checked, and reacts if a split changes its loss.

:class:`.batcher.MicroBatcher` has a :class:`SplitWatch` for all steps of an attempt, in the process
that trains. Steps with the same structure of batch and the same code are a kind, and each kind is
checked once.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from robust_train.config.training_plans import SplitRule
from robust_train.memory.nesting import DESCEND, rebuild
from robust_train.model.errors import UserError
from robust_train.step.split_check import NOTHING_TO_COMPARE, Kept, SplitCheck
from robust_train.step.splitting import Parts

log = logging.getLogger("robust_train")


OnFound = Callable[[int, SplitCheck, bool], None]
"""Called with the step, the check, and whether the attempt ends."""


def ignore_check(step: int, check: SplitCheck, ends_attempt: bool) -> None:
    """Do nothing with a check."""


class SplitWatch:
    """Remembers which kinds of steps were checked.

    Args:
        rule: the reaction if a split changes its loss.
        on_found: called for each split that does not keep its loss.
        muted: creates a context in which a trainer reports nothing.
    """

    def __init__(
        self,
        rule: SplitRule | None = None,
        on_found: OnFound = ignore_check,
        muted: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
    ) -> None:
        self.rule = rule if rule else SplitRule()
        self.on_found = on_found
        self.muted = muted
        self._checked: set[object] = set()

    def knows(self, kind: object) -> bool:
        """Return whether this kind of step was checked before."""
        return kind in self._checked

    def accept(self, kind: object, check: SplitCheck, step: int, *, ran_out: bool) -> bool:
        """Record the check of a kind of step, and return whether the step may run in parts.

        Raises:
            UserError: the step may not run in parts, and there is no out-of-memory error to end the
                attempt with.
        """
        if check.seen == NOTHING_TO_COMPARE:
            return True
        self._checked.add(kind)
        if check.is_kept:
            return True
        ends_attempt = ran_out and (check.kept is Kept.CANNOT or self._ends_with(check))
        self.on_found(step, check, ends_attempt)
        if ends_attempt:
            return False
        if check.kept is Kept.CANNOT:
            # The step's own parts may have another size. If not, they fail by themselves.
            return True
        if self.rule.is_exact:
            raise UserError(f"run.backward: {check.message}")
        log.warning("step %d: %s", step, check.message)
        return True

    def _ends_with(self, check: SplitCheck) -> bool:
        return check.kept is Kept.NO and self.rule.ends_attempt


def kind_of_step(parts: Parts, function: Any) -> object:
    """Return the kind of a step: the structure of its batch, and the code that runs."""
    functions = (function, parts.count, parts.split)
    return (structure_of(parts.batch), *map(code_of, functions))


def structure_of(batch: Any) -> tuple[object, ...]:
    """Return the types and numbers of dimensions of the objects in a batch, without sizes."""
    structure: list[object] = []

    def note(item: Any, name: str) -> Any:
        dimensions = getattr(item, "ndim", None)
        kind = getattr(item, "dtype", None)
        # The places of list items would make each length of a list a kind of its own.
        place = name if dimensions is not None else ""
        structure.append((place, type(item), kind, dimensions))
        is_array = dimensions is not None
        return item if is_array or isinstance(item, list) else DESCEND

    rebuild(batch, note)
    return tuple(structure)


def code_of(function: Any) -> object:
    """Return the code of a function, which stays the same object if each step defines it again."""
    while isinstance(function, partial):
        function = function.func
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    return code if code is not None else type(function)
