"""Why a job waits, in one short line, and who has how much of each GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from robust_train.gpu.processes import Holder
from robust_train.gpu.select import describe_process, label
from robust_train.queue.order import GpuReservation, WaitingJob
from robust_train.queue.scheduler import GpuState, Plan, gpu_states, in_use
from robust_train.readable import mib, shortened
from robust_train.values import MIB, GpuInfo

LONGEST = 120


def why_waiting(
    job: WaitingJob,
    reservations: Sequence[GpuReservation],
    gpus: Sequence[GpuInfo],
    decided: Plan,
    holders: Mapping[int, Holder] | None = None,
) -> str:
    """Return why a job gets no GPU now: at most 120 characters, the nearest obstacle first.

    ``holders`` names processes on the GPUs, where those were listed.
    """
    for reservation in reservations:
        if reservation.gpu is None:
            owner = f" of {reservation.owner}" if reservation.owner else ""
            text = f"the record of job {reservation.id}{owner} cannot be read: it may have any GPU"
            return shortened(text, LONGEST)
    if job.id in decided.capped:
        return shortened(decided.capped[job.id], LONGEST)
    promised = {gpu.uuid: id_ for id_, group in decided.groups.items() for gpu in group}
    if decided.first not in (None, job.id):
        promised |= dict.fromkeys(decided.kept, decided.first)
    found: dict[tuple[int, str], list[GpuState]] = {}
    available = 0
    for state in gpu_states(reservations, gpus).values():
        if state.gpu.uuid not in job.only:
            continue
        obstacle = _obstacle(state, job, promised.get(state.gpu.uuid))
        if obstacle is None:
            available += 1
        else:
            found.setdefault(obstacle, []).append(state)
    awaited = decided.kept[: job.count] if decided.first == job.id else ()
    groups = sorted(
        found.items(),
        key=lambda group: (all(s.gpu.uuid not in awaited for s in group[1]), group[0][0]),
    )
    parts = [_sentence(text, states, job, holders or {}) for (_, text), states in groups]
    if job.count > 1:
        parts.insert(0, f"{available} of {job.count} GPUs available")
    return shortened("; ".join(parts) or "none of its GPUs is there", LONGEST)


def _obstacle(state: GpuState, job: WaitingJob, promised_to: str | None) -> tuple[int, str] | None:
    """Return how far away a GPU is, for sorting, and why; None if the job could have it."""
    if state.gpu.unusable is not None:
        return 4, state.gpu.unusable
    most = min(state.limit, job.jobs_per_device)
    if state.count >= most:
        jobs = "one job" if most == 1 else f"{most} jobs"
        if state.is_exclusive():
            return 1, "taken, and its compute mode allows one process"
        of_them = " of the job there" if most < job.jobs_per_device else ""
        return 1, f"taken, {jobs} per GPU (gpu_jobs_per_device={most}{of_them})"
    if state.usable < job.need_bytes:
        ours = sum(in_use(r, state.gpu) for r in state.reservations)
        return (2, "ours") if state.gpu.free_bytes + ours >= job.need_bytes else (3, "others")
    if promised_to not in (None, job.id):
        return 0, f"kept for job {promised_to}, which is ahead in the queue"
    return None


def _sentence(
    text: str, states: Sequence[GpuState], job: WaitingJob, holders: Mapping[int, Holder]
) -> str:
    numbers = ", ".join(dict.fromkeys(str(state.gpu.index) for state in states))
    if text in ("ours", "others"):
        usable = max(max(state.usable for state in states), 0)
        text = f"{'at most ' * (len(states) > 1)}{usable // MIB} of {mib(job.need_bytes)} free"
        jobs = dict.fromkeys(r.id for state in states for r in state.reservations)
        processes = [one for state in states for one in state.gpu.processes or ()]
        if jobs:
            text += f" beside job {', '.join(jobs)}"
        elif processes:
            largest = max(processes, key=lambda process: process.used_bytes or 0)
            text += f", {describe_process(largest, holders)}"
    return f"GPU{'s' * (len(states) > 1)} {numbers}: {text}"


def describe(reservations: Sequence[GpuReservation], gpus: Sequence[GpuInfo]) -> list[str]:
    """Return a line for each GPU: how much is free, and who has how much."""
    lines = []
    for state in gpu_states(reservations, gpus).values():
        gpu = state.gpu
        parts = [
            f"{mib(r.reserved_bytes)} reserved by job {r.id} ({r.owner})"
            + (", which is leaving" if r.draining else "")
            for r in state.reservations
        ]
        others = gpu.used_bytes - sum(in_use(r, gpu) for r in state.reservations)
        if others >= MIB:
            parts.append(f"{mib(others)} used by others")
        text = gpu.unusable or f"{mib(gpu.free_bytes)} of {mib(gpu.total_bytes)} free"
        lines.append(f"{label(gpu)}: {', '.join([text, *parts])}")
    return lines
