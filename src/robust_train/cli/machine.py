"""``robust-train gpus`` and ``queue``: shows this machine's GPUs, and the jobs that run on them or
wait for them. ``doctor`` and ``memory info`` use the listing of GPUs too."""

from __future__ import annotations

import contextlib
import os
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, replace

import psutil

from robust_train.cli.command import Answer, Table
from robust_train.gpu.inventory import read_inventory
from robust_train.gpu.processes import find_holders, is_hidden, is_there, user_name
from robust_train.gpu.visible import VARIABLE, visible_gpus
from robust_train.host.linux import describe_processes, processes_of
from robust_train.model.events import Json
from robust_train.model.gpu import GpuInfo, Inventory
from robust_train.queue.plan import Plan, describe, who_goes_first, why_waiting
from robust_train.queue.queue_dir import QueueError, directory_for, may_exist
from robust_train.queue.registry import QueuedJob, Registry
from robust_train.readable import MIB, as_clock, mib, shorten

_GPU_COLUMNS = (
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
_JOB_COLUMNS = ("id", "#", "state", "job", "user", "MiB", "held", "GPU", "for")
_LONGEST_NAME = 20  # so that the table of jobs fits 80 columns


def show_gpus(arguments: Namespace) -> Answer:
    """Show a row for each GPU."""
    inventory = read_inventory()
    path = directory_for(None, os.environ)
    jobs: Sequence[QueuedJob] = ()
    with contextlib.suppress(QueueError):
        if may_exist(path):
            with contextlib.closing(Registry(path)) as registry:
                inventory = replace(inventory, gpus=registry.mark_excluded(inventory.gpus))
                jobs = registry.jobs()
    data = machine_as_json(inventory, jobs)
    shown: list[str | Table] = [data["problem"]] if data["problem"] else []
    if data["gpus"]:
        rows = [_gpu_row(gpu, _describe_reservation(gpu["uuid"], jobs)) for gpu in data["gpus"]]
        shown.append(Table(_GPU_COLUMNS, rows))
    shown += [f"GPU {lost.index} skipped: {lost.reason}" for lost in inventory.skipped]
    warnings = [data["warning"]] if data["warning"] else []
    return Answer(data, shown, warnings)


def machine_as_json(inventory: Inventory, jobs: Sequence[QueuedJob]) -> dict[str, Json]:
    """Return the driver and the GPUs in JSON's types.

    For each GPU, it has whether programs started here see the GPU, for how long its ``jobs`` have
    left it idle, and the user and command of each process if known.
    """
    visible = visible_gpus(inventory, os.environ)
    holders = find_holders(inventory.gpus)
    shown = {gpu.uuid for gpu in visible.gpus}
    idle = {uuid: seconds for job in jobs for uuid, seconds in job.idle().items()}
    gpus = [asdict(gpu) for gpu in inventory.gpus]
    for gpu in gpus:
        gpu["visible"] = gpu["uuid"] in shown
        gpu["idle_seconds"] = idle.get(gpu["uuid"])
        for process in gpu["processes"] or ():
            holder = holders.get(process["pid"])
            process["command"] = None if holder is None else holder.command
            process["user"] = None if holder is None else holder.user
    return {
        "driver_version": inventory.driver_version,
        "problem": inventory.problem,
        "warning": visible.warning or None,
        "gpus": gpus,
        "skipped": [asdict(lost) for lost in inventory.skipped],
    }


def _describe_reservation(uuid: str, jobs: Sequence[QueuedJob]) -> str | None:
    """Return which jobs have reserved a GPU, even if they do not use it yet."""
    ids = [job.shown_id for job in jobs if uuid in job.gpus]
    return f"reserved by {', '.join(ids)} (robust-train queue)" if ids else None


def _gpu_row(gpu: dict[str, Json], reservation: str | None) -> list[object]:
    percent = gpu["utilization_percent"]
    processes = gpu["processes"]
    notes = []
    if not gpu["visible"]:
        notes.append(f"hidden by {VARIABLE}")
    if gpu["unusable"]:
        notes.append(gpu["unusable"])
    if gpu["idle_seconds"] is not None:
        idle = as_clock(gpu["idle_seconds"])
        notes.append(f"idle for {idle} under its job (robust-train queue)")
    elif reservation is not None:
        notes.append(reservation)
    return [
        gpu["index"],
        gpu["name"],
        gpu["uuid"],
        gpu["used_bytes"] // MIB,
        gpu["free_bytes"] // MIB,
        gpu["total_bytes"] // MIB,
        None if percent is None else f"{percent}%",
        "?" if processes is None else len(processes),
        ", ".join(_describe_process(process) for process in processes or ()),
        "; ".join(notes),
    ]


def _describe_process(process: dict[str, Json]) -> str:
    """Return a process on a GPU, such as ``ann:python(4711) 800 MiB``."""
    text = f"pid {process['pid']}"
    if process["command"] is not None:
        text = f"{process['user']}:{process['command']}({process['pid']})"
    if not process["computes"]:
        text += " (draws)"
    if process["used_bytes"] is not None:
        text += f" {mib(process['used_bytes'])}"
    return text


def show_queue(arguments: Namespace) -> Answer:
    """Show the jobs that run and wait on this host."""
    path = directory_for(arguments.dir, os.environ)
    nothing = (
        f"no job holds or waits for a GPU (queue directory {path}); robust-train ps --live "
        "lists those on the CPU too"
    )
    if not may_exist(path):
        data: dict[str, Json] = {"directory": str(path), "jobs": [], "excluded": []}
        return Answer(data, [nothing])
    # The time at which the records are read, because reading the GPUs may take seconds.
    now = time.monotonic()
    with contextlib.closing(Registry(path)) as registry:
        jobs_now = registry.jobs()
        excluded = registry.exclusions()
        limit = registry.gpu_limit()
        warnings = []
        gpus: Sequence[GpuInfo] = ()
        if jobs_now:
            inventory = read_inventory(processes=False)
            gpus = registry.mark_excluded(inventory.gpus)
            if not inventory.answered:
                warnings.append(str(inventory.problem))
    plan = Plan(jobs_now, gpus, now, limit)
    jobs = [_job_as_json(job, jobs_now, gpus, plan, now) for job in jobs_now]
    jobs.sort(key=lambda job: job["position"] or 0)
    shown: list[str | Table] = [nothing]
    if jobs:
        shown = [Table(_JOB_COLUMNS, [_job_row(job) for job in jobs])]
    shown += [f"job {job['id']}: {job['reason']}" for job in jobs if job["reason"]]
    shown += describe(jobs_now, gpus) if arguments.verbose else ()
    shown += [f"{gpu.uuid}: {gpu.sentence()}" for gpu in excluded]
    data = {"directory": str(path), "jobs": jobs, "excluded": [asdict(gpu) for gpu in excluded]}
    return Answer(data, shown, warnings)


def _job_as_json(
    job: QueuedJob, jobs: Sequence[QueuedJob], gpus: Sequence[GpuInfo], plan: Plan, now: float
) -> dict[str, Json]:
    indexes = {gpu.uuid: gpu.index for gpu in gpus}
    idle = job.idle()
    reasons = _launcher_problems(job)
    if not job.gpus:
        reasons += _reasons_to_wait(job, jobs, gpus, plan, now)
    elif idle:
        seconds = as_clock(max(idle.values()))
        reasons.append(f"{len(idle)} of its GPUs idle for {seconds}")
    return {
        "id": job.shown_id,
        "state": job.state,
        "position": None if job.gpus else plan.order.index(job) + 1,
        "name": job.name,
        "user": user_name(job.owner),
        "pid": job.pid,
        "run_dir": job.run_dir,
        "claim_bytes": job.reserved_bytes,
        "num_gpus": job.count,
        "jobs_per_device": job.jobs_per_device,
        "priority": ("low", "normal", "high")[min(job.urgency, 2)],
        "gpus": [
            {
                "uuid": uuid,
                "index": indexes.get(uuid),
                "taken_bytes": taken_bytes,
                "idle_seconds": idle.get(uuid),
            }
            for uuid, taken_bytes in zip(job.gpus, job.taken_bytes, strict=True)
        ],
        "seconds_in_state": round(max(now - job.since, 0.0), 1),
        "reason": "; ".join(filter(None, reasons)) or None,
    }


def _reasons_to_wait(
    job: QueuedJob, jobs: Sequence[QueuedJob], gpus: Sequence[GpuInfo], plan: Plan, now: float
) -> list[str]:
    if not job.is_polling(now):
        return ["it does not poll (stopped, or its driver hangs), so other jobs overtake it"]
    if job.id in plan.groups:
        return ["a GPU is free for it"]
    return [who_goes_first(job, plan.order), why_waiting(job, jobs, gpus, plan, {})]


def _launcher_problems(job: QueuedJob) -> list[str]:
    """Return why the launcher that a job's record names cannot be the job's live launcher."""
    # Only the process id is compared, because a forged record may contain any start time too.
    with contextlib.suppress(psutil.Error, ValueError, OverflowError):
        user = psutil.Process(job.pid).uids().real
        if user != job.owner:
            return [f"its record names pid {job.pid}, a process of {user_name(user)}"]
    if not job.is_here:
        return [f"its launcher (pid {job.pid} there) is in another container"]
    if is_hidden(job.pid) or is_there(job.pid, job.started):
        return []
    ended = f"its launcher (pid {job.pid}) has ended"
    left = processes_of(job.id, job.owner)
    if left:
        stop = f"robust-train stop {job.shown_id}"
        return [f"{ended} and left {describe_processes(left)}: {stop}"]
    return [f"{ended}, and its remaining processes are not visible here"]


def _job_row(job: dict[str, Json]) -> list[object]:
    num_gpus = job["num_gpus"]
    claim = job["claim_bytes"] // MIB
    numbers = [str(gpu["index"]) for gpu in job["gpus"] if gpu["index"] is not None]
    # GPUs that have vanished no longer have a number.
    names = [gpu["uuid"] for gpu in job["gpus"] if gpu["index"] is None]
    held = [gpu["taken_bytes"] for gpu in job["gpus"] if gpu["taken_bytes"] is not None]
    if numbers:
        names.insert(0, f"GPU {', '.join(numbers)}")
    return [
        job["id"],
        job["position"],
        job["state"],
        shorten(job["name"], _LONGEST_NAME),
        job["user"],
        claim if num_gpus == 1 else f"{num_gpus} × {claim}",
        max(held) // MIB if held else None,
        ", ".join(names),
        as_clock(int(job["seconds_in_state"])),
    ]
