"""CUDA processes of this machine, as NVML lists them: which of them may be ended, and by whom."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from robust_train.gpu.holders import sees_host_pids, user_name
from robust_train.queue.reservations import start_ticks
from robust_train.values import Inventory


@dataclass(frozen=True)
class CudaProcess:
    """A process that NVML lists as computing, and that exists under this number here.

    Attributes:
        pid: its id.
        uid: its real user; ``user`` is the name.
        command: its short name.
        start_ticks: when it started, in clock ticks since boot, against reused ids.
        gpus: NVML's indices of the GPUs that it is on.
        used_bytes: its memory on all of them; None where the driver does not say.
    """

    pid: int
    uid: int
    user: str
    command: str
    start_ticks: int
    gpus: tuple[int, ...]
    used_bytes: int | None


@dataclass(frozen=True)
class Listed:
    """What NVML lists.

    Attributes:
        processes: CUDA processes that can be told here.
        others: why a listed number is none of them, by number.
    """

    processes: tuple[CudaProcess, ...]
    others: dict[int, str]


@dataclass(frozen=True)
class Choice:
    """Whom to end, and for each number that was named and must not be ended the reason."""

    targets: tuple[CudaProcess, ...]
    refusals: dict[int, str]


def list_cuda_processes(inventory: Inventory, proc: Path = Path("/proc")) -> Listed:
    """Who computes on the GPUs of ``inventory``.

    NVML may tell the host's numbers inside a container, where the same number is another process.
    So there a process counts only if it has CUDA's library loaded.
    """
    on: dict[int, list[int]] = {}
    used: dict[int, int | None] = {}
    others: dict[int, str] = {}
    for gpu in inventory.gpus:
        for process in gpu.processes or ():
            if not process.computes:
                others[process.pid] = "only draws on a GPU and is no CUDA process"
                continue
            on.setdefault(process.pid, []).append(gpu.index)
            known, told = used.get(process.pid, 0), process.used_bytes
            used[process.pid] = None if known is None or told is None else known + told
    needs_proof = not sees_host_pids(proc)
    processes = []
    for pid in sorted(on):
        others.pop(pid, None)
        found = _identify(proc, pid, tuple(dict.fromkeys(on[pid])), used[pid])
        if found is None:
            others[pid] = "is not to be seen from here (in another container, or it just ended)"
        elif needs_proof and not _has_cuda_library(proc, pid):
            others[pid] = (
                "has not loaded CUDA's library: NVML means another process by that number, one "
                "outside of this container"
            )
        else:
            processes.append(found)
    return Listed(tuple(processes), others)


def choose(listed: Listed, named: Sequence[int], *, uid: int, ancestors: Collection[int]) -> Choice:
    """Which of the listed processes to end.

    Args:
        listed: what NVML lists.
        named: process ids that were asked for; none: all of the caller's own.
        uid: the caller's user; only 0 may name others' processes.
        ancestors: the caller itself and all that it was started by.
    """
    if not named:
        own = [p for p in listed.processes if p.uid == uid and p.pid not in ancestors]
        return Choice(tuple(own), {})
    by_pid = {process.pid: process for process in listed.processes}
    targets: list[CudaProcess] = []
    refusals: dict[int, str] = {}
    for pid in dict.fromkeys(named):
        process = by_pid.get(pid)
        if pid in ancestors:
            refusals[pid] = "is this command itself, or what it was started from"
        elif process is None:
            refusals[pid] = listed.others.get(pid, "is no CUDA process: NVML does not list it")
        elif process.uid != uid and uid != 0:
            refusals[pid] = f"belongs to {process.user}"
        else:
            targets.append(process)
    return Choice(tuple(targets), refusals)


def ancestors_of(pid: int, proc: Path = Path("/proc")) -> frozenset[int]:
    """``pid`` itself, its parent, that one's parent and so on."""
    found: set[int] = set()
    while pid > 0 and pid not in found:
        found.add(pid)
        pid = int(_status(proc, pid).get("PPid", "0"))
    return frozenset(found)


def _identify(
    proc: Path, pid: int, gpus: tuple[int, ...], used_bytes: int | None
) -> CudaProcess | None:
    started = start_ticks(pid)
    status = _status(proc, pid)
    if started is None or "Uid" not in status:
        return None
    # the real user, by whom signals go; the folder's owner is the effective one
    uid = int(status["Uid"].split()[0])
    name = "".join(c if c.isprintable() else "?" for c in status.get("Name", "?"))
    return CudaProcess(pid, uid, user_name(uid), name, started, gpus, used_bytes)


def _status(proc: Path, pid: int) -> dict[str, str]:
    try:
        text = (proc / str(pid) / "status").read_text(errors="replace")
    except OSError:
        return {}
    pairs = (line.partition(":") for line in text.splitlines())
    return {key: value.strip() for key, _, value in pairs}


def _has_cuda_library(proc: Path, pid: int) -> bool:
    try:
        with (proc / str(pid) / "maps").open(errors="replace") as lines:
            return any("libcuda.so" in os.path.basename(line.rstrip()) for line in lines)
    except OSError:
        return False
