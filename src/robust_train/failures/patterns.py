"""What a report is: the first section of ``patterns.txt`` that matches it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from robust_train.failures.error_reports import ErrorReport
from robust_train.model.failure import FailureKind

_DEVICES = (
    r"(?:CUDA|HIP|XPU|MPS|NPU|MLU|MUSA|HPU|DCU|GCU|SDAA|GPU|TPU|HBM|VRAM|PrivateUse1)"
)
_NOTHING = "(?!)"
_HEADER = re.compile(
    r"\[(?P<kind>\w+), (?P<library>[\w. -]+)(?:, (?P<clue>\w+))?\](?P<names>.*)"
)

# where several failed at once, the one whose remedy keeps the job alive
_PRIORITY = (
    FailureKind.DEVICE_OOM,
    FailureKind.HOST_OOM,
    FailureKind.DEVICE_FAULT,
    FailureKind.WORKER_DEATH,
    FailureKind.DEVICE_UNAVAILABLE,
    FailureKind.COMM,
    FailureKind.INTERRUPTED,
    FailureKind.BUG,
)


@dataclass(frozen=True)
class Match:
    """What a report is: its kind, the library that raised it where known, and a clue."""

    kind: FailureKind
    library: str | None = None
    clue: str | None = None


@dataclass(frozen=True)
class Pattern:
    """A section: a report with one of these types, error numbers or words is a ``match``."""

    match: Match
    names: tuple[str, ...]
    words: re.Pattern[str]
    types: frozenset[str]
    errnos: frozenset[int]

    def matches(self, report: ErrorReport) -> bool:
        """Return whether the report is one of this section's."""
        if not self.types.isdisjoint(report.types) or report.errno in self.errnos:
            return True
        return self.words.search(report.text) is not None


def _read() -> tuple[Pattern, ...]:
    text = (Path(__file__).with_suffix(".txt")).read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    starts = [number for number, line in enumerate(lines) if _HEADER.match(line)]
    ends = [*starts[1:], len(lines)]
    return tuple(
        _pattern(lines[start:end]) for start, end in zip(starts, ends, strict=True)
    )


def _pattern(lines: list[str]) -> Pattern:
    header = _HEADER.match(lines[0])
    assert header is not None
    given = {"type": set[str](), "errno": set[str]()}
    words = []
    for line in lines[1:]:
        key, _, values = line.partition(" ")
        if key in given:
            given[key].update(values.split())
        else:
            words.append(line.replace("@DEVICES@", _DEVICES))
    library = header["library"]
    return Pattern(
        Match(
            FailureKind(header["kind"]),
            None if library == "-" else library,
            header["clue"],
        ),
        tuple(header["names"].split()),
        re.compile("|".join(words) or _NOTHING, re.IGNORECASE),
        frozenset(given["type"]),
        frozenset(map(int, given["errno"])),
    )


# compiled now: when memory has run out, there is none to compile them
PATTERNS = _read()
"""All sections of ``patterns.txt``, in order."""


def match(report: ErrorReport) -> Match | None:
    """Return what a report is; None if no section matches, which is a bug by default. A match of
    the kind ``bug`` is one that no cause behind the exception can change."""
    if report.is_programming_error:
        for_vllm = named("NOT_ENOUGH_FOR_VLLM")
        is_vllms = report.types[:1] == ("ValueError",) and for_vllm.matches(report)
        return for_vllm.match if is_vllms else None
    in_turn = (row for row in PATTERNS if "apart" not in row.names)
    return next((row.match for row in in_turn if row.matches(report)), None)


def most_telling(
    matches: Iterable[tuple[ErrorReport, Match]],
) -> tuple[ErrorReport, Match]:
    """Return the one of several to act upon."""
    return min(matches, key=lambda pair: _PRIORITY.index(pair[1].kind))


def named(name: str) -> Pattern:
    """Return the section with this name."""
    return next(row for row in PATTERNS if name in row.names)
