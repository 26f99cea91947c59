"""The processes behind the ids that NVML lists: whose they are, and which are CUDA processes."""

from __future__ import annotations

import os
import pwd
import signal
from collections.abc import Iterable
from dataclasses import dataclass

import psutil

from robust_train.model.gpu import GpuInfo, Inventory

# the kernel's PROC_PID_INIT_INO
INITIAL_PID_NAMESPACE = "pid:[4026531836]"


@dataclass(frozen=True)
class GpuUser:
    """A process that holds GPU memory: its command's short name and its user."""

    pid: int
    command: str
    user: str


@dataclass(frozen=True)
class CudaProcess:
    """A process that NVML lists as computing, and that exists under this number here."""

    pid: int
    uid: int  # its real user, by whom signals go; `user` is the name
    user: str
    command: str
    started: float  # seconds since boot, against reused ids
    gpus: tuple[int, ...]  # NVML's indices of the GPUs that it is on
    used_bytes: (
        int | None
    )  # its memory on all of them; None if the driver does not report it


@dataclass(frozen=True)
class CudaProcesses:
    """The CUDA processes that are known here; ``others`` has the reason for each other number."""

    processes: tuple[CudaProcess, ...]
    others: dict[int, str]


def find_holders(gpus: Iterable[GpuInfo]) -> dict[int, GpuUser]:
    """Return names for the known processes on ``gpus``, by process id. NVML lists the host's ids;
    in a container the same number is another process, so there is none."""
    if not sees_host_pids():
        return {}
    found = {}
    for pid in sorted({process.pid for gpu in gpus for process in gpu.processes or ()}):
        try:
            process = psutil.Process(pid)
            command, user = _command(process), user_name(process.uids().effective)
        except psutil.Error:
            continue
        found[pid] = GpuUser(pid, command, user)
    return found


def list_cuda_processes(inventory: Inventory) -> CudaProcesses:
    """Return who computes on the GPUs of ``inventory``. In a container, where NVML may list the
    host's numbers, a process counts only if it has CUDA's library loaded."""
    on: dict[int, list[int]] = {}
    used: dict[int, int | None] = {}
    others: dict[int, str] = {}
    for gpu in inventory.gpus:
        for process in gpu.processes or ():
            if not process.computes:
                others[process.pid] = "only draws on a GPU and is no CUDA process"
                continue
            on.setdefault(process.pid, []).append(gpu.index)
            known, size = used.get(process.pid, 0), process.used_bytes
            used[process.pid] = None if known is None or size is None else known + size
    needs_proof = not sees_host_pids()
    processes = []
    for pid in sorted(on):
        others.pop(pid, None)
        found = _identify(pid, tuple(dict.fromkeys(on[pid])), used[pid])
        if found is None:
            others[pid] = (
                "is not visible from here (in another container, or it just ended)"
            )
        elif needs_proof and not has_cuda_library(pid):
            others[pid] = (
                "has not loaded CUDA's library: NVML means another process by that number, one "
                "outside of this container"
            )
        else:
            processes.append(found)
    return CudaProcesses(tuple(processes), others)


def sees_host_pids() -> bool:
    """Return whether this process numbers processes as the host does, unlike in a container."""
    try:
        return os.readlink("/proc/self/ns/pid") == INITIAL_PID_NAMESPACE
    except OSError:
        return False


def started_at(pid: int) -> float | None:
    """Return when a process started, in seconds since boot whatever the clock; None if none."""
    try:
        booted = psutil.boot_time()  # first: psutil adds the one that it read last
        return round(psutil.Process(pid).create_time() - booted, 2)
    except psutil.Error:
        return None


def send_signal(pid: int, started: float, signum: signal.Signals) -> bool:
    """Signal a process that is known by number and start; return False if it has ended. Raises
    PermissionError: it is another user's."""
    try:
        process = psutil.Process(pid)
        if not is_there(pid, started):
            return False
        process.send_signal(signum)  # compares the start once more
    except psutil.AccessDenied as error:
        raise PermissionError from error
    except psutil.NoSuchProcess:
        return False
    return True


def is_there(pid: int, started: float) -> bool:
    """Return whether that process has not ended; a zombie has."""
    try:
        status = psutil.Process(pid).status()
    except psutil.Error:
        return False
    return status != psutil.STATUS_ZOMBIE and started_at(pid) == started


def user_name(uid: int) -> str:
    """Return the name of a user, or the number if there is none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def is_mps_server(pid: int) -> bool:
    """Return whether a process is NVIDIA's Multi-Process Service, which shares a GPU. Its number
    means nothing in a container: there MPS's pipe shows it, which its clients need."""
    try:
        if psutil.Process(pid).name().startswith("nvidia-cuda-mps"):
            return True
    except psutil.Error:
        pass
    pipes = os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps"
    return not sees_host_pids() and os.path.exists(os.path.join(pipes, "control"))


def _identify(
    pid: int, gpus: tuple[int, ...], used_bytes: int | None
) -> CudaProcess | None:
    started = started_at(pid)
    if started is None:
        return None
    try:
        process = psutil.Process(pid)
        uid, command = process.uids().real, _command(process)
    except psutil.Error:
        return None
    return CudaProcess(pid, uid, user_name(uid), command, started, gpus, used_bytes)


def _command(process: psutil.Process) -> str:
    return "".join(c if c.isprintable() else "?" for c in process.name())


def has_cuda_library(pid: int) -> bool:
    try:
        maps = psutil.Process(pid).memory_maps()
    except psutil.Error:
        return False
    return any("libcuda.so" in os.path.basename(entry.path) for entry in maps)
