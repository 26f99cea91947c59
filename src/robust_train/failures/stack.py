"""Reads stacks, which show where a program failed, crashed or hung. Pure.

A stack is the text of a traceback. A failed attempt takes it from an exception (`stack_of`), and
the launcher finds it in a process's output (`last_stack_in`, `native_stack_in`). `refine_match`
uses the stack if the message alone leaves the cause open. For example, if memory ran out in
``Module.to``, the model was being moved to the GPU, and a smaller batch does not help. The launcher
calls `where_it_stands` for an attempt that hangs.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, replace

from robust_train.failures.error_reports import ErrorReport
from robust_train.failures.patterns import Match
from robust_train.model.failure import Clue, FailureKind
from robust_train.readable import shorten

TRACEBACK = "Traceback (most recent call last)"

# The frame of a module's top level. A second such frame is a module that is being imported.
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
_IN_A_LIBRARY = re.compile(r"[/\\](?:(?:site|dist)-packages|lib[/\\]python3[.\d]*)[/\\]|<frozen")
# Frames of robust-train that call the trainer.
_IN_THE_RUNNER = re.compile(r"[/\\]robust_train[/\\](?:attempt(?!.script)|launcher|host)[/\\]")
# Frames of robust-train that call the trainer or that the trainer calls.
_IN_ROBUST_TRAIN = re.compile(
    r"[/\\]robust_train[/\\](?:attempt(?!.script)|launcher|host|memory|step|folder)[/\\]"
)
# The launcher writes a heading above the stacks of each process.
_START_OF_A_PROCESS = re.compile(r"^(?=(?:rank|process) \d+ \()", re.MULTILINE)
_RANK = re.compile(r"^rank (?P<rank>\d+) \(process (?P<pid>\d+), (?P<status>.*)\)$", re.MULTILINE)
_PROCESS = re.compile(r"^process (?P<pid>\d+) \(.*, (?P<status>[\w-]+)\)$", re.MULTILINE)
# faulthandler's format of a thread and of a frame.
_THREAD = re.compile(r"^((?:Current thread|Thread) .*):\n((?:  File .*(?:\n|$))*)", re.MULTILINE)
_FRAME = re.compile(r'\s*File "(?:.*/)?(?P<file>[^"/]*)", line (?P<line>\d+) in (?P<function>.*)')
_MOST_SHOWN = 300  # characters
_OPEN_FILES = re.compile(r"Too many open files", re.IGNORECASE)


def stack_of(exception: BaseException) -> str:
    """Return an exception's stack as the text of a traceback. It begins with the main module's
    frame, a line without a file."""
    lines = [_MAIN]
    for frame, _ in traceback.walk_tb(exception.__traceback__):
        name = frame.f_code.co_name
        if name != "<module>" or frame.f_globals.get("__name__") != "__main__":
            lines.append(f'File "{frame.f_code.co_filename}", in {name}')
    return "\n".join(lines)


def last_stack_in(log: str) -> str:
    """Return the last traceback in a log, empty if there is none."""
    _, separator, stack = log.rpartition(TRACEBACK)
    return stack if separator else ""


@dataclass(frozen=True)
class NativeStack:
    """The frames that Python prints when native code ends the process."""

    cause: str  # for example `Segmentation fault`
    # The frames of the thread that crashed, innermost first, without robust-train's frames.
    frames: tuple[str, ...]

    @property
    def headline(self) -> str:
        """The cause, and the innermost frame outside of libraries."""
        if not self.frames:
            return self.cause
        outside = [frame for frame in self.frames if not _IN_A_LIBRARY.search(frame)]
        frame = outside[0] if outside else self.frames[0]
        return f"{self.cause} at {frame.removeprefix('File ')}"

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
    frames: list[str] = []
    thread = _CRASHED_THREAD.search(text)
    if thread is not None:
        frames = [line.strip() for line in thread["frames"].splitlines()]
    cause = text.partition("\n")[0].strip()
    return NativeStack(cause, tuple(_frames_of_trainer(frames)))


def _frames_of_trainer(frames: Iterable[str]) -> list[str]:
    """Return the frames, innermost first, up to the trainer's function that the runner called."""
    kept: list[str] = []
    for frame in frames:
        if _IN_THE_RUNNER.search(frame):
            break
        kept.append(frame)
    return kept


def where_it_stands(stacks: str) -> str:
    """Return where each process of an attempt hangs, for example ``rank 1 at train.py:12 in load``.

    That is the innermost frame outside of libraries.

    Stopped processes come first. If no process has such a frame, the headings are returned.

    Args:
        stacks: faulthandler's output, with a heading for each of several processes.
    """
    ranks = {heading["pid"]: heading["rank"] for heading in _RANK.finditer(stacks)}
    stopped: dict[str, str] = {}
    others: dict[str, str] = {}
    for section in _START_OF_A_PROCESS.split(stacks):
        frame = _trainer_frame_in(section)
        heading = _RANK.match(section)
        if heading is None:
            heading = _PROCESS.match(section)
        pid = "" if heading is None else heading["pid"]
        if heading is not None and heading["status"] in ("stopped", "tracing-stop"):
            stopped.setdefault(pid, f"is stopped by a signal {frame}".rstrip())
        elif frame:
            others[pid] = frame
    places: list[str] = []
    for pid, place in (stopped | others).items():
        if pid in ranks:
            places.append(f"rank {ranks[pid]} {place}")
        elif pid:
            places.append(f"process {pid} {place}")
        else:
            places.append(place)
    if not places:
        places = [line for line in stacks.splitlines() if _PROCESS.match(line)]
    return shorten("; ".join(places), _MOST_SHOWN)


def _trainer_frame_in(section: str) -> str:
    """Return the trainer's innermost frame in a process's stacks, empty if there is none. The main
    thread's frame is preferred."""
    main_threads: list[str] = []
    other_threads: list[str] = []
    for thread in _THREAD.finditer(section):
        heading, frames = thread.groups()
        is_main = "Current" in heading or "MainThread" in heading
        threads = main_threads if is_main else other_threads
        threads.append(frames)
    # faulthandler writes the main thread last.
    for frames in reversed(other_threads + main_threads):
        for frame in _frames_of_trainer(frames.splitlines()):
            is_foreign = _IN_A_LIBRARY.search(frame) or _IN_ROBUST_TRAIN.search(frame)
            at = _FRAME.match(frame)
            if at is not None and not is_foreign:
                return f"at {at['file']}:{at['line']} in {at['function']}"
    return ""


def refine_match(match: Match | None, report: ErrorReport, stack: str) -> Match | None:
    """Return the match that a report's words suggest, corrected by its stack."""
    # A lock's file is in /dev/shm, which a container may lack. Only data-loader workers need it.
    if _MAKES_A_LOCK.search(stack):
        return Match(FailureKind.WORKER_DEATH, "multiprocessing")
    if match is None:
        return _match_network_code(report, stack)
    is_in_loader = _IN_A_LOADER.search(stack) is not None
    if is_in_loader and "ConnectionResetError" in report.types:
        # If a worker is killed while it hands over a batch, this is the first sign.
        return Match(FailureKind.WORKER_DEATH, "torch", Clue.KILLED)
    if match.kind.is_memory:
        return replace(match, clue=_memory_clue(stack) or match.clue)
    is_in_worker = _IN_WORKER.search(report.text) is not None
    if is_in_worker and match.kind is FailureKind.DEVICE_FAULT:
        # Each worker has its own CUDA context, so the training process is intact.
        return Match(FailureKind.WORKER_DEATH, match.library)
    if _OPEN_FILES.search(report.text) and (is_in_worker or is_in_loader):
        # Workers hand over batches through file descriptors.
        return Match(FailureKind.WORKER_DEATH, match.library)
    return match


def _match_network_code(report: ErrorReport, stack: str) -> Match | None:
    """Return a match for an error whose words are unknown, if it was raised in network code or is a
    timeout of network code."""
    if report.is_programming_error:
        return None
    is_timeout = "TimeoutError" in report.types or _TIMEOUT.search(report.text) is not None
    frames = stack
    if not is_timeout:
        # Only the innermost frame raised the error.
        frames = stack.rpartition("File ")[2].partition("\n")[0]
    if _IS_IN_NETWORK_CODE.search(frames):
        return Match(FailureKind.COMM, "http", Clue.DOWNLOAD)
    return None


def _memory_clue(stack: str) -> str | None:
    """Return a clue if memory ran out in an import, or while a model was created, loaded or moved.
    A lazy import inside a step counts as the step."""
    if _IS_IN_A_STEP.search(stack):
        return None
    # Python removes importlib's own frames from most tracebacks.
    if "<frozen importlib" in stack or stack.count(_MAIN) > 1:
        return Clue.IMPORT
    return Clue.MODEL if _MAKES_OR_MOVES_A_MODEL.search(stack) else None
