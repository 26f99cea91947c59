"""Restores a program's output as it was before terminals, boxes and log handlers laid it out.
Pure."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence

_QUOTED_TRACEBACK = re.compile(r'"Traceback \(most recent call last\):\\n(?:[^"\\\n]|\\.)*"')
_DIGITS = re.compile(r"\d+")
_FRAMED = re.compile(r"^\s*([│┃║|]|[*#](?=\s))(.*)\1\s*$")
_TOP = re.compile(
    r"^\s*(?:[╭┌┏╔](?P<title>.*)[╮┐┓╗]"
    r"|(?P<rule>[*#])(?P=rule){2,}(?!(?P=rule))(?P<words>.+?)(?P=rule){3,})\s*$"
)
_BOTTOM = re.compile(r"^\s*(?:[╰└┗╚].*[╯┘┛╝]|(?P<rule>[*#])(?P=rule){4,})\s*$")
_RULES = " ─━═┄╌-"
# rich's handler writes the place of a call at the right end of a record's first line.
_PLACE_AT_THE_RIGHT = re.compile(r"(?<!\s)\s{2,}[\w./<>-]+\.py:\d+$")
# Lines that a training loop prints again and again.
_PROGRESS = re.compile(
    r"\b(?:(?:global_)?steps?|epochs?|iter(?:ation)?s?|it|batch|update|loss)\b\W{0,4}\d"
    r"|\b\d+/\d+\b.{0,40}\d:\d\d|\b(?:it/s|s/it)\b",
    re.IGNORECASE,
)
_SHAPE_LENGTH = 16
_FEW_STEPS = 5
"""A program that has reported at least this many steps since an error has overcome it."""
_DEEPER = 2


def without_frames(text: str) -> str:
    """Return a text without the boxes around its messages, each message on one line.

    Boxes of tracebacks are kept for their own reader, and so are tables. A traceback inside a JSON
    record gets its own lines.
    """
    plain = _QUOTED_TRACEBACK.sub(_unquoted, text)
    return "\n".join(_unframed(plain.splitlines()))


def _unquoted(quoted: re.Match[str]) -> str:
    try:
        content = json.loads(quoted[0])
    except ValueError:
        return quoted[0]
    return f"\n{content}\n"


def _unframed(lines: Sequence[str]) -> Iterator[str]:
    # A text before it was wrapped, and its last line.
    text = ""
    last = ""
    # rich wraps the message below a traceback to the width of the traceback's box.
    width_below = 0
    is_traceback = False
    # The left side of a box, whose right side may be blank.
    left = ""
    for framed in lines:
        line = framed
        if left and line.lstrip().startswith(f"{left} ") and not _FRAMED.match(line):
            line = line.lstrip().lstrip(left)
        inner = line if is_traceback else _inside_frames(line)
        top = _TOP.match(inner)
        bottom = _BOTTOM.match(inner)
        is_bottom = bottom is not None
        for rule in (top, bottom):
            if rule is not None:
                left = rule["rule"] or ""
        is_traceback |= top is not None and "Traceback" in line
        words = inner.strip()
        width = width_below if inner == line else len(inner) - 2
        is_text = bool(words) and top is None
        is_text = is_text and not is_bottom and not is_traceback
        # The text continues below if its next word had no room here.
        needed = len(last) + 1 + len(words.partition(" ")[0])
        if is_text and last and len(last) <= width < needed:
            text += f" {words}"
            last = words
            continue
        if text:
            yield text
        text = ""
        last = ""
        if is_traceback:
            yield line
        elif is_text and width:
            text = words
            last = words
        elif top is not None:
            yield (top["title"] or top["words"] or "").strip(_RULES)
        elif not is_bottom:
            yield _PLACE_AT_THE_RIGHT.sub("", line.rstrip())
        if is_bottom or not words:
            width_below = len(line.rstrip()) if is_traceback else 0
        is_traceback = is_traceback and not is_bottom
    if text:
        yield text


def _inside_frames(line: str) -> str:
    """Return the text between the sides of the boxes around a line, and return a table's line
    unchanged."""
    inner = line
    framed = _FRAMED.match(inner)
    while framed is not None:
        inner = framed[2]
        if framed[1] in inner and _FRAMED.match(inner) is None:
            return line
        framed = _FRAMED.match(inner)
    return inner


def joined(lines: Sequence[str]) -> list[str]:
    """Append lines with deeper indentation to the lines that they continue."""
    joined_lines: list[str] = []
    indent = 0
    for line in lines:
        words = line.strip()
        deeper = len(line) - len(line.lstrip()) - indent
        if joined_lines and words and joined_lines[-1] and deeper >= _DEEPER:
            joined_lines[-1] += f" {words}"
            continue
        indent = len(line) - len(line.lstrip())
        joined_lines.append(line.rstrip())
    return joined_lines


def since_progress(text: str) -> str:
    """Return the end of an output, from the last steps on. If a program continued for some steps
    after an error, it has overcome the error."""
    lines = text.splitlines()
    shapes = {
        number: _DIGITS.sub("0", line.strip())[:_SHAPE_LENGTH]
        for number, line in enumerate(lines)
        if _PROGRESS.search(line)
    }
    count = Counter(shapes.values())
    steps = [number for number, shape in shapes.items() if count[shape] >= _FEW_STEPS]
    if len(steps) < _FEW_STEPS:
        return text
    return "\n".join(lines[steps[-_FEW_STEPS] :])
