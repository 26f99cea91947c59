"""``robust-train gpus``: the GPUs of this machine, how full they are and who holds them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from robust_train.cli.parser import Parser
from robust_train.cli.table import print_table
from robust_train.gpu.inventory import read_inventory
from robust_train.gpu.processes import Holder, find_holders
from robust_train.gpu.visible import VARIABLE, Visible, visible_gpus
from robust_train.values import MIB, GpuInfo, GpuProcess, Inventory

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


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; returns the exit code, 0 also where there is no GPU."""
    parser = Parser(
        prog="robust-train gpus",
        description="GPUs of this machine: index, name, UUID, used/free/total MiB, "
        "utilisation, processes and who holds them.",
    )
    parser.add_argument("--json", action="store_true", help="for programs; sizes in bytes")
    arguments = parser.parse_args(argv)
    inventory = read_inventory()
    visible = visible_gpus(inventory, os.environ)
    holders = find_holders(inventory.gpus)
    if arguments.json:
        print(json.dumps(_as_json(inventory, visible, holders), indent=2))
        return 0
    if visible.warning is not None:
        print(f"warning: {visible.warning}", file=sys.stderr)
    if inventory.problem is not None:
        print(inventory.problem)
    elif visible.hidden_on_purpose:
        print(f"{VARIABLE}={os.environ.get(VARIABLE)} hides every GPU from programs started here")
    rows = _rows(inventory, visible, holders)
    if rows:
        _print_rows(rows)
    return 0


def _rows(
    inventory: Inventory, visible: Visible, holders: Mapping[int, Holder]
) -> list[tuple[str, ...]]:
    shown = {gpu.uuid for gpu in visible.gpus}
    rows: list[tuple[str, ...]] = []
    for gpu in inventory.gpus:
        percent = gpu.utilization_percent
        rows.append(
            (
                str(gpu.index),
                gpu.name,
                gpu.uuid,
                str(gpu.used_bytes // MIB),
                str(gpu.free_bytes // MIB),
                str(gpu.total_bytes // MIB),
                "-" if percent is None else f"{percent}%",
                "?" if gpu.processes is None else str(len(gpu.processes)),
                ", ".join(_held_by(process, holders) for process in gpu.processes or ()) or "-",
                "; ".join(_notes(gpu, gpu.uuid in shown)),
            )
        )
    for lost in inventory.skipped:
        uuid = lost.uuid or "-"
        rows.append((str(lost.index), "-", uuid, *["-"] * 6, f"skipped: {lost.reason}"))
    return rows


def _notes(gpu: GpuInfo, is_shown: bool) -> list[str]:
    notes = [] if is_shown else [f"hidden by {VARIABLE}"]
    if gpu.unusable is not None:
        notes.append(gpu.unusable)
    if gpu.unified_memory:
        notes.append("shares the host's memory")
    if gpu.parent_uuid is not None:
        notes.append(f"slice of GPU {gpu.index}")
    return notes


def _held_by(process: GpuProcess, holders: Mapping[int, Holder]) -> str:
    holder = holders.get(process.pid)
    who = f"pid {process.pid}"
    if holder is not None:
        who = f"{holder.user}:{holder.command}({process.pid})"
    size = "" if process.used_bytes is None else f" {process.used_bytes // MIB} MiB"
    return who + size


def _print_rows(rows: Sequence[tuple[str, ...]]) -> None:
    shown = [i for i, name in enumerate(COLUMNS) if name != "note" or any(r[i] for r in rows)]
    print_table([COLUMNS[i] for i in shown], [[row[i] for i in shown] for row in rows], _RIGHT)


def _as_json(
    inventory: Inventory, visible: Visible, holders: Mapping[int, Holder]
) -> dict[str, Any]:
    shown = {gpu.uuid for gpu in visible.gpus}
    gpus = []
    for gpu in inventory.gpus:
        entry = asdict(gpu) | {"visible": gpu.uuid in shown}
        for process in entry["processes"] or ():
            holder = holders.get(process["pid"])
            process["command"] = None if holder is None else holder.command
            process["user"] = None if holder is None else holder.user
        gpus.append(entry)
    return {
        "driver_version": inventory.driver_version,
        "problem": inventory.problem,
        "warning": visible.warning,
        "gpus": gpus,
        "skipped": [asdict(lost) for lost in inventory.skipped],
    }
