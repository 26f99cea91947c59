"""``robust-train queue``: who runs and who waits on this host, and why."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from robust_train.cli.output import Parser, fail, print_json, print_table
from robust_train.errors import EXIT_BAD_CONFIG
from robust_train.events import Json
from robust_train.gpu.inventory import read_inventory
from robust_train.gpu.processes import send_signal, user_name
from robust_train.queue.exclusions import mark_excluded, read_exclusions
from robust_train.queue.order import DEFAULT_RULES, QueueRules, why_overtaken
from robust_train.queue.queue_dir import QueueProblem, directory_for
from robust_train.queue.queue_rules import read_rules, running
from robust_train.queue.queued_job import as_waiting, split
from robust_train.queue.reasons import describe, why_waiting
from robust_train.queue.records import JobRecord, JobState, printable
from robust_train.queue.reservations import JobRegistry, LiveJob, RegistryBusy, boottime
from robust_train.queue.scheduler import plan
from robust_train.queue.usage import read_usage, recent_hours, week_hours
from robust_train.readable import as_clock, shortened
from robust_train.runfolder.run_list import find_live_runs
from robust_train.values import MIB, GpuInfo

COLUMNS = ("id", "#", "state", "job", "user", "MiB", "GPU", "for")
_RIGHT = {"#", "MiB", "for"}
_LONGEST_NAME = 20  # the table fits 80 columns
_PATIENCE_SECONDS = 2.0


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table or cancel a job; return the exit code. 0: done, also where there is no job.
    1: the job to cancel is not there or not the caller's. 2: the queue directory cannot be used."""
    parser = Parser(
        prog="robust-train queue",
        description="Jobs on this host: those that run, with their GPUs, and those that wait, with "
        "their queue position (#) and the reason.",
    )
    parser.add_json()
    parser.add_argument("--verbose", action="store_true", help="who has how much of each GPU")
    parser.add_argument("--usage", action="store_true", help="GPU-hours by user, of seven days")
    parser.add_argument("--dir", help="the queue directory, as gpu_queue_dir")
    commands = parser.add_subparsers(dest="command")
    cancel = commands.add_parser("cancel", help="ask one of your own jobs to stop (SIGTERM)")
    cancel.add_argument("id", help="as the table shows it")
    arguments = parser.parse_args(argv)
    path = directory_for(arguments.dir, os.environ)
    try:
        registry = JobRegistry(path) if os.path.exists(path) else None
    except QueueProblem as problem:
        print(problem, file=sys.stderr)
        return EXIT_BAD_CONFIG
    try:
        found = [] if registry is None else _living(registry)
        if arguments.command == "cancel":
            return _cancel(found, arguments.id)
        if arguments.usage:
            return _print_usage(registry, found, as_json=arguments.json)
        rules = DEFAULT_RULES if registry is None else read_rules(registry.directory, found)
        jobs, gpus = _describe(registry, found, rules) if registry and found else ([], [])
        excluded = [] if registry is None else read_exclusions(registry.directory)
    finally:
        if registry is not None:
            registry.close()
    if arguments.json:
        about = [asdict(item) for item in excluded]
        print_json({"directory": str(path), "jobs": jobs, "excluded": about})
        return 0
    if jobs:
        print_table(COLUMNS, [_row(job) for job in jobs], _RIGHT)
    else:
        print(_nobody(path))
    now = boottime()
    lines = [f"job {job['id']}: {job['reason']}" for job in jobs if job["reason"]]
    lines += gpus if arguments.verbose else ()
    lines += [f"{item.uuid}: {item.sentence(now)}" for item in excluded]
    for line in lines:
        print("\n".join(textwrap.wrap(line, _width(), subsequent_indent="  ")))
    return 0


def _nobody(path: Path) -> str:
    """Return the sentence for an empty queue: jobs of this user may run on the CPU."""
    states = [run.state for run in find_live_runs()]
    if on_cpu := sum(state is not None and state.device == "cpu" for state in states):
        jobs = "1 job runs" if on_cpu == 1 else f"{on_cpu} jobs run"
        return f"no job holds or waits for a GPU; {jobs} on the CPU (robust-train run list)"
    return f"no job holds or waits for a GPU (queue directory {path})"


def _width() -> int:
    """Return the terminal's width; in a pipe a reason stays one line."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 10_000


def _living(registry: JobRegistry) -> list[LiveJob]:
    try:
        with registry.locked(_PATIENCE_SECONDS):
            return registry.jobs(sweep=True)
    except RegistryBusy as busy:
        print(f"warning: {busy}", file=sys.stderr)
        return registry.jobs()


def _describe(
    registry: JobRegistry, found: Sequence[LiveJob], rules: QueueRules
) -> tuple[list[dict[str, Json]], list[str]]:
    """Return the jobs in JSON's types, and a line for each GPU."""
    inventory = read_inventory(processes=False)
    if not inventory.answered:
        print(f"warning: {inventory.problem}", file=sys.stderr)
    gpus = mark_excluded(inventory.gpus, read_exclusions(registry.directory))
    waiting, reservations = split(found)
    now = boottime()
    decided = plan(waiting, reservations, gpus, now, rules)
    jobs: list[dict[str, Json]] = []
    for job in found:
        record = job.record
        if record is None:
            shut = "its record cannot be read, so it may have any GPU"
            about = {"owner_uid": job.owner, "reason": shut}
            jobs.append({"id": job.id, "state": "unreadable", **about})
            continue
        position = reason = None
        if record.state is JobState.WAITING:
            me = as_waiting(record, job.owner)
            position = decided.order.index(me) + 1
            reason = why_waiting(me, reservations, gpus, decided)
            if record.id in decided.groups:
                reason = "a GPU is free for it"
            elif why := why_overtaken(me, decided.order, reservations, rules):
                reason = f"{why}; {reason}"
        elif idle := record.idle():
            reason = f"{len(idle)} of its GPUs idle for {as_clock(max(idle.values()))}"
        about = _as_json(record, now, gpus)
        jobs.append(about | {"position": position, "reason": reason})
    jobs.sort(key=lambda job: job.get("position") or 0)
    return jobs, describe(reservations, gpus)


def _print_usage(registry: JobRegistry | None, found: Sequence[LiveJob], *, as_json: bool) -> int:
    """Print how much GPU time each user had, most first."""
    now, jobs = boottime(), running(found)
    usage = {} if registry is None else read_usage(registry.directory, jobs, now)
    users: list[dict[str, Json]] = [
        {
            "uid": uid,
            "user": user_name(uid),
            "gpus": len({gpu for owner, record in jobs if owner == uid for gpu in record.gpus}),
            "recent_gpu_hours": recent_hours(hours, now),
            "gpu_hours": round(week_hours(hours, now), 2),
        }
        for uid, hours in usage.items()
    ]
    users.sort(key=lambda user: (-user["gpu_hours"], user["uid"]))
    columns = ("user", "GPUs now", "GPU-hours, recent", "GPU-hours, 7 days")
    rows = [[str(value) for key, value in user.items() if key != "uid"] for user in users]
    if as_json:
        print_json({"users": users})
    elif rows:
        print_table(columns, rows, columns[1:])
    else:
        print("nobody has had a GPU through the queue since this machine was started")
    return 0


def _as_json(record: JobRecord, now: float, gpus: Sequence[GpuInfo]) -> dict[str, Json]:
    indexes = {gpu.uuid: gpu.index for gpu in gpus}
    return {
        "id": record.id,
        "state": record.state.value,
        "position": None,
        "name": record.name,
        "user": record.user,
        "pid": record.pid,
        "run_dir": record.run_dir,
        "claim_bytes": record.reserved_bytes,
        "num_gpus": record.count,
        "jobs_per_device": record.jobs_per_device,
        "gpus": [
            {"uuid": uuid, "index": indexes.get(uuid), "taken_bytes": taken_bytes}
            | {"idle_seconds": record.idle().get(uuid)}
            for uuid, taken_bytes in zip(record.gpus, record.taken_bytes, strict=True)
        ],
        "seconds_in_state": round(max(now - record.since, 0.0), 1),
        "seconds_since_queued": round(max(now - record.queued_at, 0.0), 1),
    }


def _row(job: dict[str, Json]) -> list[str]:
    if job["state"] == "unreadable":
        return [job["id"], "-", "?", "-", user_name(job["owner_uid"]), "?", "?", "?"]
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


def _cancel(found: Sequence[LiveJob], job_id: str) -> int:
    job = next((job for job in found if job.id == job_id), None)
    if job is None:
        problem = "there is no such job"
    elif job.owner != os.geteuid():
        # the file's owner, not the record: that could name anybody's process
        problem = f"it belongs to user {job.owner}"
    elif job.record is None:
        problem = "its record cannot be read, and so its process is not known; end that yourself"
    else:
        record = job.record
        problem = (
            f"its launcher (pid {record.pid}) is gone, or in another container; what is left of "
            "the job ends by itself within seconds"
        )
        try:
            if send_signal(record.pid, record.started, signal.SIGTERM):
                print(f"{job_id} ({record.name}, pid {record.pid}) was asked to stop")
                return 0
        except PermissionError:
            problem = f"pid {record.pid} is another user's process"
    return fail(f"queue cancel {printable(job_id)}", problem)
