"""``robust-train gpus``, and the memory of the machine that other commands show as well."""

from __future__ import annotations

import os
from argparse import Namespace
from dataclasses import asdict, replace

from robust_train.cli.command import Answer, Table
from robust_train.gpu.inventory import read_inventory
from robust_train.gpu.processes import find_holders, sees_host_pids
from robust_train.gpu.visible import VARIABLE, visible_gpus
from robust_train.host.memory import read_host_memory
from robust_train.model.events import Json
from robust_train.model.gpu import Inventory
from robust_train.queue.queue_dir import directory_for, mark_excluded
from robust_train.queue.registry import existing_registry
from robust_train.readable import MIB, as_clock, mib

COLUMNS = (
    "index",
    "name",
    "uuid",
    "used MiB",
    "free MiB",
    "total MiB",
    "util",
    "processes",
    "held by",
    "note",
)
_RIGHT = {"index", "used MiB", "free MiB", "total MiB", "util", "processes"}
_OF_PROCESSES = (
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
_RIGHT_OF_PROCESSES = {
    "index",
    "used MiB",
    "free MiB",
    "total MiB",
    "pid",
    "process MiB",
}
_SIZES = ("used_bytes", "free_bytes", "total_bytes")


def gpus(arguments: Namespace) -> Answer:
    """Show a row for each GPU."""
    inventory = read_inventory()
    idle: dict[str, int] = {}
    with existing_registry(directory_for(None, os.environ)) as registry:
        if registry is not None:
            excluded = registry.exclusions()
            inventory = replace(inventory, gpus=mark_excluded(inventory.gpus, excluded))
            for job in registry.jobs():
                idle |= job.idle()
    visible = visible_gpus(inventory, os.environ)
    shown = {gpu.uuid for gpu in visible.gpus}
    found = [
        gpu | {"visible": gpu["uuid"] in shown, "idle_seconds": idle.get(gpu["uuid"])}
        for gpu in _as_json(inventory)
    ]
    data: dict[str, Json] = {
        "driver_version": inventory.driver_version,
        "problem": inventory.problem,
        "warning": visible.warning,
        "gpus": found,
        "skipped": [asdict(lost) for lost in inventory.skipped],
    }
    parts: list[str | Table] = []
    if inventory.problem is not None:
        parts.append(inventory.problem)
    elif visible.hidden_on_purpose:
        mask = os.environ.get(VARIABLE)
        parts.append(f"{VARIABLE}={mask} hides every GPU from programs started here")
    rows = [table_row(gpu) for gpu in found]
    for lost in inventory.skipped:
        unknown = ["-"] * 6
        rows.append(
            [
                str(lost.index),
                "-",
                lost.uuid or "-",
                *unknown,
                f"skipped: {lost.reason}",
            ]
        )
    if rows:
        has_notes = any(row[-1] for row in rows)
        count = len(COLUMNS) if has_notes else len(COLUMNS) - 1
        parts.append(Table(COLUMNS[:count], [row[:count] for row in rows], _RIGHT))
    return Answer(data, parts, [] if visible.warning is None else [visible.warning])


def _as_json(inventory: Inventory) -> list[dict[str, Json]]:
    """Return the GPUs in JSON's types, each process with its user and command if known."""
    holders = find_holders(inventory.gpus)
    found = [asdict(gpu) for gpu in inventory.gpus]
    for process in (process for gpu in found for process in gpu["processes"] or ()):
        holder = holders.get(process["pid"])
        process["command"] = None if holder is None else holder.command
        process["user"] = None if holder is None else holder.user
    return found


def table_row(gpu: dict[str, Json]) -> list[str]:
    percent, processes = gpu["utilization_percent"], gpu["processes"]
    return [
        str(gpu["index"]),
        gpu["name"],
        gpu["uuid"],
        *(str(gpu[size] // MIB) for size in _SIZES),
        "-" if percent is None else f"{percent}%",
        "?" if processes is None else str(len(processes)),
        ", ".join(map(_held_by, processes or ())) or "-",
        "; ".join(_notes(gpu)),
    ]


def _notes(gpu: dict[str, Json]) -> list[str]:
    notes = []
    if not gpu["visible"]:
        notes.append(f"hidden by {VARIABLE}")
    if gpu["unusable"] is not None:
        notes.append(gpu["unusable"])
    if gpu["idle_seconds"] is not None:
        idle = as_clock(gpu["idle_seconds"])
        notes.append(f"idle for {idle} under its job (robust-train queue)")
    if gpu["unified_memory"]:
        notes.append("shares the host's memory")
    if gpu["parent_uuid"] is not None:
        notes.append(f"slice of GPU {gpu['index']}")
    return notes


def _held_by(process: dict[str, Json]) -> str:
    who = f"pid {process['pid']}"
    if process["command"] is not None:
        who = f"{process['user']}:{process['command']}({process['pid']})"
    used = process["used_bytes"]
    return who if used is None else f"{who} {mib(used)}"


def machine_memory() -> Answer:
    """Return a row for each process on a GPU as NVML reports it, and the host's memory."""
    inventory, host = read_inventory(), read_host_memory()
    data: dict[str, Json] = {
        "problem": inventory.problem,
        "skipped": [asdict(gpu) for gpu in inventory.skipped],
        "gpus": _as_json(inventory),
        "in_container": not sees_host_pids(),
        "host": {"available_bytes": host.available, "total_bytes": host.total},
    }
    parts: list[str | Table] = []
    if inventory.problem is not None:
        parts.append(inventory.problem)
    rows = [row for gpu in data["gpus"] for row in _process_rows(gpu)]
    if rows:
        parts.append(Table(_OF_PROCESSES, rows, _RIGHT_OF_PROCESSES))
    parts += [f"GPU {gpu.index} skipped: {gpu.reason}" for gpu in inventory.skipped]
    if rows and data["in_container"]:
        parts.append(
            "in a container: process ids are those of the driver, mostly the host's"
        )
    if host.total is not None and host.available is not None:
        parts.append(
            f"host memory: {host.available // MIB} of {host.total // MIB} MiB available"
        )
    return Answer(data, parts)


def _process_rows(gpu: dict[str, Json]) -> list[list[str]]:
    """Return a row for each process, with the GPU's own figures, so that a filter keeps them."""
    own = [str(gpu["index"]), gpu["name"], *(str(gpu[size] // MIB) for size in _SIZES)]
    if not gpu["processes"]:
        unknown = "?" if gpu["processes"] is None else "-"
        return [[*own, *[unknown] * 4]]
    rows = []
    for process in gpu["processes"]:
        command = (process["command"] or "?") + (
            "" if process["computes"] else " (draws)"
        )
        size = (
            "?" if process["used_bytes"] is None else str(process["used_bytes"] // MIB)
        )
        rows.append([*own, str(process["pid"]), process["user"] or "?", command, size])
    return rows
