"""Finds the checkpoints that a script writes, by the pattern ``trainer.checkpoint_glob``.

The trainer behind ``trainer=command`` uses this module in the attempt's process. A script does not
say when a checkpoint is complete. So a file counts once it is unchanged between two polls and its
format shows that it is whole. A folder must also have all files that the previous folder has. Files
from before the job started do not count.
"""

from __future__ import annotations

import contextlib
import glob
import logging
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from robust_train.folder.checkpoint_files import UNFINISHED, files_in, is_whole
from robust_train.folder.checkpoints import SUFFIX
from robust_train.model.events import CheckpointUnused

log = logging.getLogger("robust_train")

Stamp = tuple[int, int]
"""A file's or folder's fingerprint: last change in nanoseconds, and size in bytes."""


@dataclass(frozen=True)
class Found:
    """A checkpoint on the disk: a file or folder with its fingerprint."""

    path: Path
    stamp: Stamp

    @property
    def changed(self) -> int:
        """The time of the last change in nanoseconds."""
        return self.stamp[0]

    @property
    def size(self) -> int:
        """The size in bytes."""
        return self.stamp[1]


NOTHING = Found(Path(), (0, 0))
"""Stands for no checkpoint. Every checkpoint is newer."""


class CheckpointWatch:
    """Looks for new checkpoints by an absolute pattern for :func:`glob.glob`. ``before`` are the
    files from before the job started."""

    def __init__(self, pattern: str, before: Mapping[str, Stamp]) -> None:
        self._pattern = pattern
        self._before = dict(before)
        self._last_seen: dict[str, Stamp] = {}

    def newest(self, *, at_rest: bool, reported: Collection[Path] | None = None) -> Found:
        """Return the newest complete checkpoint (see :meth:`find_complete`), or ``NOTHING``."""
        return next(self.find_complete(at_rest=at_rest, reported=reported), NOTHING)

    def find_complete(
        self, *, at_rest: bool, reported: Collection[Path] | None = None
    ) -> Iterator[Found]:
        """Yield the complete checkpoints of this job among the matches, newest first.

        Args:
            at_rest: whether the script has ended. Otherwise only files count that have not changed
                since the last call.
            reported: the checkpoints that the script has reported. If given, the oldest folder must
                be among them, because a script that was killed may have left it incomplete.
        """
        seen = find_stamps(self._pattern)
        last_seen = self._last_seen
        self._last_seen = seen
        settled = seen
        if not at_rest:
            settled = {path: stamp for path, stamp in seen.items() if last_seen.get(path) == stamp}
        matches = self._new_matches(settled)
        matches.sort(key=lambda match: (match.changed, match.path, match.stamp), reverse=True)
        for number, match in enumerate(matches, start=1):
            if not is_whole(match.path):
                continue
            older = matches[number:]
            if not match.path.is_dir() or _has_all_files(match.path, older, reported):
                yield match
            elif reported is not None:
                log.warning("checkpoint %s may lack files and is not used", match.path)

    def _new_matches(self, seen: Mapping[str, Stamp]) -> list[Found]:
        """Return the matches that were written since the job started."""
        return [
            Found(Path(path), stamp)
            for path, stamp in seen.items()
            if self._before.get(path) != stamp
        ]

    def explain_unused(self, newest_usable: Found) -> CheckpointUnused | None:
        """Return the event that says why no newer checkpoint than ``newest_usable`` is used.

        Either the newest match of the pattern is not whole, or the pattern matches nothing because
        of a bracket. Otherwise, return None.
        """
        seen = find_stamps(self._pattern)
        matches = self._new_matches(seen)
        newest = max(matches, key=lambda match: match.changed, default=NOTHING)
        if newest.stamp > newest_usable.stamp and not is_whole(newest.path):
            problem = "is cut off"
            if not newest.size:
                problem = "is empty"
            elif newest.path.is_dir():
                problem = "is not whole"
            text = f"checkpoint {newest.path} {problem} and is not used"
            return CheckpointUnused(text, str(newest.path))
        # The working directory and the run folder are already escaped in the pattern.
        literal = re.sub(r"(\[[\[*?]\])|\[", lambda bracket: bracket[1] or "[[]", self._pattern)
        if seen or literal == self._pattern or not find_stamps(literal):
            return None
        return CheckpointUnused(
            "a bracket in the pattern for checkpoints starts a set of characters; write [[] for a "
            f"bracket in a name: {literal}"
        )


def _has_all_files(folder: Path, older: Sequence[Found], reported: Collection[Path] | None) -> bool:
    """Return whether a folder has all files that the previous folder has. Names that differ only in
    their numbers count as the same."""
    for match in older:
        if match.path.is_dir():
            return _names_in(match.path) <= _names_in(folder)
    return reported is None or folder in reported


def _names_in(folder: Path) -> set[str]:
    """Return the names of all files in a folder, with 0 in place of each number."""
    names = [str(file.relative_to(folder)) for file in files_in(folder)]
    return {re.sub(r"\d+", "0", name) for name in names}


def find_stamps(pattern: str) -> dict[str, Stamp]:
    """Return the fingerprint of each match, by path. Manifests, and files whose names say that they
    are unfinished, are left out."""
    stamps: dict[str, Stamp] = {}
    for match in glob.glob(pattern, recursive=True):
        path = match.rstrip("/")
        if not path.endswith((*UNFINISHED, SUFFIX)):
            with contextlib.suppress(OSError):
                stamps[path] = _stamp_of(Path(path))
    return stamps


def find_checkpoint(path: Path) -> Found:
    """Return a checkpoint with its fingerprint, or ``NOTHING`` if it no longer exists."""
    with contextlib.suppress(OSError):
        return Found(path, _stamp_of(path))
    return NOTHING


def _stamp_of(path: Path) -> Stamp:
    """Return the fingerprint of a file, or of a folder with all its content.

    Raises:
        OSError: it no longer exists.
    """
    status = path.stat()
    if not path.is_dir():
        return status.st_mtime_ns, status.st_size
    inside = [file.stat() for file in files_in(path)]
    changed = max([status.st_mtime_ns] + [file_status.st_mtime_ns for file_status in inside])
    return changed, sum(file_status.st_size for file_status in inside)
