"""Identifies the processes on GPUs: their commands, users and start times, in any process.

NVML lists processes by the host's ids. In a container, such an id may belong to another process or
to none, so the functions check whether ids can be compared. A process is identified by its id and
its start, because ids are reused.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import signal
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

from robust_train.model.gpu import GpuInfo, Inventory

# The host's own namespace: PROC_PID_INIT_INO in the kernel.
INITIAL_PID_NAMESPACE = "pid:[4026531836]"


@dataclass(frozen=True)
class GpuUser:
    """The command and the user of a process that holds GPU memory."""

    command: str
    user: str


@dataclass(frozen=True)
class CudaProcess:
    """A process that computes on GPUs according to NVML, and whose id is valid here."""

    pid: int
    uid: int  # the real user, who decides about the permission to send signals
    command: str
    started: float  # seconds since boot
    gpus: tuple[int, ...]  # the NVML indices of its GPUs
    used_bytes: int | None  # its memory on all GPUs, None if the driver does not report it

    @property
    def user(self) -> str:
        """The name of its user."""
        return user_name(self.uid)


def find_holders(gpus: Iterable[GpuInfo]) -> dict[int, GpuUser]:
    """Return the commands and users of the processes on ``gpus``, by process id. Empty in a
    container, where the host's ids mean other processes."""
    if not sees_host_pids():
        return {}
    pids: set[int] = set()
    for gpu in gpus:
        pids.update(process.pid for process in gpu.processes or ())
    holders = {}
    for pid in sorted(pids):
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            user = user_name(process.uids().effective)
            holders[pid] = GpuUser(_command(process), user)
    return holders


def list_cuda_processes(inventory: Inventory) -> tuple[list[CudaProcess], dict[int, str]]:
    """List the processes that compute on the GPUs of ``inventory``.

    In a container, where NVML may list the host's ids, a process counts only if it has loaded
    CUDA's library.

    Returns:
        The processes, and by id the reason why another process that NVML lists is left out.
    """
    sizes_of: dict[int, dict[int, int | None]] = {}  # the memory of each process on each GPU
    others: dict[int, str] = {}
    for gpu in inventory.gpus:
        for listed in gpu.processes or ():
            if listed.computes:
                sizes = sizes_of.setdefault(listed.pid, {})
                held = sizes.get(gpu.index, 0)
                size = listed.used_bytes
                sizes[gpu.index] = None if held is None or size is None else held + size
            else:
                others[listed.pid] = "only draws on a GPU and is not a CUDA process"
    processes = []
    for pid, sizes in sorted(sizes_of.items()):
        others.pop(pid, None)
        started = started_at(pid)
        try:
            process = psutil.Process(pid)
            uid = process.uids().real
            command = _command(process)
        except psutil.Error:
            others[pid] = "is not visible from here (in another container, or it just ended)"
            continue
        if not has_this_number_here(pid):
            others[pid] = (
                "has not loaded CUDA's library: NVML's id means another process, outside of this "
                "container"
            )
            continue
        known_sizes = [size for size in sizes.values() if size is not None]
        used = sum(known_sizes) if len(known_sizes) == len(sizes) else None
        processes.append(CudaProcess(pid, uid, command, started, tuple(sizes), used))
    return processes, others


def sees_host_pids() -> bool:
    """Return whether process ids here are the host's ids, unlike in a container."""
    return own_pid_namespace() == INITIAL_PID_NAMESPACE


def own_pid_namespace() -> str:
    """Return the namespace of process ids here, empty if unknown."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def started_at(pid: int) -> float:
    """Return when a process started, in seconds since boot, so that changes of the clock do not
    matter. 0 if there is no such process."""
    try:
        # psutil computes the start from the boot time that it has read last, so read that first.
        booted = psutil.boot_time()
        return round(psutil.Process(pid).create_time() - booted, 2)
    except psutil.Error:
        return 0.0


def send_signal(pid: int, started: float, signum: signal.Signals) -> bool:
    """Send a signal to a process, identified by id and start. Return False if it has ended.

    Raises:
        PermissionError: the process belongs to another user.
    """
    try:
        process = psutil.Process(pid)
        if not is_there(pid, started):
            return False
        process.send_signal(signum)  # psutil compares the start once more.
    except psutil.AccessDenied as error:
        raise PermissionError from error
    except psutil.NoSuchProcess:
        return False
    return True


def is_there(pid: int, started: float) -> bool:
    """Return whether the process with this id and start is alive. A zombie is not alive."""
    try:
        status = psutil.Process(pid).status()
    except psutil.Error:
        return False
    return status != psutil.STATUS_ZOMBIE and started_at(pid) == started


def is_hidden(pid: int) -> bool:
    """Return whether /proc, mounted with hidepid, does not show a process of another user."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return not os.path.exists(f"/proc/{pid}")
    except (ProcessLookupError, OverflowError):
        pass
    return False


def user_name(uid: int) -> str:
    """Return the name of a user, or the number if there is none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def is_shared(gpu: GpuInfo, ours: Collection[int]) -> bool:
    """Return whether a process that is not among ``ours`` computes on a GPU.

    In a container, NVML's ids cannot be compared with ours. Then the GPU counts as shared only if
    more processes compute on it than we have.
    """
    others = [
        process.pid
        for process in gpu.processes or ()
        if process.computes and process.pid not in ours and not is_mps_server(process.pid)
    ]
    most_of_ours = 0 if sees_host_pids() else len(ours)
    return len(others) > most_of_ours


def is_mps_server(pid: int) -> bool:
    """Return whether a process is the server of NVIDIA's Multi-Process Service, which shares a GPU
    among processes. In a container, its id is unknown, but the pipe that its clients use exists."""
    with contextlib.suppress(psutil.Error):
        if psutil.Process(pid).name().startswith("nvidia-cuda-mps"):
            return True
    pipes = os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps"
    return not sees_host_pids() and os.path.exists(os.path.join(pipes, "control"))


def _command(process: psutil.Process) -> str:
    return "".join(c if c.isprintable() else "?" for c in process.name())


def has_library(pid: int, name: str) -> bool:
    """Return whether a process has loaded a library whose path contains ``name``.

    False if that is unknown.
    """
    try:
        return name.encode() in Path(f"/proc/{pid}/maps").read_bytes()
    except OSError:
        return False


def has_this_number_here(pid: int) -> bool:
    """Return whether the process that NVML lists as ``pid`` surely has that number here.

    In a container NVML may list the host's numbers. There the process must have loaded CUDA's
    library.
    """
    return sees_host_pids() or has_library(pid, "libcuda.so")
