"""The number formats that the operations of a pass use, and the rounding that they explain.

:mod:`.split_checker` runs its passes within a :class:`NumberFormats`, in the process that trains.
Two losses in bfloat16 may differ by a percent and still be the same loss; in float32 they may not.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from robust_train.compat import without_torch_functions

_TOLERANCE_IN_EPSILONS = 2.0
"""Relative rounding error of a loss in a format, in multiples of the format's machine epsilon."""

_TOLERANCE_OF_INPUTS = 0.5
"""The same for a loss in float32 that is computed from a less exact format, as under autocast. It
is smaller, because such a loss is a mean of many values that are rounded independently."""

_TF32_EPSILON = 2.0**-10
"""A GPU that may use TF32 keeps ten bits in matrix products of float32."""

_ADDING = frozenset(
    (
        *("add", "sub", "rsub", "subtract", "mean", "add_", "sub_"),
        *("__add__", "__radd__", "__sub__", "__rsub__", "__iadd__", "__isub__"),
    )
)
"""Functions whose result, if it is a single number, may be much smaller than its terms."""


class NumberFormats(TorchFunctionMode):
    """Notes the least exact number format among all results, as autocast chooses it.

    Attributes:
        largest_term: the largest term that a single number was added up from.
    """

    def __init__(self) -> None:
        super().__init__()
        self.largest_term = 0.0
        self._epsilon = 0.0
        self._epsilon_of_loss = 0.0

    @property
    def rounding(self) -> float:
        """The relative difference that the number formats explain."""
        of_loss = _TOLERANCE_IN_EPSILONS * self._epsilon_of_loss
        of_inputs = _TOLERANCE_OF_INPUTS * self._epsilon
        return max(of_loss, of_inputs)

    def note_loss(self, loss: Tensor) -> None:
        """Note the format of a loss."""
        epsilon = _epsilon_of(loss.dtype, loss.is_cuda)
        self._epsilon_of_loss = max(self._epsilon_of_loss, epsilon)

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
                        self.largest_term = max(self.largest_term, size)


@functools.cache
def _epsilon_of(dtype: torch.dtype, is_cuda: bool) -> float:
    """Return the machine epsilon of a number format."""
    # No loss is computed in a format of eight bits: such tensors are quantized weights.
    if dtype.itemsize < 2:
        return 0.0
    epsilon = torch.finfo(dtype).eps
    if is_cuda and dtype is torch.float32:
        return max(epsilon, _TF32_EPSILON)
    return epsilon
