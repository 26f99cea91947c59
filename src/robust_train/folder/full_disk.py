"""Explains a failed write: a full disk, or a disk that was mounted read-only.

An attempt calls it after a failed save, in the process that trains. The launcher calls it to wait
until the disk has space again.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path

from robust_train.folder.checkpoints import read_manifests

# Matches absolute paths in a message.
_IN_TEXT = re.compile(r"/[^\s'\":;,]+")
# A disk with less free space counts as full.
_LEAST_BYTES = 1 << 20


def is_read_only(path: Path) -> bool:
    """Return whether the disk of a path is mounted read-only."""
    with contextlib.suppress(OSError):
        return bool(os.statvfs(path).f_flag & os.ST_RDONLY)
    return False


def why_full(run_dir: Path, message: str, needed_bytes: int = 0) -> str:
    """Return which disk is full, empty if no disk is.

    The disks of paths in ``message`` are checked first, then whether the run folder's disk has
    space for another checkpoint.

    Args:
        run_dir: the run folder.
        message: the reason why a write failed.
        needed_bytes: the size of the failed write, 0 if unknown.
    """
    named = full_folder(paths_in(message))
    if named is not None:
        return f"no space is left in {named}"
    try:
        folder = run_dir / "checkpoints"
        size = max((manifest.bytes for manifest in read_manifests(folder)), default=0)
        size = max(needed_bytes or size, _LEAST_BYTES)
        place = folder if folder.is_dir() else run_dir
        disk = os.statvfs(place)
        # Without this check the test below would take the last space from other programs. A disk
        # that cannot reserve space (NFS before 4.2) would even be written full each time.
        if disk.f_blocks and disk.f_bavail * disk.f_frsize < size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        # Reserving space also fails for a lack of inodes and for a quota.
        with tempfile.TemporaryFile(dir=place) as file:
            os.posix_fallocate(file.fileno(), 0, size)
            os.fsync(file.fileno())
    except OSError as error:
        return f"no checkpoint fits into {run_dir} ({error.strerror})"
    return ""


def paths_in(message: str) -> list[Path]:
    """Return the absolute paths in a message."""
    return [Path(text) for text in _IN_TEXT.findall(message)]


def full_folder(paths: Iterable[Path]) -> Path | None:
    """Return the folder of the first path whose disk is full, None if no disk is full.

    The folder of a path that is itself a folder is that path.
    """
    for path in paths:
        with contextlib.suppress(OSError):
            folder = path if path.is_dir() else path.parent
            disk = os.statvfs(folder)
            is_counted = disk.f_blocks and not disk.f_flag & os.ST_RDONLY
            is_full = disk.f_bavail * disk.f_frsize < _LEAST_BYTES
            if is_counted and (is_full or (disk.f_files and not disk.f_favail)):
                return folder
    return None
