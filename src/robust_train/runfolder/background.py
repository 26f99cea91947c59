"""Writes a checkpoint while training goes on, from a copy in host memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch

from robust_train.failures import classify_failure
from robust_train.memory.host import read_host_memory
from robust_train.values import MEMORY_FAILURES

_LARGEST_SHARE = 0.25


def host_copy(content: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a copy of nested mappings and sequences with all tensors in host memory.

    None where there is no memory for it, or it would take more than a quarter of what is available.
    """
    available = read_host_memory().available
    if available is None or _bytes_of(content) > _LARGEST_SHARE * available:
        return None
    try:
        return {key: _copied(value) for key, value in content.items()}
    except Exception as error:
        if classify_failure(error).kind in MEMORY_FAILURES:
            return None
        raise


def _bytes_of(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, Mapping):
        return sum(map(_bytes_of, value.values()))
    return sum(map(_bytes_of, value)) if isinstance(value, (list, tuple)) else 0


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_copied, value))
    return value


class BackgroundWrite:
    """One write in a thread; not a daemon, so that a process never ends in the middle of it.

    Args:
        write: what to do.
        step: the optimizer step that is written.
    """

    def __init__(self, write: Callable[[], None], step: int) -> None:
        self.step = step
        self._write = write
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="checkpoint")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._write()
        except BaseException as error:
            self._error = error

    @property
    def is_done(self) -> bool:
        """Whether it has ended."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Wait for its end, and raise what it raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
