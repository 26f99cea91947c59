"""``robust-train doctor``: each GPU usable or why not, the host's queue, facts for a bug report."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from robust_train.cli.parser import Parser
from robust_train.cli.table import print_table
from robust_train.gpu.cuda_order import CudaOrderError, cuda_order
from robust_train.gpu.inventory import read_inventory
from robust_train.gpu.processes import sees_host_pids, user_name
from robust_train.gpu.visible import VARIABLE, visible_gpus
from robust_train.memory.host import read_host_memory
from robust_train.queue.exclusions import Exclusion, clear, mark_excluded, read_exclusions
from robust_train.queue.queue_dir import QueueProblem, directory_for, tmpfiles_line
from robust_train.queue.reservations import JobRegistry
from robust_train.readable import mib
from robust_train.values import GpuInfo, Inventory

COLUMNS = ("index", "uuid", "name", "mode", "free MiB", "verdict")
EXIT_TROUBLE = 1
_CONTAINER_MARKS = (Path("/.dockerenv"), Path("/run/.containerenv"))
_PACKAGES = ("robust-train", "torch", "nvidia-ml-py", "psutil")


def main(argv: Sequence[str] | None = None) -> int:
    """Print what was found; return the exit code.

    0: some GPU can be used and so can the queue directory, and no probe failed. 1: otherwise, or
    there was nothing to clear.
    """
    parser = Parser(
        prog="robust-train doctor",
        description="For each GPU usable or why not; driver, mask, queue directory, excluded GPUs, "
        "and what a bug report needs.",
    )
    parser.add_argument("--json", action="store_true", help="for programs; sizes in bytes")
    parser.add_argument("--dir", help="the queue directory, as gpu_queue_dir")
    parser.add_argument("--clear", metavar="GPU", help="use the excluded GPU with this UUID again")
    parser.add_argument(
        "--probe",
        action="store_true",
        help="use each free GPU for some seconds: allocate, run out of memory, recover",
    )
    arguments = parser.parse_args(argv)
    path = directory_for(arguments.dir, os.environ)
    registry: JobRegistry | None = None
    problem: str | None = None
    try:
        registry = JobRegistry(path)
    except QueueProblem as found:
        problem = str(found)
    try:
        if arguments.clear is not None:
            return _clear(registry, arguments.clear)
        inventory = read_inventory(processes=False)
        excluded = [] if registry is None else read_exclusions(registry.directory)
        usable, gpus = _gpus(inventory, excluded)
        report = {
            **_facts(inventory),
            "gpus": gpus,
            "queue": _queue(path, registry, problem),
            "avoided": [asdict(item) for item in excluded],
        }
    finally:
        if registry is not None:
            registry.close()
    if arguments.probe:
        report["probes"] = _probe(usable, path if problem is None else None)
    if arguments.json:
        print(json.dumps(report, indent=2))
    else:
        _print(report)
    passed = all(result["passed"] for result in report.get("probes", ()))
    return 0 if usable and problem is None and passed else EXIT_TROUBLE


def _clear(registry: JobRegistry | None, uuid: str) -> int:
    if registry is not None and clear(registry.directory, uuid):
        print(f"{uuid} is no longer excluded")
        return 0
    print(f"robust-train doctor --clear {uuid}: you have not excluded it", file=sys.stderr)
    return EXIT_TROUBLE


def _facts(inventory: Inventory) -> dict[str, Any]:
    """Return what a bug report from this machine needs; torch is not imported."""
    host = read_host_memory()
    visible = visible_gpus(inventory, os.environ)
    return {
        "driver_version": inventory.driver_version,
        "driver_answers": inventory.answered,
        "problem": inventory.problem,
        "mask": os.environ.get(VARIABLE),
        "mask_warning": visible.warning,
        "packages": {name: _version(name) for name in _PACKAGES},
        "python": platform.python_version(),
        "kernel": platform.release(),
        "wsl": "microsoft" in platform.release().lower(),
        "container": _in_container(),
        "host_memory_limit_bytes": host.total,
        "cpus": len(os.sched_getaffinity(0)),
        "cuda_order": _cuda_order(inventory),
    }


def _gpus(
    inventory: Inventory, excluded: Sequence[Exclusion]
) -> tuple[list[GpuInfo], list[dict[str, Any]]]:
    """Return the usable GPUs, and how each GPU stands."""
    shown = {gpu.uuid for gpu in visible_gpus(inventory, os.environ).gpus}
    usable, rows = [], []
    for gpu in mark_excluded(inventory.gpus, excluded):
        why = gpu.unusable or (None if gpu.uuid in shown else f"hidden by {VARIABLE}")
        if why is None:
            usable.append(gpu)
        rows.append(
            {
                "index": gpu.index,
                "uuid": gpu.uuid,
                "name": gpu.name,
                "compute_mode": gpu.compute_mode,
                "mps": gpu.mps,
                "free_bytes": gpu.free_bytes,
                "usable": why is None,
                "why_not": why,
            }
        )
    for lost in inventory.skipped:
        unknown = dict.fromkeys(("name", "compute_mode", "mps", "free_bytes"))
        row = {"index": lost.index, "uuid": lost.uuid, **unknown}
        rows.append({**row, "usable": False, "why_not": lost.reason})
    return usable, rows


def _queue(path: Path, registry: JobRegistry | None, problem: str | None) -> dict[str, Any]:
    owner = 0 if registry is None else registry.directory.owner
    return {
        "directory": str(path),
        "problem": problem,
        "file_system": None if registry is None else registry.directory.file_system,
        "jobs": None if registry is None else len(registry.jobs()),
        "unreadable": []
        if registry is None
        else [
            {"id": job.id, "owner": user_name(job.owner)}
            for job in registry.jobs()
            if job.record is None
        ],
        "lock_held_by": None if registry is None else registry.lock_holder(),
        "owner": None if registry is None else user_name(owner),
        "tmpfiles_line": tmpfiles_line(path) if owner else None,
        "in_container": not sees_host_pids(),
    }


def _probe(gpus: Sequence[GpuInfo], queue_directory: Path | None) -> list[dict[str, Any]]:
    from robust_train.cli.gpu_probe import probe

    results = []
    for gpu in gpus:
        print(f"probing GPU {gpu.index} …", file=sys.stderr)
        passed, text = probe(gpu, queue_directory)
        results.append({"index": gpu.index, "uuid": gpu.uuid, "passed": passed, "result": text})
    return results


def _print(report: dict[str, Any]) -> None:
    packages = ", ".join(f"{name} {version or '-'}" for name, version in report["packages"].items())
    print(f"driver: {report['driver_version'] or 'none'}")
    if report["problem"]:
        print(report["problem"])
    print(f"packages: {packages}, Python {report['python']}")
    limit = report["host_memory_limit_bytes"]
    print(
        f"host: Linux {report['kernel']}{' (WSL)' if report['wsl'] else ''}, "
        f"{'container' if report['container'] else 'no container'}, {report['cpus']} CPUs, "
        f"{'?' if limit is None else mib(limit)} of memory (machine or cgroup)"
    )
    mask = report["mask"]
    print(f"{VARIABLE}: {'not set' if mask is None else repr(mask)}")
    if report["mask_warning"]:
        print(f"warning: {report['mask_warning']}")
    if report["cuda_order"]:
        print(f"CUDA's order of the GPUs: {report['cuda_order']}")
    if report["gpus"]:
        print_table(COLUMNS, [_row(gpu) for gpu in report["gpus"]], {"index", "free MiB"})
    for result in report.get("probes", ()):
        print(f"probe of GPU {result['index']}: {result['result']}")
    _print_queue(report["queue"])


def _print_queue(queue: dict[str, Any]) -> None:
    if queue["problem"]:
        print(queue["problem"])
    else:
        print(f"queue: {queue['directory']} on {queue['file_system']}, {queue['jobs']} jobs")
    for job in queue["unreadable"]:
        print(f"queue: the record of job {job['id']} of {job['owner']} cannot be read")
    if queue["lock_held_by"]:
        print(f"queue: its lock is held by {queue['lock_held_by']}")
    if queue["tmpfiles_line"]:
        print(
            f"queue: {queue['directory']} belongs to {queue['owner']}, who could remove others' "
            "reservations. This line in /etc/tmpfiles.d/robust-train.conf gives it to root from "
            f"the next boot on:\n  {queue['tmpfiles_line']}"
        )
    if queue["in_container"]:
        print(
            "queue: in a container, jobs of the host and of other containers are seen only where "
            "they share this directory (mount it, or set gpu_queue_dir)"
        )


def _row(gpu: dict[str, Any]) -> list[str]:
    mode = gpu["compute_mode"] or "-"
    return [
        str(gpu["index"]),
        gpu["uuid"] or "-",
        gpu["name"] or "-",
        f"{mode}, MPS" if gpu["mps"] else mode,
        "-" if gpu["free_bytes"] is None else str(gpu["free_bytes"] // 1024**2),
        "usable" if gpu["usable"] else gpu["why_not"],
    ]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _in_container() -> bool:
    return not sees_host_pids() or any(mark.exists() for mark in _CONTAINER_MARKS)


def _cuda_order(inventory: Inventory) -> str | None:
    """Return how CUDA's default order compares with NVML's, which is that of the PCI addresses."""
    if not inventory.gpus:
        return None
    environ = {name: value for name, value in os.environ.items() if name != "CUDA_DEVICE_ORDER"}
    try:
        uuids = cuda_order(environ)
    except CudaOrderError as error:
        return f"unknown ({error})"
    known = {gpu.uuid.partition("-")[2]: gpu.index for gpu in inventory.gpus}
    order = [known.get(uuid) for uuid in uuids]
    if order == sorted(known.values()):
        return "as NVML's"
    numbers = ", ".join("?" if index is None else str(index) for index in order)
    return f"NVML's GPUs {numbers} (set CUDA_DEVICE_ORDER=PCI_BUS_ID to have them in NVML's order)"
