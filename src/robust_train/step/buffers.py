"""Keeps and restores the buffers of modules, which a repeated step must not change twice.

:mod:`.step_start` and :mod:`.pass_state` use :class:`Buffers` in the process that trains. An
example is the running mean of BatchNorm, which each pass updates.
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
    the tensor. A large buffer may be a quantized weight, so it is copied only after a step has
    changed it.

    Args:
        most_bytes: the size up to which a buffer is always copied.
    """

    def __init__(self, most_bytes: int = ALWAYS_COPIED) -> None:
        # Each module's dictionary of buffers, and its content at the start.
        self._homes: list[tuple[dict[str, Tensor | None], Any]] = []
        self._copies = Copies(most_bytes)

    def keep(self, modules: Iterable[nn.Module]) -> None:
        """Keep the buffers that modules have now, with their values, for :meth:`restore`."""
        homes = [home for _, home in map(tensors_of, modules) if home]
        self._homes = [(home, dict(home)) for home in homes]
        now = [buffer for _, buffers in self._homes for buffer in buffers.values()]
        self._copies.take(now)

    @property
    def is_lost(self) -> bool:
        """Whether a buffer without a copy was written to, so that it cannot be restored."""
        return self._copies.is_lost

    def restore(self) -> None:
        """Restore the buffers and values that :meth:`keep` found."""
        self._copies.restore()
        for home, buffers in self._homes:
            for name, buffer in buffers.items():
                home[name] = buffer
