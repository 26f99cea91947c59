"""``robust-train doctor``: each GPU usable or why not, the host's queue, facts for a bug report."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from robust_train.cli.command import Answer, Table
from robust_train.compat import torch_cuda_version
from robust_train.config.schema import RobustConfig
from robust_train.gpu.cuda_order import CudaOrderError, cuda_order
from robust_train.gpu.inventory import read_inventory
from robust_train.gpu.processes import sees_host_pids, user_name
from robust_train.gpu.visible import VARIABLE, visible_gpus
from robust_train.host.memory import cgroup_rooms, read_host_memory
from robust_train.model.errors import EXIT_FAILED
from robust_train.model.events import Json
from robust_train.model.gpu import GpuInfo, Inventory
from robust_train.queue.queue_dir import (
    Exclusion,
    QueueProblem,
    directory_for,
    mark_excluded,
    tmpfiles_line,
)
from robust_train.queue.registry import QueuedJob, Registry
from robust_train.readable import MIB, mib

_CONTAINER_MARKS = (Path("/.dockerenv"), Path("/run/.containerenv"))
_DEFAULT_MB = RobustConfig.min_gpu_memory_mb
_NOT_A_FACT = ("driver_answers", "gpus", "queue", "avoided", "probes")
_TITLES = {
    "driver_version": "driver",
    "mask": VARIABLE,
    "torch_cuda": "torch's CUDA",
    "wsl": "WSL",
    "cpus": "CPUs",
    "cuda_order": "CUDA's order of the GPUs",
}
_PACKAGES = ("robust-train", "torch", "nvidia-ml-py", "psutil")


def doctor(arguments: Namespace) -> Answer:
    """Describe GPUs, driver and queue, or clear an excluded GPU.

    The exit code is 0 if some GPU and the queue directory can be used, and no probe failed.
    """
    path = directory_for(arguments.dir, os.environ)
    registry: Registry | None = None
    problem: str | None = None
    try:
        registry = Registry(path)
    except QueueProblem as error:
        problem = str(error)
    try:
        if arguments.clear is not None:
            return _clear(registry, arguments.clear)
        inventory = read_inventory(processes=False)
        excluded = [] if registry is None else registry.exclusions()
        usable, gpus = _gpus(
            inventory, excluded, [] if registry is None else registry.jobs()
        )
        data = {
            **_facts(inventory),
            "gpus": gpus,
            "queue": _queue(path, registry, problem),
            "avoided": [asdict(item) for item in excluded],
        }
    finally:
        if registry is not None:
            registry.close()
    if arguments.probe:
        data["probes"] = _probe(usable, path if problem is None else None)
    passed = all(result["passed"] for result in data.get("probes", ()))
    is_fine = bool(usable) and problem is None and passed
    return Answer(data, _shown(data), exit_code=0 if is_fine else EXIT_FAILED)


def _clear(registry: Registry | None, uuid: str) -> Answer:
    """Use an excluded GPU again."""
    if registry is None or not registry.clear(uuid):
        return Answer(error=f"--clear {uuid}: you have not excluded this GPU")
    return Answer({"cleared": uuid}, [f"{uuid} is no longer excluded"])


def _facts(inventory: Inventory) -> dict[str, Json]:
    """Return what a bug report from this machine needs; torch is not imported."""
    visible, kernel = visible_gpus(inventory, os.environ), platform.release()
    return {
        "driver_version": inventory.driver_version,
        "driver_answers": inventory.answered,
        "problem": inventory.problem,
        "mask": os.environ.get(VARIABLE),
        "mask_warning": visible.warning,
        "packages": {name: _version(name) for name in _PACKAGES},
        "torch_cuda": torch_cuda_version(),
        "python": platform.python_version(),
        "kernel": kernel,
        "wsl": "microsoft" in kernel.lower(),
        "container": not sees_host_pids()
        or any(mark.exists() for mark in _CONTAINER_MARKS),
        "host_memory_limit_bytes": read_host_memory().total,
        "cgroup_limit_bytes": min((limit for limit, _ in cgroup_rooms()), default=None),
        "cpus": len(os.sched_getaffinity(0)),
        "cuda_order": _cuda_order(inventory),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cuda_order(inventory: Inventory) -> str | None:
    """Return how CUDA's default order compares with NVML's, which is that of the PCI addresses."""
    if not inventory.gpus:
        return None
    if any(gpu.parent_uuid for gpu in inventory.gpus):
        return "one MIG slice, whatever there is: slices do not count for num_gpus"
    environ = {
        name: value for name, value in os.environ.items() if name != "CUDA_DEVICE_ORDER"
    }
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


def _gpus(
    inventory: Inventory, excluded: Sequence[Exclusion], jobs: Sequence[QueuedJob]
) -> tuple[list[GpuInfo], list[dict[str, Json]]]:
    """Return the usable GPUs, and all GPUs with why they are not usable, or have no room now."""
    busy = {uuid: job.id for job in jobs for uuid in job.gpus}
    shown = {gpu.uuid for gpu in visible_gpus(inventory, os.environ).gpus}
    names = ("index", "uuid", "name", "compute_mode", "mps", "free_bytes")
    usable, rows = [], []
    for gpu in mark_excluded(inventory.gpus, excluded):
        why = gpu.unusable or (None if gpu.uuid in shown else f"hidden by {VARIABLE}")
        if why is None:
            usable.append(gpu)
        known = {name: getattr(gpu, name) for name in names}
        full = None
        if (job := busy.get(gpu.uuid)) is not None:
            full = f"busy: job {job} has it (robust-train queue)"
        elif gpu.free_bytes < _DEFAULT_MB * MIB:
            full = f"full: a job needs {_DEFAULT_MB} MiB by default (min_gpu_memory_mb)"
        rows.append(
            {**known, "usable": why is None, "why_not": why, "why_no_room": full}
        )
    for lost in inventory.skipped:
        known = {
            **dict.fromkeys((*names, "why_no_room")),
            "index": lost.index,
            "uuid": lost.uuid,
        }
        rows.append({**known, "usable": False, "why_not": lost.reason})
    return usable, rows


def _queue(
    path: Path, registry: Registry | None, problem: str | None
) -> dict[str, Json]:
    known: dict[str, Json] = dict.fromkeys(
        ("file_system", "jobs", "owner", "tmpfiles_line")
    )
    known["in_container"] = not sees_host_pids()
    if registry is not None:
        owner = registry.owner
        known |= {
            "file_system": registry.file_system,
            "jobs": len(registry.jobs()),
            "owner": user_name(owner),
            "tmpfiles_line": tmpfiles_line(path) if owner else None,
        }
    return {"directory": str(path), "problem": problem, **known}


def _probe(
    gpus: Sequence[GpuInfo], queue_directory: Path | None
) -> list[dict[str, Json]]:
    from robust_train.cli.gpu_probe import probe

    results = []
    for gpu in gpus:
        print(f"probing GPU {gpu.index} …", file=sys.stderr)
        passed, text = probe(gpu, queue_directory)
        results.append(
            {"index": gpu.index, "uuid": gpu.uuid, "passed": passed, "result": text}
        )
    return results


def _shown(data: dict[str, Json]) -> list[str | Table]:
    """Return the same for people."""
    rows = [
        [
            _TITLES.get(name, name.replace("_", " ").removesuffix(" bytes")),
            _text(name, value),
        ]
        for name, value in data.items()
        if name not in _NOT_A_FACT and value is not None
    ]
    probes = data.get("probes", ())
    return [
        Table(("what", "value"), rows),
        *(line for gpu in data["gpus"] for line in _gpu_lines(gpu)),
        *(f"probe of GPU {result['index']}: {result['result']}" for result in probes),
        *_queue_lines(data["queue"]),
    ]


def _text(name: str, value: Json) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{key} {known or '-'}" for key, known in value.items())
    return mib(value) if name.endswith("_bytes") else str(value)


def _gpu_lines(gpu: dict[str, Json]) -> list[str]:
    """Return whether a GPU is usable, what it is, and its UUID, a line each."""
    lines = [f"GPU {gpu['index']}: {gpu['why_not'] or gpu['why_no_room'] or 'usable'}"]
    if gpu["name"] is not None:
        mps = ", MPS" if gpu["mps"] else ""
        free = mib(gpu["free_bytes"])
        lines.append(
            f"  {gpu['name']}, compute mode {gpu['compute_mode']}{mps}, {free} free"
        )
    if gpu["uuid"]:
        lines.append(f"  {gpu['uuid']}")
    return lines


def _queue_lines(queue: dict[str, Json]) -> list[str]:
    directory = queue["directory"]
    lines = [
        queue["problem"]
        or f"queue: {directory} on {queue['file_system']}, {queue['jobs']} jobs"
    ]
    if queue["tmpfiles_line"]:
        lines.append(
            f"queue: {directory} belongs to {queue['owner']}, who could remove reservations of "
            "others. This line in /etc/tmpfiles.d/robust-train.conf makes root its owner at the "
            f"next boot:\n  {queue['tmpfiles_line']}"
        )
    if queue["in_container"]:
        lines.append(
            "queue: in a container, jobs of the host and of other containers are seen only if "
            "they share this directory (mount it, or set gpu_queue_dir)"
        )
    return lines
