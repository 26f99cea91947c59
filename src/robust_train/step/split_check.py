"""Whether splitting a batch keeps its loss: a part's loss against the losses of its two halves.

A loss that is a mean over samples adds up over parts. A contrastive loss, a Dice score or a mean
over tokens without ``count`` does not, and its gradient from parts is another gradient. Nothing in
the code of a loss says which kind it is, but its values do.
"""

from __future__ import annotations

import contextlib
import functools
import math
import statistics
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from enum import Enum, IntEnum
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from robust_train.compat import (
    depends_on_batch,
    draws_or_iterates,
    runs_eagerly,
    without_torch_functions,
)
from robust_train.failures import classify_failure
from robust_train.memory.clearing import clear_frames, return_memory
from robust_train.model.errors import UserError
from robust_train.model.failure import FailureKind
from robust_train.readable import first_line
from robust_train.step.pass_state import PassState
from robust_train.step.reachable import Models, models_of
from robust_train.step.rng import GeneratorStates
from robust_train.step.sharded import RanOutElsewhereError
from robust_train.step.splitting import Count, Length, Parts, Split, part_of, part_of_both_ends

LossOf = Callable[[Any], Tensor]
"""Returns the loss of some data, a tensor with one element, and runs no backward pass."""

_LEAST_SAMPLES = 4
"""A smaller part would have a half of one sample, which a training step may never see."""

_LEAST_TOLERANCE = 2e-5
"""Relative difference that is taken for rounding in float32, and in anything more exact."""

_TOLERANCE_IN_EPSILONS = 2.0
"""The same for a loss in a less exact number format, in multiples of its machine epsilon."""

_TOLERANCE_OF_INPUTS = 0.5
"""The same for a loss in float32 that is computed from such a format, as under autocast: it is a
mean of many values, each of which is rounded on its own."""

_TF32_EPSILON = 2.0**-10
"""Matrix products of float32 keep ten bits on a GPU that is allowed to use TF32."""

_DRAWS = 16
"""How often a loss that draws random numbers is computed, to see how much is noise."""

_STANDARD_ERRORS = 5.0
"""The mean of that many differences is noise up to this many of its standard errors, which chance
exceeds about once in 6,000 losses."""


class Kept(Enum):
    """Whether splitting keeps a loss, as far as known."""

    YES = "yes"  # the parts' losses add up to the loss of the whole
    NO = "no"  # they do not
    CANNOT = "cannot"  # a part cannot be computed
    UNKNOWN = "unknown"  # the loss of the whole could not be seen


@dataclass(frozen=True)
class SplitCheck:
    """The result of comparing a part's loss with the losses of its halves.

    Attributes:
        kept: whether splitting keeps the loss.
        seen: the figures in a sentence, or the reason why they are missing.
        samples: the number of samples in the compared part.
    """

    kept: Kept
    seen: str = ""
    samples: int = 0

    @property
    def is_kept(self) -> bool:
        """Whether the losses of parts, weighted, are the loss of the whole."""
        return self.kept is Kept.YES

    @property
    def message(self) -> str:
        """The result and the fix, in one line."""
        match self.kept:
            case Kept.YES:
                return f"splitting keeps this loss: {self.seen}"
            case Kept.NO:
                return f"splitting changes this loss: {self.seen}. {ADVICE}"
            case Kept.CANNOT:
                return f"this step cannot be split: {self.seen}"
        return f"whether splitting changes this loss could not be checked: {self.seen}"


NOTHING_TO_SEE = "its part has no loss"
"""Said of a part whose loss is zero or a mean of nothing: the next batch may show more."""

ADVICE = (
    "If it is a mean over tokens, masks or weights, give count=…; if the first dimension is not "
    "samples, give split=… and length=…; a loss that compares samples of a batch cannot be split"
)


# --- the figures, pure ---


@dataclass(frozen=True)
class Losses:
    """The loss of a part, and those of its halves with their weights."""

    whole: float
    halves: tuple[float, ...]
    weights: tuple[float, ...]
    # Relative difference that the number formats explain; 0: those of float32.
    rounding: float = 0.0
    # The largest term that was seen to be added or averaged: a small loss may be the difference of
    # large ones, whose rounding it has.
    terms: float = 0.0

    @property
    def sum(self) -> float:
        """The sum of the weighted losses of the halves. A loss with weight 0 does not count, even
        if it is NaN."""
        pairs = zip(self.weights, self.halves, strict=True)
        return math.fsum(weight * loss for weight, loss in pairs if weight)

    @property
    def difference(self) -> float:
        """How far the halves are from the whole."""
        return abs(self.whole - self.sum)

    @property
    def tolerance(self) -> float:
        """Up to which difference it is rounding."""
        relative = max(_LEAST_TOLERANCE, self.rounding)
        losses = (abs(loss) for loss in (self.whole, *self.halves))
        return relative * max(self.terms, *losses)

    @property
    def is_usable(self) -> bool:
        """Whether the loss of the whole is a number, so that there is something to compare."""
        return math.isfinite(self.whole)

    @property
    def is_zero(self) -> bool:
        """Whether all losses are 0."""
        return not any((self.whole, *self.halves))

    @property
    def agree(self) -> bool:
        """Whether whole and halves are the same but for rounding."""
        return math.isfinite(self.sum) and self.difference <= self.tolerance


def differ_beyond_noise(draws: Sequence[Losses]) -> bool:
    """Return whether whole and halves differ by more than their random numbers explain.

    Both begin with the same random numbers in a draw, so the differences of the draws are compared
    with zero, as in a paired t-test.
    """
    differences = [draw.whole - draw.sum for draw in draws]
    if not all(map(math.isfinite, differences)):
        return any(math.isfinite(draw.whole) for draw in draws)
    noise = statistics.stdev(differences) / math.sqrt(len(draws))
    tolerance = max(draw.tolerance for draw in draws)
    return abs(statistics.fmean(differences)) > max(_STANDARD_ERRORS * noise, tolerance)


def mean_of(draws: Sequence[Losses]) -> Losses:
    """Return the means of several draws."""
    halves = tuple(map(statistics.fmean, zip(*(draw.halves for draw in draws), strict=True)))
    return replace(draws[0], whole=statistics.fmean(draw.whole for draw in draws), halves=halves)


def mean_of_ranks(losses: Sequence[float], items: Sequence[float]) -> float:
    """Return the mean of the ranks' losses, each of which is a mean of this many items.

    The loss of a rank without items is a mean of nothing, and counts only if no rank has any.
    """
    if len(losses) == 1 or not any(items):
        return sum(losses) / len(losses)
    pairs = zip(losses, items, strict=True)
    return sum(loss * count for loss, count in pairs if count) / sum(items)


def in_words(losses: Losses, samples: int, first: int | None = None) -> str:
    """Return the figures in words for a person.

    Args:
        losses: the losses of a part and its pieces.
        samples: the number of samples in the part.
        first: the number of samples in its first piece. None: half of them.
    """
    before, after = losses.halves
    whole = f"a part of {samples} has loss {losses.whole:.6g}"
    pieces = "its halves"
    if first is not None:
        pieces = f"its first {first} and its other {samples - first} samples"
    text = f"{whole}, {pieces} {before:.6g} and {after:.6g}"
    if max(losses.weights) - min(losses.weights) > 1e-9:
        listed = " and ".join(f"{weight:.3g}" for weight in losses.weights)
        text = f"{text} with weights {listed}"
    return f"{text}, which make {losses.sum:.6g}"


# --- the passes ---


class _Mode(Enum):
    """In which mode the modules are for a comparison."""

    # As they are, except for layers whose output depends on chance or on the whole batch.
    CALM = "calm"
    EVALUATION = "evaluation"


class _Outcome(Enum):
    """The result of a single comparison."""

    EXACT = 0
    NOISY = 1  # they differ, and so does the same part with other random numbers
    NOT_FINITE = 2
    FAILED = 3
    DIFFERS = 4


class _Trouble(IntEnum):
    """How a pass went. The worst of all ranks counts."""

    NONE = 0
    FAILED = 1
    RAN_OUT = 2


class PassFailedError(Exception):
    """A part or a half of it cannot be computed, on this rank or on another."""


class PassRanOutError(Exception):
    """Memory ran out in a pass, on this rank or on another."""


Figures = Callable[[Sequence[float]], Sequence[Sequence[float]]]
"""Exchanges figures among the ranks that make the same passes, and returns each rank's figures in
order."""


def only_own(mine: Sequence[float]) -> Sequence[Sequence[float]]:
    """Return the figures of the only rank."""
    return [mine]


class Checker:
    """Compares a part's loss with those of its halves, and leaves everything as it was.

    The ranks of a sharded model run the passes together. Then a loss is the mean over all ranks,
    and decisions depend only on exchanged figures.

    Args:
        loss_of: returns the loss of some data, a tensor with one element, without a backward pass.
        parts: the batch.
        size: samples in a part that fits.
        models: the modules that learn.
        function: a function that reaches further modules, generators and metrics. None:
            ``loss_of``.
        around: creates a context for each pass that suppresses logs and reports.
        figures: exchanges figures with the ranks that make the same passes.
        named: attributes that a line already said cannot be restored.
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
        figures: Figures = only_own,
        named: set[str] | None = None,
        host_memory_ran_out: bool = False,
    ) -> None:
        self._loss_of = loss_of
        self._host_memory_ran_out = host_memory_ran_out
        self._around = around
        self._figures = figures
        self._parts = parts
        reached = loss_of if function is None else function
        self._state = PassState(models, reached, named)
        self._size = min(max(size, _LEAST_SAMPLES), parts.samples)
        self._pieces: list[Any] = []
        # For each rank, the number of items that its losses of the pieces average over.
        self._items: list[Sequence[float]] = []
        self._weights: tuple[float, ...] = ()
        self._needs_gradients = False
        self._trouble = _Trouble.NONE  # this rank's, not yet exchanged
        self._error: Exception | None = None
        self._drawn: GeneratorStates | None = None  # after the last comparison
        self._draws: list[Losses] = []
        self._whole: dict[_Mode, float] = {}  # the part's own loss
        self._mode = _Mode.CALM  # the mode of the last comparison
        self._formats = _Formats()
        self._rounding = 0.0  # the largest of all ranks
        self._terms = 0.0

    def check(self) -> SplitCheck:
        """Return what the comparison shows."""
        try:
            with warnings.catch_warnings(), runs_eagerly(torch):
                warnings.simplefilter("ignore")
                check = self._check_what_fits()
        except PassFailedError:
            check = SplitCheck(Kept.UNKNOWN, self._why_failed(), self._size)
        except Exception:
            # After a fault of the device nothing can be put back.
            with contextlib.suppress(Exception):
                self._state.restore()
            raise
        self._state.restore()
        return check

    def _check_what_fits(self) -> SplitCheck:
        """Check a part, and a smaller part if memory runs out."""
        self._size = int(min(size for (size,) in self._exchange(self._size)))
        if self._size < 2:
            return SplitCheck(Kept.UNKNOWN, "a rank has a lone sample", 1)
        while self._size > 1:
            try:
                return self._compare_what_shows_something()
            except PassRanOutError:
                self._pieces = []
            # The exception is gone here, and with it what its frames held.
            return_memory(thorough=False, workspaces=True)
            self._size = (self._size + 1) // 2 if self._size > 2 else 1
        return SplitCheck(Kept.UNKNOWN, "memory ran out during the check", 1)

    def _compare_what_shows_something(self) -> SplitCheck:
        """Compare parts until a part has a loss other than 0: zeros, for example of a hinge loss,
        prove nothing."""
        for choose in (self._from_both_ends, self._of_other_samples):
            self._whole.clear()
            self._formats = _Formats()
            self._divide(choose, self._size // 2)
            if not any(self._weights):
                continue
            check = self._compare_in_modes()
            is_zero = check.is_kept and self._draws[0].is_zero
            if not is_zero:
                return self._compare_other_pieces(check)
        return SplitCheck(Kept.UNKNOWN, NOTHING_TO_SEE, self._size)

    def _compare_other_pieces(self, check: SplitCheck) -> SplitCheck:
        """Compare other pieces, if the halves agree.

        Halves may agree by chance: those with as many tokens as each other do under any mean. A
        quarter and the rest rarely do as well, nor do, if that leaves no other pieces, the halves
        of other samples.
        """
        if not check.is_kept or len(self._draws) != 1:
            return check
        first = max(self._size // 4, 1)
        is_small = first == self._size // 2
        choose = self._the_same
        if is_small:
            self._whole.clear()
            choose = self._of_other_samples
        self._divide(choose, first)
        # A piece that cannot be computed shows nothing: no step has to have one of its size.
        if self._compare(self._mode) is not _Outcome.DIFFERS:
            return check
        text = in_words(self._draws[0], self._size, None if is_small else first)
        return SplitCheck(Kept.NO, text, self._size)

    def _from_both_ends(self) -> Any:
        """Return samples of both ends of the batch: halves that differ as much as they can."""
        parts = self._parts
        if parts.split is not part_of:
            return self._from((parts.samples - self._size) // 2)
        try:
            return part_of_both_ends(parts.batch, parts.samples, self._size)
        except (TypeError, ValueError):  # Arrays of unknown libraries may not be joined.
            return self._from((parts.samples - self._size) // 2)

    def _of_other_samples(self) -> Any:
        """Return samples of the middle of the batch, or of its start, if these were the first."""
        parts = self._parts
        is_from_ends = parts.split is part_of
        middle = (parts.samples - self._size) // 2
        return self._from(middle if is_from_ends else 0)

    def _the_same(self) -> Any:
        return self._pieces[0]

    def _from(self, start: int) -> Any:
        return self._parts.split(self._parts.batch, start, start + self._size)

    def _divide(self, choose: Callable[[], Any], first: int) -> None:
        """Choose samples and divide them in two."""
        items: tuple[float, ...] = (0.0, 0.0, 0.0)
        parts = self._parts
        with self._noting_trouble():
            part = Parts(choose(), self._size, parts.split, parts.count)
            halves = [part.part(0, first), part.part(first, self._size)]
            self._pieces = [part.batch, *(half.data for half in halves)]
            weights = [1.0, *(half.weight for half in halves)]
            items = tuple(weight * part.items for weight in weights)
        self._items = self._exchange(*items)
        whole, *of_halves = map(sum, zip(*self._items, strict=True))
        self._weights = tuple(of_half / whole if whole else 0.0 for of_half in of_halves)

    def _compare_in_modes(self) -> SplitCheck:
        """Compare in the mode of training, and in that of evaluation if that leaves doubts."""
        calm = self._compare(_Mode.CALM)
        if calm in (_Outcome.EXACT, _Outcome.DIFFERS):
            return self._conclude(calm)
        draws = self._draws
        still = self._compare(_Mode.EVALUATION)
        if still is _Outcome.DIFFERS or (still is _Outcome.EXACT and calm is not _Outcome.NOISY):
            return self._conclude(still)
        if still is _Outcome.NOISY:
            return self._compare_means(_Mode.EVALUATION)
        if calm is _Outcome.NOISY:
            self._draws = draws
            return self._compare_means(_Mode.CALM)
        if calm is _Outcome.FAILED and still is _Outcome.FAILED:
            return SplitCheck(Kept.CANNOT, self._why_failed(), self._size)
        return SplitCheck(Kept.UNKNOWN, "it is not a finite number", self._size)

    def _conclude(self, outcome: _Outcome) -> SplitCheck:
        kept = Kept.YES if outcome is _Outcome.EXACT else Kept.NO
        return SplitCheck(kept, in_words(self._draws[0], self._size), self._size)

    def _compare_means(self, mode: _Mode) -> SplitCheck:
        """Compare the means of several draws of the random numbers."""
        while len(self._draws) < _DRAWS:
            self._draws.append(self._draw(mode, self._drawn))
        differs = differ_beyond_noise(self._draws)
        text = f"{in_words(mean_of(self._draws), self._size)} (means of {_DRAWS})"
        return SplitCheck(Kept.NO if differs else Kept.YES, text, self._size)

    def _compare(self, mode: _Mode) -> _Outcome:
        """Return the result of a comparison. A second comparison separates noise from a
        difference."""
        self._mode = mode
        outcome = self._first_outcome(mode)
        if outcome is _Outcome.FAILED and not self._needs_gradients:
            # A gradient penalty needs them, and cannot be computed without.
            self._needs_gradients = True
            outcome = self._first_outcome(mode)
        if outcome is not _Outcome.DIFFERS:
            return outcome
        assert self._drawn is not None
        has_drawn = not self._drawn.equal(self._state.random_numbers)
        is_noisy = any(drawn for (drawn,) in self._exchange(has_drawn))
        if not is_noisy:
            # Others than the known generators may have been asked.
            self._draws.append(self._draw(mode, self._drawn))
            first, second = self._draws
            is_noisy = first.whole != second.whole
        return _Outcome.NOISY if is_noisy else _Outcome.DIFFERS

    def _first_outcome(self, mode: _Mode) -> _Outcome:
        self._draws = []
        try:
            losses = self._draw(mode)
        except PassFailedError:
            return _Outcome.FAILED
        self._draws = [losses]
        if not math.isfinite(losses.whole):
            return _Outcome.NOT_FINITE
        return _Outcome.EXACT if losses.agree else _Outcome.DIFFERS

    def _draw(self, mode: _Mode, random_numbers: GeneratorStates | None = None) -> Losses:
        """Return the losses of the part and of its halves, computed in sequence as in a step.

        Raises:
            PassFailedError: a loss cannot be computed.
            PassRanOutError: memory ran out in a pass.
        """
        with self._in_mode(mode), self._formats:
            whole = self._whole.get(mode)
            if whole is None or random_numbers is not None:
                self._restore(random_numbers)
                whole = self._value_of(0)
            if random_numbers is None:
                self._whole[mode] = whole
            self._restore(random_numbers)
            halves = (self._value_of(1), self._value_of(2))
            self._drawn = GeneratorStates(self._state.generators)
        return Losses(whole, halves, self._weights, self._rounding, self._terms)

    def _restore(self, random_numbers: GeneratorStates | None) -> None:
        with self._noting_trouble():
            self._state.restore()
            if random_numbers is not None:
                random_numbers.restore()
            for module in self._state.modules:
                if not depends_on_batch(torch, module):
                    continue
                if module.running_mean is None:
                    _give_statistics(module)

    def _value_of(self, number: int) -> float:
        """Return the loss of the part (0) or of a half, the mean of all ranks' items."""
        value = math.nan
        with self._noting_trouble(), self._around(), torch.set_grad_enabled(self._needs_gradients):
            loss = self._loss_of(self._pieces[number]).detach()
            self._formats.note_loss(loss)
            value = float(loss)
        rows = self._exchange(value, self._formats.rounding, self._formats.terms)
        values, roundings, terms = zip(*rows, strict=True)
        self._rounding = max(roundings)
        self._terms = max(terms)
        return mean_of_ranks(values, [items[number] for items in self._items])

    @contextlib.contextmanager
    def _noting_trouble(self) -> Iterator[None]:
        """Note an error of the block, which the ranks leave together by `_exchange`."""
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
            # A fault of the device or of a peer says nothing of the pass.
            if not kind.is_memory and not is_of_program:
                raise
            clear_frames(error)
            self._error = error.with_traceback(None)
            trouble = _Trouble.RAN_OUT if kind.is_memory else _Trouble.FAILED
            self._trouble = max(self._trouble, trouble)

    def _exchange(self, *mine: float) -> list[Sequence[float]]:
        """Return every rank's figures, in order.

        Raises:
            PassFailedError: a rank met an error before.
            PassRanOutError: memory ran out on a rank.
        """
        rows = self._figures([self._trouble, *mine])
        self._trouble = _Trouble.NONE
        match _Trouble(int(max(row[0] for row in rows))):
            case _Trouble.RAN_OUT:
                raise PassRanOutError
            case _Trouble.FAILED:
                raise PassFailedError
        return [row[1:] for row in rows]

    def _why_failed(self) -> str:
        if self._error is None:
            return "it failed on another rank"
        return described(self._error)

    @contextlib.contextmanager
    def _in_mode(self, mode: _Mode) -> Iterator[None]:
        """Set the modules' flags alone: a ``train()`` of the user's own may do more."""
        trained = [module for module in self._state.modules if module.training]
        for module in trained:
            module.training = mode is _Mode.CALM and not is_restless(module)
        try:
            yield
        finally:
            for module in trained:
                module.training = True


def is_restless(module: nn.Module) -> bool:
    """Return whether a layer's output in training depends on chance, on the batch or on passes.

    That of BatchNorm and dropout is known to, and what-changes.md says so.
    """
    return depends_on_batch(torch, module) or draws_or_iterates(torch, module)


def _give_statistics(module: Any) -> None:
    """Give a BatchNorm without running statistics some, so that it says nothing of the batch.

    The state of the beginning has none, so that these are gone when it is restored.
    """
    like = module.weight
    device = None if like is None else like.device
    size = module.num_features
    module.running_mean = torch.zeros(size, device=device)
    module.running_var = torch.ones(size, device=device)


def described(error: Exception) -> str:
    """Describe an error in one line."""
    name = type(error).__name__
    text = first_line(error)
    return text if text.startswith(name) else f"{name}: {text}"


class _Formats(TorchFunctionMode):
    """Notes the least exact number format of all results, as autocast chooses it, and how large
    the terms are that a loss is put together of."""

    def __init__(self) -> None:
        super().__init__()
        self._epsilon = 0.0
        self._epsilon_of_loss = 0.0
        self.terms = 0.0

    @property
    def rounding(self) -> float:
        """Relative difference that the number formats explain."""
        return max(
            _TOLERANCE_IN_EPSILONS * self._epsilon_of_loss, _TOLERANCE_OF_INPUTS * self._epsilon
        )

    def note_loss(self, loss: Tensor) -> None:
        """Take the format of a loss."""
        self._epsilon_of_loss = max(self._epsilon_of_loss, _epsilon_of(loss.dtype, loss.is_cuda))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.is_floating_point():
            self._epsilon = max(self._epsilon, _epsilon_of(result.dtype, result.is_cuda))
            name = getattr(func, "__name__", "")
            if not result.ndim and name in _ADDING:
                self._note_terms(args)
        return result

    def _note_terms(self, args: Sequence[Any]) -> None:
        with without_torch_functions(torch):
            for term in args[:2]:
                if isinstance(term, Tensor) and term.is_floating_point():
                    size = float(term.detach().abs().mean())
                    if math.isfinite(size):
                        self.terms = max(self.terms, size)


_ADDING = frozenset(("add", "sub", "rsub", "subtract", "mean", "__add__", "__radd__")) | {
    "__sub__",
    "__rsub__",
    "__iadd__",
    "__isub__",
    "add_",
    "sub_",
}
"""Functions whose result, if it is one number, may be much smaller than what it is made of."""


@functools.cache
def _epsilon_of(dtype: torch.dtype, is_cuda: bool) -> float:
    """Return the machine epsilon of a number format. Formats of eight bits do not hold losses."""
    if dtype.itemsize < 2:
        return 0.0
    epsilon = torch.finfo(dtype).eps
    return max(epsilon, _TF32_EPSILON) if is_cuda and dtype is torch.float32 else epsilon


# --- for loops of one's own ---


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

    Gradient accumulation relies on it. A contrastive loss, a Dice score over the batch, class
    weights, or a mean over tokens without ``count`` do not add up. A part is computed as a whole
    and in two pieces, without a backward pass. Gradients, weights, buffers, random generators, and
    the variables of ``function`` are restored.

    Args:
        function: returns the mean loss of its part (a tensor with one element), or a tuple of that
            and any other value.
        batch: tensors, arrays or lists in any nesting of tuples, mappings and dataclasses, all with
            one sample per index of their first dimension.
        model: the module that learns, or several. None: the modules that ``function`` closes over.
        count: returns the number of items that the loss averages over, if these are not the
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

    if not size:
        size = parts.samples // 2
    checker = Checker(loss_of, parts, size, models_of(model, function), function)
    return checker.check()
