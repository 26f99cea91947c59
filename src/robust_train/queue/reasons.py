"""Why a job waits: in one short line, and in full."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from robust_train.gpu.processes import Holder
from robust_train.gpu.select import describe_process, label, needed
from robust_train.queue.scheduler import (
    GpuReservation,
    GpuState,
    Plan,
    WaitingJob,
    gpu_states,
    in_use,
)
from robust_train.readable import mib, shortened
from robust_train.values import MIB, GpuInfo

LONGEST = 120
_MOST_GPUS_DESCRIBED = 4


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
            return shortened(_unreadable(reservation), LONGEST)
    promised = {gpu.uuid: id_ for id_, group in decided.groups.items() for gpu in group}
    if decided.first not in (None, job.id):
        promised |= dict.fromkeys(decided.kept, decided.first)
    found: dict[tuple[int, str], list[GpuState]] = {}
    available = 0
    for state in _of(job, reservations, gpus):
        obstacle = _obstacle(state, job, promised.get(state.gpu.uuid))
        if obstacle is None:
            available += 1
        else:
            found.setdefault(obstacle, []).append(state)
    awaited = decided.awaited if decided.first == job.id else ()
    groups = sorted(
        found.items(),
        key=lambda group: (all(s.gpu.uuid not in awaited for s in group[1]), group[0][0]),
    )
    parts = [_sentence(text, states, job, holders or {}) for (_, text), states in groups]
    if job.count > 1:
        parts.insert(0, f"{available} of {job.count} GPUs available")
    return shortened("; ".join(parts) or "none of its GPUs is there", LONGEST)


def why_not(
    job: WaitingJob, reservations: Sequence[GpuReservation], gpus: Sequence[GpuInfo], decided: Plan
) -> str:
    """Return what a job needs, and for each of its GPUs who has how much of it."""
    parts = [_unreadable(r) for r in reservations if r.gpu is None]
    mine = _of(job, reservations, gpus)
    kept = () if decided.first in (None, job.id) else decided.kept
    for state in mine[:_MOST_GPUS_DESCRIBED]:
        text = _describe(state)
        if state.gpu.uuid in kept:
            text += f", and is kept for job {decided.first}, which came earlier"
        parts.append(text)
    if len(mine) > _MOST_GPUS_DESCRIBED:
        parts.append(f"and {len(mine) - _MOST_GPUS_DESCRIBED} more")
    need = f"needs {needed(job.need_bytes, job.count)}"
    if job.count > 1:
        available = sum(state.suits(job) and state.gpu.uuid not in kept for state in mine)
        need += f", {available} available now"
    return f"{need}; {'; '.join(parts) or 'none of its GPUs is there'}"


def _of(
    job: WaitingJob, reservations: Sequence[GpuReservation], gpus: Sequence[GpuInfo]
) -> list[GpuState]:
    return [s for s in gpu_states(reservations, gpus).values() if s.gpu.uuid in job.only]


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
        emptiest = max(states, key=lambda state: state.usable)
        text = f"{max(emptiest.usable, 0) // MIB} of {mib(job.need_bytes)} free"
        processes = sorted(emptiest.gpu.processes or (), key=lambda p: -(p.used_bytes or 0))
        if len(states) > 1:
            text = f"at most {text}"
        elif emptiest.reservations:
            text += f" beside job {', '.join(r.id for r in emptiest.reservations)}"
        elif processes:
            text += f", {describe_process(processes[0], holders)}"
    return f"GPU{'s' * (len(states) > 1)} {numbers}: {text}"


def _unreadable(reservation: GpuReservation) -> str:
    owner = f" of {reservation.owner}" if reservation.owner else ""
    return f"the record of job {reservation.id}{owner} cannot be read, so it may have any GPU"


def _describe(state: GpuState) -> str:
    gpu = state.gpu
    if gpu.unusable is not None:
        return f"{label(gpu)}: {gpu.unusable}"
    text = f"{label(gpu)} has {mib(gpu.free_bytes)} of {mib(gpu.total_bytes)} free"
    parts = [
        f"{mib(r.reserved_bytes)} reserved by job {r.id}"
        + (f" ({r.owner})" if r.owner else "")
        + (", which is leaving" if r.draining else "")
        for r in state.reservations
    ]
    others = gpu.used_bytes - sum(in_use(r, gpu) for r in state.reservations)
    if others >= MIB:
        parts.append(f"{mib(others)} used by others")
    return text + (f": {', '.join(parts)}" if parts else "")
