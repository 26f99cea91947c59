"""Check whether splitting a batch keeps its loss: compare a part's loss with those of its halves.

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from enum import Enum, IntEnum
from typing import Any

import torch
from torch import Tensor, nn

from robust_train.compat import depends_on_batch, draws_or_iterates, runs_eagerly
from robust_train.failures import classify_failure
from robust_train.memory.clearing import clear_frames, return_memory
from robust_train.model.errors import UserError
from robust_train.model.failure import FailureKind
from robust_train.readable import first_line
from robust_train.step.number_formats import NumberFormats
from robust_train.step.pass_state import PassState
from robust_train.step.reachable import Models, models_of
from robust_train.step.rng import GeneratorStates
from robust_train.step.sharded import RanOutElsewhereError
from robust_train.step.split_check import NOTHING_TO_COMPARE, Kept, SplitCheck
from robust_train.step.split_losses import (
    Losses,
    describe_losses,
    differ_beyond_noise,
    mean_of,
    mean_of_ranks,
)
from robust_train.step.splitting import Count, Length, Parts, Split, part_of, part_of_both_ends

LossOf = Callable[[Any], Tensor]
"""Returns the loss of some data, a tensor with one element, and runs no backward pass."""

ExchangeFigures = Callable[[Sequence[float]], Sequence[Sequence[float]]]
"""Sends figures to the ranks that make the same passes, and returns each rank's figures in order.
"""

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
    checker = SplitChecker(loss_of, parts, size, models_of(model, function), function)
    return checker.check()


class _Mode(Enum):
    """The mode that the modules are in for a comparison."""

    # As in training, except that layers whose output varies by themselves are in evaluation mode.
    STEADY_TRAINING = "steady training"
    EVALUATION = "evaluation"


class _Outcome(Enum):
    """The result of a single comparison."""

    EQUAL = "equal"
    NOISY = "noisy"  # they differ, and so does the same part with other random numbers
    NOT_FINITE = "not finite"
    FAILED = "failed"
    DIFFERENT = "different"


class _Trouble(IntEnum):
    """How a pass went wrong. The worst of all ranks counts."""

    NONE = 0
    FAILED = 1
    RAN_OUT = 2


class PassFailedError(Exception):
    """A part or one of its halves cannot be computed, on this rank or on another."""


class PassRanOutError(Exception):
    """Memory ran out in a pass, on this rank or on another."""


def keep_figures(mine: Sequence[float]) -> Sequence[Sequence[float]]:
    """Return the figures of a process that trains alone."""
    return [mine]


class SplitChecker:
    """Compares a part's loss with those of its halves, and leaves everything as it was.

    The ranks of a sharded model run the passes together. Then a loss is the mean over all ranks,
    and decisions depend only on exchanged figures, so that every rank decides the same.

    Args:
        loss_of: returns the loss of some data, a tensor with one element, without a backward pass.
        parts: the batch.
        size: samples in a part that fits.
        models: the modules that learn.
        function: a function that reaches further modules, generators and metrics. None:
            ``loss_of``.
        around: creates a context for each pass that suppresses logs and reports.
        exchange: exchanges figures with the ranks that make the same passes.
        reported: attributes that a log line has already reported as impossible to restore.
        host_memory_ran_out: whether this happened just before, which explains ambiguous errors.
    """

    def __init__(
        self,
        loss_of: LossOf,
        parts: Parts,
        size: int,
        models: Iterable[nn.Module],
        function: Any = None,
        *,
        around: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
        exchange: ExchangeFigures = keep_figures,
        reported: set[str] | None = None,
        host_memory_ran_out: bool = False,
    ) -> None:
        self._loss_of = loss_of
        self._host_memory_ran_out = host_memory_ran_out
        self._around = around
        self._exchange_figures = exchange
        self._parts = parts
        reached_from = loss_of if function is None else function
        self._state = PassState(models, reached_from, reported)
        self._size = min(max(size, _LEAST_SAMPLES), parts.samples)
        self._pieces: list[Any] = []  # the part, its first half and its second half
        # For each rank, the number of items that its losses of the pieces average over.
        self._items: list[Sequence[float]] = []
        self._weights: tuple[float, ...] = ()  # of the halves
        self._needs_gradients = False
        # How this rank's passes went, not yet exchanged with the other ranks.
        self._trouble = _Trouble.NONE
        self._error: Exception | None = None
        # The losses of the latest comparison, one for each draw of random numbers.
        self._draws: list[Losses] = []
        self._random_numbers_after: GeneratorStates | None = None
        self._mode = _Mode.STEADY_TRAINING  # of the latest comparison
        self._whole_loss: dict[_Mode, float] = {}  # the loss of the part, computed once
        self._formats = NumberFormats()
        self._rounding = 0.0  # the largest of all ranks
        self._largest_term = 0.0

    def check(self) -> SplitCheck:
        """Compare the losses, and restore the state."""
        try:
            with warnings.catch_warnings(), runs_eagerly(torch):
                warnings.simplefilter("ignore")
                check = self._check_size_that_fits()
        except PassFailedError:
            check = SplitCheck(Kept.UNKNOWN, self._describe_failure(), self._size)
        except Exception:
            # After a device fault nothing on the device can be restored.
            with contextlib.suppress(Exception):
                self._state.restore()
            raise
        self._state.restore()
        return check

    # --- which samples to compare ---

    def _check_size_that_fits(self) -> SplitCheck:
        """Check a part, and a smaller part if memory runs out."""
        self._size = int(min(size for (size,) in self._exchange(self._size)))
        if self._size < 2:
            return SplitCheck(Kept.UNKNOWN, "a rank has a lone sample", 1)
        while self._size > 1:
            try:
                return self._check_samples_with_a_loss()
            except PassRanOutError:
                self._pieces = []
            # The exception is gone here, so the memory that its frames held can be released.
            return_memory(thorough=False, workspaces=True)
            self._size = (self._size + 1) // 2 if self._size > 2 else 1
        return SplitCheck(Kept.UNKNOWN, "memory ran out during the check", 1)

    def _check_samples_with_a_loss(self) -> SplitCheck:
        """Compare a part, and another part if the loss of the first is 0.

        Equal zeros, for example of a hinge loss, prove nothing.
        """
        for choose in (self._choose_both_ends, self._choose_other_samples):
            self._whole_loss.clear()
            self._formats = NumberFormats()
            self._divide(choose, self._size // 2)
            if not any(self._weights):
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
            self._whole_loss.clear()
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
        return self._pieces[0]

    def _slice_from(self, start: int) -> Any:
        return self._parts.split(self._parts.batch, start, start + self._size)

    def _divide(self, choose: Callable[[], Any], first: int) -> None:
        """Choose samples and divide them in two, with ``first`` samples in the first piece."""
        items: tuple[float, ...] = (0.0, 0.0, 0.0)
        parts = self._parts
        with self._record_trouble():
            part = Parts(choose(), self._size, parts.split, parts.count)
            halves = [part.part(0, first), part.part(first, self._size)]
            self._pieces = [part.batch, *(half.data for half in halves)]
            weights = [1.0, *(half.weight for half in halves)]
            items = tuple(weight * part.items for weight in weights)
        self._items = self._exchange(*items)
        whole, *of_halves = map(sum, zip(*self._items, strict=True))
        self._weights = tuple(of_half / whole if whole else 0.0 for of_half in of_halves)

    # --- comparisons ---

    def _compare_in_modes(self) -> SplitCheck:
        """Compare in training mode, and also in evaluation mode if that leaves doubts."""
        training = self._compare(_Mode.STEADY_TRAINING)
        if training in (_Outcome.EQUAL, _Outcome.DIFFERENT):
            return self._conclude(training)
        draws = self._draws
        evaluation = self._compare(_Mode.EVALUATION)
        if evaluation is _Outcome.DIFFERENT:
            return self._conclude(evaluation)
        if evaluation is _Outcome.EQUAL and training is not _Outcome.NOISY:
            return self._conclude(evaluation)
        if evaluation is _Outcome.NOISY:
            return self._compare_means(_Mode.EVALUATION)
        if training is _Outcome.NOISY:
            self._draws = draws
            return self._compare_means(_Mode.STEADY_TRAINING)
        if training is _Outcome.FAILED and evaluation is _Outcome.FAILED:
            return SplitCheck(Kept.CANNOT, self._describe_failure(), self._size)
        return SplitCheck(Kept.UNKNOWN, "it is not a finite number", self._size)

    def _conclude(self, outcome: _Outcome) -> SplitCheck:
        kept = Kept.YES if outcome is _Outcome.EQUAL else Kept.NO
        return SplitCheck(kept, describe_losses(self._draws[0], self._size), self._size)

    def _compare_means(self, mode: _Mode) -> SplitCheck:
        """Compare the mean losses of several draws of random numbers."""
        while len(self._draws) < _DRAWS:
            self._draws.append(self._compute_losses(mode, self._random_numbers_after))
        kept = Kept.NO if differ_beyond_noise(self._draws) else Kept.YES
        means = describe_losses(mean_of(self._draws), self._size)
        return SplitCheck(kept, f"{means} (means of {_DRAWS})", self._size)

    def _compare(self, mode: _Mode) -> _Outcome:
        """Compare the losses. If they differ, a second draw shows whether that is noise."""
        self._mode = mode
        outcome = self._compare_once(mode)
        if outcome is _Outcome.FAILED and not self._needs_gradients:
            # A gradient penalty cannot be computed without gradients.
            self._needs_gradients = True
            outcome = self._compare_once(mode)
        if outcome is not _Outcome.DIFFERENT:
            return outcome
        assert self._random_numbers_after is not None
        has_drawn = not self._random_numbers_after.equal(self._state.random_numbers)
        is_noisy = any(drawn for (drawn,) in self._exchange(has_drawn))
        if not is_noisy:
            # The loss may draw from a generator that we do not know.
            self._draws.append(self._compute_losses(mode, self._random_numbers_after))
            first, second = self._draws
            is_noisy = first.whole != second.whole
        return _Outcome.NOISY if is_noisy else _Outcome.DIFFERENT

    def _compare_once(self, mode: _Mode) -> _Outcome:
        self._draws = []
        try:
            losses = self._compute_losses(mode)
        except PassFailedError:
            return _Outcome.FAILED
        self._draws = [losses]
        if not math.isfinite(losses.whole):
            return _Outcome.NOT_FINITE
        return _Outcome.EQUAL if losses.agree else _Outcome.DIFFERENT

    # --- passes ---

    def _compute_losses(self, mode: _Mode, random_numbers: GeneratorStates | None = None) -> Losses:
        """Return the losses of the part and of its halves, computed in sequence as in a step.

        Args:
            random_numbers: the states of the generators to begin with. None: the original states,
                with which the loss of the part is computed only once.

        Raises:
            PassFailedError: a loss cannot be computed.
            PassRanOutError: memory ran out in a pass.
        """
        with self._set_mode(mode), self._formats:
            whole = self._whole_loss.get(mode)
            if whole is None or random_numbers is not None:
                self._restore(random_numbers)
                whole = self._compute_loss(0)
            if random_numbers is None:
                self._whole_loss[mode] = whole
            self._restore(random_numbers)
            halves = (self._compute_loss(1), self._compute_loss(2))
            self._random_numbers_after = GeneratorStates(self._state.generators)
        return Losses(whole, halves, self._weights, self._rounding, self._largest_term)

    def _restore(self, random_numbers: GeneratorStates | None) -> None:
        with self._record_trouble():
            self._state.restore()
            if random_numbers is not None:
                random_numbers.restore()
            for module in self._state.modules:
                if depends_on_batch(torch, module) and module.running_mean is None:
                    _give_statistics(module)

    def _compute_loss(self, piece: int) -> float:
        """Return the loss of the part (0) or of a half (1, 2), averaged over all ranks' items."""
        value = math.nan
        with self._record_trouble(), self._around(), torch.set_grad_enabled(self._needs_gradients):
            loss = self._loss_of(self._pieces[piece]).detach()
            self._formats.note_loss(loss)
            value = float(loss)
        rows = self._exchange(value, self._formats.rounding, self._formats.largest_term)
        values, roundings, terms = zip(*rows, strict=True)
        self._rounding = max(roundings)
        self._largest_term = max(terms)
        return mean_of_ranks(values, [items[piece] for items in self._items])

    @contextlib.contextmanager
    def _set_mode(self, mode: _Mode) -> Iterator[None]:
        """Set the modules' flags directly, because a user's ``train()`` may do more."""
        trained = [module for module in self._state.modules if module.training]
        for module in trained:
            in_training = mode is _Mode.STEADY_TRAINING
            module.training = in_training and not _varies_by_itself(module)
        try:
            yield
        finally:
            for module in trained:
                module.training = True

    # --- errors, on this rank and on others ---

    @contextlib.contextmanager
    def _record_trouble(self) -> Iterator[None]:
        """Record an error of the block. Then all ranks raise it together in `_exchange`."""
        try:
            yield
        except RanOutElsewhereError:
            return
        except UserError:
            raise
        except Exception as error:
            failure = classify_failure(error, host_memory_ran_out=self._host_memory_ran_out)
            kind = failure.kind
            is_of_program = kind in (FailureKind.BUG, FailureKind.UNKNOWN)
            # A fault of the device or of another rank is not an answer to the check.
            if not kind.is_memory and not is_of_program:
                raise
            clear_frames(error)
            self._error = error.with_traceback(None)
            trouble = _Trouble.RAN_OUT if kind.is_memory else _Trouble.FAILED
            self._trouble = max(self._trouble, trouble)

    def _exchange(self, *mine: float) -> list[Sequence[float]]:
        """Return every rank's figures, in order.

        Raises:
            PassFailedError: a rank recorded an error.
            PassRanOutError: memory ran out on a rank.
        """
        rows = self._exchange_figures([self._trouble, *mine])
        self._trouble = _Trouble.NONE
        worst = _Trouble(int(max(row[0] for row in rows)))
        if worst is _Trouble.RAN_OUT:
            raise PassRanOutError
        if worst is _Trouble.FAILED:
            raise PassFailedError
        return [row[1:] for row in rows]

    def _describe_failure(self) -> str:
        if self._error is None:
            return "it failed on another rank"
        return describe_error(self._error)


def describe_error(error: Exception) -> str:
    """Describe an error in one line."""
    name = type(error).__name__
    text = first_line(error)
    return text if text.startswith(name) else f"{name}: {text}"


def _varies_by_itself(module: nn.Module) -> bool:
    """Return whether a layer's output in training depends on chance, on the batch or on earlier
    passes.

    For BatchNorm and dropout that is known, and what-changes.md mentions it.
    """
    return depends_on_batch(torch, module) or draws_or_iterates(torch, module)


def _give_statistics(module: Any) -> None:
    """Give running statistics to a BatchNorm that has none, so that it ignores the batch.

    Restoring the original state removes them.
    """
    device = None if module.weight is None else module.weight.device
    size = module.num_features
    module.running_mean = torch.zeros(size, device=device)
    module.running_var = torch.ones(size, device=device)
