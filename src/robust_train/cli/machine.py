"""``robust-train gpus`` and ``queue``: this machine's GPUs and who waits for them."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import textwrap
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import psutil

from robust_train.cli.command import Answer, Table
from robust_train.folder.run_list import find_live_runs
from robust_train.gpu.inventory import read_inventory
from robust_train.gpu.processes import (
    find_holders,
    is_hidden,
    is_there,
    sees_host_pids,
    user_name,
)
from robust_train.gpu.visible import VARIABLE, visible_gpus
from robust_train.host.linux import named, processes_of
from robust_train.host.memory import read_host_memory
from robust_train.model.events import Json
from robust_train.model.gpu import GpuInfo, Inventory
from robust_train.queue.plan import Plan, describe, who_goes_first, why_waiting
from robust_train.queue.queue_dir import (
    MOST_FILES_PER_USER,
    QueueProblem,
    directory_for,
)
from robust_train.queue.registry import QueuedJob, Registry
from robust_train.readable import MIB, as_clock, mib, shortened

_SIZES = ("used MiB", "free MiB", "total MiB")
_OF_GPUS = ("index", "name", "uuid", *_SIZES, "util", "processes", "held by", "note")
_OF_PROCESSES = ("index", "name", *_SIZES, "pid", "user", "command", "process MiB")
_OF_JOBS = ("id", "#", "state", "job", "user", "MiB", "GPU", "for")
_LONGEST_NAME = 20  # the table of jobs fits 80 columns


def gpus(arguments: Namespace) -> Answer:
    """Show a row for each GPU."""
    inventory = read_inventory()
    idle: dict[str, int] = {}
    path = directory_for(None, os.environ)
    with contextlib.suppress(QueueProblem), contextlib.ExitStack() as stack:
        if path.exists():
            registry = stack.enter_context(contextlib.closing(Registry(path)))
            inventory = replace(inventory, gpus=registry.marked(inventory.gpus))
            for job in registry.jobs():
                idle |= job.idle()
    visible = visible_gpus(inventory, os.environ)
    shown = {gpu.uuid for gpu in visible.gpus}
    found = _gpus_as_json(inventory)
    for gpu in found:
        uuid = gpu["uuid"]
        gpu |= {"visible": uuid in shown, "idle_seconds": idle.get(uuid)}
    data = {
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
    rows = [_gpu_row(gpu) for gpu in found]
    for lost in inventory.skipped:
        why = f"skipped: {lost.reason}"
        rows.append([lost.index, None, lost.uuid, *[None] * 6, why])
    if rows:
        count = len(_OF_GPUS) if any(row[-1] for row in rows) else -1
        parts.append(Table(_OF_GPUS[:count], [row[:count] for row in rows]))
    return Answer(
        data,
        parts,
        [] if visible.warning is None else [visible.warning],
    )


def _gpus_as_json(inventory: Inventory) -> list[dict[str, Json]]:
    """Return the GPUs in JSON's types, each process with its user and command if known."""
    holders = find_holders(inventory.gpus)
    found = [asdict(gpu) for gpu in inventory.gpus]
    for gpu in found:
        for process in gpu["processes"] or ():
            holder = holders.get(process["pid"])
            process["command"] = None if holder is None else holder.command
            process["user"] = None if holder is None else holder.user
    return found


def _sizes(gpu: dict[str, Json]) -> list[int]:
    return [gpu[size] // MIB for size in ("used_bytes", "free_bytes", "total_bytes")]


def _gpu_row(gpu: dict[str, Json]) -> list[object]:
    percent, processes = gpu["utilization_percent"], gpu["processes"]
    return [
        gpu["index"],
        gpu["name"],
        gpu["uuid"],
        *_sizes(gpu),
        None if percent is None else f"{percent}%",
        "?" if processes is None else len(processes),
        ", ".join(map(_held_by, processes or ())),
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
    found, in_container = _gpus_as_json(inventory), not sees_host_pids()
    data: dict[str, Json] = {
        "problem": inventory.problem,
        "skipped": [asdict(gpu) for gpu in inventory.skipped],
        "gpus": found,
        "in_container": in_container,
        "host": {"available_bytes": host.available, "total_bytes": host.total},
    }
    parts: list[str | Table] = []
    if inventory.problem is not None:
        parts.append(inventory.problem)
    if rows := [row for gpu in found for row in _process_rows(gpu)]:
        parts.append(Table(_OF_PROCESSES, rows))
    parts += [f"GPU {gpu.index} skipped: {gpu.reason}" for gpu in inventory.skipped]
    if rows and in_container:
        parts.append(
            "in a container: process ids are those of the driver, mostly the host's"
        )
    if host.total is not None and host.available is not None:
        parts.append(
            f"host memory: {host.available // MIB} of {host.total // MIB} MiB available"
        )
    return Answer(data, parts)


def _process_rows(gpu: dict[str, Json]) -> list[list[object]]:
    """Return a row for each process, with the GPU's own figures, so that a filter keeps them."""
    own = [gpu["index"], gpu["name"], *_sizes(gpu)]
    if not gpu["processes"]:
        unknown = "?" if gpu["processes"] is None else "-"
        return [[*own, *[unknown] * 4]]
    rows = []
    for process in gpu["processes"]:
        draws = "" if process["computes"] else " (draws)"
        size = process["used_bytes"]
        rows.append(
            [
                *own,
                process["pid"],
                process["user"] or "?",
                f"{process['command'] or '?'}{draws}",
                "?" if size is None else size // MIB,
            ]
        )
    return rows


def queue(arguments: Namespace) -> Answer:
    """Show the jobs that run and wait on this host."""
    path = directory_for(arguments.dir, os.environ)
    if not os.path.exists(path):
        nothing = {"directory": str(path), "jobs": [], "excluded": []}
        return Answer(nothing, [_empty(path)])
    with contextlib.closing(Registry(path)) as registry:
        found = registry.jobs()
        excluded = registry.exclusions()
        limit = registry.gpu_limit()
        warnings = [
            f"{user_name(user)} has {MOST_FILES_PER_USER + count} record files in "
            f"{registry.path}; only {MOST_FILES_PER_USER} were read"
            for user, count in registry.left_out.items()
        ]
        gpus: Sequence[GpuInfo] = ()
        if found:
            inventory = read_inventory(processes=False)
            gpus = registry.marked(inventory.gpus)
            if not inventory.answered:
                warnings.append(str(inventory.problem))
    now = time.monotonic()
    decided = Plan(found, gpus, now, limit)
    jobs = [_job_as_json(job, found, gpus, decided, now) for job in found]
    jobs.sort(key=lambda job: job["position"] or 0)
    lines = [f"job {job['id']}: {job['reason']}" for job in jobs if job["reason"]]
    lines += describe(found, gpus) if arguments.verbose else ()
    lines += [f"{item.uuid}: {item.sentence()}" for item in excluded]
    data: dict[str, Json] = {
        "directory": str(path),
        "jobs": jobs,
        "excluded": [asdict(item) for item in excluded],
    }
    table = Table(_OF_JOBS, [_job_row(job) for job in jobs])
    shown = [table if jobs else _empty(path), *map(_wrapped, lines)]
    return Answer(data, shown, warnings)


def _empty(path: Path) -> str:
    """Return the sentence for an empty queue: jobs of this user may run on the CPU."""
    states = [run.state for run in find_live_runs()]
    if on_cpu := sum(state is not None and state.device == "cpu" for state in states):
        jobs = "1 job runs" if on_cpu == 1 else f"{on_cpu} jobs run"
        return f"no job holds or waits for a GPU; {jobs} on the CPU (robust-train ps --live)"
    return f"no job holds or waits for a GPU (queue directory {path})"


def _wrapped(line: str) -> str:
    """Return a line as wide as the terminal; in a pipe it stays one line."""
    if not sys.stdout.isatty():
        return line
    width = shutil.get_terminal_size().columns
    return "\n".join(
        textwrap.wrap(
            line,
            width,
            subsequent_indent="  ",
        )
    )


def _job_as_json(
    job: QueuedJob,
    found: Sequence[QueuedJob],
    gpus: Sequence[GpuInfo],
    decided: Plan,
    now: float,
) -> dict[str, Json]:
    indexes, idle = {gpu.uuid: gpu.index for gpu in gpus}, job.idle()
    reasons = _reasons(job, found, gpus, decided, now)
    return {
        "id": job.id,
        "state": job.state,
        "position": None if job.gpus else decided.order.index(job) + 1,
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
        "seconds_since_queued": round(max(now - job.queued_at, 0.0), 1),
        "reason": "; ".join(reasons) or None,
    }


def _reasons(
    job: QueuedJob,
    found: Sequence[QueuedJob],
    gpus: Sequence[GpuInfo],
    decided: Plan,
    now: float,
) -> list[str]:
    """Return why a job waits, and what is odd about it."""
    reasons = _about_launcher(job)
    if job.gpus:
        if idle := job.idle():
            seconds = as_clock(max(idle.values()))
            reasons.append(f"{len(idle)} of its GPUs idle for {seconds}")
    elif not job.is_polling(now):
        reasons.append(
            "it does not poll (stopped, or its driver hangs): others pass it"
        )
    elif job.id in decided.groups:
        reasons.append("a GPU is free for it")
    else:
        first = who_goes_first(job, decided.order)
        reasons += [first] if first else []
        reasons.append(why_waiting(job, found, gpus, decided, {}))
    return reasons


def _about_launcher(job: QueuedJob) -> list[str]:
    """Return what does not fit the launcher that a job's record names."""
    # by number alone: the time of its start and the namespace can be made up as well
    with contextlib.suppress(
        psutil.Error,
        ValueError,
        OverflowError,
    ):
        user = psutil.Process(job.pid).uids().real
        if user != job.owner:
            whose = f"which here is a process of {user_name(user)}"
            return [f"its record names pid {job.pid}, {whose}"]
    if not job.is_here:
        return [f"its launcher (pid {job.pid} there) is in another container"]
    if is_hidden(job.pid) or is_there(job.pid, job.started):
        return []
    ended = f"its launcher (pid {job.pid}) has ended"
    if left := processes_of(job.id, job.owner):
        remedy = f"robust-train stop {job.id}"
        return [f"{ended} and left {named(left)}: {remedy}"]
    return [f"{ended}, and what is left of it is not visible here"]


def _job_row(job: dict[str, Json]) -> list[object]:
    many, claim, gpus = job["num_gpus"], job["claim_bytes"] // MIB, job["gpus"]
    # ``GPU 0``, ``GPU 0, 1, 3``; the UUID if the number is not known
    names = [gpu["uuid"] if gpu["index"] is None else str(gpu["index"]) for gpu in gpus]
    prefix = "GPU " if gpus and gpus[0]["index"] is not None else ""
    return [
        job["id"],
        job["position"],
        job["state"],
        shortened(job["name"], _LONGEST_NAME),
        job["user"],
        claim if many == 1 else f"{many} × {claim}",
        prefix + ", ".join(names),
        as_clock(int(job["seconds_in_state"])),
    ]
