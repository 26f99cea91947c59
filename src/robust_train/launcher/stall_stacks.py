"""What the processes of an attempt that hangs are doing, written before they are killed.

Our own Python processes answer a signal by faulthandler; of others py-spy knows the stacks, where
it is installed and may trace them.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from robust_train.config.request import AttemptRequest
from robust_train.gpu.bounded import printed_by
from robust_train.host.signals import DUMP_STACKS
from robust_train.launcher.flight_recorder import request_dumps
from robust_train.launcher.interpreters import Interpreter, Interpreters
from robust_train.launcher.stall_watch import STOPPED, trainers_processes
from robust_train.readable import shortened

_MOST_PROCESSES = 64
_ONE_SECONDS, _ALL_SECONDS = 3.0, 10.0
_OWN_STACKS_SECONDS = 1.0
_OF_A_RANK_SECONDS = 0.3
_DUMP_SECONDS = 5.0


def dump_stacks(
    request: AttemptRequest,
    interpreters: Interpreters,
    processes: Sequence[Interpreter],
) -> float:
    """Write what the processes of an attempt do; return the seconds that they need for theirs."""
    dumps = request_dumps(request.run_dir, request.attempt)
    spy = shutil.which("py-spy") or shutil.which(
        "py-spy", path=str(Path(sys.executable).parent)
    )
    until = time.monotonic() + _ALL_SECONDS
    sections = []
    own = [one.pid for one in processes]
    for process in _silent_processes(request, own)[:_MOST_PROCESSES]:
        with contextlib.suppress(psutil.Error):
            section = f"process {process.pid} ({_about(process)})"
            if spy is not None and time.monotonic() < until:
                section += "".join(f"\n{line}" for line in _threads(spy, process))
            sections.append(section + "\n\n")
    with contextlib.suppress(OSError), request.stacks_file.open("a") as file:
        file.write("".join(sections))
    if not request.runs_script:
        for rank, one in enumerate(processes):
            if one.ended is None:
                _have_it_write(request, interpreters, rank, one)
    return max(_OWN_STACKS_SECONDS, _DUMP_SECONDS if dumps else 0.0)


def _have_it_write(
    request: AttemptRequest, interpreters: Interpreters, rank: int, one: Interpreter
) -> None:
    """Have an interpreter write its stacks; several write into one file, one after the other."""
    if request.ranks == 1:
        interpreters.signal(one, DUMP_STACKS)
        return
    with contextlib.suppress(OSError, psutil.Error):
        heading = (
            f"rank {rank} (process {one.pid}, {psutil.Process(one.pid).status()})\n"
        )
        with request.stacks_file.open("a") as file:
            file.write(heading)
        size = request.stacks_file.stat().st_size
        interpreters.signal(one, DUMP_STACKS)
        until = time.monotonic() + _OF_A_RANK_SECONDS
        # a stopped one writes nothing
        while request.stacks_file.stat().st_size == size and time.monotonic() < until:
            time.sleep(_OF_A_RANK_SECONDS / 10)
        time.sleep(_OF_A_RANK_SECONDS / 10)


def _silent_processes(
    request: AttemptRequest, own: Sequence[int]
) -> list[psutil.Process]:
    """Return the processes that do not answer the signal."""
    found = trainers_processes(own, request)
    if request.runs_script:
        return found
    left = []
    for one in found:
        with contextlib.suppress(psutil.Error):
            if one.pid not in own or one.status() in STOPPED:
                left.append(one)
    return left


def _about(process: psutil.Process) -> str:
    command = shlex.join(process.cmdline()) or process.name()
    return f"{shortened(command, 100)}, {process.status()}"


def _threads(spy: str, process: psutil.Process) -> Iterator[str]:
    """Yield a process's threads as faulthandler writes them; none if py-spy finds none."""
    # one that is stopped cannot be paused
    pause = ("--nonblocking",) if process.status() in STOPPED else ()
    printed = printed_by(
        (spy, "dump", "--json", *pause, "--pid", str(process.pid)), _ONE_SECONDS
    )
    try:
        threads = json.loads(printed or b"[]")
        for thread in threads:
            is_main = thread["os_thread_id"] == process.pid
            name = "MainThread" if is_main else thread["thread_name"]
            yield f"Thread {thread['os_thread_id']} {name} (most recent call first):"
            for frame in thread["frames"]:
                yield f'  File "{frame["filename"]}", line {frame["line"]} in {frame["name"]}'
    except (ValueError, TypeError, KeyError):
        return
