"""Examines the files of a checkpoint: whether they are whole, their size and their checksums.

The attempt's process uses it when it writes a checkpoint, and the launcher uses it before a job
resumes from a checkpoint. A format such as zip or safetensors shows by itself whether a file is
complete.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import struct
import zipfile
import zlib
from pathlib import Path

from robust_train.files import sync
from robust_train.readable import first_line

_BLOCK_BYTES = 1 << 20
_END_BYTES = 1 << 16  # how much of a file's end `checksum_of` reads


def damage_in(path: Path, *, reads: bool) -> str:
    """Return a description of the damage in a checkpoint, empty if no damage is known.

    Args:
        path: the checkpoint, a file or a folder.
        reads: whether to read the files that contain checksums, and compare them.

    Raises:
        OSError: the checkpoint cannot be read now.
    """
    for file in _files_of(path):
        if _file_by_form(file) is False:
            return f"{file.name} is torn"
        if reads:
            damage = _damage_in_zip(file)
            if damage:
                return damage
    return ""


def _damage_in_zip(file: Path) -> str:
    """Return the damage in a zip file, whose parts are compared with their checksums."""
    try:
        if not is_zip(file):
            return ""
        with zipfile.ZipFile(file) as archive:
            bad = archive.testzip()
    except MemoryError:
        raise
    except Exception as error:
        # A damaged header may cause nearly any exception, such as EINVAL for a bad offset.
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise
        return f"{file.name}: {first_line(error)}"
    return f"the checksum of {bad} is wrong" if bad else ""


def content_of(path: Path) -> int:
    """Return a checksum of all files that contain no checksums, such as safetensors files.

    Raises:
        OSError: the checkpoint cannot be read now.
    """
    checksum = 0
    for file in _files_of(path):
        if not is_zip(file):
            with file.open("rb") as opened:
                while block := opened.read(_BLOCK_BYTES):
                    checksum = zlib.crc32(block, checksum)
    return checksum


def is_readable(path: Path) -> bool:
    """Return whether a checkpoint is certainly whole, by its format and the checksums in it."""
    return bool(whole_by_form(path)) and not damage_in(path, reads=True)


def sync_all(path: Path) -> None:
    """Flush a file or folder, everything in it and its name to disk."""
    for item in (path, *path.rglob("*"), path.parent):
        sync(item)
    # A checkpoint outside of the run folder may have a parent that this user may not open.
    with contextlib.suppress(PermissionError):
        sync(path.parent.parent)


def size_of(path: Path) -> int:
    """Return the size of a file, or of all files in a folder, in bytes.

    Raises:
        OSError: the size cannot be read now.
    """
    return sum(file.stat().st_size for file in _files_of(path))


def checksum_of(path: Path) -> int:
    """Return a checksum of the end of each file, which takes as long for large as for small files.

    The end of a ``torch.save`` file contains the checksums of all its parts.

    Raises:
        OSError: the checkpoint cannot be read now.
    """
    checksum = 0
    for file in _files_of(path):
        with file.open("rb") as opened:
            opened.seek(max(os.fstat(opened.fileno()).st_size - _END_BYTES, 0))
            checksum = zlib.crc32(opened.read(), checksum)
    return checksum


# Suffixes of files that are still being written.
UNFINISHED = (".tmp", ".temp", ".part", ".partial", ".incomplete", "~")

_LARGEST_HEADER_BYTES = 100_000_000  # the limit of safetensors itself


def is_whole(path: Path) -> bool:
    """Return False for a checkpoint that is torn, empty, or cannot be read."""
    try:
        return whole_by_form(path) is not False
    except OSError:
        return False


def whole_by_form(path: Path) -> bool | None:
    """Return whether a file or folder is whole, None if its format does not show that.

    Zip files, which ``torch.save`` and ``numpy.savez`` write, have their directory at the end.
    Files of safetensors have their length at the beginning. In other formats, only an empty file is
    known to be torn. A folder is whole if all of its files are whole.

    Raises:
        OSError: the checkpoint cannot be read now.
    """
    if not path.is_dir():
        if path.stat().st_size == 0:
            return False
        return _file_by_form(path)
    files = files_in(path)
    if not files or any(file.name.endswith(UNFINISHED) for file in files):
        return False
    answers = {_file_by_form(file) for file in files}
    if False in answers:
        return False
    return None if None in answers else True


def _files_of(path: Path) -> list[Path]:
    return sorted(files_in(path)) if path.is_dir() else [path]


def files_in(folder: Path) -> list[Path]:
    """Return all files in a folder and the folders below it."""
    return [Path(root) / name for root, _, names in os.walk(folder) for name in names]


def is_zip(path: Path) -> bool:
    try:
        return zipfile.is_zipfile(path)
    except zipfile.BadZipFile:  # the end of the file is damaged
        return False


def _file_by_form(path: Path) -> bool | None:
    """Return whether a file is whole, None if its format does not show that."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        if start.startswith(b"PK\x03\x04"):
            return is_zip(path)
        if path.suffix != ".safetensors":
            return None
        if len(start) < 8:
            return False
        (header_bytes,) = struct.unpack("<Q", start)
        if header_bytes > min(size - 8, _LARGEST_HEADER_BYTES):
            return False
        try:
            header = json.loads(file.read(header_bytes))
            ends = [v["data_offsets"][1] for k, v in header.items() if k != "__metadata__"]
        except (ValueError, TypeError, KeyError, IndexError, AttributeError):
            return False
    return bool(size == 8 + header_bytes + max(ends, default=0))
