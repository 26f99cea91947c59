"""Writes files atomically, reads files and JSON that other users may have written, and converts
values to JSON. All processes use it."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import math
import os
import re
import stat
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_LARGEST = 2.0**63  # larger numbers of a file are read as unknown
_DEEPEST = 100  # levels of lists and objects that are converted, because readers recurse
_LONGEST_INTEGER = 14_000  # bits, because Python writes no more than 4,300 digits

log = logging.getLogger("robust_train")


@contextlib.contextmanager
def replacing(path: Path, *, durable: bool = False) -> Iterator[Path]:
    """Yield the path of a temporary file to write. At the end of the block, the file is renamed to
    ``path``. If the block or the renaming raises, the temporary file is removed and ``path`` is
    unchanged. With ``durable``, the new content survives a power cut after the block."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        if durable:
            sync(temporary)
        temporary.replace(path)
        if durable:
            sync(path.parent)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def sync(path: Path) -> None:
    """Flush a file's content or a directory's entries to disk."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        # This file system does not support fsync.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(fd)


def write_json(
    path: Path, content: Any, *, indent: int | None = None, durable: bool = False
) -> None:
    """Write a JSON file atomically. NaN becomes null.

    Raises:
        OSError: the file cannot be written.
    """
    text = json.dumps(strict_json(content), indent=indent, ensure_ascii=False, default=str)
    with replacing(path, durable=durable) as temporary:
        # A path may contain bytes that are not text. They are escaped like in JSON.
        temporary.write_bytes((text + "\n").encode("utf-8", "backslashreplace"))


def set_aside(folder: Path, stays: re.Pattern[str] | None = None) -> Path | None:
    """Move a folder's contents to a new subfolder ``earlier-<n>``, except names that match
    ``stays``. Return the subfolder, or None if there was nothing to move.

    Raises:
        OSError: the contents cannot be moved.
    """
    moved = []
    for item in folder.iterdir():
        is_kept = stays is not None and stays.fullmatch(item.name)
        if not is_kept and not item.name.startswith("earlier-"):
            moved.append(item)
    if not moved:
        return None
    number = 1
    while (folder / f"earlier-{number}").exists():
        number += 1
    earlier = folder / f"earlier-{number}"
    earlier.mkdir()
    for item in moved:
        item.rename(earlier / item.name)
    return earlier


class LineFile:
    """Appends lines to a file that may be replaced at any time. If the last line is incomplete,
    because the disk was full or a process was killed, the next line still starts on a new line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._has_warned = False
        self._after_torn_line = self._ends_torn()

    def try_append(self, data: bytes) -> bool:
        """Append whole lines, and return whether that succeeded. Only the first failure is
        logged."""
        try:
            self.append(data)
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                log.warning("cannot write %s: %s; training continues", self._path, error.strerror)
            return False
        return True

    def append(self, data: bytes) -> None:
        """Append whole lines.

        Raises:
            OSError: the lines cannot be written.
        """
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            data = b"\n" + data if self._after_torn_line else data
            while data:
                written = os.write(descriptor, data)
                self._after_torn_line = data[written - 1 : written] != b"\n"
                data = data[written:]
        finally:
            os.close(descriptor)

    def _ends_torn(self) -> bool:
        with contextlib.suppress(OSError):
            if self._path.is_file():
                with self._path.open("rb") as file:
                    file.seek(-1, os.SEEK_END)
                    return file.read(1) != b"\n"
        return False


class Spacing:
    """Decides which frequent lines are written, so that a long job does not fill the disk.

    Each kind of line may fill ``budget`` bytes at once. After that, the next line must wait for a
    share of the time since the first. So the file grows with the logarithm of time: ten times the
    time adds about two budgets.
    """

    _MOST_KINDS = 100

    def __init__(self, budget: int = 256 * 1024) -> None:
        self._budget = budget
        # By kind: the time of the first and of the last written line, and the bytes written.
        self._written: dict[str, tuple[float, float, int]] = {}

    def limit_kind(self, kind: str) -> str:
        """Return the kind under which a line counts. A trainer may use a new event name for each
        step, so all kinds beyond the limit count as one, ``""``."""
        if kind in self._written or len(self._written) < self._MOST_KINDS:
            return kind
        return ""

    def passes(self, kind: str, length: int) -> bool:
        """Return whether to write a line of ``length`` bytes now. If so, the line is counted."""
        kind = self.limit_kind(kind)
        now = time.monotonic()
        first, last, written = self._written.get(kind, (now, now, 0))
        gap = (now - first) * length / self._budget
        if written + length > self._budget and now - last < gap:
            return False
        self._written[kind] = (first, now, written + length)
        return True


def open_regular(path: Path | str, folder: int | None = None) -> int:
    """Open a file that anyone may have created for reading, and return its descriptor. If ``path``
    is relative, it is relative to the open ``folder``.

    Raises:
        OSError: the file cannot be read. ELOOP means a symbolic link, EINVAL a file that is not
            regular.
    """
    # O_NONBLOCK, because opening a FIFO would wait for a writer.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(path, flags, dir_fd=folder)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise OSError(errno.EINVAL, "not a regular file")


def read_small(
    path: Path | str, most_bytes: int, folder: int | None = None
) -> tuple[bytes, os.stat_result]:
    """Return content and status of a file that anyone may have created.

    Raises:
        OSError: the file cannot be read, is not regular, or is larger than ``most_bytes``.
    """
    with open(open_regular(path, folder), "rb") as file:
        data = file.read(most_bytes + 1)
        if len(data) > most_bytes:
            raise OSError(errno.EINVAL, f"larger than {most_bytes} bytes")
        return data, os.fstat(file.fileno())


def digest_of(path: Path | str, most_bytes: int) -> str:
    """Return the SHA-256 of a file's content.

    Raises:
        OSError: like :func:`read_small`.
    """
    data, _ = read_small(path, most_bytes)
    return hashlib.sha256(data).hexdigest()


def parse_json(data: bytes | str) -> Any:
    """Parse JSON that anyone may have written. Control characters in its texts become ``?``.

    Raises:
        ValueError: the data is not JSON, is nested too deeply, or has a number that is not finite.
    """
    try:
        return make_printable(json.loads(data))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, or an empty object if it cannot be read."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        content = json.loads(path.read_bytes())
        return content if isinstance(content, dict) else {}
    return {}


def _parse_int(text: str) -> int | None:
    # The length is checked first, because Python refuses to convert very long numbers.
    is_short = len(text.lstrip("-")) < 20
    return int(text) if is_short and abs(int(text)) < _LARGEST else None


def _parse_float(text: str) -> float | None:
    return float(text) if abs(float(text)) < _LARGEST else None


def _parse_constant(text: str) -> None:
    """Read NaN and infinities as unknown."""


_DECODER = json.JSONDecoder(
    parse_int=_parse_int, parse_float=_parse_float, parse_constant=_parse_constant
)


def json_lines(path: Path) -> Iterator[dict[str, Any] | None]:
    """Yield the JSON object in each line of a file, or None for a line that is not an object. A
    device or pipe, which may have no end, yields nothing.

    Raises:
        OSError: the file does not exist, or cannot be read.
    """
    is_endless = path.exists() and not (path.is_file() or path.is_dir())
    if is_endless:
        return
    # Read as bytes, because texts may contain other line separators than b"\n".
    with path.open("rb") as file:
        for line in file:
            try:
                content = _DECODER.decode(line.decode("utf-8", "replace").strip())
            except (ValueError, RecursionError):
                content = None
            if isinstance(content, dict) or line.strip():
                yield content if isinstance(content, dict) else None


def make_printable(value: Any) -> Any:
    """Return a JSON value with ``?`` for each control character in its texts.

    Raises:
        ValueError: a number is not finite.
    """
    if isinstance(value, str):
        return "".join(c if c.isprintable() else "?" for c in value)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("a number that is not finite")
    if isinstance(value, list):
        return [make_printable(item) for item in value]
    if isinstance(value, dict):
        return {make_printable(key): make_printable(item) for key, item in value.items()}
    return value


def to_plain(value: object, where: str = "", within: tuple[int, ...] = ()) -> Any:
    """Convert a trainer's value to JSON's types, for a process without torch. Never raises.

    Numbers of any library become Python numbers, paths become strings, and containers are
    converted with their items. Other values become text, and a warning names them by ``where``. A
    warning also names NaN and infinities, which JSON lacks.

    Args:
        value: the value.
        where: the value's name for warnings, or empty for no warnings.
        within: ids of the containers around the value, so that a container within itself ends.
    """
    if isinstance(value, float) and where and not math.isfinite(value):
        log.warning("%s is %s, which JSON lacks: it is saved as null", where, value)
    if value is None or isinstance(value, (bool, float, str)):
        return value
    if isinstance(value, int) and value.bit_length() < _LONGEST_INTEGER:
        return value
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    text = f"<{kind}>"
    is_walked = len(within) < _DEEPEST and id(value) not in within

    within += (id(value),)

    def convert_item(key: object, item: object) -> Any:
        return to_plain(item, f"{where}[{key!r}]" if where else where, within)

    # The value's methods may raise anything.
    with contextlib.suppress(Exception):
        if kind.startswith("omegaconf."):
            value = sys.modules["omegaconf"].OmegaConf.to_container(value, resolve=True)
        if isinstance(value, os.PathLike):
            return os.fsdecode(value)
        if isinstance(value, Mapping) and is_walked:
            return {str(key): convert_item(key, item) for key, item in value.items()}
        if isinstance(value, (list, tuple, set, frozenset)) and is_walked:
            return [convert_item(number, item) for number, item in enumerate(value)]
        if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
            return to_plain(value.item(), where, within)
        text = repr(value)
    if where:
        log.warning("%s is a %s, which is not JSON: it is saved as text", where, kind)
    return text


def strict_json(value: Any) -> Any:
    """Return ``value`` with NaN and infinities, which JSON lacks, replaced by None."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): strict_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict_json(item) for item in value]
    return value
