"""Prepares a program's output for the search for errors. Pure.

Programs print errors in boxes, wrap them to the width of a terminal, and print progress below
errors that they have overcome. `exits`, `memory_messages` and the launcher call these functions on
the end of an output, so that each message is on one line and the error that ended the process is
the last.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence

# A traceback as a string in a JSON record.
_QUOTED_TRACEBACK = re.compile(r'"Traceback \(most recent call last\):\\n(?:[^"\\\n]|\\.)*"')
# A line of a box, with the same character at both sides.
_FRAMED = re.compile(r"^\s*([│┃║|]|[*#](?=\s))(.*)\1\s*$")
_TOP = re.compile(
    r"^\s*(?:[╭┌┏╔](?P<title>.*)[╮┐┓╗]"
    r"|(?P<rule>[*#])(?P=rule){2,}(?!(?P=rule))(?P<words>.+?)(?P=rule){3,})\s*$"
)
_BOTTOM = re.compile(r"^\s*(?:[╰└┗╚].*[╯┘┛╝]|(?P<rule>[*#])(?P=rule){4,})\s*$")
_RULES = " ─━═┄╌-"
# rich's log handler prints the file and line of a call at the right end of a record's first line.
_PLACE_AT_THE_RIGHT = re.compile(r"(?<!\s)\s{2,}[\w./<>-]+\.py:\d+$")
_DIGITS = re.compile(r"\d+")
# Lines that a training loop prints at every step.
_PROGRESS = re.compile(
    r"\b(?:(?:global_)?steps?|epochs?|iter(?:ation)?s?|it|batch|update|loss)\b\W{0,4}\d"
    r"|\b\d+/\d+\b.{0,40}\d:\d\d|\b(?:it/s|s/it)\b",
    re.IGNORECASE,
)
_SHAPE_LENGTH = 16
"""Lines of progress belong together if they start with the same characters, digits aside."""
_FEW_STEPS = 5
"""A program that has reported at least this many steps since an error has overcome it."""
_CONTINUATION_INDENT = 2
"""A line continues the line above if it is indented by at least this many columns more."""


def _headed_by(words: str) -> re.Pattern[str]:
    """Return a pattern for a line with these words and the tracebacks below it. All the lines may
    have the same prefix."""
    traceback = r"\1Traceback \(.*\n(?:\1\s.*\n)*\1?(?:\S.*)?(?:\n|$)"
    chained = r"(?:\1[ \t]*\n\1(?:During handling|The above exc).*\n\1[ \t]*\n" + traceback + ")*"
    return re.compile(rf"^(.{{0,99}})(?:{words}).*\n{traceback}{chained}", re.MULTILINE)


# Errors in a destructor, or at the interpreter's exit, which do not end the process.
_IGNORED = _headed_by(r"Exception ignored |Error in atexit\b")
_IN_A_THREAD = _headed_by("Exception in thread ")


def remove_boxes(text: str) -> str:
    """Return a text without the boxes around its messages, each message on one line.

    Boxes of tracebacks stay, because :mod:`.error_reports` reads them, and so do tables. A
    traceback inside a JSON record gets its own lines.
    """
    plain = _QUOTED_TRACEBACK.sub(_unquote, text)
    return "\n".join(_unbox_lines(plain.splitlines()))


def _unquote(quoted: re.Match[str]) -> str:
    try:
        content = json.loads(quoted[0])
    except ValueError:
        return quoted[0]
    return f"\n{content}\n"


def _unbox_lines(lines: Sequence[str]) -> Iterator[str]:
    # The message in the current box so far, on one line, and its last part as the box shows it.
    message = ""
    last_part = ""
    # rich wraps the message below a traceback to the width of the traceback's box.
    width_below = 0
    is_in_traceback = False
    # The left side of a box of * or #, whose right side may be blank.
    left_side = ""
    for printed in lines:
        line = _remove_left_side(printed, left_side)
        inner = line if is_in_traceback else _inside_frames(line)
        top = _TOP.match(inner)
        bottom = _BOTTOM.match(inner)
        for border in (top, bottom):
            if border is not None:
                left_side = border["rule"] or ""
        if top is not None and "Traceback" in line:
            is_in_traceback = True
        words = inner.strip()
        is_border = top is not None or bottom is not None
        is_text = bool(words) and not is_border and not is_in_traceback
        width = width_below if inner == line else len(inner) - 2
        if is_text and _was_wrapped_before(words, last_part, width):
            message += f" {words}"
            last_part = words
            continue
        if message:
            yield message
        message = ""
        last_part = ""
        if is_in_traceback:
            yield line
        elif is_text and width:
            message = words
            last_part = words
        elif top is not None:
            yield (top["title"] or top["words"] or "").strip(_RULES)
        elif bottom is None:
            yield _PLACE_AT_THE_RIGHT.sub("", line.rstrip())
        if bottom is not None or not words:
            width_below = len(line.rstrip()) if is_in_traceback else 0
        if bottom is not None:
            is_in_traceback = False
    if message:
        yield message


def _remove_left_side(line: str, left_side: str) -> str:
    """Remove a box's left side from a line without a right side."""
    text = line.lstrip()
    if left_side and text.startswith(f"{left_side} ") and not _FRAMED.match(line):
        return text.lstrip(left_side)
    return line


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


def _was_wrapped_before(words: str, last_part: str, width: int) -> bool:
    """Return whether a box wrapped its text before these words: the first word had no room in the
    line above."""
    if not last_part:
        return False
    first_word = words.partition(" ")[0]
    needed = len(last_part) + 1 + len(first_word)
    return len(last_part) <= width < needed


def put_final_error_last(output: str) -> str:
    """Return an output whose last error is the error that ended the process.

    Errors that Python ignored are removed. Errors of threads, which do not end the process, move
    above the error of the main thread.
    """
    output = _IGNORED.sub("", output)
    thread_errors = [found[0] for found in _IN_A_THREAD.finditer(output)]
    return "\n".join([*thread_errors, _IN_A_THREAD.sub("", output)])


def join_indented_lines(lines: Sequence[str]) -> list[str]:
    """Append lines with deeper indentation to the lines that they continue."""
    joined: list[str] = []
    indent = 0
    for line in lines:
        words = line.strip()
        own_indent = len(line) - len(line.lstrip())
        is_deeper = own_indent - indent >= _CONTINUATION_INDENT
        if words and is_deeper and joined and joined[-1]:
            joined[-1] += f" {words}"
            continue
        indent = own_indent
        joined.append(line.rstrip())
    return joined


def drop_before_last_steps(text: str) -> str:
    """Return an output from its last few steps on. A program that continued for some steps after an
    error has overcome that error."""
    lines = text.splitlines()
    shapes: dict[int, str] = {}
    for number, line in enumerate(lines):
        if _PROGRESS.search(line):
            shapes[number] = _DIGITS.sub("0", line.strip())[:_SHAPE_LENGTH]
    counts = Counter(shapes.values())
    steps = [number for number, shape in shapes.items() if counts[shape] >= _FEW_STEPS]
    if len(steps) < _FEW_STEPS:
        return text
    return "\n".join(lines[steps[-_FEW_STEPS] :])
