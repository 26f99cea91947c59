"""``robust-train queue``: the jobs that run and wait on this host, and why."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import textwrap
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import psutil

from robust_train.cli.command import Answer, CommandFailed, Table
from robust_train.files import printable
from robust_train.folder.run_list import find_live_runs
from robust_train.gpu.inventory import read_inventory
from robust_train.gpu.processes import send_signal, user_name
from robust_train.model.errors import EXIT_BAD_CONFIG
from robust_train.model.events import Json
from robust_train.model.gpu import GpuInfo
from robust_train.queue.plan import Plan, describe, who_goes_first, why_waiting
from robust_train.queue.queue_dir import (
    MOST_FILES_PER_USER,
    directory_for,
    mark_excluded,
)
from robust_train.queue.registry import QueuedJob, Registry
from robust_train.readable import MIB, as_clock, shortened

COLUMNS = ("id", "#", "state", "job", "user", "MiB", "GPU", "for")
_RIGHT = {"#", "MiB", "for"}
_LONGEST_NAME = 20  # the table fits 80 columns


def queue(arguments: Namespace) -> Answer:
    """Show the jobs that run and wait on this host."""
    if arguments.usage:
        problem = "--usage is gone: the queue no longer counts GPU-hours; `queue` lists holders"
        raise CommandFailed(problem, EXIT_BAD_CONFIG)
    path = directory_for(arguments.dir, os.environ)
    if not os.path.exists(path):
        return Answer(
            {"directory": str(path), "jobs": [], "excluded": []}, [_empty(path)]
        )
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
        gpus = mark_excluded(inventory.gpus, excluded)
        if not inventory.answered:
            warnings.append(str(inventory.problem))
    jobs = _describe(found, gpus, limit)
    table = (
        Table(COLUMNS, [_row(job) for job in jobs], _RIGHT) if jobs else _empty(path)
    )
    now = time.monotonic()
    lines = [f"job {job['id']}: {job['reason']}" for job in jobs if job["reason"]]
    lines += describe(found, gpus) if arguments.verbose else ()
    lines += [f"{item.uuid}: {item.sentence(now)}" for item in excluded]
    return Answer(
        {
            "directory": str(path),
            "jobs": jobs,
            "excluded": [asdict(item) for item in excluded],
        },
        [table, *map(_wrapped, lines)],
        warnings,
    )


def cancel(arguments: Namespace) -> Answer:
    """Ask one of the caller's own jobs to stop."""
    path = directory_for(arguments.dir, os.environ)
    found: Sequence[QueuedJob] = ()
    if os.path.exists(path):
        with contextlib.closing(Registry(path)) as registry:
            found = registry.jobs()
    job = next((job for job in found if job.id == arguments.id), None)
    if job is None:
        raise CommandFailed(f"{printable(arguments.id)}: there is no such job")
    # the owner of the file, not of the record: that could name any process
    if job.owner != os.geteuid():
        raise CommandFailed(f"{job.id}: it belongs to user {job.owner}")
    try:
        is_sent = send_signal(job.pid, job.started, signal.SIGTERM)
    except PermissionError as error:
        raise CommandFailed(
            f"{job.id}: pid {job.pid} is another user's process"
        ) from error
    if not is_sent:
        raise CommandFailed(
            f"{job.id}: its launcher (pid {job.pid}) has ended, or is in another container; what "
            "is left of the job keeps its GPUs until it ends"
        )
    return Answer(shown=[f"{job.id} ({job.name}, pid {job.pid}) was asked to stop"])


def _empty(path: Path) -> str:
    """Return the sentence for an empty queue: jobs of this user may run on the CPU."""
    states = [run.state for run in find_live_runs()]
    if on_cpu := sum(state is not None and state.device == "cpu" for state in states):
        jobs = "1 job runs" if on_cpu == 1 else f"{on_cpu} jobs run"
        return f"no job holds or waits for a GPU; {jobs} on the CPU (robust-train run list)"
    return f"no job holds or waits for a GPU (queue directory {path})"


def _wrapped(line: str) -> str:
    """Return a line as wide as the terminal; in a pipe it stays one line."""
    if not sys.stdout.isatty():
        return line
    width = shutil.get_terminal_size().columns
    return "\n".join(textwrap.wrap(line, width, subsequent_indent="  "))


def _describe(
    found: Sequence[QueuedJob], gpus: Sequence[GpuInfo], limit: int
) -> list[dict[str, Json]]:
    """Return the jobs in JSON's types, in the order of the queue."""
    now = time.monotonic()
    decided = Plan(found, gpus, now, limit)
    jobs = []
    for job in found:
        position, reasons = None, []
        if whose := _whose_process(job):
            reasons.append(whose)
        if not job.gpus:
            position = decided.order.index(job) + 1
            if not job.is_polling(now):
                reasons.append(
                    "it does not poll (stopped, or its driver hangs): others pass it"
                )
            elif job.id in decided.groups:
                reasons.append("a GPU is free for it")
            else:
                first = who_goes_first(job, decided.order)
                reasons += [first] if first else []
                reasons.append(why_waiting(job, found, gpus, decided, {}))
        elif idle := job.idle():
            reasons.append(
                f"{len(idle)} of its GPUs idle for {as_clock(max(idle.values()))}"
            )
        about = _as_json(job, now, gpus)
        jobs.append(
            about | {"position": position, "reason": "; ".join(reasons) or None}
        )
    jobs.sort(key=lambda job: job["position"] or 0)
    return jobs


def _whose_process(job: QueuedJob) -> str | None:
    """Return whose process the record names, if it is not the record's owner's."""
    try:
        user = psutil.Process(job.pid).uids().real
    except (psutil.Error, ValueError, OverflowError):
        return None  # ended, hidden, or in another container
    if user == job.owner:
        return None
    return (
        f"its record names pid {job.pid}, which here is a process of {user_name(user)}"
    )


def _as_json(job: QueuedJob, now: float, gpus: Sequence[GpuInfo]) -> dict[str, Json]:
    indexes = {gpu.uuid: gpu.index for gpu in gpus}
    idle = job.idle()
    return {
        "id": job.id,
        "state": job.state,
        "position": None,
        "name": job.name,
        "user": user_name(job.owner),
        "pid": job.pid,
        "run_dir": job.run_dir,
        "claim_bytes": job.reserved_bytes,
        "num_gpus": job.count,
        "jobs_per_device": job.jobs_per_device,
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
    }


def _row(job: dict[str, Json]) -> list[str]:
    many, claim, gpus = job["num_gpus"], str(job["claim_bytes"] // MIB), job["gpus"]
    # ``GPU 0``, ``GPU 0, 1, 3``; the UUID if the number is not known
    names = [gpu["uuid"] if gpu["index"] is None else str(gpu["index"]) for gpu in gpus]
    prefix = "GPU " if gpus and gpus[0]["index"] is not None else ""
    return [
        job["id"],
        "-" if job["position"] is None else str(job["position"]),
        job["state"],
        shortened(job["name"], _LONGEST_NAME),
        job["user"],
        claim if many == 1 else f"{many} × {claim}",
        prefix + (", ".join(names) or "-"),
        as_clock(int(job["seconds_in_state"])),
    ]
