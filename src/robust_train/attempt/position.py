"""Where training is in its data, counted in batches, so that it goes on with the very next one."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
from collections.abc import Iterable, Iterator, Sized
from typing import Any, TypeVar

from robust_train.folder.checkpoints import START, Position

log = logging.getLogger("robust_train")

T = TypeVar("T")

_LARGEST_STATE = 100_000


class Batches:
    """Counts the batches that a trainer is given."""

    def __init__(self) -> None:
        self._at = START
        self._resumed = START
        self._loader: Any = None

    @property
    def position(self) -> Position:
        """Where it is now: the batch given last counts."""
        at = self._at
        return Position(at.batches, at.in_pass, _state_of(self._loader))

    def resume(self, at: Position, passes_over: int = 0) -> None:
        """Begin the next pass at a position, or so many batches later."""
        if passes_over:
            log.info("training diverged here: passing over %d batches", passes_over)
            at = Position(at.batches + passes_over, at.in_pass + passes_over)
        self._resumed = at

    def over(self, loader: Iterable[T]) -> Iterator[T]:
        """Yield a pass over a loader; of the first one what is left."""
        at, self._resumed = self._resumed, Position()
        given = max(at.batches, self._at.batches)
        has_state = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        self._loader = loader if has_state else None
        done, skips = at.in_pass, at.in_pass
        if at.loader is not None and has_state:
            restorable: Any = loader
            restorable.load_state_dict(at.loader)
            skips = 0
        elif isinstance(loader, Sized) and skips:
            done = skips = skips % max(len(loader), 1)
        self._at = Position(given, done)
        for batch in itertools.islice(loader, skips, None):
            self._at = Position(self._at.batches + 1, self._at.in_pass + 1)
            yield batch


def _state_of(loader: Any) -> Any:
    """Return a loader's state where it is plain and small, None otherwise: then it is counted."""
    if loader is None:
        return None
    with contextlib.suppress(TypeError, ValueError):
        state = loader.state_dict()
        text = json.dumps(state)
        if len(text) < _LARGEST_STATE and json.loads(text) == state:
            return state
    return None
