"""Files that are there whole or not at all, and directories that others may have tampered with."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def replacing(path: Path, *, durable: bool = False) -> Iterator[Path]:
    """Yield a path beside ``path`` to write to; when the block is left, that becomes ``path``.

    If the block raises, or the renaming does, nothing of it stays and what was there is untouched.
    ``durable``: the new content survives a power cut once the block is left.
    """
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
    """Have a file's content, or the names in a directory, survive a power cut."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # no such promise on this disk
            raise
    finally:
        os.close(fd)


class DirectoryProblem(Exception):
    """What is wrong with a directory, to follow its name in a sentence."""


def open_or_make(path: Path | str, mode: int, dir_fd: int | None = None) -> int:
    """A descriptor of the directory, which is made with ``mode`` where there is none.

    Whoever calls checks owner and mode on the descriptor: what lies under the path may be another
    one a moment later.

    Args:
        path: relative to ``dir_fd`` where that is given.
        mode: of a directory that is made, whatever the umask.
        dir_fd: the directory that it lies in.

    Raises:
        DirectoryProblem: it cannot be made or opened, or is a link.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    is_new = False
    try:
        if dir_fd is None:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
        try:
            os.mkdir(path, mode, dir_fd=dir_fd)
            is_new = True
        except FileExistsError:
            pass
        fd = os.open(path, flags, dir_fd=dir_fd)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise DirectoryProblem("is a symbolic link or no directory") from error
        raise DirectoryProblem(f"cannot be used ({error.strerror})") from error
    if is_new:
        try:
            os.fchmod(fd, mode)
        except OSError as error:
            os.close(fd)
            raise DirectoryProblem(f"cannot be used ({error.strerror})") from error
    return fd


def read_small(path: Path, most_bytes: int) -> tuple[bytes, int]:
    """Return content and owner of a file that anybody may have put there.

    Raises:
        OSError: it cannot be read. ELOOP for a symbolic link, EINVAL for what is no regular file
            or has more than ``most_bytes``.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "no regular file")
        if status.st_size > most_bytes:
            raise OSError(errno.EINVAL, f"larger than {most_bytes} bytes")
        return os.read(fd, most_bytes), status.st_uid
    finally:
        os.close(fd)


def parse_json(data: bytes | str) -> Any:
    """Return JSON that anybody may have written, its text without control characters.

    Raises:
        ValueError: it is no JSON, nested too deeply, or has a number that is not finite.
    """
    try:
        return _printable(json.loads(data))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _printable(value: Any) -> Any:
    if isinstance(value, str):
        return "".join(c if c.isprintable() else "?" for c in value)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("a number that is not finite")
    if isinstance(value, list):
        return [_printable(item) for item in value]
    if isinstance(value, dict):
        return {_printable(key): _printable(item) for key, item in value.items()}
    return value
