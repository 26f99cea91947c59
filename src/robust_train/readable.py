"""Formats figures, names and tables for people. Pure, used by all processes."""

from __future__ import annotations

import contextlib
import datetime
import difflib
import signal
from collections.abc import Collection, Sequence

MIB = 1024**2
GIB = 1024**3

_MINUTE = 60
_HOUR = 3600
_DAY = 86400


def as_clock(seconds: int) -> str:
    """Return integer seconds as ``1:02:03`` or ``2:03``."""
    minutes, rest = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def duration(seconds: float) -> str:
    """Return ``0.4 s``, ``12 s``, ``3 min 5 s``, ``2 h 10 min``, ``3 d 4 h``."""
    if 0 < seconds < 0.05:
        return "< 0.1 s"
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for size, name, smaller, smaller_name in (
        (_DAY, "d", _HOUR, "h"),
        (_HOUR, "h", _MINUTE, "min"),
        (_MINUTE, "min", 1, "s"),
    ):
        if whole >= size:
            count, rest = divmod(whole, size)
            part = rest // smaller
            return f"{count} {name} {part} {smaller_name}" if part else f"{count} {name}"
    return f"{whole} s"


def step_time(seconds: float) -> str:
    """Return the time of one step, such as ``0.2 s`` or ``46 µs``."""
    return f"{number(seconds)} s" if seconds >= 1e-3 else f"{number(seconds * 1e6)} µs"


def ordinal(number: int) -> str:
    """Return ``1st``, ``2nd``, ``3rd``, ``11th`` …"""
    is_teen = 10 < number % 100 < 20
    endings = {} if is_teen else {1: "st", 2: "nd", 3: "rd"}
    return f"{number}{endings.get(number % 10, 'th')}"


def counted(number: int, noun: str) -> str:
    """Return ``1 job``, ``2 jobs``."""
    ending = "" if number == 1 else "s"
    return f"{number} {noun}{ending}"


def of_all(done: int | None, total: int | None) -> str:
    """Return ``12/400``, or ``12`` if the total is unknown, or empty if ``done`` is."""
    if done is None:
        return ""
    return f"{done}/{total}" if total else str(done)


def signal_name(number: int) -> str:
    """Return ``SIGTERM``, or ``signal 36`` for a signal without a name."""
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


def memory(size: float) -> str:
    """Return a rounded size: ``512 MiB``, ``15.8 GiB``."""
    if size >= 100 * GIB:
        return f"{size / GIB:.0f} GiB"
    if size >= GIB:
        return f"{size / GIB:.1f} GiB"
    if size >= 10 * MIB:
        return f"{size / MIB:.0f} MiB"
    return f"{size / MIB:.1f} MiB"


def by_processes(ranks: int) -> str:
    """Return `` × 2 processes`` to append to a size or a device, empty for one process."""
    return f" × {ranks} processes" if ranks > 1 else ""


def mib(size_bytes: float, places: int = 0) -> str:
    """Return ``15800 MiB``, for comparison with a limit or with nvidia-smi."""
    return f"{size_bytes / MIB:.{places}f} MiB" if places else f"{size_bytes // MIB:.0f} MiB"


def number(value: float) -> str:
    """Return a number with at most four digits, without needless zeros."""
    if value and (abs(value) >= 1e6 or abs(value) < 1e-3):
        mantissa, _, exponent = f"{value:.3g}".partition("e")
        return f"{mantissa}e{int(exponent)}" if exponent else mantissa
    return f"{value:,.4g}" if abs(value) < 10_000 else f"{value:,.0f}"


def percent(share: float) -> str:
    """Return a share of 0 to 1 in percent. Only 1 becomes ``100 %``, and only 0 becomes ``0 %``."""
    if 0 < share < 0.01:
        return "< 1 %"
    if 0.99 < share < 1:
        return "> 99 %"
    return f"{100 * share:.0f} %"


def moment(time: float) -> str:
    """Return date and time of day, in this process's time zone."""
    try:
        at = datetime.datetime.fromtimestamp(time).astimezone()
    except (OverflowError, OSError, ValueError):
        return "?"
    return at.strftime("%Y-%m-%d %H:%M:%S %Z").strip()


def shorten(text: str, longest: int) -> str:
    """Return ``text`` on one line of at most ``longest`` characters, all of them printable."""
    text = one_line(" ".join(text.split()))
    return text if len(text) <= longest else text[: longest - 1] + "…"


def suggest(name: str, names: Collection[str], prefix: str = "") -> str:
    """Return ``did you mean lr?`` for a misspelled name, or all accepted names if none is
    similar."""
    close = difflib.get_close_matches(name, names, n=1)
    if close:
        return f"did you mean {prefix}{close[0]}?"
    return f"accepted are {', '.join(names)}"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if it has no message."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines and lines[0] else type(error).__name__


def named_line(error: BaseException) -> str:
    """Return the error's type and the first line of its message, like the end of a traceback."""
    name = type(error).__name__
    line = first_line(error)
    return name if line == name else f"{name}: {line}"


def one_line(text: str) -> str:
    """Return a text with its line breaks and control characters escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def cell_text(cell: object) -> str:
    """Return the text of a table's cell, ``-`` if it is unknown or empty."""
    return "-" if cell is None or cell == "" else one_line(str(cell))


def align_columns(rows: Sequence[Sequence[object]], names: Sequence[str]) -> list[str]:
    """Return a table as lines of text, the names of its columns first. Integers are aligned to the
    right."""
    lines = [""] * (len(rows) + 1)
    for number, name in enumerate(names):
        cells = [row[number] for row in rows]
        texts = [cell_text(name)] + [cell_text(cell) for cell in cells]
        width = max(len(text) for text in texts)
        has_integers = any(isinstance(cell, int) for cell in cells)
        for row_number, text in enumerate(texts):
            padded = text.rjust(width) if has_integers else text.ljust(width)
            lines[row_number] += f"  {padded}"
    return [line[2:].rstrip() for line in lines]
