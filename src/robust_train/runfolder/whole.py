"""Whether a checkpoint was written to its end, as far as its form shows."""

from __future__ import annotations

import json
import os
import struct
import zipfile
from pathlib import Path

UNFINISHED = (".tmp", ".temp", ".part", ".partial", ".incomplete", "~")
"""How names of files end that are still being written."""

_LARGEST_HEADER_BYTES = 100_000_000  # what safetensors itself accepts


def is_whole(path: Path) -> bool:
    """Return False for a checkpoint that is torn, empty, or cannot be read."""
    try:
        return whole_by_form(path) is not False
    except OSError:
        return False


def whole_by_form(path: Path) -> bool | None:
    """Return whether a file or folder is whole, None where its form does not show it.

    Zip files (what ``torch.save`` and ``numpy.savez`` write) have their directory at the end,
    safetensors their length at the beginning. Of other forms only an empty file is known to be
    torn. A folder is whole if everything in it is. Raises OSError: it cannot be read.
    """
    if not path.is_dir():
        return _file_by_form(path, if_empty=False)
    files = files_in(path)
    if not files or any(file.name.endswith(UNFINISHED) for file in files):
        return False
    answers = {_file_by_form(file, if_empty=None) for file in files}
    return False if False in answers else None if None in answers else True


def files_in(folder: Path) -> list[Path]:
    """Return all files in a folder and the folders below it."""
    return [Path(root) / name for root, _, names in os.walk(folder) for name in names]


def _file_by_form(path: Path, *, if_empty: bool | None) -> bool | None:
    size = path.stat().st_size
    if size == 0:
        return if_empty
    with path.open("rb") as file:
        start = file.read(8)
        if start.startswith(b"PK\x03\x04"):
            return zipfile.is_zipfile(file)
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
