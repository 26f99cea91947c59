"""Clues from a stack, where the words of a failure leave its cause open. Pure.

A stack is a traceback's text. In the attempt's process it is that of an exception. The launcher
finds it in what a process printed, or in the stacks of an attempt that hangs.
"""

from __future__ import annotations

import itertools
import re
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from robust_train.failures.error_reports import ErrorReport
from robust_train.failures.patterns import Match
from robust_train.model.failure import Clue, FailureKind
from robust_train.readable import shorten

TRACEBACK = "Traceback (most recent call last)"

_MAIN = ", in <module>"
_MAKES_OR_MOVES_A_MODEL = re.compile(
    r"[/\\]torch[/\\]nn[/\\]modules[/\\](?:module\.py\".*, in _apply|\w+\.py\".*, in __init__)$"
    r"|[/\\]torch[/\\]serialization\.py\".*, in load$",
    re.MULTILINE,
)
_IS_IN_A_STEP = re.compile(r", in (?:_call_impl|backward|step|__next__)$", re.MULTILINE)
_IN_A_LOADER = re.compile(r"[/\\]torch[/\\]utils[/\\]data[/\\]|[/\\]multiprocessing[/\\]")
_MAKES_A_LOCK = re.compile(r"[/\\]multiprocessing[/\\]synchronize\.py\".*in __init__")
_IS_IN_NETWORK_CODE = re.compile(
    r"[/\\](?:urllib|http|requests|urllib3|httpx|httpcore|aiohttp|fsspec|huggingface_hub|botocore"
    r"|grpc|paramiko|pymongo|redis|websockets?)[/\\]|[/\\](?:socket|ssl|rendezvous)\.py\""
)
_TIMEOUT = re.compile(r"^(?:\w+\.)*(?:TimeoutError|timeout)\b", re.IGNORECASE)
_IN_WORKER = re.compile(r"\bCaught \w*(?:Error|Exception) in DataLoader worker process \d+")
_CRASHED_THREAD = re.compile(r"^Current thread .*:\n(?P<frames>(?:  .*(?:\n|$))*)", re.MULTILINE)
_IS_A_LIBRARYS = re.compile(r"[/\\](?:(?:site|dist)-packages|lib[/\\]python3[.\d]*)[/\\]|<frozen")
_IS_OF_THE_RUNNER = re.compile(r"[/\\]robust_train[/\\](?:attempt(?!.script)|launcher|host)[/\\]")
_IS_OURS = re.compile(
    r"[/\\]robust_train[/\\](?:attempt(?!.script)|launcher|host|memory|step|folder)[/\\]"
)
_OF_A_PROCESS = re.compile(r"^(?=(?:rank|process) \d+ \()", re.MULTILINE)
_RANK = re.compile(r"^rank (?P<rank>\d+) \(process (?P<pid>\d+), (?P<status>.*)\)$", re.MULTILINE)
_PROCESS = re.compile(r"^process (?P<pid>\d+) \(.*, (?P<status>[\w-]+)\)$", re.MULTILINE)
_THREAD = re.compile(r"^((?:Current thread|Thread) .*):\n((?:  File .*(?:\n|$))*)", re.MULTILINE)
_FRAME = re.compile(r'\s*File "(?:.*/)?(?P<file>[^"/]*)", line (?P<line>\d+) in (?P<function>.*)')
_MOST_SHOWN = 300
_OPEN_FILES = re.compile(r"Too many open files", re.IGNORECASE)


def stack_of(exception: BaseException) -> str:
    """Return the stack as the text of a traceback, with the main module's stack on one line."""
    lines = [_MAIN]
    for frame, _ in traceback.walk_tb(exception.__traceback__):
        name = frame.f_code.co_name
        if name != "<module>" or frame.f_globals.get("__name__") != "__main__":
            lines.append(f'File "{frame.f_code.co_filename}", in {name}')
    return "\n".join(lines)


def last_stack_in(log: str) -> str:
    """Return the last traceback that a log quotes, empty if there is none."""
    _, separator, stack = log.rpartition(TRACEBACK)
    return stack if separator else ""


@dataclass(frozen=True)
class NativeStack:
    """The frames that Python prints when native code ends the process."""

    cause: str  # `Segmentation fault`
    # The frames of the thread that crashed, innermost first, without this package's frames.
    frames: tuple[str, ...]

    @property
    def headline(self) -> str:
        """The cause, and the innermost frame outside of libraries."""
        trainers_frames = (frame for frame in self.frames if not _IS_A_LIBRARYS.search(frame))
        where = next(trainers_frames, next(iter(self.frames), ""))
        return f"{self.cause} at {where.removeprefix('File ')}" if where else self.cause

    def __str__(self) -> str:
        frames = "\n".join(f"  {frame}" for frame in self.frames)
        return (
            f"Fatal Python error: {self.cause}\n\n"
            f"Current thread (most recent call first):\n{frames}\n"
        )


def native_stack_in(output: str) -> NativeStack | None:
    """Return the last stack that faulthandler wrote, None if it wrote none."""
    _, separator, text = output.rpartition("Fatal Python error: ")
    if not separator:
        return None
    thread = _CRASHED_THREAD.search(text)
    frames = [line.strip() for line in thread["frames"].splitlines()] if thread else []
    return NativeStack(text.partition("\n")[0].strip(), tuple(_above_runner(frames)))


def _above_runner(frames: Iterable[str]) -> Iterator[str]:
    """Yield the frames below the runner's frame, innermost first."""
    return itertools.takewhile(lambda frame: not _IS_OF_THE_RUNNER.search(frame), frames)


def where_it_stands(stacks: str) -> str:
    """Return the innermost frames outside of libraries in the stacks of an attempt that hangs.

    ``stacks`` is faulthandler's output, with a heading for each of several processes. Processes
    that are stopped come first. If no process has such a frame, the headings are returned.
    """
    ranks = {match["pid"]: f"rank {match['rank']} " for match in _RANK.finditer(stacks)}
    stopped: dict[str, str] = {}
    others: dict[str, str] = {}
    for section in _OF_A_PROCESS.split(stacks):
        frame = _own_frame(section)
        heading = _RANK.match(section)
        if heading is None:
            heading = _PROCESS.match(section)
        pid = "" if heading is None else heading["pid"]
        if heading is not None and heading["status"] in ("stopped", "tracing-stop"):
            stopped.setdefault(pid, f"is stopped by a signal {frame}".rstrip())
        elif frame:
            others[pid] = frame
    places = []
    for pid, where in (stopped | others).items():
        process = f"process {pid} " if pid else ""
        places.append(f"{ranks.get(pid, process)}{where}")
    headings = (line for line in stacks.splitlines() if _PROCESS.match(line))
    return shorten("; ".join(places or headings), _MOST_SHOWN)


def _own_frame(section: str) -> str:
    """Return the trainer's innermost frame: the main thread's, else another thread's."""
    threads = [(match[1], match[2].splitlines()) for match in _THREAD.finditer(section)]
    # faulthandler writes the main thread last.
    threads.sort(key=lambda thread: "Current" in thread[0] or "MainThread" in thread[0])
    for _, frames in reversed(threads):
        for frame in _above_runner(frames):
            is_own = not (_IS_A_LIBRARYS.search(frame) or _IS_OURS.search(frame))
            at = _FRAME.match(frame)
            if is_own and at:
                return f"at {at['file']}:{at['line']} in {at['function']}"
    return ""


def memory_clue(stack: str) -> str:
    """Return a clue if memory ran out in an import, or while a model was created, loaded or moved;
    empty otherwise. A lazy import inside a step counts as the step."""
    if _IS_IN_A_STEP.search(stack):
        return ""
    # Python removes importlib's own frames from most tracebacks.
    if "<frozen importlib" in stack or stack.count(_MAIN) > 1:
        return Clue.IMPORT
    return Clue.MODEL if _MAKES_OR_MOVES_A_MODEL.search(stack) else ""


def refined(meaning: Match | None, report: ErrorReport, stack: str) -> Match | None:
    """Refine a match by words with the evidence of the stack."""
    # A lock's file is in /dev/shm, which a container may lack. Only workers need such a file.
    if _MAKES_A_LOCK.search(stack):
        return Match(FailureKind.WORKER_DEATH, "multiprocessing")
    types = report.types
    text = report.text
    if meaning is None:
        # Without specific words it is a network failure only if the network's code raised it, or
        # waited for it.
        timed_out = "TimeoutError" in types or _TIMEOUT.search(text) is not None
        where = stack if timed_out else stack.rpartition("File ")[2].partition("\n")[0]
        if not report.is_programming_error and _IS_IN_NETWORK_CODE.search(where):
            return Match(FailureKind.COMM, "http", Clue.DOWNLOAD)
        return None
    is_in_loader = _IN_A_LOADER.search(stack) is not None
    if is_in_loader and "ConnectionResetError" in types:
        # This may be the first sign of a killed worker, if it was just handing over a batch.
        return Match(FailureKind.WORKER_DEATH, "torch", Clue.KILLED)
    if meaning.kind.is_memory:
        return replace(meaning, clue=memory_clue(stack) or meaning.clue)
    # Workers have a context of their own, and hand each batch over by descriptors.
    in_worker = _IN_WORKER.search(text) is not None
    lacks_descriptors = _OPEN_FILES.search(text) is not None
    is_out_of_descriptors = lacks_descriptors and (in_worker or is_in_loader)
    if is_out_of_descriptors or (in_worker and meaning.kind is FailureKind.DEVICE_FAULT):
        return Match(FailureKind.WORKER_DEATH, meaning.library)
    return meaning
