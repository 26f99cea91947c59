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
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode

from robust_train.compat import runs_eagerly
from robust_train.failures import classify_failure
from robust_train.memory.clearing import clear_frames, return_memory
from robust_train.model.failure import FailureKind
from robust_train.readable import first_line
from robust_train.step.rewind import GeneratorStates, PassState
from robust_train.step.sharded import RanOutElsewhere
from robust_train.step.splitting import Parts, part_of, part_of_both_ends

LossOf = Callable[[Any], Tensor]
"""Returns the loss of some data, a tensor with one element, and runs no backward pass."""

_LEAST_SAMPLES = 4
"""A smaller part would have a half of one sample, which a training step may never see."""

_LEAST_TOLERANCE = 2e-5
"""Relative difference that is taken for rounding in float32, and in anything more exact."""

_TOLERANCE_IN_EPSILONS = 2.0
"""The same for a number format that is less exact, in multiples of its machine epsilon."""

_TF32_EPSILON = 2.0**-10
"""Matrix products of float32 keep ten bits on a GPU that is allowed to use TF32."""

_SMALLEST_LOSS = 1e-3
"""Losses below are compared as if they were this large: they may be differences of larger terms."""

_DRAWS = 16
"""How often a loss that draws random numbers is computed, to see how much is noise."""

_STANDARD_ERRORS = 5.0
"""The mean of that many differences is noise up to this many of its standard errors, which chance
exceeds about once in 6,000 losses."""


class Kept(Enum):
    """What is known about a loss and its parts."""

    YES = "yes"  # the parts' losses add up to the loss of the whole
    NO = "no"  # they do not
    CANNOT = "cannot"  # a part cannot be computed
    UNKNOWN = "unknown"  # the loss of the whole could not be seen


@dataclass(frozen=True)
class SplitCheck:
    """What a comparison of a part's loss with the losses of its halves has shown.

    Attributes:
        kept: whether splitting keeps the loss.
        seen: the figures in a sentence, or why there are none.
        samples: in the part that was looked at.
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
        """What was seen and what helps, in one line."""
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
    epsilon: float = 0.0  # of the least exact number format that was seen

    @property
    def sum(self) -> float:
        """The weighted losses of the halves; one without weight counts nothing, even if NaN."""
        pairs = zip(self.weights, self.halves, strict=True)
        return math.fsum(weight * loss for weight, loss in pairs if weight)

    @property
    def difference(self) -> float:
        """How far the halves are from the whole."""
        return abs(self.whole - self.sum)

    @property
    def tolerance(self) -> float:
        """Up to which difference it is rounding."""
        relative = max(_LEAST_TOLERANCE, _TOLERANCE_IN_EPSILONS * self.epsilon)
        largest = max(abs(loss) for loss in (self.whole, *self.halves))
        return relative * max(largest, _SMALLEST_LOSS)

    @property
    def is_usable(self) -> bool:
        """Whether the loss of the whole is a number, so that there is something to compare."""
        return math.isfinite(self.whole)

    @property
    def is_zero(self) -> bool:
        """Whether there is no loss at all."""
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
    differences = [one.whole - one.sum for one in draws]
    if not all(map(math.isfinite, differences)):
        return any(math.isfinite(one.whole) for one in draws)
    noise = statistics.stdev(differences) / math.sqrt(len(draws))
    tolerance = max(one.tolerance for one in draws)
    return abs(statistics.fmean(differences)) > max(
        _STANDARD_ERRORS * noise, tolerance
    )


def mean_of(draws: Sequence[Losses]) -> Losses:
    """Return the means of several draws."""
    halves = tuple(
        map(statistics.fmean, zip(*(one.halves for one in draws), strict=True))
    )
    return replace(
        draws[0],
        whole=statistics.fmean(one.whole for one in draws),
        halves=halves,
    )


def in_words(losses: Losses, samples: int) -> str:
    """Return the figures as a person compares them."""
    first, second = losses.halves
    whole = f"a part of {samples} has loss {losses.whole:.6g}"
    text = f"{whole}, its halves {first:.6g} and {second:.6g}"
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


class _Outcome(IntEnum):
    """What one comparison shows. With several ranks the largest counts."""

    EXACT = 0
    NOISY = (
        1  # they differ, and so does the same part with other random numbers
    )
    NOT_FINITE = 2
    FAILED = 3
    DIFFERS = 4


class _Trouble(IntEnum):
    """How a pass went. With several ranks the largest counts."""

    NONE = 0
    FAILED = 1
    RAN_OUT = 2


class PassFailed(Exception):
    """A part or one of its halves cannot be computed."""


class PassRanOut(Exception):
    """Memory ran out in a pass, on this rank or on another."""


class Checker:
    """Compares a part's loss with those of its halves, and leaves everything as it was.

    Args:
        loss_of: returns the loss of some data, a tensor with one element, without a backward pass.
        parts: the batch.
        size: samples in a part that fits.
        models: what learns.
        function: what reaches further modules, generators and metrics; None: ``loss_of``.
        around: makes a context for each pass, in which nothing is logged or reported.
        agree: returns the largest of all ranks' figures, if ranks make these passes together.
        named: attributes of which a line says already that they cannot be put back.
    """

    def __init__(
        self,
        loss_of: LossOf,
        parts: Parts,
        size: int,
        models: Iterable[nn.Module],
        function: Any = None,
        *,
        around: Callable[
            [], AbstractContextManager[object]
        ] = contextlib.nullcontext,
        agree: Callable[[int], int] = int,
        named: set[str] | None = None,
        host_memory_ran_out: bool = False,
    ) -> None:
        self._host_memory_ran_out = host_memory_ran_out
        self._loss_of = loss_of
        self._around = around
        self._agree = agree
        self._parts = parts
        reached = loss_of if function is None else function
        self._state = PassState(models, reached, named)
        self._size = min(max(size, _LEAST_SAMPLES), parts.samples)
        self._pieces: list[Any] = []
        self._weights: tuple[float, ...] = ()
        self._needs_gradients = False
        self._error: Exception | None = None
        self._drawn: GeneratorStates | None = None  # after the last comparison
        self._draws: list[Losses] = []

    def check(self) -> SplitCheck:
        """Return what the comparison shows."""
        try:
            with warnings.catch_warnings(), runs_eagerly(torch):
                warnings.simplefilter("ignore")
                check = self._check_what_fits()
        except PassFailed:
            seen = described(self._error)
            check = SplitCheck(Kept.UNKNOWN, seen, self._size)
        # After any other error the step goes back to its start.
        self._state.restore()
        return check

    def _check_what_fits(self) -> SplitCheck:
        """Check a part, and a smaller one if memory runs out."""
        while self._size > 1:
            try:
                return self._compare_what_shows_something()
            except PassRanOut:
                self._pieces = []
            # The exception is gone here, and with it what its frames held.
            return_memory(thorough=False, workspaces=True)
            self._size = (self._size + 1) // 2 if self._size > 2 else 1
        return SplitCheck(Kept.UNKNOWN, "memory ran out in it", 1)

    def _compare_what_shows_something(self) -> SplitCheck:
        """Compare parts until one has a loss: zeros, as of a hinge, are equal whatever it is."""
        check = SplitCheck(Kept.UNKNOWN, NOTHING_TO_SEE, self._size)
        for choose in (self._from_both_ends, self._from_the_middle):
            self._divide(choose())
            if self._agree(not any(self._weights)):
                continue
            check = self._compare_in_modes()
            is_zero = check.is_kept and self._draws[0].is_zero
            if not self._agree(is_zero):
                return check
        return SplitCheck(Kept.UNKNOWN, NOTHING_TO_SEE, self._size)

    def _from_both_ends(self) -> Any:
        """Return samples of both ends of the batch: halves that differ as much as they can."""
        parts = self._parts
        if parts.split is not part_of:
            return self._from_the_middle()
        try:
            return part_of_both_ends(parts.batch, parts.samples, self._size)
        except (
            TypeError,
            ValueError,
        ):  # Arrays of unknown libraries may not be joined.
            return self._from_the_middle()

    def _from_the_middle(self) -> Any:
        start = (self._parts.samples - self._size) // 2
        return self._parts.split(self._parts.batch, start, start + self._size)

    def _divide(self, data: Any) -> None:
        parts = self._parts
        part = Parts(data, self._size, parts.split, parts.count)
        middle = self._size // 2
        halves = [part.part(0, middle), part.part(middle, self._size)]
        self._pieces = [data, *(half.data for half in halves)]
        self._weights = tuple(half.weight for half in halves)

    def _compare_in_modes(self) -> SplitCheck:
        """Compare in the mode of training, and in that of evaluation if that leaves doubts."""
        calm = self._compare(_Mode.CALM)
        if calm in (_Outcome.EXACT, _Outcome.DIFFERS):
            return self._conclude(calm)
        draws = self._draws
        still = self._compare(_Mode.EVALUATION)
        if still is _Outcome.DIFFERS or (
            still is _Outcome.EXACT and calm is not _Outcome.NOISY
        ):
            return self._conclude(still)
        if still is _Outcome.NOISY:
            return self._compare_means(_Mode.EVALUATION)
        if calm is _Outcome.NOISY:
            self._draws = draws
            return self._compare_means(_Mode.CALM)
        if calm is _Outcome.FAILED and still is _Outcome.FAILED:
            return SplitCheck(Kept.CANNOT, described(self._error), self._size)
        return SplitCheck(
            Kept.UNKNOWN, "it is not a finite number", self._size
        )

    def _conclude(self, outcome: _Outcome) -> SplitCheck:
        kept = Kept.YES if outcome is _Outcome.EXACT else Kept.NO
        return SplitCheck(
            kept, in_words(self._draws[0], self._size), self._size
        )

    def _compare_means(self, mode: _Mode) -> SplitCheck:
        """Compare the means of several draws of the random numbers."""
        while len(self._draws) < _DRAWS:
            self._draws.append(self._draw(mode, self._drawn))
        differs = self._agree(differ_beyond_noise(self._draws))
        text = (
            f"{in_words(mean_of(self._draws), self._size)} (means of {_DRAWS})"
        )
        return SplitCheck(Kept.NO if differs else Kept.YES, text, self._size)

    def _compare(self, mode: _Mode) -> _Outcome:
        """Return what one comparison shows; a second one separates noise from a difference."""
        outcome = _Outcome(self._agree(self._first_outcome(mode)))
        if outcome is _Outcome.FAILED and not self._needs_gradients:
            # A gradient penalty needs them, and cannot be computed without.
            self._needs_gradients = True
            outcome = _Outcome(self._agree(self._first_outcome(mode)))
        if outcome is not _Outcome.DIFFERS:
            return outcome
        self._draws.append(self._draw(mode, self._drawn))
        first, second = self._draws
        is_noisy = self._agree(first.whole != second.whole)
        return _Outcome.NOISY if is_noisy else _Outcome.DIFFERS

    def _first_outcome(self, mode: _Mode) -> _Outcome:
        self._draws = []
        try:
            losses = self._draw(mode)
        except PassFailed:
            return _Outcome.FAILED
        self._draws = [losses]
        if not math.isfinite(losses.whole):
            return _Outcome.NOT_FINITE
        return _Outcome.EXACT if losses.agree else _Outcome.DIFFERS

    def _draw(
        self, mode: _Mode, random_numbers: GeneratorStates | None = None
    ) -> Losses:
        """Return the losses of the part and of its halves, one after the other as in a step.

        Raises:
            PassFailed: one of them cannot be computed.
            PassRanOut: memory ran out in one of them.
        """
        formats = _Formats()
        with self._in_mode(mode), formats:
            self._restore(random_numbers)
            whole = self._value_of(self._pieces[0])
            self._restore(random_numbers)
            halves = tuple(map(self._value_of, self._pieces[1:]))
            self._drawn = GeneratorStates(self._state.generators)
        return Losses(whole, halves, self._weights, formats.epsilon)

    def _restore(self, random_numbers: GeneratorStates | None) -> None:
        self._state.restore()
        if random_numbers is not None:
            random_numbers.restore()

    def _value_of(self, data: Any) -> float:
        value = math.nan
        trouble = _Trouble.NONE
        try:
            with self._around(), torch.set_grad_enabled(self._needs_gradients):
                value = float(self._loss_of(data).detach())
        except Exception as error:
            trouble = _trouble_of(error, self._host_memory_ran_out)
            if trouble is _Trouble.NONE:
                raise
            clear_frames(error)
            self._error = error.with_traceback(None)
        # Ranks that make these passes together leave them together.
        match _Trouble(self._agree(trouble)):
            case _Trouble.RAN_OUT:
                raise PassRanOut
            case _Trouble.FAILED:
                raise PassFailed
        return value

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


def _trouble_of(error: Exception, host_memory_ran_out: bool) -> _Trouble:
    """Return what an error says of a pass; a fault of the device or of a peer says nothing."""
    kind = classify_failure(
        error, host_memory_ran_out=host_memory_ran_out
    ).kind
    if isinstance(error, RanOutElsewhere) or kind.is_memory:
        return _Trouble.RAN_OUT
    is_of_program = kind in (FailureKind.BUG, FailureKind.UNKNOWN)
    return _Trouble.FAILED if is_of_program else _Trouble.NONE


_RESTLESS = (_BatchNorm, _DropoutNd, nn.RNNBase, nn.MultiheadAttention)


def is_restless(module: nn.Module) -> bool:
    """Return whether a layer's output in training depends on chance, on the batch or on passes.

    That of BatchNorm and dropout is known to, and what-changes.md says so. Spectral norm takes a
    step of its power iteration in each pass.
    """
    if (
        isinstance(module, _RESTLESS)
        or type(module).__name__ == "_SpectralNorm"
    ):
        return True
    hooks = module._forward_pre_hooks.values()
    return any(type(hook).__name__ == "SpectralNorm" for hook in hooks)


def described(error: Exception | None) -> str:
    """Return an error in one line; None: only another rank knows it."""
    if error is None:
        return "it failed on another rank"
    name = type(error).__name__
    text = first_line(error)
    return text if text.startswith(name) else f"{name}: {text}"


class _Formats(TorchFunctionMode):
    """Notes the least exact number format of all results, as autocast chooses it."""

    def __init__(self) -> None:
        super().__init__()
        self.epsilon = 0.0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.is_floating_point():
            self.epsilon = max(
                self.epsilon, _epsilon_of(result.dtype, result.is_cuda)
            )
        return result


@functools.cache
def _epsilon_of(dtype: torch.dtype, is_cuda: bool) -> float:
    """Return the machine epsilon of a format; formats of eight bits hold no losses."""
    if dtype.itemsize < 2:
        return 0.0
    epsilon = torch.finfo(dtype).eps
    return (
        max(epsilon, _TF32_EPSILON)
        if is_cuda and dtype is torch.float32
        else epsilon
    )
