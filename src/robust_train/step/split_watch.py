"""The splits that have been checked, and the reaction if a split changes its loss.

:class:`.batcher.MicroBatcher` has a watch for all steps of an attempt, in the process that
trains.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from robust_train.config.placeholders import SplitRule
from robust_train.memory.tensors import WALKED, rebuilt
from robust_train.model.errors import UserError
from robust_train.step.split_check import NOTHING_TO_COMPARE, Kept, SplitCheck
from robust_train.step.splitting import Parts

log = logging.getLogger("robust_train")


OnFound = Callable[[int, SplitCheck, bool], None]


class SplitWatch:
    """Remembers which kinds of batch and function were checked.

    Args:
        rule: what follows if a split changes its loss.
        on_found: called with the step, the check, and whether the attempt ends, for each split that
            does not keep its loss.
        muted: makes a context in which a trainer reports nothing.
    """

    def __init__(
        self,
        rule: SplitRule | None = None,
        on_found: OnFound = lambda step, check, ends_attempt: None,
        muted: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
    ) -> None:
        self.rule = rule if rule else SplitRule()
        self.on_found = on_found
        self.muted = muted
        self._known: set[object] = set()

    def knows(self, kind: object) -> bool:
        """Return whether this kind of step was checked before."""
        return kind in self._known

    def accept(self, kind: object, check: SplitCheck, step: int, *, ran_out: bool) -> bool:
        """Record the check of a kind of step, and return whether the step may run in parts.

        Raises:
            UserError: it may not, and no memory has run out that would end the attempt.
        """
        if check.seen == NOTHING_TO_COMPARE:
            return True
        self._known.add(kind)
        if check.is_kept:
            return True
        ends_attempt = ran_out and (check.kept is Kept.CANNOT or self._ends_with(check))
        self.on_found(step, check, ends_attempt)
        if ends_attempt:
            return False
        if check.kept is Kept.CANNOT:
            return True  # Its parts may be of another size; else they fail by themselves.
        if self.rule.is_exact:
            raise UserError(f"run.backward: {check.message}")
        log.warning("step %d: %s", step, check.message)
        return True

    def _ends_with(self, check: SplitCheck) -> bool:
        return check.kept is Kept.NO and self.rule.ends_attempt


def kind_of_step(parts: Parts, function: Any) -> object:
    """Return the kind of a step: the structure of its batch and the code that runs."""
    functions = (function, parts.count, parts.split)
    return (structure_of(parts.batch), *map(code_of, functions))


def structure_of(batch: Any) -> tuple[object, ...]:
    """Return the types and dimensions of the objects in a batch, without sizes."""
    structure: list[object] = []

    def note(item: Any, name: str) -> Any:
        dimensions = getattr(item, "ndim", None)
        kind = getattr(item, "dtype", None)
        # Names of list items would make a kind of each length.
        place = name if dimensions is not None else ""
        structure.append((place, type(item), kind, dimensions))
        is_list_of_samples = isinstance(item, list) and dimensions is None
        return item if is_list_of_samples or dimensions is not None else WALKED

    rebuilt(batch, note)
    return tuple(structure)


def code_of(function: Any) -> object:
    """Return the code of a function, which stays the same if it is defined anew in each step."""
    while isinstance(function, partial):
        function = function.func
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    return code if code is not None else type(function)
