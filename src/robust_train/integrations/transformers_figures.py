"""Figures that TRL's trainers collect in each pass of a model until they log their mean.

A batch that runs in parts would count once for each part. `transformers_step` therefore joins the
figures of a batch's parts, and `transformers_loss` drops the figures of passes that only measure.
Both run in the attempt's process. With other trainers, nothing is collected.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from robust_train.compat import TOKENS_SEEN, figures_of_passes
from robust_train.step.splitting import Part, length_of

IGNORED = -100
"""The label of positions without loss."""


class PassFigures:
    """A copy of the figures that a trainer has collected so far."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._lists = {}
        for mode, lists in figures_of_passes(trainer).items():
            self._lists[mode] = {name: list(values) for name, values in lists.items()}
        self._tokens = getattr(trainer, TOKENS_SEEN, None)

    def restore(self) -> None:
        """Set the trainer's figures back to this copy."""
        for mode, lists in figures_of_passes(self._trainer).items():
            lists.clear()
            for name, values in self._lists.get(mode, {}).items():
                lists[name] = list(values)
        if self._tokens is not None:
            setattr(self._trainer, TOKENS_SEEN, self._tokens)

    def join_added(self, weights: Sequence[float]) -> None:
        """Replace the values added since this copy by their mean, weighted by ``weights``.

        A figure that was not added once for each weight stays as it is.
        """
        total = sum(weights)
        for mode, lists in figures_of_passes(self._trainer).items():
            for name, values in lists.items():
                count = len(self._lists.get(mode, {}).get(name, ()))
                added = values[count:]
                if len(added) == len(weights) and total:
                    pairs = zip(added, weights, strict=True)
                    values[count:] = [sum(value * weight for value, weight in pairs) / total]


class BatchFigures:
    """Joins the figures of a batch's parts, so that the batch counts as one pass."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._before_batch = PassFigures(trainer)
        self._weights: list[float] = []

    @contextlib.contextmanager
    def collect(self, part: Part) -> Iterator[None]:
        """Keep the figures of a part, which runs within the block, unless the block raises.

        After a batch's last part, the figures of all parts are joined.
        """
        before_part = PassFigures(self._trainer)
        is_first = part.start == 0
        if is_first:
            self._before_batch = before_part
            self._weights = []
        try:
            yield
        except BaseException:
            before_part.restore()
            raise
        if part.is_whole or not figures_of_passes(self._trainer):
            return
        self._weights.append(_count_predicted_tokens(part.data))
        if part.is_last:
            self._before_batch.join_added(self._weights)


def _count_predicted_tokens(data: Any) -> float:
    """Return the number of tokens that TRL averages the figures of a pass over.

    TRL leaves out each sample's first token, which is not predicted, whatever the Trainer counts.
    """
    labels = data.get("shift_labels", data.get("labels"))
    if not isinstance(labels, Tensor) or labels.ndim < 2:
        return length_of(data)
    if "shift_labels" not in data:
        labels = labels[..., 1:]
    return float(labels.ne(IGNORED).sum())
