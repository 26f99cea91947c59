"""``robust-train doctor``: each GPU usable or why not, the host's queue, facts for a bug report."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from robust_train.cli.output import EXIT_NOT_DONE, Parser, fail, print_json
from robust_train.compat import torch_cuda_version
from robust_train.config.schema import RobustConfig
from robust_train.events import Json
from robust_train.gpu.cuda_order import CudaOrderError, cuda_order
from robust_train.gpu.inventory import read_inventory
from robust_train.gpu.processes import sees_host_pids, user_name
from robust_train.gpu.visible import VARIABLE, visible_gpus
from robust_train.memory.host import cgroup_rooms, read_host_memory
from robust_train.queue.exclusions import Exclusion, clear, mark_excluded, read_exclusions
from robust_train.queue.queue_dir import QueueProblem, directory_for, tmpfiles_line
from robust_train.queue.reservations import JobRegistry, LiveJob
from robust_train.readable import mib
from robust_train.values import MIB, GpuInfo, Inventory

_CONTAINER_MARKS = (Path("/.dockerenv"), Path("/run/.containerenv"))
_DEFAULT_MB = RobustConfig.min_gpu_memory_mb
_PACKAGES = ("robust-train", "torch", "nvidia-ml-py", "psutil")


def main(argv: Sequence[str] | None = None) -> int:
    """Print what was found; return the exit code. 0: some GPU can be used and so can the queue
    directory, and no probe failed. 1: otherwise, or there was nothing to clear."""
    parser = Parser(
        prog="robust-train doctor",
        description="For each GPU usable or why not; driver, mask, queue directory, excluded GPUs, "
        "and what a bug report needs.",
    )
    parser.add_json()
    parser.add_argument("--dir", help="the queue directory, as gpu_queue_dir")
    parser.add_argument("--clear", metavar="GPU", help="use the excluded GPU with this UUID again")
    probe = "use each free GPU for some seconds: allocate, run out of memory, recover"
    parser.add_argument("--probe", action="store_true", help=probe)
    arguments = parser.parse_args(argv)
    path = directory_for(arguments.dir, os.environ)
    registry: JobRegistry | None = None
    problem: str | None = None
    try:
        registry = JobRegistry(path)
    except QueueProblem as found:
        problem = str(found)
    try:
        if (uuid := arguments.clear) is not None:
            if registry is None or not clear(registry.directory, uuid):
                return fail(f"doctor --clear {uuid}", "no job of yours excluded it")
            print(f"{uuid} is no longer excluded")
            return 0
        inventory = read_inventory(processes=False)
        excluded = [] if registry is None else read_exclusions(registry.directory)
        usable, gpus = _gpus(inventory, excluded, [] if registry is None else registry.jobs())
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
        print_json(report)
    else:
        _print(report)
    passed = all(result["passed"] for result in report.get("probes", ()))
    return 0 if usable and problem is None and passed else EXIT_NOT_DONE


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
        "container": not sees_host_pids() or any(mark.exists() for mark in _CONTAINER_MARKS),
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


def _gpus(
    inventory: Inventory, excluded: Sequence[Exclusion], jobs: Sequence[LiveJob]
) -> tuple[list[GpuInfo], list[dict[str, Json]]]:
    """Return the usable GPUs, and all GPUs with why they are not usable, or have no room now."""
    busy = {uuid: job.id for job in jobs if job.record is not None for uuid in job.record.gpus}
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
        rows.append({**known, "usable": why is None, "why_not": why, "why_no_room": full})
    for lost in inventory.skipped:
        known = {**dict.fromkeys((*names, "why_no_room")), "index": lost.index, "uuid": lost.uuid}
        rows.append({**known, "usable": False, "why_not": lost.reason})
    return usable, rows


def _queue(path: Path, registry: JobRegistry | None, problem: str | None) -> dict[str, Json]:
    known: dict[str, Json] = dict.fromkeys(
        ("file_system", "jobs", "lock_held_by", "owner", "tmpfiles_line")
    )
    known |= {"unreadable": [], "in_container": not sees_host_pids()}
    if registry is not None:
        jobs, owner = registry.jobs(), registry.directory.owner
        unreadable = [job for job in jobs if job.record is None]
        known |= {
            "file_system": registry.directory.file_system,
            "jobs": len(jobs),
            "unreadable": [{"id": job.id, "owner": user_name(job.owner)} for job in unreadable],
            "lock_held_by": registry.lock_holder(),
            "owner": user_name(owner),
            "tmpfiles_line": tmpfiles_line(path) if owner else None,
        }
    return {"directory": str(path), "problem": problem, **known}


def _probe(gpus: Sequence[GpuInfo], queue_directory: Path | None) -> list[dict[str, Json]]:
    from robust_train.cli.gpu_probe import probe

    results = []
    for gpu in gpus:
        print(f"probing GPU {gpu.index} …", file=sys.stderr)
        passed, text = probe(gpu, queue_directory)
        results.append({"index": gpu.index, "uuid": gpu.uuid, "passed": passed, "result": text})
    return results


def _print(report: dict[str, Json]) -> None:
    packages = ", ".join(f"{name} {version or '-'}" for name, version in report["packages"].items())
    packages += f", torch's CUDA {report['torch_cuda'] or '?'}"
    limit, mask = report["host_memory_limit_bytes"], report["mask"]
    host = f"Linux {report['kernel']}{' (WSL)' if report['wsl'] else ''}"
    host += ", container" if report["container"] else ", no container"
    host += f", {report['cpus']} CPUs, {'?' if limit is None else mib(limit)} of memory"
    host += (
        " (its cgroup's limit)" if report["cgroup_limit_bytes"] == limit else ", no cgroup limit"
    )
    lines = [
        f"driver: {report['driver_version'] or 'none'}",
        report["problem"],
        f"packages: {packages}, Python {report['python']}",
        f"host: {host}",
        f"{VARIABLE}: {'not set' if mask is None else repr(mask)}",
        report["mask_warning"] and f"warning: {report['mask_warning']}",
        report["cuda_order"] and f"CUDA's order of the GPUs: {report['cuda_order']}",
    ]
    print("\n".join(line for line in lines if line))
    for gpu in report["gpus"]:
        print(_described(gpu))
    for result in report.get("probes", ()):
        print(f"probe of GPU {result['index']}: {result['result']}")
    _print_queue(report["queue"])


def _print_queue(queue: dict[str, Json]) -> None:
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


def _described(gpu: dict[str, Json]) -> str:
    """Return whether it is usable, what it is, and its UUID, a line each."""
    about = gpu["name"]
    if about is not None:
        mps = ", MPS" if gpu["mps"] else ""
        about += f", compute mode {gpu['compute_mode']}{mps}, {mib(gpu['free_bytes'])} free"
    state = gpu["why_not"] or gpu["why_no_room"] or "usable"
    lines = (f"GPU {gpu['index']}: {state}", about, gpu["uuid"])
    return "\n  ".join(line for line in lines if line)
