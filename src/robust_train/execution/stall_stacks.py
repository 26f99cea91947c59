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
from collections.abc import Iterator
from pathlib import Path

import psutil

from robust_train.execution.flight_recorder import request_dumps
from robust_train.execution.request import AttemptRequest
from robust_train.execution.stall_watch import STOPPED, trainers_processes
from robust_train.gpu.bounded import printed_by
from robust_train.readable import shortened

_MOST_PROCESSES = 64
_ONE_SECONDS, _ALL_SECONDS = 3.0, 10.0
_OWN_STACKS_SECONDS = 1.0
_OF_A_RANK_SECONDS = 0.5
_DUMP_SECONDS = 5.0


def dump_stacks(request: AttemptRequest, server: int) -> float:
    """Write what all but our own processes do; return the seconds that these need for theirs."""
    dumps = request_dumps(request.run_dir, request.attempt)
    spy = shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))
    until = time.monotonic() + _ALL_SECONDS
    sections = []
    for process in _processes(request, server)[:_MOST_PROCESSES]:
        with contextlib.suppress(psutil.Error):
            section = f"process {process.pid} ({_about(process)})"
            if spy is not None and time.monotonic() < until:
                section += "".join(f"\n{line}" for line in _threads(spy, process))
            sections.append(section + "\n\n")
    with contextlib.suppress(OSError), request.stacks_file.open("a") as file:
        file.write("".join(sections))
    has_ranks = request.world_size > 1
    own = _OWN_STACKS_SECONDS + _OF_A_RANK_SECONDS * (request.ranks if has_ranks else 0)
    return max(own, _DUMP_SECONDS if dumps else 0.0)


def _processes(request: AttemptRequest, server: int) -> list[psutil.Process]:
    """Return the processes that do not answer the signal."""
    found = trainers_processes(server, request)
    if request.runs_script:
        return found
    parents, left = {server}, []
    with contextlib.suppress(psutil.Error):
        if request.world_size > 1:
            parents = {child.pid for child in psutil.Process(server).children()}
    for one in found:
        with contextlib.suppress(psutil.Error):
            if one.ppid() not in parents or one.status() in STOPPED:
                left.append(one)
    return left


def _about(process: psutil.Process) -> str:
    command = shlex.join(process.cmdline()) or process.name()
    return f"{shortened(command, 100)}, {process.status()}"


def _threads(spy: str, process: psutil.Process) -> Iterator[str]:
    """Yield a process's threads as faulthandler writes them; none where py-spy finds none."""
    # one that is stopped cannot be paused
    pause = ("--nonblocking",) if process.status() in STOPPED else ()
    printed = printed_by((spy, "dump", "--json", *pause, "--pid", str(process.pid)), _ONE_SECONDS)
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
