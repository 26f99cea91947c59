"""The processes on GPUs: their owners, whether they compute, and their memory in addition to
tensors."""

from __future__ import annotations

import contextlib
import os
import pwd
import signal
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from robust_train.files import read_object, write_json
from robust_train.model.gpu import GpuInfo, Inventory
from robust_train.readable import GIB, MIB

# the kernel's PROC_PID_INIT_INO
INITIAL_PID_NAMESPACE = "pid:[4026531836]"


@dataclass(frozen=True)
class GpuUser:
    """Who holds GPU memory: a process's command, and its user."""

    command: str
    user: str


@dataclass(frozen=True)
class CudaProcess:
    """A process that NVML lists as computing, and that exists under this number here."""

    pid: int
    uid: int  # its real user, by whom signals go
    command: str
    started: float  # seconds since boot, against reused ids
    gpus: tuple[int, ...]  # NVML's indices of the GPUs that it is on
    # its memory on all of them; None if the driver does not report it
    used_bytes: int | None

    @property
    def user(self) -> str:
        """Its user's name."""
        return user_name(self.uid)


def find_holders(gpus: Iterable[GpuInfo]) -> dict[int, GpuUser]:
    """Return names for the known processes on ``gpus``, by process id. NVML lists the host's ids.
    In a container the same number is another process, so it returns no names."""
    if not sees_host_pids():
        return {}
    pids = {process.pid for gpu in gpus for process in gpu.processes or ()}
    holders = {}
    for pid in sorted(pids):
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            user = user_name(process.uids().effective)
            holders[pid] = GpuUser(_command(process), user)
    return holders


def list_cuda_processes(inventory: Inventory) -> tuple[list[CudaProcess], dict[int, str]]:
    """Return the processes that compute on the GPUs of ``inventory``, and by number, the reason why
    another process that NVML lists is not among them. In a container, where NVML may list the
    host's numbers, a process counts only if it has CUDA's library loaded."""
    on: dict[int, dict[int, int | None]] = {}
    others: dict[int, str] = {}
    for gpu in inventory.gpus:
        for listed in gpu.processes or ():
            if listed.computes:
                sizes = on.setdefault(listed.pid, {})
                held = sizes.get(gpu.index, 0)
                size = listed.used_bytes
                sizes[gpu.index] = None if held is None or size is None else held + size
            else:
                others[listed.pid] = "only draws on a GPU and is no CUDA process"
    needs_proof = not sees_host_pids()
    processes = []
    for pid, sizes in sorted(on.items()):
        others.pop(pid, None)
        started = started_at(pid)
        try:
            process = psutil.Process(pid)
            uid = process.uids().real
            command = _command(process)
        except psutil.Error:
            others[pid] = "is not visible from here (in another container, or it just ended)"
            continue
        if needs_proof and not has_cuda_library(pid):
            others[pid] = (
                "has not loaded CUDA's library: NVML means another process by that number, one "
                "outside of this container"
            )
            continue
        known_sizes = [size for size in sizes.values() if size is not None]
        processes.append(
            CudaProcess(
                pid,
                uid,
                command,
                started,
                tuple(sizes),
                sum(known_sizes) if len(known_sizes) == len(sizes) else None,
            )
        )
    return processes, others


def sees_host_pids() -> bool:
    """Return whether this process numbers processes as the host does, unlike in a container."""
    return own_pid_namespace() == INITIAL_PID_NAMESPACE


def own_pid_namespace() -> str:
    """Return in which namespace this process numbers processes, empty if unknown."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def started_at(pid: int) -> float:
    """Return when a process started, in seconds since boot whatever the clock, or 0 if none has."""
    try:
        # first: psutil adds the one that it read last
        booted = psutil.boot_time()
        return round(psutil.Process(pid).create_time() - booted, 2)
    except psutil.Error:
        return 0.0


def send_signal(pid: int, started: float, signum: signal.Signals) -> bool:
    """Signal a process, identified by number and start. Returns False if it has ended. Raises
    PermissionError if it belongs to another user."""
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
    """Return whether that process is alive. A zombie is not."""
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
    """Return whether a process that is not among ``ours`` computes on a GPU, as far as is known.
    A container may not know NVML's numbers, so only processes beyond the number of ours show it."""
    others = [
        process.pid
        for process in gpu.processes or ()
        if process.computes and process.pid not in ours and not is_mps_server(process.pid)
    ]
    return len(others) > (0 if sees_host_pids() else len(ours))


def is_mps_server(pid: int) -> bool:
    """Return whether a process is NVIDIA's Multi-Process Service, which shares a GPU. Its number
    means nothing in a container: there MPS's pipe shows it, which its clients need."""
    with contextlib.suppress(psutil.Error):
        if psutil.Process(pid).name().startswith("nvidia-cuda-mps"):
            return True
    pipes = os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps"
    return not sees_host_pids() and os.path.exists(os.path.join(pipes, "control"))


def _command(process: psutil.Process) -> str:
    return "".join(c if c.isprintable() else "?" for c in process.name())


def has_cuda_library(pid: int) -> bool:
    try:
        maps = psutil.Process(pid).memory_maps()
    except psutil.Error:
        return False
    return any("libcuda.so" in os.path.basename(entry.path) for entry in maps)


def has_library(pid: int, name: str) -> bool:
    """Return whether a process has loaded a library whose path contains ``name``."""
    try:
        return name.encode() in Path(f"/proc/{pid}/maps").read_bytes()
    except OSError:
        return False


def is_meant(pid: int) -> bool:
    """Return whether NVML surely means the process that has this number here.

    In a container it may list the host's numbers, so a process has to use CUDA there.
    """
    return sees_host_pids() or has_library(pid, "libcuda.so")


# --- what a process takes ----------------------------------------------------------------------

CONTEXT_BYTES = 512 * MIB
"""The size of a CUDA context with its kernels, until it is measured. NVML counts it in addition to
torch's cache."""

CACHE_FACTOR = 1.1
"""Bytes that the caching allocator holds for each that tensors take at their peak: it asks the
driver for 2 MiB or 20 MiB at least (``kSmallBuffer``, ``kLargeBuffer`` in CUDACachingAllocator.h)
and keeps what lies between tensors. With expandable segments it is mostly less."""

_PLAUSIBLE = range(64 * MIB, 8 * GIB)
_PLAUSIBLE_AT_MOST = range(128 * MIB, 2 * GIB)
_AT_MOST = " at most"


def footprint(allocated_bytes: int, gpu_name: str = "") -> int:
    """Return the memory that NVML shows for a process whose tensors take ``allocated_bytes`` at
    their peak. ``gpu_name`` is the GPU's model, on which earlier jobs measured their contexts."""
    context_bytes = learned_context_bytes(gpu_name) or CONTEXT_BYTES
    return int(allocated_bytes * CACHE_FACTOR) + context_bytes


def learned_context_bytes(gpu_name: str) -> int:
    """Return the largest context of this user's jobs on GPUs of this model, 0 if unknown. If NVML
    lists no processes, return the smallest upper bound."""
    contexts = _learned()
    measured = contexts.get(gpu_name)
    return measured if measured else contexts.get(gpu_name + _AT_MOST, 0)


def learn_context_bytes(gpu_name: str, figures: Mapping[str, int]) -> None:
    """Remember what an attempt measured. Never raises: a guess is all that is lost."""
    contexts = _learned()
    measured = figures.get("context_bytes", 0)
    at_most = figures.get("context_at_most_bytes", 0)
    name = gpu_name + _AT_MOST
    learned = dict(contexts)
    if measured in _PLAUSIBLE:
        learned[gpu_name] = max(measured, contexts.get(gpu_name, 0))
    if at_most in _PLAUSIBLE_AT_MOST:  # others' memory only adds
        learned[name] = min(at_most, contexts.get(name, at_most))
    path = _contexts_file()
    if learned != contexts and path is not None:
        with contextlib.suppress(OSError):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_json(path, learned, indent=2)


def _contexts_file() -> Path | None:
    """Return the file that remembers contexts, or None without a home."""
    chosen, home = (os.environ.get(name, "") for name in ("XDG_CACHE_HOME", "HOME"))
    # the XDG Base Directory Specification ignores relative paths
    cache = chosen if os.path.isabs(chosen) else os.path.join(home, ".cache")
    path = Path(cache) / "robust-train/contexts.json"
    return path if path.is_absolute() else None


def _learned() -> dict[str, int]:
    path = _contexts_file()
    contexts = {} if path is None else read_object(path)
    return {
        name: size for name, size in contexts.items() if type(size) is int and size in _PLAUSIBLE
    }
