"""Looks up reports and reads their figures. ``patterns.txt`` has the words for both. Pure."""

from __future__ import annotations

import itertools
import logging
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from robust_train.failures.error_reports import ErrorReport
from robust_train.model.failure import Evidence, FailureKind

log = logging.getLogger("robust_train")

_NOTHING = "(?!)"
_FIGURE = "figure"
_SIZE = r"(?P<number>\d[\d,]*(?:\.\d*)?)\s*(?P<unit>[kmgtpe]i?b?|bytes?|b)\b"
_COUNT = r"(?P<number>\d+)(?P<unit>)"
# torch's and MPS's "MB" are 1024 based too. XLA's letters stand alone ("5.02G").
_UNITS = "bkmgtpe"
_PREEMPTIVE = re.compile(r"preemptively rejected", re.IGNORECASE)
# Libraries whose memory is in the statistics of torch's allocator.
_TORCH = frozenset({"torch", "cuda", "hip", "cublas", "cudnn", "cufft", "cusolver", "nccl", None})
# Words before the names and numbers of CUDA's and HIP's errors.
_CODE = (
    r"\b(?:CUDA|HIP|CU)_?ERROR_?"
    r"|\b(?:CUDA|HIP)\w* ?(?:runtime |driver )?(?:error|failure|err)(?: code)?\W{1,3}"
    r"|\[(?=\d+\] Call to cu)"
)
_VOCABULARY = re.compile(r"^(@\w+@) = (.*)", re.MULTILINE)
_HEADER = re.compile(
    r"^\[(?P<kind>\w+), (?P<library>[\w. -]+)(?:, (?P<clue>\w+))?\](?P<names>.*)", re.MULTILINE
)

# If several failed at once, the first kind in this list decides, because its remedy keeps the job
# alive.
_PRIORITY = (
    FailureKind.DEVICE_OOM,
    FailureKind.HOST_OOM,
    FailureKind.DEVICE_FAULT,
    FailureKind.WORKER_DEATH,
    FailureKind.SETUP,
    FailureKind.DEVICE_UNAVAILABLE,
    FailureKind.DISK_FULL,
    FailureKind.COMM,
    FailureKind.INTERRUPTED,
    FailureKind.BUG,
)


@dataclass(frozen=True)
class Match:
    """The meaning of a report: its kind, the library that raised it if known, and a clue."""

    kind: FailureKind
    library: str | None = None
    clue: str | None = None


@dataclass(frozen=True)
class Pattern:
    """A section of ``patterns.txt``: a report with one of these types or words is a ``match``."""

    match: Match
    names: tuple[str, ...]
    words: re.Pattern[str]
    types: re.Pattern[str]

    def matches(self, report: ErrorReport) -> bool:
        """Return whether the report matches this section."""
        is_typed = any(map(self.types.fullmatch, report.types))
        return is_typed or self.words.search(report.text) is not None


def _sections() -> Iterator[tuple[re.Match[str], list[str]]]:
    """Yield the header and the lines of each section of ``patterns.txt``."""
    text = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8")
    # A word's meaning may contain words that are defined above it.
    for name, meaning in reversed(_VOCABULARY.findall(text)):
        text = text.replace(name, meaning)
    headers = list(_HEADER.finditer(text))
    ends = [header.start() for header in headers[1:]]
    for header, end in itertools.zip_longest(headers, ends):
        lines = text[header.end() : end].splitlines()
        yield (header, [line for line in lines if line and not line.startswith("#")])


def _pattern(header: re.Match[str], lines: Sequence[str]) -> Pattern:
    types = " ".join(line for line in lines if line.startswith("type ")).split()
    words = [_words(line) for line in lines if not line.startswith("type ")]
    return Pattern(
        Match(
            FailureKind(header["kind"]),
            None if header["library"] == "-" else header["library"],
            header["clue"],
        ),
        tuple(header["names"].split()),
        re.compile("|".join(words) or _NOTHING, re.IGNORECASE),
        re.compile("|".join(types) or _NOTHING),
    )


def _words(line: str) -> str:
    """Return the regular expression for a line: ``a ~ b``, codes, or an expression."""
    if line.startswith("code "):
        # `IllegalAddress` is also written `ILLEGAL_ADDRESS`
        codes = (re.sub(r"(?<=[a-z])(?=[A-Z])", "[_]?", code) for code in line.split()[1:])
        either = "|".join(codes)
        return rf"(?:{_CODE})(?:{either})\b"
    first, near, second = line.partition(" ~ ")
    if not near:
        return line
    return f"{first}.{{0,60}}?{second}|{second}.{{0,60}}?{first}"


def _figure(lines: Sequence[str]) -> list[re.Pattern[str]]:
    texts = (line.replace("SIZE", _SIZE).replace("COUNT", _COUNT) for line in lines)
    return [re.compile(text, re.IGNORECASE) for text in texts]


# The patterns are compiled now: when memory has run out, there is none to compile them.
_ALL = list(_sections())
PATTERNS = [_pattern(header, lines) for header, lines in _ALL if header["kind"] != _FIGURE]
FIGURES = {header["library"]: _figure(lines) for header, lines in _ALL if header["kind"] == _FIGURE}


def match(report: ErrorReport) -> Match | None:
    """Return a report's meaning, or None if no section matches, which is a bug by default. A match
    of the kind ``bug`` is final, whatever caused the exception."""
    if report.is_programming_error:
        is_believed = report.types[0] == "ValueError"
        rows = [row for row in PATTERNS if "VALUE_ERROR" in row.names and is_believed]
    else:
        rows = [row for row in PATTERNS if "apart" not in row.names]
    as_written = (row.match for row in rows if row.matches(report))
    unwrapped = (row.match for row in rows if row.words.search(report.unwrapped))
    return next(itertools.chain(as_written, unwrapped), None)


def named(name: str) -> Pattern:
    """Return the section with this name."""
    return next(row for row in PATTERNS if name in row.names)


UNCLEAR = named("UNCLEAR")
_WRITER = named("WRITER").match


def most_telling(
    matches: Iterable[tuple[ErrorReport, Match | None]],
) -> tuple[ErrorReport, Match] | None:
    """Return the match to act upon, from reports each of which may be a consequence of the next.

    The first match decides, and among several that failed at the same time the worst. A file that
    was not written to its end may have any cause, so the next match decides, if there is any.
    """
    pairs: list[tuple[ErrorReport, Match]] = []
    for report, match in matches:
        if match is not None:
            pairs.append((report, match))
            if not report.in_group and match != _WRITER:
                break
    candidates = [pair for pair in pairs if pair[1] != _WRITER]
    if not candidates:
        candidates = pairs[:1]
    return min(candidates, key=lambda pair: _PRIORITY.index(pair[1].kind), default=None)


def read_evidence(text: str, match: Match) -> Evidence:
    """Return the figures in a message, whose ``text`` is on one line.

    torch asks the driver only below ``memory.fraction``. So the process reached its own limit if
    the request exceeds the allowed memory, if more was free than was requested, or if torch rejects
    "preemptively" (since 2.15).
    """
    figures: dict[str, Any] = {name: _first(patterns, text) for name, patterns in FIGURES.items()}
    requested = figures["requested_bytes"]
    allocated = figures["allocated_bytes"]
    reserved = figures.pop("reserved_bytes")
    is_unsaid = not figures["reserved_unallocated_bytes"]
    if allocated is not None and reserved is not None and is_unsaid:
        figures["reserved_unallocated_bytes"] = max(0, reserved - allocated)
    own_limit = _PREEMPTIVE.search(text) is not None
    if requested is not None:
        free = figures["free_bytes"]
        allowed = figures["allowed_bytes"]
        unused = figures["reserved_unallocated_bytes"] or 0
        held = unused if allocated is None else allocated + unused
        own_limit |= free is not None and free >= requested
        own_limit |= bool(allowed) and held + requested > allowed
    is_device = match.kind is FailureKind.DEVICE_OOM and match.library == "torch"
    if not is_device:
        own_limit = False
    return Evidence(**figures, own_limit=own_limit, clue=match.clue, library=match.library)


def with_statistics(evidence: Evidence, text: str) -> Evidence:
    """Add missing figures from torch, if torch is loaded and has started CUDA."""
    torch = sys.modules.get("torch")
    if torch is None or evidence.library not in _TORCH:
        return evidence
    try:
        if not torch.cuda.is_initialized():
            return evidence
        figures = _statistics(torch, text)
    except Exception:  # a broken driver must not hide the failure
        return evidence
    missing: dict[str, Any] = {
        name: value for name, value in figures.items() if getattr(evidence, name) is None
    }
    return replace(evidence, **missing)


def _statistics(torch: Any, text: str) -> dict[str, int]:
    named = re.search(r"\bGPU (\d+)", text)
    count = torch.cuda.device_count()
    device = int(named.group(1)) if named and int(named.group(1)) < count else None
    allocated = torch.cuda.memory_allocated(device)
    free, total = torch.cuda.mem_get_info(device)
    return {
        "allocated_bytes": allocated,
        "reserved_unallocated_bytes": max(0, torch.cuda.memory_reserved(device) - allocated),
        "free_bytes": free,
        "total_bytes": total,
    }


def _first(patterns: Sequence[re.Pattern[str]], text: str) -> int | None:
    for pattern in patterns:
        match = pattern.search(text)
        if match is not None:
            return _bytes(match)
    return None


def _bytes(match: re.Match[str]) -> int | None:
    groups = match.groupdict()
    number = groups.get("number") or groups.get("plain") or ""
    unit = (groups.get("unit") or "b")[0].lower()
    try:
        return int(float(number.replace(",", "")) * 1024 ** _UNITS.index(unit))
    except (ValueError, OverflowError):
        return None
