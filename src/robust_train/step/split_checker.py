"""Checks whether a split keeps the loss, by comparing a part's loss with its halves' losses.

A loss that is a mean over samples adds up over parts. A contrastive loss, a Dice score or a mean
over tokens without ``count`` does not, and parts would give another gradient. The code of a loss
does not show which kind it is, but its values do: the part [a b c d] has loss L, the halves [a b]
and [c d] have L1 and L2, and splitting keeps the loss if L = (L1 + L2) / 2, apart from rounding.

The engine runs a :class:`SplitChecker` before it splits a batch for the first time, and users call
:func:`check_split`. It runs in the process that trains, without backward passes.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from robust_train.compat import runs_eagerly
from robust_train.memory.clearing import return_memory
from robust_train.step.loss_passes import LossPasses, Mode, PassFailedError, PassRanOutError
from robust_train.step.reachable import Models, models_of
from robust_train.step.split_check import NOTHING_TO_COMPARE, Kept, SplitCheck
from robust_train.step.split_losses import Losses, describe_losses, differ_beyond_noise, mean_of
from robust_train.step.splitting import Count, Length, Parts, Split, part_of, part_of_both_ends

_LEAST_SAMPLES = 4
"""A half of a smaller part would be a single sample, which a training step may never see."""

_DRAWS = 16
"""How often a loss that draws random numbers is computed, to measure its noise."""


def check_split(
    function: Callable[[Any], Any],
    batch: Any,
    model: Models = None,
    *,
    count: Count | None = None,
    split: Split | None = None,
    length: Length | None = None,
    size: int | None = None,
) -> SplitCheck:
    """Check whether the weighted losses of a batch's parts add up to the loss of the batch::

        check = check_split(loss_of, next(iter(loader)), model)
        if not check.is_kept:
            print(check.message)

    Gradient accumulation relies on that. Contrastive losses, Dice scores over the batch, losses
    with class weights, and means over tokens without ``count`` do not add up. The loss of a part is
    computed as a whole and in two pieces, without a backward pass. Gradients, weights, buffers,
    random generators, and the variables of ``function`` are restored.

    Args:
        function: returns the mean loss of its part (a tensor with one element), or a tuple of that
            loss and any other value.
        batch: tensors, arrays or lists in any nesting of tuples, mappings and dataclasses, all with
            one sample per index of their first dimension.
        model: the module that learns, or several. None: the modules that ``function`` closes over.
        count: returns the number of items that the loss averages over, if the items are not the
            samples: tokens, or labels that are not -100. For a sum, use ``lambda data: 1``.
        split: ``split(batch, start, stop)``, if the batch cannot be sliced.
        length: returns the number of samples of such a batch, if that is not its ``len``.
        size: the number of samples in the checked part. None: half of the batch, at least 4.

    Returns:
        The result. ``is_kept`` is the answer, and ``message`` explains it in one line with the
        figures.

    Raises:
        TypeError, ValueError: the number of samples is unknown, or ``size`` is below 2.
    """
    if size is not None and size < 2:
        raise ValueError(f"size={size}: must be 2 or more")
    parts = Parts.of(batch, length, split, count)
    if parts.samples < 2:
        return SplitCheck(Kept.UNKNOWN, "the batch has fewer than 2 samples", parts.samples)

    def loss_of(data: Any) -> Tensor:
        result = function(data)
        loss: Tensor = result[0] if isinstance(result, tuple) else result
        return loss

    if size is None:
        size = parts.samples // 2
    passes = LossPasses(loss_of, models_of(model, function), function)
    return SplitChecker(passes, parts, size).check()


class _Outcome(Enum):
    """The result of a single comparison."""

    EQUAL = "equal"
    NOISY = "noisy"  # they differ, and so does the same part with other random numbers
    NOT_FINITE = "not finite"
    FAILED = "failed"
    DIFFERENT = "different"


class SplitChecker:
    """Compares a part's loss with those of its halves, and leaves everything as it was.

    The ranks of a sharded model run the passes together. Then a loss is the mean over all ranks,
    and decisions depend only on exchanged figures, so that every rank decides the same.

    Args:
        passes: runs the passes, and restores the state after them.
        parts: the batch.
        size: the number of samples in a part that fits into memory.
    """

    def __init__(self, passes: LossPasses, parts: Parts, size: int) -> None:
        self._passes = passes
        self._parts = parts
        self._size = min(max(size, _LEAST_SAMPLES), parts.samples)
        # The losses of the latest comparison, for each draw of random numbers.
        self._draws: list[Losses] = []
        self._mode = Mode.STEADY_TRAINING  # of the latest comparison

    def check(self) -> SplitCheck:
        """Compare the losses, and restore the state."""
        try:
            with warnings.catch_warnings(), runs_eagerly(torch):
                warnings.simplefilter("ignore")
                check = self._check_size_that_fits()
        except PassFailedError:
            check = SplitCheck(Kept.UNKNOWN, self._passes.describe_failure(), self._size)
        except Exception:
            # After a device fault nothing on the device can be restored.
            with contextlib.suppress(Exception):
                self._passes.state.restore()
            raise
        self._passes.state.restore()
        return check

    # --- which samples to compare ---

    def _check_size_that_fits(self) -> SplitCheck:
        """Check a part, and a smaller part if memory runs out."""
        self._size = int(min(size for (size,) in self._passes.exchange(self._size)))
        if self._size < 2:
            return SplitCheck(Kept.UNKNOWN, "a rank has a lone sample", 1)
        while self._size > 1:
            try:
                return self._check_samples_with_a_loss()
            except PassRanOutError:
                self._passes.pieces = []
            # The exception no longer exists, so the memory that its frames held can be released.
            return_memory(thorough=False, workspaces=True)
            self._size = (self._size + 1) // 2 if self._size > 2 else 1
        return SplitCheck(Kept.UNKNOWN, "memory ran out during the check", 1)

    def _check_samples_with_a_loss(self) -> SplitCheck:
        """Compare a part, and another part if the loss of the first is 0.

        Equal zeros, for example of a hinge loss, prove nothing.
        """
        for choose in (self._choose_both_ends, self._choose_other_samples):
            self._passes.begin_part()
            self._divide(choose, self._size // 2)
            if not any(self._passes.weights):
                continue
            check = self._compare_in_modes()
            is_zero = check.is_kept and self._draws[0].is_zero
            if not is_zero:
                return self._confirm_with_other_pieces(check)
        return SplitCheck(Kept.UNKNOWN, NOTHING_TO_COMPARE, self._size)

    def _confirm_with_other_pieces(self, check: SplitCheck) -> SplitCheck:
        """If the halves agree, compare other pieces as well.

        Halves may agree by chance: with equal numbers of tokens they agree for a mean over tokens,
        too. A quarter and the rest rarely have equal numbers. If the part is so small that a
        quarter is its half, the halves of other samples are compared.
        """
        if not check.is_kept or len(self._draws) != 1:
            return check
        first = max(self._size // 4, 1)
        is_small = first == self._size // 2
        choose = self._choose_same_samples
        if is_small:
            self._passes.forget_whole()
            choose = self._choose_other_samples
        self._divide(choose, first)
        # A piece that cannot be computed proves nothing: no step needs a part of its size.
        if self._compare(self._mode) is not _Outcome.DIFFERENT:
            return check
        text = describe_losses(self._draws[0], self._size, None if is_small else first)
        return SplitCheck(Kept.NO, text, self._size)

    def _choose_both_ends(self) -> Any:
        """Return samples of both ends of the batch: such halves differ as much as they can."""
        parts = self._parts
        if parts.split is not part_of:
            return self._slice_from((parts.samples - self._size) // 2)
        try:
            return part_of_both_ends(parts.batch, parts.samples, self._size)
        except (TypeError, ValueError):  # Arrays of unknown libraries may not be joined.
            return self._slice_from((parts.samples - self._size) // 2)

    def _choose_other_samples(self) -> Any:
        """Return samples of the middle of the batch, or of its start if the middle was compared."""
        parts = self._parts
        is_from_ends = parts.split is part_of
        middle = (parts.samples - self._size) // 2
        return self._slice_from(middle if is_from_ends else 0)

    def _choose_same_samples(self) -> Any:
        return self._passes.pieces[0]

    def _slice_from(self, start: int) -> Any:
        return self._parts.split(self._parts.batch, start, start + self._size)

    def _divide(self, choose: Callable[[], Any], first: int) -> None:
        """Choose samples and divide them in two, with ``first`` samples in the first piece."""
        items: tuple[float, ...] = (0.0, 0.0, 0.0)
        parts = self._parts
        with self._passes.record_trouble():
            part = Parts(choose(), self._size, parts.split, parts.count)
            halves = [part.part(0, first), part.part(first, self._size)]
            self._passes.pieces = [part.batch, *(half.data for half in halves)]
            weights = [1.0, *(half.weight for half in halves)]
            items = tuple(weight * part.items for weight in weights)
        self._passes.set_items(items)

    # --- comparisons ---

    def _compare_in_modes(self) -> SplitCheck:
        """Compare in training mode, and also in evaluation mode if that leaves doubts."""
        training = self._compare(Mode.STEADY_TRAINING)
        if training in (_Outcome.EQUAL, _Outcome.DIFFERENT):
            return self._conclude(training)
        draws = self._draws
        evaluation = self._compare(Mode.EVALUATION)
        if evaluation is _Outcome.DIFFERENT:
            return self._conclude(evaluation)
        if evaluation is _Outcome.EQUAL and training is not _Outcome.NOISY:
            return self._conclude(evaluation)
        if evaluation is _Outcome.NOISY:
            return self._compare_means(Mode.EVALUATION)
        if training is _Outcome.NOISY:
            self._draws = draws
            return self._compare_means(Mode.STEADY_TRAINING)
        if training is _Outcome.FAILED and evaluation is _Outcome.FAILED:
            return SplitCheck(Kept.CANNOT, self._passes.describe_failure(), self._size)
        return SplitCheck(Kept.UNKNOWN, "it is not a finite number", self._size)

    def _conclude(self, outcome: _Outcome) -> SplitCheck:
        kept = Kept.YES if outcome is _Outcome.EQUAL else Kept.NO
        return SplitCheck(kept, describe_losses(self._draws[0], self._size), self._size)

    def _compare_means(self, mode: Mode) -> SplitCheck:
        """Compare the mean losses of several draws of random numbers."""
        while len(self._draws) < _DRAWS:
            self._draws.append(self._compute_again(mode))
        kept = Kept.NO if differ_beyond_noise(self._draws) else Kept.YES
        means = describe_losses(mean_of(self._draws), self._size)
        return SplitCheck(kept, f"{means} (means of {_DRAWS})", self._size)

    def _compare(self, mode: Mode) -> _Outcome:
        """Compare the losses. If they differ, a second draw shows whether that is noise."""
        self._mode = mode
        outcome = self._compare_once(mode)
        if outcome is _Outcome.FAILED and not self._passes.needs_gradients:
            # A gradient penalty cannot be computed without gradients.
            self._passes.needs_gradients = True
            outcome = self._compare_once(mode)
        if outcome is not _Outcome.DIFFERENT:
            return outcome
        is_noisy = self._passes.have_drawn()
        if not is_noisy:
            # The loss may draw from an unknown generator.
            self._draws.append(self._compute_again(mode))
            first, second = self._draws
            is_noisy = first.whole != second.whole
        return _Outcome.NOISY if is_noisy else _Outcome.DIFFERENT

    def _compute_again(self, mode: Mode) -> Losses:
        """Return the losses with the next random numbers."""
        return self._passes.compute(mode, self._passes.random_numbers_after)

    def _compare_once(self, mode: Mode) -> _Outcome:
        self._draws = []
        try:
            losses = self._passes.compute(mode)
        except PassFailedError:
            return _Outcome.FAILED
        self._draws = [losses]
        if not math.isfinite(losses.whole):
            return _Outcome.NOT_FINITE
        return _Outcome.EQUAL if losses.agree else _Outcome.DIFFERENT
