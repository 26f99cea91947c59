"""Buffers of modules, which a step that is repeated must not leave changed.

:mod:`.step_start` keeps and restores them in the process that trains.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from robust_train.compat import tensors_of
from robust_train.step.copies import ALWAYS_COPIED, Copies


class Buffers:
    """The buffers of modules and their values, kept to restore them later.

    A buffer is identified by its entry in the module's dictionary, because the module may replace
    the tensor. Quantized weights are buffers too, so a large buffer is copied only once a step has
    changed it.
    """

    def __init__(self, most_bytes: int = ALWAYS_COPIED) -> None:
        # Each module's dictionary of buffers, and its content at the start.
        self._homes: list[tuple[dict[str, Tensor | None], Any]] = []
        self._copies = Copies(most_bytes)

    def keep(self, modules: Iterable[nn.Module]) -> None:
        """Remember the buffers that modules have now, with their values, for :meth:`restore`."""
        homes = [home for _, home in map(tensors_of, modules) if home]
        self._homes = [(home, dict(home)) for home in homes]
        now = [buffer for _, buffers in self._homes for buffer in buffers.values()]
        self._copies.take(now)

    @property
    def is_lost(self) -> bool:
        """Whether a buffer without a copy was written to."""
        return self._copies.is_lost

    def restore(self) -> None:
        """Put back the buffers and values that :meth:`keep` found."""
        self._copies.restore()
        for home, buffers in self._homes:
            for name, buffer in buffers.items():
                home[name] = buffer
