"""What ``memory info`` and ``cleanup`` show of the machine: NVML's truth for each process."""

from __future__ import annotations

from typing import Any

from robust_train.cli.table import print_table
from robust_train.gpu.inventory import read_inventory
from robust_train.gpu.processes import find_holders, sees_host_pids
from robust_train.memory.host import read_host_memory
from robust_train.values import MIB

COLUMNS = (
    "index",
    "name",
    "used MiB",
    "free MiB",
    "total MiB",
    "pid",
    "user",
    "command",
    "process MiB",
)
_RIGHT = {"index", "used MiB", "free MiB", "total MiB", "pid", "process MiB"}


def read_machine_memory() -> dict[str, Any]:
    """Return GPUs with their processes, and the host's memory; JSON's types, sizes in bytes."""
    inventory = read_inventory()
    holders = find_holders(inventory.gpus)
    gpus = []
    for gpu in inventory.gpus:
        processes = None
        if gpu.processes is not None:
            processes = [
                {
                    "pid": process.pid,
                    "user": holders[process.pid].user if process.pid in holders else None,
                    "command": holders[process.pid].command if process.pid in holders else None,
                    "used_bytes": process.used_bytes,
                    "computes": process.computes,
                }
                for process in gpu.processes
            ]
        gpus.append(
            {
                "index": gpu.index,
                "uuid": gpu.uuid,
                "name": gpu.name,
                "used_bytes": gpu.used_bytes,
                "free_bytes": gpu.free_bytes,
                "total_bytes": gpu.total_bytes,
                "processes": processes,
            }
        )
    host = read_host_memory()
    return {
        "problem": inventory.problem,
        "skipped": [{"index": gpu.index, "reason": gpu.reason} for gpu in inventory.skipped],
        "gpus": gpus,
        "in_container": not sees_host_pids(),
        "host": {"available_bytes": host.available, "total_bytes": host.total},
    }


def print_machine_memory(machine: dict[str, Any]) -> None:
    """Print the same for people."""
    if machine["problem"] is not None:
        print(machine["problem"])
    rows = [row for gpu in machine["gpus"] for row in _rows(gpu)]
    if rows:
        print_table(COLUMNS, rows, _RIGHT)
    for gpu in machine["skipped"]:
        print(f"GPU {gpu['index']} skipped: {gpu['reason']}")
    if rows and machine["in_container"]:
        print("in a container: process ids are those of the driver, mostly the host's")
    host = machine["host"]
    if host["total_bytes"] is not None:
        available, total = host["available_bytes"] // MIB, host["total_bytes"] // MIB
        print(f"host memory: {available} of {total} MiB available")


def _rows(gpu: dict[str, Any]) -> list[list[str]]:
    """A row for each process; the GPU's own figures stand in each, so that a filter keeps them."""
    own = [str(gpu["index"]), gpu["name"]]
    own += [str(gpu[key] // MIB) for key in ("used_bytes", "free_bytes", "total_bytes")]
    if not gpu["processes"]:
        unknown = "?" if gpu["processes"] is None else "-"
        return [[*own, unknown, unknown, unknown, unknown]]
    return [
        [
            *own,
            str(process["pid"]),
            process["user"] or "?",
            (process["command"] or "?") + ("" if process["computes"] else " (draws)"),
            "?" if process["used_bytes"] is None else str(process["used_bytes"] // MIB),
        ]
        for process in gpu["processes"]
    ]
