"""Looks up error reports in ``patterns.txt``, and reads the figures in their messages.

`find_match` returns what a report means: its kind of failure, its library and a clue.
`read_evidence` returns figures such as the requested bytes. The other modules of ``failures`` call
both, in the attempt's process and in the launcher. Everything but `with_statistics` is pure.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from robust_train.failures.error_reports import ErrorReport
from robust_train.model.failure import Evidence, FailureKind

# A regular expression that matches nothing.
_NOTHING = "(?!)"
# The kind in the header of a section with figures.
_FIGURE = "figure"
_SIZE = r"(?P<number>\d[\d,]*(?:\.\d*)?)\s*(?P<unit>[kmgtpe]i?b?|bytes?|b)\b"
_COUNT = r"(?P<number>\d+)(?P<unit>)"
# The first letters of units, by powers of 1024. torch and MPS print "MB" for units of 1024 too,
# and XLA prints the letter alone ("5.02G").
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

# If several processes failed at once, the first of these kinds decides, because its remedy keeps
# the job alive.
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
    """A section of ``patterns.txt``: the meaning of reports that have one of its types or words."""

    match: Match
    names: tuple[str, ...]  # names by which code refers to the section
    words: re.Pattern[str]
    types: re.Pattern[str]  # whole class names of exceptions

    def matches(self, report: ErrorReport) -> bool:
        """Return whether the report matches this section."""
        is_typed = any(map(self.types.fullmatch, report.types))
        return is_typed or self.words.search(report.text) is not None


class MatchedReport(NamedTuple):
    """A report and its meaning."""

    report: ErrorReport
    match: Match


def _read_sections() -> Iterator[tuple[re.Match[str], list[str]]]:
    """Yield the header and the lines of each section of ``patterns.txt``."""
    text = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8")
    # A definition may use words that are defined above it, so the last is replaced first.
    for name, meaning in reversed(_VOCABULARY.findall(text)):
        text = text.replace(name, meaning)
    headers = list(_HEADER.finditer(text))
    ends = [header.start() for header in headers[1:]]
    for header, end in itertools.zip_longest(headers, ends):
        lines = text[header.end() : end].splitlines()
        yield (header, [line for line in lines if line and not line.startswith("#")])


def _parse_pattern(header: re.Match[str], lines: Sequence[str]) -> Pattern:
    types = " ".join(line for line in lines if line.startswith("type ")).split()
    words = [_parse_words(line) for line in lines if not line.startswith("type ")]
    library = header["library"]
    if library == "-":
        library = None
    return Pattern(
        match=Match(FailureKind(header["kind"]), library, header["clue"]),
        names=tuple(header["names"].split()),
        words=re.compile("|".join(words) or _NOTHING, re.IGNORECASE),
        types=re.compile("|".join(types) or _NOTHING),
    )


def _parse_words(line: str) -> str:
    """Return the regular expression for a line: ``code …``, ``a ~ b``, or an expression."""
    if line.startswith("code "):
        # `IllegalAddress` is also written `ILLEGAL_ADDRESS`.
        codes = [re.sub(r"(?<=[a-z])(?=[A-Z])", "[_]?", code) for code in line.split()[1:]]
        either = "|".join(codes)
        return rf"(?:{_CODE})(?:{either})\b"
    first, near, second = line.partition(" ~ ")
    if not near:
        return line
    return f"{first}.{{0,60}}?{second}|{second}.{{0,60}}?{first}"


def _parse_figure(lines: Sequence[str]) -> list[re.Pattern[str]]:
    texts = [line.replace("SIZE", _SIZE).replace("COUNT", _COUNT) for line in lines]
    return [re.compile(text, re.IGNORECASE) for text in texts]


# The patterns are compiled on import, because no memory may be left for it after a failure.
_PATTERNS: list[Pattern] = []
# The patterns of each figure, by its name in `Evidence`.
_FIGURES: dict[str, list[re.Pattern[str]]] = {}
for _header, _lines in _read_sections():
    if _header["kind"] == _FIGURE:
        _FIGURES[_header["library"]] = _parse_figure(_lines)
    else:
        _PATTERNS.append(_parse_pattern(_header, _lines))


def find_match(report: ErrorReport) -> Match | None:
    """Return a report's meaning, or None if no section matches. The caller then assumes a bug. A
    match of the kind ``bug`` is final, whatever caused the exception."""
    if not report.is_programming_error:
        patterns = [pattern for pattern in _PATTERNS if "apart" not in pattern.names]
    elif report.types[0] == "ValueError":
        patterns = [pattern for pattern in _PATTERNS if "VALUE_ERROR" in pattern.names]
    else:
        return None
    for pattern in patterns:
        if pattern.matches(report):
            return pattern.match
    for pattern in patterns:
        if pattern.words.search(report.unwrapped):
            return pattern.match
    return None


def find_pattern(name: str) -> Pattern:
    """Return the section with this name."""
    for pattern in _PATTERNS:
        if name in pattern.names:
            return pattern
    raise LookupError(f"patterns.txt has no section {name}")


UNCLEAR = find_pattern("UNCLEAR")
_WRITER = find_pattern("WRITER").match


def choose_match(matches: Iterable[tuple[ErrorReport, Match | None]]) -> MatchedReport | None:
    """Choose the match to act on. Each report may be a consequence of the next report.

    The first match decides. In a group of exceptions, the match with the highest priority decides.
    A file that was not written to its end may have any cause, so the next match, if any, decides
    instead.
    """
    matched: list[MatchedReport] = []
    for report, match in matches:
        if match is None:
            continue
        matched.append(MatchedReport(report, match))
        if not report.in_group and match != _WRITER:
            break
    candidates = [candidate for candidate in matched if candidate.match != _WRITER]
    if not candidates:
        candidates = matched[:1]
    return min(candidates, key=_priority, default=None)


def _priority(candidate: MatchedReport) -> int:
    return _PRIORITY.index(candidate.match.kind)


def read_evidence(text: str, match: Match) -> Evidence:
    """Return the figures in a one-line message, with the clue and the library of its match."""
    figures: dict[str, Any] = {}
    for name, patterns in _FIGURES.items():
        figures[name] = _first_size_in(text, patterns)
    allocated = figures["allocated_bytes"]
    reserved = figures.pop("reserved_bytes")
    is_unused_known = bool(figures["reserved_unallocated_bytes"])
    if allocated is not None and reserved is not None and not is_unused_known:
        figures["reserved_unallocated_bytes"] = max(0, reserved - allocated)
    is_of_torch = match.kind is FailureKind.DEVICE_OOM and match.library == "torch"
    own_limit = is_of_torch and _has_reached_own_limit(text, figures)
    return Evidence(**figures, own_limit=own_limit, clue=match.clue, library=match.library)


def _has_reached_own_limit(text: str, figures: dict[str, int | None]) -> bool:
    """Return whether torch refused the memory because of ``memory.fraction``.

    torch asks the driver only below that limit. So the process reached the limit if the request
    exceeds the allowed memory, if more memory was free than was requested, or if torch says that it
    rejected the request "preemptively" (since 2.15).
    """
    if _PREEMPTIVE.search(text):
        return True
    requested = figures["requested_bytes"]
    if requested is None:
        return False
    free = figures["free_bytes"]
    if free is not None and free >= requested:
        return True
    allowed = figures["allowed_bytes"]
    if not allowed:
        return False
    held = (figures["allocated_bytes"] or 0) + (figures["reserved_unallocated_bytes"] or 0)
    return held + requested > allowed


def with_statistics(evidence: Evidence, text: str) -> Evidence:
    """Fill in figures that the message lacks from torch's statistics, if CUDA has started in this
    process."""
    torch = sys.modules.get("torch")
    if torch is None or evidence.library not in _TORCH:
        return evidence
    try:
        if not torch.cuda.is_initialized():
            return evidence
        figures = _read_statistics(torch, text)
    except Exception:  # A broken driver must not hide the failure.
        return evidence
    missing: dict[str, Any] = {
        name: value for name, value in figures.items() if getattr(evidence, name) is None
    }
    return replace(evidence, **missing)


def _read_statistics(torch: Any, text: str) -> dict[str, int]:
    """Return torch's figures for the GPU that a message names, otherwise for the current GPU."""
    device: int | None = None
    number = re.search(r"\bGPU (\d+)", text)
    if number is not None and int(number[1]) < torch.cuda.device_count():
        device = int(number[1])
    allocated = torch.cuda.memory_allocated(device)
    free, total = torch.cuda.mem_get_info(device)
    return {
        "allocated_bytes": allocated,
        "reserved_unallocated_bytes": max(0, torch.cuda.memory_reserved(device) - allocated),
        "free_bytes": free,
        "total_bytes": total,
    }


def _first_size_in(text: str, patterns: Sequence[re.Pattern[str]]) -> int | None:
    """Return the size in bytes that the first matching pattern finds in a text, or None."""
    for pattern in patterns:
        size = pattern.search(text)
        if size is not None:
            return _parse_bytes(size)
    return None


def _parse_bytes(size: re.Match[str]) -> int | None:
    groups = size.groupdict()
    number = groups.get("number") or groups.get("plain") or ""
    unit = (groups.get("unit") or "b")[0].lower()
    try:
        return int(float(number.replace(",", "")) * 1024 ** _UNITS.index(unit))
    except (ValueError, OverflowError):
        return None
