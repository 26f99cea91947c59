"""A script's own checkpoints: which file of a pattern is the newest that is whole.

What lay there before the job began is not the job's: files are compared with what was seen then, by
size and time of change, so that no two clocks have to agree.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from robust_train.files import replacing

_UNFINISHED = (".tmp", ".temp", ".part", ".partial", ".incomplete", "~")
_ZIP = b"PK\x03\x04"
_LARGEST_HEADER_BYTES = 100_000_000  # what safetensors itself accepts


@dataclass(frozen=True)
class Stamp:
    """By which a file or folder is known again: last change in nanoseconds, and size in bytes."""

    changed_ns: int
    size: int


class CheckpointWatch:
    """Looks for new checkpoints.

    Args:
        pattern: as for :func:`glob.glob`, ``**`` included; absolute.
        before: what lay there before the job.
    """

    def __init__(self, pattern: str, before: Mapping[str, Stamp]) -> None:
        self._pattern = pattern
        self._before = dict(before)
        self._last_seen: dict[str, Stamp] = {}

    def newest(self, *, at_rest: bool) -> Path | None:
        """The newest whole match that is the job's own, None where there is none.

        Args:
            at_rest: nobody writes any more. Otherwise only what has not changed since the last look
                counts.
        """
        seen = stamps(self._pattern)
        last_seen, self._last_seen = self._last_seen, seen
        own = {path: stamp for path, stamp in seen.items() if self._before.get(path) != stamp}
        if not at_rest:
            own = {path: stamp for path, stamp in own.items() if last_seen.get(path) == stamp}
        for path in sorted(own, key=lambda path: (own[path].changed_ns, path), reverse=True):
            if is_whole(Path(path)):
                return Path(path)
        return None


def stamps(pattern: str) -> dict[str, Stamp]:
    """Every match with its stamp; unfinished ones by their name are left out."""
    found: dict[str, Stamp] = {}
    for match in glob.glob(pattern, recursive=True):
        path = match.rstrip("/")
        if not path.endswith(_UNFINISHED):
            with contextlib.suppress(OSError):
                found[path] = stamp_of(Path(path))
    return found


def stamp_of(path: Path) -> Stamp:
    """The stamp of a file, or of a folder with all that is in it. Raises OSError if it is gone."""
    status = path.stat()
    if not path.is_dir():
        return Stamp(status.st_mtime_ns, status.st_size)
    changed, size = status.st_mtime_ns, 0
    for file in _files_in(path):
        status = file.stat()
        changed, size = max(changed, status.st_mtime_ns), size + status.st_size
    return Stamp(changed, size)


def is_whole(path: Path) -> bool:
    """Whether a checkpoint was written to its end, as far as its form tells.

    Zip files (what ``torch.save`` and ``numpy.savez`` write) have their directory at the end,
    safetensors their length at the beginning. Of other forms only an empty file is known to be
    torn. A folder is whole if everything in it is.
    """
    try:
        if path.is_dir():
            files = _files_in(path)
            return bool(files) and all(
                not file.name.endswith(_UNFINISHED) and _is_whole_file(file, may_be_empty=True)
                for file in files
            )
        return _is_whole_file(path, may_be_empty=False)
    except OSError:
        return False


def _is_whole_file(path: Path, *, may_be_empty: bool) -> bool:
    size = path.stat().st_size
    if size == 0:
        return may_be_empty
    with path.open("rb") as file:
        start = file.read(8)
    if start.startswith(_ZIP):
        return zipfile.is_zipfile(path)
    if path.suffix == ".safetensors":
        return _is_whole_safetensors(path, start, size)
    return True


def _is_whole_safetensors(path: Path, start: bytes, size: int) -> bool:
    if len(start) < 8:
        return False
    (header_bytes,) = struct.unpack("<Q", start)
    if header_bytes > min(size - 8, _LARGEST_HEADER_BYTES):
        return False
    with path.open("rb") as file:
        file.seek(8)
        try:
            header = json.loads(file.read(header_bytes))
            ends = [v["data_offsets"][1] for k, v in header.items() if k != "__metadata__"]
        except (ValueError, TypeError, KeyError, IndexError, AttributeError):
            return False
    return bool(size == 8 + header_bytes + max(ends, default=0))


def _files_in(folder: Path) -> list[Path]:
    return [Path(root) / name for root, _, names in os.walk(folder) for name in names]


def write_stamps(path: Path, found: Mapping[str, Stamp]) -> None:
    """Remember what was found, whole or not at all."""
    rows = {name: [stamp.changed_ns, stamp.size] for name, stamp in found.items()}
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(rows))


def read_stamps(path: Path) -> dict[str, Stamp] | None:
    """What :func:`write_stamps` wrote, None where it cannot be read."""
    try:
        return {name: Stamp(*row) for name, row in json.loads(path.read_text()).items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return None
