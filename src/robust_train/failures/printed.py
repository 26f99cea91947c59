"""What a program printed, as it was before terminals, boxes and log handlers laid it out. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

_DIGITS = re.compile(r"\d+")
_FRAMED = re.compile(r"^\s*([│┃║|])(.*)\1\s*$")
_TOP = re.compile(r"^\s*[╭┌┏╔](.*)[╮┐┓╗]\s*$")
_BOTTOM = re.compile(r"^\s*[╰└┗╚].*[╯┘┛╝]\s*$")
_RULES = " ─━═┄╌-"
# rich's handler writes the place of a call at the right end of a record's first line
_PLACE_AT_THE_RIGHT = re.compile(r"\s{2,}[\w./<>-]+\.py:\d+$")
# what a training loop prints again and again
_PROGRESS = re.compile(
    r"\b(?:(?:global_)?steps?|epochs?|iter(?:ation)?s?|it|batch|update|loss)\b\W{0,4}\d"
    r"|\b\d+/\d+\b.{0,40}\d:\d\d|\b(?:it/s|s/it)\b",
    re.IGNORECASE,
)
_SHAPE_LENGTH = 16
_FEW_STEPS = 5
"""A program that has reported at least this many steps since has overcome an error."""
_DEEPER = 2


def without_frames(text: str) -> str:
    """Return a text without the boxes around its messages, each on one line.

    A box of a traceback stays as it is: its own reader knows it. So do tables.
    """
    return "\n".join(_unframed(text.splitlines()))


def _unframed(lines: Sequence[str]) -> Iterator[str]:
    # the text of a box so far, as it was before it was wrapped, and its last line
    box: list[str] = []
    last = ""
    is_traceback = False
    for line in lines:
        top = _TOP.match(line)
        framed = _FRAMED.match(line)
        is_bottom = _BOTTOM.match(line) is not None
        if top is not None:
            is_traceback = "Traceback" in line
        is_text = framed is not None and framed[1] not in framed[2]
        if is_text and framed is not None and not is_traceback:
            words = framed[2].strip()
            # a text goes on below if its next word had no room
            first_word = words.partition(" ")[0]
            needed = len(last) + 1 + len(first_word)
            if last and words and needed > len(framed[2]) - 2:
                box[-1] += f" {words}"
            else:
                box.append(words)
            last = words
            continue
        yield from box
        box = []
        last = ""
        if is_traceback:
            yield line
        elif top is not None:
            yield top[1].strip(_RULES)
        elif not is_bottom:
            yield _PLACE_AT_THE_RIGHT.sub("", line.rstrip())
        if is_bottom:
            is_traceback = False
    yield from box


def joined(lines: Sequence[str]) -> list[str]:
    """Return lines with those that are indented deeper appended to the one that they continue."""
    found: list[str] = []
    indent = 0
    for line in lines:
        words = line.strip()
        deeper = len(line) - len(line.lstrip()) - indent
        if found and words and found[-1] and deeper >= _DEEPER:
            found[-1] += f" {words}"
            continue
        indent = len(line) - len(line.lstrip())
        found.append(line.rstrip())
    return found


def since_progress(text: str) -> str:
    """Return the end of an output, from the last steps on: what was reported before a program went
    on for some steps was overcome."""
    lines = text.splitlines()
    shapes = {
        number: _DIGITS.sub("0", line.strip())[:_SHAPE_LENGTH]
        for number, line in enumerate(lines)
        if _PROGRESS.search(line)
    }
    count = Counter(shapes.values())
    steps = [
        number
        for number, shape in shapes.items()
        if count[shape] >= _FEW_STEPS
    ]
    if len(steps) < _FEW_STEPS:
        return text
    return "\n".join(lines[steps[-_FEW_STEPS] :])
