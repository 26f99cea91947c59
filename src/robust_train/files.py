"""Files that are there whole or not at all; JSON that others may have written."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import itertools
import json
import logging
import math
import os
import re
import stat
import sys
import types
import typing
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

Json = Any  # A value of JSON's types
T = TypeVar("T")

_LARGEST = 2**1023  # of the integers that are floats, too
_DRAWABLE = 2.0**63
_DEEPEST = 100  # levels of lists and objects: readers recurse
_LONGEST_INTEGER = 14_000  # bits; Python writes no more than 4,300 digits

log = logging.getLogger("robust_train")


@contextlib.contextmanager
def replacing(path: Path, *, durable: bool = False) -> Iterator[Path]:
    """Yield a path beside ``path`` to write to; when the block is left, that becomes ``path``. If
    the block raises, or the renaming does, nothing of it stays and what was there is untouched.
    ``durable``: the new content survives a power cut once the block is left."""
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
        # no such promise on this disk
        if error.errno not in (
            errno.EINVAL,
            errno.ENOTSUP,
        ):
            raise
    finally:
        os.close(fd)


def write_json(
    path: Path, content: Json, *, indent: int | None = None, durable: bool = False
) -> None:
    """Write a file of JSON by :func:`replacing`; NaN becomes null. Raises OSError: it cannot be
    written."""
    text = json.dumps(
        strict_json(content), indent=indent, ensure_ascii=False, default=str
    )
    with replacing(path, durable=durable) as temporary:
        # bytes of a path that are no text are escaped, as JSON does it
        temporary.write_bytes((text + "\n").encode("utf-8", "backslashreplace"))


def set_aside(folder: Path, stays: re.Pattern[str] | None = None) -> Path | None:
    """Move what a folder holds into ``earlier-<n>`` there, but for names that match ``stays``;
    return the new folder, None if there was nothing. Raises OSError: that is not possible."""
    left = [
        item
        for item in folder.iterdir()
        if not item.name.startswith("earlier-")
        and not (stays and stays.fullmatch(item.name))
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
    """Appends lines to a file, which may be replaced meanwhile. A line that was torn (by a full
    disk, by the end of its process) is ended before the next one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._after_torn_line = self._ends_torn()

    def append(self, data: bytes) -> None:
        """Append whole lines. Raises OSError."""
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
    """Decides which of the lines that come often are written: ever fewer as time passes.

    Each kind may fill ``budget`` bytes at once. Later its lines are a share of its time apart that
    grows with their length, so that ten times the time adds about two budgets.
    """

    _MOST_KINDS = 100

    def __init__(self, budget: int = 256 * 1024) -> None:
        self._budget = budget
        # first and last time, bytes written
        self._seen: dict[str, tuple[float, float, int]] = {}

    def known(self, kind: str) -> str:
        """Return the kind that counts: the same for all that come after too many others."""
        # a trainer may name an event of its own for each step
        return kind if kind in self._seen or len(self._seen) < self._MOST_KINDS else ""

    def passes(self, kind: str, length: int, now: float) -> bool:
        """Return whether a line of ``length`` bytes is to be written."""
        kind = self.known(kind)
        first, last, written = self._seen.get(kind, (now, now, 0))
        gap = (now - first) * length / self._budget
        # a clock that was set back must not end the record
        if written + length > self._budget and 0 <= now - last < gap:
            return False
        self._seen[kind] = first, now, written + length
        return True


def read_small(path: Path, most_bytes: int) -> tuple[bytes, int]:
    """Return content and owner of a file that anybody may have put there. Raises OSError: it cannot
    be read. ELOOP for a symbolic link, EINVAL for what is not a regular file or has more than
    ``most_bytes``."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        if status.st_size > most_bytes:
            raise OSError(errno.EINVAL, f"larger than {most_bytes} bytes")
        return os.read(fd, most_bytes), status.st_uid
    finally:
        os.close(fd)


def parse_json(data: bytes | str) -> Json:
    """Return JSON that anybody may have written, its text without control characters. Raises
    ValueError: it is no JSON, nested too deeply, or has a number that is not finite."""
    try:
        return printable(json.loads(data))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def read_object(path: Path) -> dict[str, Json]:
    """Return the JSON object in a file; empty where there is none that can be read."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        content = json.loads(path.read_bytes())
        return content if isinstance(content, dict) else {}
    return {}


def finite(value: object) -> float | None:
    """Return ``value`` if it is a number that can be drawn, else None; booleans are no numbers."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        # a comparison with NaN is false
        return float(value) if -_DRAWABLE < value < _DRAWABLE else None
    return None


# numbers that cannot be drawn are read as unknown
_DECODER = json.JSONDecoder(
    parse_int=lambda text: (
        int(text) if len(text) < 20 and abs(int(text)) < _DRAWABLE else None
    ),
    parse_float=lambda text: finite(float(text)),
    parse_constant=lambda text: None,
)


def json_lines(path: Path) -> Iterator[dict[str, Json] | None]:
    """Yield the JSON object in each line of a file, None if a line has none; nothing of a
    device or pipe, which may have no end. Raises OSError: it is not there, or cannot be read."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        return
    # in bytes: only b"\n" ends a line there, and texts may hold other separators
    with path.open("rb") as file:
        for line in file:
            try:
                content = _DECODER.decode(line.decode("utf-8", "replace").strip())
            except (ValueError, RecursionError):
                content = None
            if isinstance(content, dict) or line.strip():
                yield content if isinstance(content, dict) else None


def printable(value: Json) -> Json:
    """Return JSON with its text without control characters; ValueError: a number is not finite."""
    if isinstance(value, str):
        return "".join(c if c.isprintable() else "?" for c in value)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("a number that is not finite")
    if isinstance(value, list):
        return [printable(item) for item in value]
    if isinstance(value, dict):
        return {printable(key): printable(item) for key, item in value.items()}
    return value


class MalformedEvent(ValueError):
    """An object that is not what was expected; the message gives the reason."""


def from_json(cls: type[T], data: object) -> T:
    """Return the frozen dataclass ``cls`` from one JSON object; unknown keys are ignored. Raises
    MalformedEvent: a field is missing or of another type."""
    if not isinstance(data, Mapping):
        raise MalformedEvent("not an object")
    found: T = _build(cls, data, cls.__name__)
    return found


def _build(cls: type[Any], data: Mapping[str, Json], where: str) -> Any:
    hints = _hints(cls)  # type: ignore[arg-type]  # every class is hashable
    given: dict[str, Json] = {}
    for item in dataclasses.fields(cls):
        if item.name in data:
            given[item.name] = _value(
                hints[item.name], data[item.name], f"{where}.{item.name}"
            )
        elif (
            item.default is dataclasses.MISSING
            and item.default_factory is dataclasses.MISSING
        ):
            raise MalformedEvent(f"{where} needs {item.name}")
    return cls(**given)


_hints = functools.cache(typing.get_type_hints)


def _value(hint: Any, value: Json, where: str) -> Any:
    """Return ``value`` as the field's type, which is one of the few that events use."""
    inner = typing.get_args(hint)
    kind = typing.get_origin(hint) or hint
    if kind in (typing.Union, types.UnionType):  # a type or None
        return None if value is None else _value(inner[0], value, where)
    if kind is Any:
        return value
    if kind is tuple and isinstance(value, (list, tuple)):
        return tuple(_value(inner[0], one, where) for one in value)
    if isinstance(value, Mapping):
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            own = getattr(kind, "parse", None)
            return _build(kind, value, where) if own is None else own(value)
        if issubclass(kind, Mapping):
            return dict(value)
    if issubclass(kind, Enum):
        with contextlib.suppress(ValueError):
            return kind(value)
    if kind is Path and isinstance(value, str):
        return Path(value)
    if kind is float and type(value) is int and abs(value) < _LARGEST:
        return float(value)
    if type(value) is kind:  # exactly: a bool is no int
        return value
    raise MalformedEvent(
        f"{where}: {value!r} is not of type {getattr(kind, '__name__', kind)}"
    )


def as_json(value: object) -> Json:
    """Return a value in JSON's types; a dataclass by its own ``as_json``, else with all fields."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        own = getattr(value, "as_json", None)
        return fields_as_json(value) if own is None else own()
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(item) for item in value]
    return value


def fields_as_json(value: object) -> dict[str, Json]:
    """Return all fields of a dataclass, in JSON's types."""
    assert dataclasses.is_dataclass(value)
    return {
        one.name: as_json(getattr(value, one.name)) for one in dataclasses.fields(value)
    }


def plain(value: object, where: str = "", within: tuple[int, ...] = ()) -> Json:
    """Return what a trainer gave in JSON's types, for a process without torch; never raises.

    Numbers of any library become Python's, paths strings; containers are walked, each once on a
    way down (``within``); the rest becomes text, with a warning that names it by ``where``, as for
    NaN and infinities, which JSON lacks.
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

    def inner(key: object, item: object) -> Json:
        return plain(item, where and f"{where}[{key!r}]", (*within, id(value)))

    with contextlib.suppress(Exception):  # of methods that are not ours
        if kind.startswith("omegaconf."):
            value = sys.modules["omegaconf"].OmegaConf.to_container(value, resolve=True)
        if isinstance(value, os.PathLike):
            return os.fsdecode(value)
        if isinstance(value, Mapping) and is_walked:
            return {str(key): inner(key, item) for key, item in value.items()}
        if isinstance(value, (list, tuple, set, frozenset)) and is_walked:
            return [inner(number, item) for number, item in enumerate(value)]
        if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
            return plain(value.item(), where, (*within, id(value)))
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
