"""``robust-train doctor``: each GPU usable or why not, the host's queue, facts for a bug report.

``--probe`` uses a GPU for some seconds, runs out of memory and recovers. :func:`probe` reserves a
GPU and starts this file in a process of its own, with an end; :func:`exercise` is what that does.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from robust_train.cli.command import Answer, Table
from robust_train.compat import torch_cuda_version
from robust_train.config.schema import RobustConfig
from robust_train.gpu.bounded import NoAnswer, run_command
from robust_train.gpu.cuda_order import CudaOrderError, cuda_order
from robust_train.gpu.inventory import read_inventory
from robust_train.gpu.processes import find_holders, sees_host_pids, user_name
from robust_train.gpu.select import others_on
from robust_train.gpu.visible import VARIABLE, visible_gpus
from robust_train.host.memory import cgroup_rooms, read_host_memory
from robust_train.model.errors import EXIT_FAILED
from robust_train.model.events import Json
from robust_train.model.gpu import OFTEN, GpuInfo, Inventory
from robust_train.queue.host_queue import GpuRequest, HostQueue
from robust_train.queue.queue_dir import (
    GpuFault,
    QueueProblem,
    directory_for,
    tmpfiles_line,
)
from robust_train.queue.registry import QueuedJob, Registry
from robust_train.queue.waiting import NoGpu, wait_for_gpus
from robust_train.readable import GIB, MIB, mib

if TYPE_CHECKING:
    import torch

_CONTAINER_MARKS = (Path("/.dockerenv"), Path("/run/.containerenv"))
_DEFAULT_MB = RobustConfig.min_gpu_memory_mb
_TITLES = {
    "driver_version": "driver",
    "problem": "problem",
    "mask": VARIABLE,
    "mask_warning": "mask warning",
    "packages": "packages",
    "driver_cuda": "driver's CUDA",
    "torch_cuda": "torch's CUDA",
    "python": "python",
    "kernel": "kernel",
    "wsl": "WSL",
    "container": "container",
    "host_memory_limit_bytes": "host memory limit",
    "cgroup_limit_bytes": "cgroup limit",
    "cpus": "CPUs",
    "cuda_order": "CUDA's order of the GPUs",
}
_PACKAGES = ("robust-train", "torch", "nvidia-ml-py", "psutil")
_PROBE_SECONDS = 90.0
_PROBE_BYTES = 2 * GIB
_PROBE_CACHE_BYTES = 1 * GIB  # beside it are CUDA's context and libraries
_PARTS = 8


def doctor(arguments: Namespace) -> Answer:
    """Describe GPUs, driver and queue, or clear an excluded GPU.

    The exit code is 0 if some GPU and the queue directory can be used, and no probe failed.
    """
    path = directory_for(arguments.dir, os.environ)
    in_container = not sees_host_pids()
    queue: dict[str, Json] = {"directory": str(path), "problem": None}
    queue |= dict.fromkeys(("file_system", "jobs", "owner", "tmpfiles_line"))
    queue["in_container"] = in_container
    excluded: Sequence[GpuFault] = ()
    jobs: Sequence[QueuedJob] = ()
    faults: Mapping[str, Sequence[GpuFault]] = {}
    inventory = read_inventory(processes=False)
    try:
        registry = Registry(path)
    except QueueProblem as error:
        queue["problem"] = str(error)
    else:
        excluded, jobs = registry.exclusions(), registry.jobs()
        faults = registry.faults()
        inventory = replace(inventory, gpus=registry.marked(inventory.gpus))
        queue |= {
            "file_system": registry.file_system,
            "jobs": len(jobs),
            "owner": user_name(registry.owner),
            "tmpfiles_line": tmpfiles_line(path) if registry.owner else None,
        }
        is_cleared = arguments.clear is not None and registry.clear(arguments.clear)
        registry.close()
        if is_cleared:
            shown = f"{arguments.clear} is no longer excluded"
            return Answer({"cleared": arguments.clear}, [shown])
    if arguments.clear is not None:
        problem = f"--clear {arguments.clear}: you have not excluded this GPU"
        return Answer(error=problem)
    usable, gpus = _gpus(inventory, faults, jobs)
    doubt = None if inventory.may_run(torch_cuda_version()) else _doubt(inventory)
    data = {
        **_facts(inventory, in_container),
        "gpus": gpus,
        "queue": queue,
        "avoided": [asdict(item) for item in excluded],
    }
    if arguments.probe:
        data["probes"] = []
        for gpu in usable:
            print(f"probing GPU {gpu.index} …", file=sys.stderr)
            passed, text = probe(gpu, None if queue["problem"] else path)
            result = {"index": gpu.index, "uuid": gpu.uuid}
            data["probes"].append({**result, "passed": passed, "result": text})
            doubt = None if passed else doubt
    if doubt is not None:
        for row in gpus:
            row["why_not"] = row["why_not"] or doubt
            row["usable"] = False
    passed = all(result["passed"] for result in data.get("probes", ()))
    is_fine = any(row["usable"] for row in gpus) and queue["problem"] is None and passed
    return Answer(
        data,
        _shown(data),
        exit_code=0 if is_fine else EXIT_FAILED,
    )


def _facts(inventory: Inventory, in_container: bool) -> dict[str, Json]:
    """Return what a bug report from this machine needs; torch is not imported."""
    visible, kernel = visible_gpus(inventory, os.environ), platform.release()
    marked = any(mark.exists() for mark in _CONTAINER_MARKS)
    return {
        "driver_version": inventory.driver_version,
        "driver_answers": inventory.answered,
        "problem": inventory.problem,
        "mask": os.environ.get(VARIABLE),
        "mask_warning": visible.warning,
        "packages": {name: _version(name) for name in _PACKAGES},
        "driver_cuda": inventory.cuda_version,
        "torch_cuda": torch_cuda_version(),
        "python": platform.python_version(),
        "kernel": kernel,
        "wsl": "microsoft" in kernel.lower(),
        "container": in_container or marked,
        "host_memory_limit_bytes": read_host_memory().total,
        "cgroup_limit_bytes": min((limit for limit, _ in cgroup_rooms()), default=None),
        "cpus": len(os.sched_getaffinity(0)),
        "cuda_order": _cuda_order(inventory),
    }


def _doubt(inventory: Inventory) -> str:
    """Return why CUDA may work with no GPU; torch is not imported, so it is a guess."""
    versions = inventory.cuda_versions(torch_cuda_version())
    return f"CUDA probably cannot work: {versions} (a guess; doctor --probe tries it)"


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
    environ = dict(os.environ)
    environ.pop("CUDA_DEVICE_ORDER", None)
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
    inventory: Inventory,
    faults: Mapping[str, Sequence[GpuFault]],
    jobs: Sequence[QueuedJob],
) -> tuple[list[GpuInfo], list[dict[str, Json]]]:
    """Return the usable GPUs, and every GPU with the reason why it is unusable or full."""
    busy = {uuid: job.id for job in jobs for uuid in job.gpus}
    visible = {gpu.uuid for gpu in visible_gpus(inventory, os.environ).gpus}
    names = ("index", "uuid", "name", "compute_mode", "mps", "free_bytes")
    usable, rows = [], []
    for gpu in inventory.gpus:
        hidden = None if gpu.uuid in visible else f"hidden by {VARIABLE}"
        why = gpu.unusable or hidden
        if why is None:
            usable.append(gpu)
        full = None
        if gpu.uuid in busy:
            full = f"busy: job {busy[gpu.uuid]} has it (robust-train queue)"
        elif gpu.free_bytes < _DEFAULT_MB * MIB:
            full = f"full: a job needs {_DEFAULT_MB} MiB by default (min_gpu_memory_mb)"
        row = {name: getattr(gpu, name) for name in names}
        row["faults"] = [asdict(one) for one in faults.get(gpu.uuid, ())]
        rows.append(row | {"usable": why is None, "why_not": why, "why_no_room": full})
    for lost in inventory.skipped:
        row = dict.fromkeys((*names, "why_no_room"))
        row |= {"index": lost.index, "uuid": lost.uuid, "faults": []}
        rows.append(row | {"usable": False, "why_not": lost.reason})
    return usable, rows


def _shown(data: dict[str, Json]) -> list[str | Table]:
    """Return the same for people."""
    known = {name: data[name] for name in _TITLES if data[name] is not None}
    rows = [(_TITLES[name], _text(name, value)) for name, value in known.items()]
    lines = []
    for gpu in data["gpus"]:
        why = gpu["why_not"] or gpu["why_no_room"] or "usable"
        lines.append(f"GPU {gpu['index']}: {why}")
        if gpu["name"] is not None:
            mps = ", MPS" if gpu["mps"] else ""
            mode, free = gpu["compute_mode"], mib(gpu["free_bytes"])
            lines.append(f"  {gpu['name']}, compute mode {mode}{mps}, {free} free")
        if gpu["uuid"]:
            lines.append(f"  {gpu['uuid']}")
        lines += _fault_lines(gpu["faults"])
    probes = data.get("probes", ())
    lines += [f"probe of GPU {one['index']}: {one['result']}" for one in probes]
    return [Table(("what", "value"), rows), *lines, *_queue_lines(data["queue"])]


def _fault_lines(faults: Sequence[Mapping[str, Json]]) -> list[str]:
    """Return a line about the jobs that a GPU has failed, and one for each of them."""
    if not faults:
        return []
    count = len(faults)
    last = "; others are chosen first" if count >= OFTEN else ""
    lines = [f"  failed {count} job{'s' * (count > 1)} in the last weeks{last}:"]
    for one in faults:
        date = time.strftime("%Y-%m-%d %H:%M", time.localtime(one["time"]))
        lines.append(f"    {date} {one['job']}: {one['reason']}")
    return lines


def _text(name: str, value: Json) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{key} {known or '-'}" for key, known in value.items())
    return mib(value) if name.endswith("_bytes") else str(value)


def _queue_lines(queue: dict[str, Json]) -> list[str]:
    directory, usual = (
        queue["directory"],
        "queue: {directory} on {file_system}, {jobs} jobs",
    )
    lines = [queue["problem"] or usual.format(**queue)]
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


def probe(gpu: GpuInfo, queue_directory: Path | None) -> tuple[bool, str]:
    """Probe a usable GPU that no job has and on which no one computes; return whether it passed,
    and one line about it. Without a ``queue_directory`` nothing is reserved."""
    queue = HostQueue(
        queue_directory,
        name="doctor --probe",
        run_dir=os.getcwd(),
        jobs_per_device=1,
        read=lambda processes: visible_gpus(
            read_inventory(processes=processes),
            os.environ,
        ),
    )
    request = GpuRequest(
        _PROBE_BYTES,
        wait=False,
        only=frozenset({gpu.uuid}),
    )
    try:
        found = wait_for_gpus(queue, request)
        if isinstance(found, NoGpu):
            return True, f"not probed: {found.reason}"
        now = [one for one in read_inventory().gpus if one.uuid == gpu.uuid]
        if others := "".join(others_on(one, find_holders(now)) for one in now):
            return True, f"not probed: others compute on it: {others}"
        environ = {**os.environ, VARIABLE: gpu.uuid}
        command = [sys.executable, "-m", __name__]
        done = run_command(command, _PROBE_SECONDS, environ)
    except (OSError, NoAnswer) as error:
        return False, str(error)
    finally:
        queue.release()
    printed = done.stderr if done.returncode else done.stdout
    lines = printed.decode(errors="replace").strip().splitlines()
    last = lines[-1] if lines else f"exit code {done.returncode}"
    if done.returncode != 0:
        return False, last
    seen = json.loads(last)
    return seen["left_bytes"] == 0, (
        f"computed, ran out of memory and went on with 1/{seen['parts']:g} of it in "
        f"{seen['seconds']:.1f} s, {seen['left_bytes']} bytes left"
    )


def exercise(device: torch.device, free_bytes: int) -> dict[str, Json]:
    """Compute on a device, ask for twice the memory that may be had there, and go on. Raises
    RuntimeError: a result is wrong, or memory never ran out."""
    import torch

    from robust_train.step.oom_handler import adaptive_batch_training

    started = time.monotonic()
    ones = torch.ones(512, 512, device=device)
    if not torch.equal((ones @ ones).cpu(), torch.full((512, 512), 512.0)):
        raise RuntimeError("a product of matrices is wrong")
    calls = 0

    def use(batch_size: int) -> int:
        nonlocal calls
        calls += 1
        block = torch.empty(
            batch_size * (free_bytes // _PARTS),
            dtype=torch.uint8,
            device=device,
        )
        block[:: 1 << 20].fill_(1)
        if int(block[-1 - (len(block) - 1) % (1 << 20)]) != 1:
            raise RuntimeError("memory does not hold what was written")
        return batch_size

    size = adaptive_batch_training(
        use,
        initial_batch_size=2 * _PARTS,
        min_batch_size=1,
    )
    if calls == 1:
        raise RuntimeError("twice the memory was allocated")
    left = 0
    if device.type == "cuda":
        del ones
        torch.cuda.empty_cache()
        left = torch.cuda.memory_allocated(device)
    seconds = time.monotonic() - started
    return {"parts": _PARTS / size, "left_bytes": left, "seconds": seconds}


def probe_here() -> None:
    """Exercise the first GPU of this process, and print what was seen."""
    import torch

    try:
        torch.cuda.current_device()  # starts CUDA
    except (AssertionError, RuntimeError) as error:
        sys.exit(" ".join(str(error).split()))
    total = torch.cuda.get_device_properties(0).total_memory
    # memory runs out at a limit of this process: others may come to the GPU meanwhile
    torch.cuda.set_per_process_memory_fraction(min(_PROBE_CACHE_BYTES / total, 1.0), 0)
    print(json.dumps(exercise(torch.device("cuda", 0), _PROBE_CACHE_BYTES)))


if __name__ == "__main__":
    probe_here()
