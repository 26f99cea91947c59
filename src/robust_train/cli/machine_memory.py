"""The machine's GPUs and what NVML shows of each process, for several commands."""

from __future__ import annotations

from dataclasses import asdict

from robust_train.cli.output import print_table
from robust_train.events import Json
from robust_train.gpu.inventory import read_inventory
from robust_train.gpu.processes import find_holders, sees_host_pids
from robust_train.memory.host import read_host_memory
from robust_train.values import MIB, Inventory

COLUMNS = (
    *("index", "name", "used MiB", "free MiB", "total MiB"),
    *("pid", "user", "command", "process MiB"),
)
_RIGHT = {"index", "used MiB", "free MiB", "total MiB", "pid", "process MiB"}


def gpus_as_json(inventory: Inventory) -> list[dict[str, Json]]:
    """Return the GPUs in JSON's types, each process with its user and command where known."""
    holders = find_holders(inventory.gpus)
    gpus = [asdict(gpu) for gpu in inventory.gpus]
    for process in (process for gpu in gpus for process in gpu["processes"] or ()):
        holder = holders.get(process["pid"])
        process["command"] = None if holder is None else holder.command
        process["user"] = None if holder is None else holder.user
    return gpus


def read_machine_memory() -> dict[str, Json]:
    """Return GPUs with their processes, and the host's memory; JSON's types, sizes in bytes."""
    inventory, host = read_inventory(), read_host_memory()
    return {
        "problem": inventory.problem,
        "skipped": [asdict(gpu) for gpu in inventory.skipped],
        "gpus": gpus_as_json(inventory),
        "in_container": not sees_host_pids(),
        "host": {"available_bytes": host.available, "total_bytes": host.total},
    }


def print_machine_memory(machine: dict[str, Json]) -> None:
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


def _rows(gpu: dict[str, Json]) -> list[list[str]]:
    """Return a row for each process, with the GPU's own figures, so that a filter keeps them."""
    sizes = [str(gpu[key] // MIB) for key in ("used_bytes", "free_bytes", "total_bytes")]
    own = [str(gpu["index"]), gpu["name"], *sizes]
    if not gpu["processes"]:
        return [[*own, *["?" if gpu["processes"] is None else "-"] * 4]]
    rows = []
    for process in gpu["processes"]:
        command = (process["command"] or "?") + ("" if process["computes"] else " (draws)")
        size = "?" if process["used_bytes"] is None else str(process["used_bytes"] // MIB)
        rows.append([*own, str(process["pid"]), process["user"] or "?", command, size])
    return rows
