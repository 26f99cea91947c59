"""``robust-train doctor``: for each GPU usable or why not, and how the host's queue stands."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from robust_train.cli.parser import Parser
from robust_train.cli.table import print_table
from robust_train.gpu.inventory import read_inventory
from robust_train.gpu.visible import VARIABLE, visible_gpus
from robust_train.queue import quarantine
from robust_train.queue.queue_dir import QueueProblem, directory_for
from robust_train.queue.reservations import Ledger
from robust_train.values import MIB

COLUMNS = ("index", "uuid", "name", "free MiB", "verdict")
EXIT_TROUBLE = 1
_INITIAL_PID_NAMESPACE = "pid:[4026531836]"


def main(argv: Sequence[str] | None = None) -> int:
    """Print what was found; returns the exit code.

    0: some GPU can be used and so can the queue directory, or the machine has no GPU. 1: otherwise,
    or the driver hangs, or there was nothing to clear.
    """
    parser = Parser(
        prog="robust-train doctor",
        description="For each GPU usable or why not; driver, mask, queue directory, GPUs avoided.",
    )
    parser.add_argument("--json", action="store_true", help="for programs; sizes in bytes")
    parser.add_argument("--dir", help="the queue directory, as gpu_queue_dir")
    parser.add_argument("--clear", metavar="GPU", help="stop avoiding the GPU with this UUID")
    arguments = parser.parse_args(argv)
    path = directory_for(arguments.dir, os.environ)
    ledger: Ledger | None = None
    problem: str | None = None
    try:
        ledger = Ledger(path)
    except QueueProblem as found:
        problem = str(found)
    try:
        if arguments.clear is not None:
            return _clear(ledger, arguments.clear)
        report = _examine(path, ledger, problem)
    finally:
        if ledger is not None:
            ledger.close()
    if arguments.json:
        print(json.dumps(report, indent=2))
    else:
        _print(report)
    has_gpus = bool(report["gpus"])
    can_be_used = problem is None and any(gpu["usable"] for gpu in report["gpus"])
    fine = report["driver_answers"] and (not has_gpus or can_be_used)
    return 0 if fine else EXIT_TROUBLE


def _clear(ledger: Ledger | None, uuid: str) -> int:
    if ledger is not None and quarantine.clear(ledger.directory, uuid):
        print(f"{uuid} is no longer avoided")
        return 0
    print(
        f"robust-train doctor --clear {uuid}: nothing of yours stands against it", file=sys.stderr
    )
    return EXIT_TROUBLE


def _examine(path: Path, ledger: Ledger | None, problem: str | None) -> dict[str, Any]:
    inventory = read_inventory(processes=False)
    visible = visible_gpus(inventory, os.environ)
    sick = [] if ledger is None else quarantine.read_sick(ledger.directory)
    shown = {gpu.uuid for gpu in visible.gpus}
    gpus: list[dict[str, Any]] = []
    for gpu in quarantine.without_sick(inventory.gpus, sick):
        why = gpu.unusable or (None if gpu.uuid in shown else f"hidden by {VARIABLE}")
        gpus.append(
            {
                "index": gpu.index,
                "uuid": gpu.uuid,
                "name": gpu.name,
                "free_bytes": gpu.free_bytes,
                "usable": why is None,
                "why_not": why,
            }
        )
    gpus += [
        {
            "index": lost.index,
            "uuid": lost.uuid,
            "name": None,
            "free_bytes": None,
            "usable": False,
            "why_not": lost.reason,
        }
        for lost in inventory.skipped
    ]
    return {
        "driver_version": inventory.driver_version,
        "driver_answers": inventory.answered,
        "problem": inventory.problem,
        "mask": os.environ.get(VARIABLE),
        "mask_warning": visible.warning,
        "gpus": gpus,
        "queue": {
            "directory": str(path),
            "problem": problem,
            "file_system": None if ledger is None else ledger.directory.file_system,
            "jobs": None if ledger is None else len(ledger.entries()),
            "lock_held_by": None if ledger is None else ledger.who_decides(),
            "in_container": _in_container(),
        },
        "avoided": [asdict(item) for item in sick],
    }


def _print(report: dict[str, Any]) -> None:
    queue = report["queue"]
    print(f"driver: {report['driver_version'] or 'none'}")
    if report["problem"]:
        print(report["problem"])
    mask = report["mask"]
    print(f"{VARIABLE}: {'not set' if mask is None else repr(mask)}")
    if report["mask_warning"]:
        print(f"warning: {report['mask_warning']}")
    if report["gpus"]:
        rows = [
            [
                str(gpu["index"]),
                gpu["uuid"] or "-",
                gpu["name"] or "-",
                "-" if gpu["free_bytes"] is None else str(gpu["free_bytes"] // MIB),
                "usable" if gpu["usable"] else gpu["why_not"],
            ]
            for gpu in report["gpus"]
        ]
        print_table(COLUMNS, rows, {"index", "free MiB"})
    if queue["problem"]:
        print(queue["problem"])
    else:
        print(f"queue: {queue['directory']} on {queue['file_system']}, {queue['jobs']} jobs")
    if queue["lock_held_by"]:
        print(f"queue: its lock is held by {queue['lock_held_by']}")
    if queue["in_container"]:
        print(
            "queue: in a container, jobs of the host and of other containers are seen only where "
            "they share this directory (mount it, or set gpu_queue_dir)"
        )


def _in_container() -> bool:
    try:
        return os.readlink("/proc/self/ns/pid") != _INITIAL_PID_NAMESPACE
    except OSError:
        return False
