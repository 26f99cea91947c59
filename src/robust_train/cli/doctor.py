"""``robust-train doctor``: shows whether each GPU is usable, the host's queue, and the facts for a
bug report.

``--probe`` uses a GPU for a few seconds, runs out of memory and recovers. `probe` starts this file
as a separate process with a time limit, and that process calls `exercise`.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from robust_train.cli.command import Answer, Table
from robust_train.cli.machine import machine_as_json
from robust_train.compat import torch_cuda_version
from robust_train.config.schema import RobustConfig
from robust_train.gpu.bounded import NoAnswerError, run_command
from robust_train.gpu.cuda_order import CudaOrderError, cuda_order
from robust_train.gpu.inventory import read_inventory
from robust_train.gpu.processes import find_holders, sees_host_pids, user_name
from robust_train.gpu.select import others_on
from robust_train.gpu.visible import VARIABLE
from robust_train.host.memory import read_cgroup_limits, read_host_memory
from robust_train.model.errors import EXIT_FAILED
from robust_train.model.events import Json
from robust_train.model.gpu import GpuInfo, Inventory
from robust_train.queue.queue_dir import QueueError, directory_for, tmpfiles_line
from robust_train.queue.registry import QueuedJob, Registry
from robust_train.readable import GIB, MIB, counted, mib

if TYPE_CHECKING:
    import torch

_CONTAINER_MARKS = (Path("/.dockerenv"), Path("/run/.containerenv"))
_DEFAULT_MB = RobustConfig.min_gpu_memory_mb
_PACKAGES = ("robust-train", "torch", "nvidia-ml-py", "psutil")
_PROBE_SECONDS = 90.0
_PROBE_CACHE_BYTES = 1 * GIB  # in addition to CUDA's context and libraries
_PARTS = 8  # the probe allocates its memory in parts of this size, 1/8
# Parts of the answer that have lines of their own below the table of facts.
_SHOWN_BELOW = {"gpus", "skipped", "queue", "probes"}


def doctor(arguments: Namespace) -> Answer:
    """Describe GPUs, driver and queue, or include an excluded GPU again.

    The exit code is 0 if some GPU and the queue directory can be used, and no probe failed.
    """
    path = directory_for(arguments.dir, os.environ)
    inventory = read_inventory(processes=arguments.probe)
    queue: dict[str, Json] = {"directory": str(path), "problem": None}
    jobs: Sequence[QueuedJob] = ()
    try:
        with contextlib.closing(Registry(path)) as registry:
            if arguments.include:
                return _include(arguments.include, registry)
            jobs = registry.jobs()
            inventory = replace(inventory, gpus=registry.mark_excluded(inventory.gpus))
            queue["jobs"] = len(jobs)
            queue["file_system"] = registry.file_system
            if registry.owner:
                # The owner of the directory could remove other users' reservations.
                queue["owner"] = user_name(registry.owner)
                queue["tmpfiles_line"] = tmpfiles_line(path)
    except QueueError as error:
        queue["problem"] = str(error)
    listing = machine_as_json(inventory, jobs)
    jobs_by_gpu = {uuid: job.shown_id for job in jobs for uuid in job.gpus}
    usable = []
    for gpu, row in zip(inventory.gpus, listing["gpus"], strict=True):
        row["why_not"] = None if gpu.owned else gpu.unusable
        if row["why_not"] is None and not row["visible"]:
            row["why_not"] = f"hidden by {VARIABLE}"
        row["why_no_room"] = _why_no_room(gpu, jobs_by_gpu.get(gpu.uuid))
        if row["why_not"] is None:
            usable.append((gpu, row["why_no_room"]))
    probes = []
    if arguments.probe:
        probes = [_probe_if_idle(gpu, why_no_room) for gpu, why_no_room in usable]
    doubt = _doubt_cuda(inventory)
    if any(result.has_computed for result in probes):
        doubt = None
    for row in listing["gpus"]:
        row["why_not"] = row["why_not"] or doubt
        row["usable"] = row["why_not"] is None
    has_usable_gpu = any(row["usable"] for row in listing["gpus"])
    has_passed = all(result.passed for result in probes)
    is_fine = has_usable_gpu and has_passed and queue["problem"] is None
    data = {
        **listing,
        **_collect_facts(inventory),
        "queue": queue,
        "probes": [result.as_json() for result in probes],
    }
    return Answer(data, _format(data), exit_code=0 if is_fine else EXIT_FAILED)


def _include(uuid: str, registry: Registry) -> Answer:
    """Include an excluded GPU again."""
    if registry.include(uuid):
        return Answer(shown=[f"{uuid} is no longer excluded"])
    return Answer(error=f"--include {uuid}: you have not excluded this GPU")


def _doubt_cuda(inventory: Inventory) -> str | None:
    """Return why CUDA probably cannot work, judging by versions, because torch is not imported."""
    cuda = torch_cuda_version()
    if inventory.may_run(cuda):
        return None
    versions = inventory.cuda_versions(cuda)
    return f"CUDA probably cannot work: {versions} (a guess; doctor --probe tries it)"


@dataclass(frozen=True)
class ProbeResult:
    """The result of the probe of one GPU.

    Attributes:
        passed: the GPU has no problem, as far as is known.
        has_computed: the GPU was probed, and its results were correct.
        text: a line about the probe.
    """

    gpu: GpuInfo
    passed: bool
    has_computed: bool
    text: str

    def as_json(self) -> dict[str, Json]:
        """Return the result as ``--json`` prints it."""
        return {
            "index": self.gpu.index,
            "uuid": self.gpu.uuid,
            "passed": self.passed,
            "result": self.text,
        }


def _probe_if_idle(gpu: GpuInfo, why_no_room: str | None) -> ProbeResult:
    """Probe a GPU, or skip it if someone uses it."""
    used_by = why_no_room
    if not used_by:
        used_by = others_on(gpu, find_holders([gpu]))
    if used_by:
        return ProbeResult(gpu, passed=True, has_computed=False, text=f"not probed: {used_by}")
    print(f"probing GPU {gpu.index} …", file=sys.stderr)
    passed, text = probe(gpu)
    return ProbeResult(gpu, passed=passed, has_computed=passed, text=text)


def _collect_facts(inventory: Inventory) -> dict[str, Json]:
    """Return this machine's facts for a bug report, without importing torch."""
    kernel = platform.release()
    return {
        "driver_cuda": inventory.cuda_version,
        "torch_cuda": torch_cuda_version(),
        "cuda_order": _describe_cuda_order(inventory),
        "mask": os.environ.get(VARIABLE),
        "packages": {name: _version(name) for name in _PACKAGES},
        "python": platform.python_version(),
        "kernel": kernel,
        "wsl": "microsoft" in kernel.lower(),
        "container": not sees_host_pids() or any(mark.exists() for mark in _CONTAINER_MARKS),
        "host_memory_limit_bytes": read_host_memory().total,
        "cgroup_limit_bytes": min((limit for limit, _ in read_cgroup_limits()), default=None),
        "cpus": len(os.sched_getaffinity(0)),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _describe_cuda_order(inventory: Inventory) -> str | None:
    """Return NVML's numbers of the GPUs in CUDA's default order. NVML sorts by PCI address."""
    if not inventory.gpus:
        return None
    environ = {name: text for name, text in os.environ.items() if name != "CUDA_DEVICE_ORDER"}
    try:
        uuids = cuda_order(environ)
    except CudaOrderError as error:
        return f"unknown ({error})"
    indexes = {gpu.uuid.partition("-")[2]: gpu.index for gpu in inventory.gpus}
    numbers = ", ".join(str(indexes.get(uuid, "?")) for uuid in uuids)
    return f"NVML's GPUs {numbers} (in NVML's order with CUDA_DEVICE_ORDER=PCI_BUS_ID)"


def _why_no_room(gpu: GpuInfo, job: str | None) -> str | None:
    """Return why a usable GPU has no room for a job now."""
    if job is not None:
        return f"busy: job {job} has it (robust-train queue)"
    if gpu.owned:
        return f"busy: {gpu.unusable}"
    if gpu.free_bytes < _DEFAULT_MB * MIB:
        return f"full: a job needs {_DEFAULT_MB} MiB by default (min_gpu_memory_mb)"
    return None


def _format(data: dict[str, Json]) -> list[str | Table]:
    """Return the answer as lines for people."""
    facts = []
    for name, value in data.items():
        if value is not None and name not in _SHOWN_BELOW:
            facts.append((name.removesuffix("_bytes").replace("_", " "), _format_fact(name, value)))
    lines: list[str | Table] = [Table(("what", "value"), facts)]
    for gpu in data["gpus"]:
        why = gpu["why_not"] or gpu["why_no_room"] or "usable"
        mps = ", MPS" if gpu["mps"] else ""
        lines += [
            f"GPU {gpu['index']}: {why}",
            f"  {gpu['name']}, compute mode {gpu['compute_mode']}{mps}, "
            f"{mib(gpu['free_bytes'])} free",
            f"  {gpu['uuid']}",
        ]
    lines += [f"GPU {lost['index']}: {lost['reason']}" for lost in data["skipped"]]
    for probe in data["probes"]:
        lines.append(f"probe of GPU {probe['index']}: {probe['result']}")
    queue = data["queue"]
    directory = queue["directory"]
    if queue["problem"]:
        lines.append(queue["problem"])
    else:
        where = f"{directory} on {queue['file_system']}"
        lines.append(f"queue: {where}, {counted(queue['jobs'], 'job')}")
    line = queue.get("tmpfiles_line")
    if line:
        lines.append(
            f"queue: {directory} belongs to {queue['owner']}, who could remove reservations of "
            "other users. This line in /etc/tmpfiles.d/robust-train.conf makes root its owner at "
            f"the next boot:\n  {line}"
        )
    if data["container"]:
        lines.append(
            "queue: in a container, jobs of the host and of other containers are visible only if "
            "they share this directory (mount it, or set gpu_queue=PATH)"
        )
    return lines


def _format_fact(name: str, value: Json) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{key} {text or '-'}" for key, text in value.items())
    return mib(value) if name.endswith("_bytes") else str(value)


def probe(gpu: GpuInfo) -> tuple[bool, str]:
    """Probe an unused GPU, and return whether it passed, and a line about it."""
    environ = {**os.environ, VARIABLE: gpu.uuid}
    try:
        done = run_command([sys.executable, "-m", __name__], _PROBE_SECONDS, environ)
    except (OSError, NoAnswerError) as error:
        return False, str(error)
    printed = done.stderr if done.returncode else done.stdout
    lines = printed.decode(errors="replace").strip().splitlines()
    last = lines[-1] if lines else f"exit code {done.returncode}"
    if done.returncode != 0:
        return False, last
    return True, f"computed, ran out of memory and continued with 1/{last} of it"


def probe_here() -> None:
    """Exercise the first GPU of this process, and print the result: the main function of the probe
    process."""
    import torch

    try:
        # Starts CUDA.
        torch.cuda.current_device()
    except (AssertionError, RuntimeError) as error:
        sys.exit(" ".join(str(error).split()))
    total = torch.cuda.get_device_properties(0).total_memory
    # Memory runs out at a limit of this process, so that another job that starts on the GPU has
    # enough.
    torch.cuda.set_per_process_memory_fraction(min(_PROBE_CACHE_BYTES / total, 1.0), 0)
    print(exercise(torch.device("cuda", 0), _PROBE_CACHE_BYTES))


def exercise(device: torch.device, free_bytes: int) -> int:
    """Compute on a device, request twice its free memory, and recover with smaller requests.

    Returns:
        N, if 1/N of the memory was allocated in the end.

    Raises:
        RuntimeError: a result is wrong, or memory did not run out.
    """
    import torch

    from robust_train.step.oom_handler import adaptive_batch_training

    ones = torch.ones(512, 512, device=device)
    if not torch.equal((ones @ ones).cpu(), torch.full((512, 512), 512.0)):
        raise RuntimeError("a product of matrices is wrong")
    sizes: list[int] = []

    def allocate(batch_size: int) -> None:
        sizes.append(batch_size)
        torch.empty(batch_size * (free_bytes // _PARTS), dtype=torch.uint8, device=device)

    adaptive_batch_training(allocate, initial_batch_size=2 * _PARTS, min_batch_size=1)
    if len(sizes) == 1:
        raise RuntimeError("twice the free memory was allocated")
    return _PARTS // sizes[-1]


if __name__ == "__main__":
    probe_here()
