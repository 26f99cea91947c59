"""``robust-train queue``: who runs and who waits on this host, and why."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from robust_train.cli.parser import Parser
from robust_train.cli.table import print_table
from robust_train.gpu.inventory import read_inventory
from robust_train.queue import quarantine
from robust_train.queue.census import as_waiter, census
from robust_train.queue.queue_dir import QueueProblem, directory_for
from robust_train.queue.records import JobRecord, JobState
from robust_train.queue.reservations import Entry, Ledger, LedgerBusy, boottime, start_ticks
from robust_train.queue.scheduler import plan, why_not
from robust_train.readable import as_clock
from robust_train.values import MIB, GpuInfo

COLUMNS = ("id", "position", "state", "job", "user", "claim MiB", "GPU", "for", "reason")
_RIGHT = {"position", "claim MiB", "for"}
EXIT_NOT_DONE = 1
EXIT_UNUSABLE = 2
_PATIENCE_SECONDS = 2.0


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table or cancel a job; returns the exit code.

    0: done, also where there is no job. 1: the job to cancel is not there or not the caller's.
    2: the queue directory cannot be used.
    """
    parser = Parser(
        prog="robust-train queue",
        description="Jobs on this host: those that run, with their GPUs, and those that wait, with "
        "their place in line and the reason.",
    )
    parser.add_argument("--json", action="store_true", help="for programs; sizes in bytes")
    parser.add_argument("--dir", help="the queue directory, as gpu_queue_dir")
    commands = parser.add_subparsers(dest="command")
    cancel = commands.add_parser("cancel", help="ask one of your own jobs to stop (SIGTERM)")
    cancel.add_argument("id", help="as the table shows it")
    arguments = parser.parse_args(argv)
    path = directory_for(arguments.dir, os.environ)
    try:
        ledger = Ledger(path) if path.exists() else None
    except QueueProblem as problem:
        print(problem, file=sys.stderr)
        return EXIT_UNUSABLE
    try:
        entries = [] if ledger is None else _entries(ledger)
        if arguments.command == "cancel":
            return _cancel(entries, arguments.id)
        jobs = _jobs(ledger, entries)
    finally:
        if ledger is not None:
            ledger.close()
    if arguments.json:
        print(json.dumps({"directory": str(path), "jobs": jobs}, indent=2))
    elif jobs:
        print_table(COLUMNS, [_row(job) for job in jobs], _RIGHT)
    else:
        print(f"no job runs or waits on this host (queue directory {path})")
    return 0


def _entries(ledger: Ledger) -> list[Entry]:
    try:
        with ledger.locked(_PATIENCE_SECONDS):
            return ledger.entries(sweep=True)
    except LedgerBusy as busy:
        print(f"warning: {busy}", file=sys.stderr)
        return ledger.entries()


def _jobs(ledger: Ledger | None, entries: Sequence[Entry]) -> list[dict[str, Any]]:
    if ledger is None or not entries:
        return []
    inventory = read_inventory(processes=False)
    if not inventory.answered:
        print(f"warning: {inventory.problem}", file=sys.stderr)
    gpus = quarantine.without_sick(inventory.gpus, quarantine.read_sick(ledger.directory))
    waiters, holdings = census(entries)
    position, now = 0, boottime()
    decided = plan(waiters, holdings, gpus, now)
    jobs = []
    for entry in entries:
        record = entry.record
        if record is None:
            jobs.append({"id": entry.id, "state": "unreadable", "owner_uid": entry.owner})
            continue
        reason = None
        if record.state is JobState.WAITING:
            position += 1
            others = [holding for holding in holdings if holding.id != record.id]
            reason = why_not(as_waiter(record), others, gpus, decided)
            if record.id in decided.grants:
                reason = "its turn has come"
        jobs.append(_as_json(record, position if reason else None, reason, now, gpus))
    return jobs


def _as_json(
    record: JobRecord,
    position: int | None,
    reason: str | None,
    now: float,
    gpus: Sequence[GpuInfo],
) -> dict[str, Any]:
    indexes = {gpu.uuid: gpu.index for gpu in gpus}
    return {
        "id": record.id,
        "state": record.state.value,
        "position": position,
        "name": record.name,
        "user": record.user,
        "pid": record.pid,
        "run_dir": record.run_dir,
        "claim_bytes": record.claim_bytes,
        "num_gpus": record.count,
        "jobs_per_device": record.jobs_per_device,
        "gpus": [
            {"uuid": uuid, "index": indexes.get(uuid), "taken_bytes": taken_bytes}
            for uuid, taken_bytes in zip(record.gpus, record.taken_bytes, strict=True)
        ],
        "seconds_in_state": round(max(now - record.since, 0.0), 1),
        "seconds_since_queued": round(max(now - record.queued_at, 0.0), 1),
        "reason": reason,
    }


def _row(job: dict[str, Any]) -> list[str]:
    if job["state"] == "unreadable":
        return [job["id"], "-", "?", "-", str(job["owner_uid"]), "?", "?", "?", "unreadable record"]
    many, claim = job["num_gpus"], str(job["claim_bytes"] // MIB)
    return [
        job["id"],
        "-" if job["position"] is None else str(job["position"]),
        job["state"],
        job["name"],
        job["user"],
        claim if many == 1 else f"{many} × {claim}",
        _gpus(job["gpus"]),
        as_clock(int(job["seconds_in_state"])),
        job["reason"] or "-",
    ]


def _gpus(gpus: Sequence[dict[str, Any]]) -> str:
    """``GPU 0``, ``GPU 0, 1, 3``; in place of a number that is not known the UUID."""
    if not gpus:
        return "-"
    names = [gpu["uuid"] if gpu["index"] is None else str(gpu["index"]) for gpu in gpus]
    return ("" if gpus[0]["index"] is None else "GPU ") + ", ".join(names)


def _cancel(entries: Sequence[Entry], job_id: str) -> int:
    entry = next((entry for entry in entries if entry.id == job_id), None)
    if entry is None or entry.record is None:
        print(f"robust-train queue cancel {job_id}: there is no such job", file=sys.stderr)
        return EXIT_NOT_DONE
    # the file's owner, not the record: that could name anybody's process
    if entry.owner != os.geteuid():
        print(
            f"robust-train queue cancel {job_id}: it belongs to user {entry.owner}", file=sys.stderr
        )
        return EXIT_NOT_DONE
    problem = _terminate(entry.record)
    if problem is not None:
        print(f"robust-train queue cancel {job_id}: {problem}", file=sys.stderr)
        return EXIT_NOT_DONE
    print(f"{job_id} ({entry.record.name}, pid {entry.record.pid}) was asked to stop")
    return 0


def _terminate(record: JobRecord) -> str | None:
    """Signal the launcher, once it is sure that the process id is still its own."""
    gone = (
        f"its launcher (pid {record.pid}) is gone, or in another container; what is left of the "
        "job ends by itself within seconds"
    )
    try:
        process = os.pidfd_open(record.pid)
    except OSError:
        return gone
    try:
        if start_ticks(record.pid) != record.start_ticks:
            return gone
        if Path(f"/proc/{record.pid}").stat().st_uid != os.geteuid():
            return f"pid {record.pid} is another user's process"
        signal.pidfd_send_signal(process, signal.SIGTERM)
    except OSError:
        return gone
    finally:
        os.close(process)
    return None
