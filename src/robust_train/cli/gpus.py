"""``robust-train gpus``: the GPUs of this machine, how full they are and who holds them."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace

from robust_train.cli.machine_memory import gpus_as_json
from robust_train.cli.output import Parser, print_json, print_table
from robust_train.events import Json
from robust_train.gpu.inventory import read_inventory
from robust_train.gpu.visible import VARIABLE, visible_gpus
from robust_train.queue.exclusions import mark_excluded, read_exclusions
from robust_train.queue.queue_dir import directory_for
from robust_train.queue.queue_rules import running
from robust_train.queue.reservations import existing_registry
from robust_train.readable import as_clock, mib
from robust_train.values import MIB

COLUMNS = (
    *("index", "name", "uuid", "used MiB", "free MiB", "total MiB"),
    *("util", "processes", "held by", "note"),
)
_RIGHT = {"index", "used MiB", "free MiB", "total MiB", "util", "processes"}


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; return the exit code, 0 also where there is no GPU."""
    parser = Parser(
        prog="robust-train gpus",
        description="GPUs of this machine: index, name, UUID, used/free/total MiB, "
        "utilisation, processes and who holds them.",
    )
    parser.add_json()
    arguments = parser.parse_args(argv)
    inventory = read_inventory()
    idle: dict[str, int] = {}
    with existing_registry(directory_for(None, os.environ)) as registry:
        if registry is not None:
            excluded = read_exclusions(registry.directory)
            inventory = replace(inventory, gpus=mark_excluded(inventory.gpus, excluded))
            for _, record in running(registry.jobs()):
                idle |= record.idle()
    visible = visible_gpus(inventory, os.environ)
    shown = {gpu.uuid for gpu in visible.gpus}
    gpus = [
        gpu | {"visible": gpu["uuid"] in shown, "idle_seconds": idle.get(gpu["uuid"])}
        for gpu in gpus_as_json(inventory)
    ]
    if arguments.json:
        print_json(
            {
                "driver_version": inventory.driver_version,
                "problem": inventory.problem,
                "warning": visible.warning,
                "gpus": gpus,
                "skipped": [asdict(lost) for lost in inventory.skipped],
            }
        )
        return 0
    if visible.warning is not None:
        print(f"warning: {visible.warning}", file=sys.stderr)
    if inventory.problem is not None:
        print(inventory.problem)
    elif visible.hidden_on_purpose:
        print(f"{VARIABLE}={os.environ.get(VARIABLE)} hides every GPU from programs started here")
    rows = [table_row(gpu) for gpu in gpus]
    for lost in inventory.skipped:
        uuid = lost.uuid or "-"
        rows.append([str(lost.index), "-", uuid, *["-"] * 6, f"skipped: {lost.reason}"])
    if rows:
        count = len(COLUMNS) if any(row[-1] for row in rows) else len(COLUMNS) - 1  # no notes
        print_table(COLUMNS[:count], [row[:count] for row in rows], _RIGHT)
    return 0


def table_row(gpu: dict[str, Json]) -> list[str]:
    percent, processes = gpu["utilization_percent"], gpu["processes"]
    notes = (
        None if gpu["visible"] else f"hidden by {VARIABLE}",
        gpu["unusable"],
        None
        if gpu["idle_seconds"] is None
        else f"idle for {as_clock(gpu['idle_seconds'])} under its job (robust-train queue)",
        "shares the host's memory" if gpu["unified_memory"] else None,
        None if gpu["parent_uuid"] is None else f"slice of GPU {gpu['index']}",
    )
    return [
        str(gpu["index"]),
        gpu["name"],
        gpu["uuid"],
        *(str(gpu[key] // MIB) for key in ("used_bytes", "free_bytes", "total_bytes")),
        "-" if percent is None else f"{percent}%",
        "?" if processes is None else str(len(processes)),
        ", ".join(map(_held_by, processes or ())) or "-",
        "; ".join(note for note in notes if note is not None),
    ]


def _held_by(process: dict[str, Json]) -> str:
    who = f"pid {process['pid']}"
    if process["command"] is not None:
        who = f"{process['user']}:{process['command']}({process['pid']})"
    used = process["used_bytes"]
    return who if used is None else f"{who} {mib(used)}"
