"""Computes the loss of a part and of its halves, and leaves everything as it was.

:mod:`.split_checker` uses :class:`LossPasses` in the process that trains. The passes run without a
backward pass. The ranks of a sharded model run them together, and exchange how each pass went, so
that all ranks continue or fail at the same place.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from enum import Enum, IntEnum
from typing import Any

import torch
from torch import Tensor, nn

from robust_train.compat import depends_on_batch, draws_or_iterates
from robust_train.failures import classify_failure
from robust_train.memory.clearing import clear_frames
from robust_train.model.errors import UserError
from robust_train.model.failure import FailureKind
from robust_train.readable import first_line
from robust_train.step.number_formats import NumberFormats
from robust_train.step.pass_state import PassState
from robust_train.step.rng import GeneratorStates
from robust_train.step.sharded import RanOutElsewhereError
from robust_train.step.split_losses import Losses, mean_of_ranks

LossOf = Callable[[Any], Tensor]
"""Returns the loss of some data, a tensor with one element, and runs no backward pass."""

ExchangeFigures = Callable[[Sequence[float]], Sequence[Sequence[float]]]
"""Sends figures to all ranks that make the same passes, and returns the figures of each rank."""


class Mode(Enum):
    """The mode that the modules are in for a comparison."""

    # As in training, except that layers whose output varies by themselves are in evaluation mode.
    STEADY_TRAINING = "steady training"
    EVALUATION = "evaluation"


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


class LossPasses:
    """Computes the losses of a part and of two pieces of it, usually its halves.

    Args:
        loss_of: returns the loss of some data, a tensor with one element, without a backward pass.
        models: the modules that learn.
        function: a function that reaches further modules, generators and metrics. None:
            ``loss_of``.
        around: creates a context for each pass that suppresses logs and reports.
        exchange: exchanges figures with the ranks that make the same passes.
        reported: attributes that a log line has already reported as impossible to restore.
        host_memory_ran_out: whether this happened just before, which explains ambiguous errors.

    Attributes:
        state: the state in which each pass begins.
        pieces: the data of the part and of its two pieces.
        weights: the weights of the two pieces, over all ranks.
        needs_gradients: whether passes run with gradients enabled.
        random_numbers_after: the states of the generators after the latest passes.
    """

    def __init__(
        self,
        loss_of: LossOf,
        models: Iterable[nn.Module],
        function: Any = None,
        *,
        around: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
        exchange: ExchangeFigures = keep_figures,
        reported: set[str] | None = None,
        host_memory_ran_out: bool = False,
    ) -> None:
        self.state = PassState(models, loss_of if function is None else function, reported)
        self.pieces: list[Any] = []
        self.weights: tuple[float, ...] = ()
        self.needs_gradients = False
        self.random_numbers_after: GeneratorStates | None = None
        self._loss_of = loss_of
        self._around = around
        self._exchange_figures = exchange
        self._host_memory_ran_out = host_memory_ran_out
        # For each rank, the number of items that its losses of the pieces average over.
        self._items: list[Sequence[float]] = []
        self._whole_loss: dict[Mode, float] = {}  # the loss of the part, computed once
        self._formats = NumberFormats()
        self._rounding = 0.0  # the largest of all ranks
        self._largest_term = 0.0
        # How this rank's passes went, not yet exchanged with the other ranks.
        self._trouble = _Trouble.NONE
        self._error: Exception | None = None

    def begin_part(self) -> None:
        """Begin with new samples, whose number formats are still unknown."""
        self.forget_whole()
        self._formats = NumberFormats()

    def forget_whole(self) -> None:
        """Compute the loss of the part again, because its samples have changed."""
        self._whole_loss.clear()

    def set_items(self, items: Sequence[float]) -> None:
        """Set the weights of the two pieces from the numbers of items on all ranks."""
        self._items = self.exchange(*items)
        whole, *of_halves = map(sum, zip(*self._items, strict=True))
        self.weights = tuple(of_half / whole if whole else 0.0 for of_half in of_halves)

    def have_drawn(self) -> bool:
        """Return whether the latest passes drew random numbers, on any rank."""
        assert self.random_numbers_after is not None
        has_drawn = not self.random_numbers_after.equals(self.state.random_numbers)
        return any(drawn for (drawn,) in self.exchange(has_drawn))

    def compute(self, mode: Mode, random_numbers: GeneratorStates | None = None) -> Losses:
        """Return the losses of the part and of its halves, computed in sequence as in a step.

        Args:
            mode: the mode of the modules.
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
            self.random_numbers_after = GeneratorStates(self.state.generators)
        return Losses(whole, halves, self.weights, self._rounding, self._largest_term)

    def _restore(self, random_numbers: GeneratorStates | None) -> None:
        with self.record_trouble():
            self.state.restore()
            if random_numbers is not None:
                random_numbers.restore()
            for module in self.state.modules:
                if depends_on_batch(torch, module) and module.running_mean is None:
                    _give_statistics(module)

    def _compute_loss(self, piece: int) -> float:
        """Return the loss of the part (0) or of a piece (1, 2), averaged over all ranks' items."""
        value = math.nan
        with self.record_trouble(), self._around(), torch.set_grad_enabled(self.needs_gradients):
            loss = self._loss_of(self.pieces[piece]).detach()
            self._formats.note_loss(loss)
            value = float(loss)
        rows = self.exchange(value, self._formats.rounding, self._formats.largest_term)
        values, roundings, terms = zip(*rows, strict=True)
        self._rounding = max(roundings)
        self._largest_term = max(terms)
        return mean_of_ranks(values, [items[piece] for items in self._items])

    @contextlib.contextmanager
    def _set_mode(self, mode: Mode) -> Iterator[None]:
        """Set the modules' flags directly, because a user's ``train()`` may do more."""
        trained = [module for module in self.state.modules if module.training]
        for module in trained:
            in_training = mode is Mode.STEADY_TRAINING
            module.training = in_training and not _varies_by_itself(module)
        try:
            yield
        finally:
            for module in trained:
                module.training = True

    # --- errors, on this rank and on others ---

    @contextlib.contextmanager
    def record_trouble(self) -> Iterator[None]:
        """Record an error of the block. Then all ranks raise it together in `exchange`."""
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

    def exchange(self, *mine: float) -> list[Sequence[float]]:
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

    def describe_failure(self) -> str:
        """Describe the error of a pass in one line."""
        if self._error is None:
            return "it failed on another rank"
        return describe_error(self._error)


def describe_error(error: Exception) -> str:
    """Describe an error in one line."""
    name = type(error).__name__
    text = first_line(error)
    return text if text.startswith(name) else f"{name}: {text}"


def _varies_by_itself(module: nn.Module) -> bool:
    """Return whether a layer's output in training varies with chance, the batch or earlier passes.

    Users know that of BatchNorm and dropout, and what-changes.md mentions it.
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
