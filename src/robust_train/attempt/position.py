"""Where training is in its data, counted in batches, so that it goes on with the very next one."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
from collections.abc import Iterable, Iterator, Sized
from pathlib import Path
from typing import Any, TypeVar

from robust_train.folder.checkpoints import START, Position, read_manifests

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
        return Position(
            at.batches,
            at.in_pass,
            _state_of(self._loader),
        )

    def resume(
        self,
        path: Path,
        step: int,
        skips_to: int,
    ) -> None:
        """Begin the next pass where the checkpoint ``path`` of a step is in the data; those up to
        step ``skips_to``, with which training diverged, are passed over."""
        known = read_manifests(path.parent)
        found = (one.position for one in known if one.path == path.absolute())
        at, more = next(found, START), skips_to - step
        if step and more > 0 and (batches := round(more * at.batches / step)):
            log.info("training diverged here: passing over %d batches", batches)
            at = Position(at.batches + batches, at.in_pass + batches)
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
