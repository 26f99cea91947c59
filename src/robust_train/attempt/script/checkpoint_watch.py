"""A script's own checkpoints: which file of a pattern is the newest that is whole.

What lay there before the job began is not the job's: files are compared with what was seen then, by
size and time of change, so that no two clocks have to agree.
"""

from __future__ import annotations

import contextlib
import glob
import json
from collections.abc import Mapping
from pathlib import Path

from robust_train.folder.checkpoints import SUFFIX, UNFINISHED, files_in, is_whole

Stamp = tuple[int, int]
"""By which a file or folder is known again: last change in nanoseconds, and size in bytes."""


class CheckpointWatch:
    """Looks for new checkpoints by a pattern for :func:`glob.glob` (absolute, ``**`` included);
    ``before``: what lay there before the job."""

    def __init__(self, pattern: str, before: Mapping[str, Stamp]) -> None:
        self._pattern = pattern
        self._before = dict(before)
        self._last_seen: dict[str, Stamp] = {}

    def newest(self, *, at_rest: bool) -> Path | None:
        """Return the newest whole match that is the job's own, None if there is none. Only what
        has not changed since the last call counts, unless all is ``at_rest``."""
        seen = stamps(self._pattern)
        last_seen, self._last_seen = self._last_seen, seen
        own = {
            path: stamp
            for path, stamp in seen.items()
            if self._before.get(path) != stamp
        }
        if not at_rest:
            own = {
                path: stamp
                for path, stamp in own.items()
                if last_seen.get(path) == stamp
            }
        for path in sorted(own, key=lambda path: (own[path][0], path), reverse=True):
            if is_whole(Path(path)):
                return Path(path)
        return None


def stamps(pattern: str) -> dict[str, Stamp]:
    """Return every match with its stamp, but unfinished ones by their name and manifests."""
    found: dict[str, Stamp] = {}
    for match in glob.glob(pattern, recursive=True):
        path = match.rstrip("/")
        if not path.endswith((*UNFINISHED, SUFFIX)):
            with contextlib.suppress(OSError):
                found[path] = stamp_of(Path(path))
    return found


def stamp_of(path: Path) -> Stamp:
    """Return the stamp of a file, or of a folder with all in it. Raises OSError if it is gone."""
    status = path.stat()
    if not path.is_dir():
        return status.st_mtime_ns, status.st_size
    inside = [file.stat() for file in files_in(path)]
    changed = max(one.st_mtime_ns for one in (status, *inside))
    return changed, sum(one.st_size for one in inside)


def read_stamps(path: Path) -> dict[str, Stamp] | None:
    """Return what was written as JSON, None if it cannot be read."""
    try:
        found = json.loads(path.read_text()).items()
        return {name: (changed, size) for name, (changed, size) in found}
    except (OSError, ValueError, TypeError, AttributeError):
        return None
