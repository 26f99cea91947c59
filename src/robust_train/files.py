"""Atomic file writes, and tolerant parsing of untrusted JSON. All processes use it."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
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

_LARGEST = 2.0**63  # limit of the numbers that are read
_DEEPEST = 100  # levels of lists and objects, because readers recurse
_LONGEST_INTEGER = 14_000  # bits; Python writes no more than 4,300 digits

log = logging.getLogger("robust_train")


@contextlib.contextmanager
def replacing(path: Path, *, durable: bool = False) -> Iterator[Path]:
    """Yield a path next to ``path`` to write to. At the end of the block that file becomes
    ``path``. If the block or the renaming raises, the new file is removed and ``path`` is
    untouched. With ``durable`` the new content survives a power cut after the block."""
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
    """Flush a file, or a directory's entries, to disk."""
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
    """Write a JSON file by :func:`replacing`. NaN becomes null.

    Raises:
        OSError: it cannot be written.
    """
    text = json.dumps(strict_json(content), indent=indent, ensure_ascii=False, default=str)
    with replacing(path, durable=durable) as temporary:
        # Bytes of a path that are not text are escaped, as JSON does it.
        temporary.write_bytes((text + "\n").encode("utf-8", "backslashreplace"))


def set_aside(folder: Path, stays: re.Pattern[str] | None = None) -> Path | None:
    """Move the folder's contents to ``earlier-<n>`` there, except names that match ``stays``, and
    return the new folder, None if there were no contents.

    Raises:
        OSError: that is not possible.
    """
    left = [
        item
        for item in folder.iterdir()
        if not item.name.startswith("earlier-") and not (stays and stays.fullmatch(item.name))
    ]
    if not left:
        return None
    names = (folder / f"earlier-{number}" for number in itertools.count(1))
    earlier = next(path for path in names if not path.exists())
    earlier.mkdir()
    for item in left:
        item.rename(earlier / item.name)
    return earlier


class LineFile:
    """Appends lines to a file that may be replaced at any time. A line that was torn (by a full
    disk, or the end of its process) is ended before the next line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._has_warned = False
        self._after_torn_line = self._ends_torn()

    def try_append(self, data: bytes) -> bool:
        """Append whole lines, and return whether that succeeded. A full or unreachable disk costs
        one warning."""
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
            OSError: the disk did not take them.
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
    """Decides which frequent lines are written: fewer and fewer as time passes.

    Each kind may fill ``budget`` bytes at once. Later its lines keep a distance, a share of its age
    that grows with their length, so that ten times the age adds about two budgets.
    """

    _MOST_KINDS = 100

    def __init__(self, budget: int = 256 * 1024) -> None:
        self._budget = budget
        # First and last time, and bytes written.
        self._seen: dict[str, tuple[float, float, int]] = {}

    def known(self, kind: str) -> str:
        """Return the kind that counts. Kinds beyond the limit share one."""
        # A trainer may use a new event name for each step.
        return kind if kind in self._seen or len(self._seen) < self._MOST_KINDS else ""

    def passes(self, kind: str, length: int) -> bool:
        """Return whether a line of ``length`` bytes is to be written now."""
        kind = self.known(kind)
        now = time.monotonic()
        first, last, written = self._seen.get(kind, (now, now, 0))
        gap = (now - first) * length / self._budget
        if written + length > self._budget and now - last < gap:
            return False
        self._seen[kind] = first, now, written + length
        return True


def open_regular(path: Path | str, folder: int | None = None) -> int:
    """Return a descriptor for reading a file that anybody may have put there. If ``path`` is
    relative, it is in the open ``folder``.

    Raises:
        OSError: it cannot be read. ELOOP for a symbolic link, EINVAL for a file that is not
            regular.
    """
    # O_NONBLOCK, because a FIFO must not block the open.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(path, flags, dir_fd=folder)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise OSError(errno.EINVAL, "not a regular file")


def read_small(
    path: Path | str, most_bytes: int, folder: int | None = None
) -> tuple[bytes, os.stat_result]:
    """Return content and status of such a file.

    Raises:
        OSError: it cannot be read, or is larger than ``most_bytes``.
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
    """Return JSON that anybody may have written, its text without control characters.

    Raises:
        ValueError: it is not JSON, nested too deeply, or has a number that is not finite.
    """
    try:
        return printable(json.loads(data))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, empty if it cannot be read."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        content = json.loads(path.read_bytes())
        return content if isinstance(content, dict) else {}
    return {}


# Larger numbers and NaN are read as unknown.
_DECODER = json.JSONDecoder(
    parse_int=lambda text: (
        int(text) if len(text.lstrip("-")) < 20 and abs(int(text)) < _LARGEST else None
    ),
    parse_float=lambda text: float(text) if abs(float(text)) < _LARGEST else None,
    parse_constant=lambda text: None,
)


def json_lines(path: Path) -> Iterator[dict[str, Any] | None]:
    """Yield the JSON object in each line of a file, None for a line without an object. A device or
    pipe, which may have no end, yields nothing.

    Raises:
        OSError: the file does not exist, or cannot be read.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        return
    # Bytes, because only b"\n" ends a line there, and texts may contain other separators.
    with path.open("rb") as file:
        for line in file:
            try:
                content = _DECODER.decode(line.decode("utf-8", "replace").strip())
            except (ValueError, RecursionError):
                content = None
            if isinstance(content, dict) or line.strip():
                yield content if isinstance(content, dict) else None


def printable(value: Any) -> Any:
    """Return JSON with its text without control characters.

    Raises:
        ValueError: a number is not finite.
    """
    if isinstance(value, str):
        return "".join(c if c.isprintable() else "?" for c in value)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("a number that is not finite")
    if isinstance(value, list):
        return [printable(item) for item in value]
    if isinstance(value, dict):
        return {printable(key): printable(item) for key, item in value.items()}
    return value


def plain(value: object, where: str = "", within: tuple[int, ...] = ()) -> Any:
    """Convert a trainer's value to JSON's types, for a process without torch. Never raises.

    Numbers of any library become Python's, and paths become strings. Containers are walked, each
    once on a way down (``within``). Other values become text, with a warning that names them by
    ``where``. The same holds for NaN and infinities, which JSON lacks.
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

    def inner(key: object, item: object) -> Any:
        return plain(item, f"{where}[{key!r}]" if where else where, within)

    with contextlib.suppress(Exception):  # the value's methods may raise anything
        if kind.startswith("omegaconf."):
            value = sys.modules["omegaconf"].OmegaConf.to_container(value, resolve=True)
        if isinstance(value, os.PathLike):
            return os.fsdecode(value)
        if isinstance(value, Mapping) and is_walked:
            return {str(key): inner(key, item) for key, item in value.items()}
        if isinstance(value, (list, tuple, set, frozenset)) and is_walked:
            return [inner(number, item) for number, item in enumerate(value)]
        if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
            return plain(value.item(), where, within)
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
