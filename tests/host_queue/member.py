"""A light launcher for tests: stands in the host's line, holds a GPU with a child, and obeys.

Run as ``python member.py NEED_MIB [key=value …]``; it prints one JSON object a line: ``waiting``
with the sentence of each status, ``granted`` with the GPUs and the child's pid, ``refused``. A line
on its standard input makes it act: ``move UUID…``, ``rejoin``,
``open``, ``end``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from robust_train.gpu.inventory import read_inventory
from robust_train.gpu.visible import Visible, visible_gpus
from robust_train.queue.host_queue import GpuRequest, HostQueue
from robust_train.queue.queue_dir import directory_for
from robust_train.queue.waiting import NoGpu, WaitStatus, wait_for_gpus
from robust_train.readable import MIB


def say(event: str, **fields: Any) -> None:
    print(json.dumps({"event": event, **fields}), flush=True)


def look(processes: bool) -> Visible:
    return visible_gpus(read_inventory(processes=processes), os.environ)


def main() -> None:
    need = int(sys.argv[1]) * MIB
    options = dict(argument.split("=", 1) for argument in sys.argv[2:])
    queue = HostQueue(
        directory_for(None, os.environ),
        name=options.get("name", "test"),
        run_dir=str(Path.cwd()),
        jobs_per_device=int(options.get("per_device", 1)),
        read=look,
    )
    request = GpuRequest(
        need,
        wait=options.get("wait", "yes") == "yes",
        timeout_seconds=float(options.get("timeout", 300)),
        interval_seconds=float(options.get("interval", 600)),
        only=frozenset(filter(None, [options.get("only")])),
        count=int(options.get("count", 1)),
    )

    def announce(status: WaitStatus) -> None:
        say("waiting", sentence=status.sentence(), position=status.position)

    def get() -> bool:
        found = wait_for_gpus(queue, request, announce, time.sleep)
        if isinstance(found, NoGpu):
            say("refused", reason=found.reason)
            return False
        child = subprocess.Popen(["sleep", "1000"], pass_fds=queue.hold, stdout=subprocess.DEVNULL)
        children.append(child)
        uuids = [gpu.uuid for gpu in found]
        free = min(gpu.free_bytes for gpu in found) // MIB
        say("granted", gpu=uuids[0], gpus=uuids, free=free, child=child.pid)
        return True

    children: list[subprocess.Popen[bytes]] = []
    if not get():
        return
    for line in sys.stdin:
        command, *arguments = line.split()
        if command == "move":
            say("moved", done=queue.take(arguments, need))
        elif command == "open":
            say("open", gpus={gpu.uuid: gpu.free_bytes // MIB for gpu in queue.open_gpus()})
        elif command == "rejoin":
            _end(children)
            get()
        elif command == "end":
            break
    _end(children)
    queue.release()
    say("ended")


def _end(children: list[subprocess.Popen[bytes]]) -> None:
    while children:
        child = children.pop()
        child.kill()
        child.wait()


if __name__ == "__main__":
    main()
