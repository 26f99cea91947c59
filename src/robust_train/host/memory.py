"""Host memory: what this process has, and what there is for it. In bytes."""

from __future__ import annotations

import contextlib
import resource
from dataclasses import dataclass
from pathlib import Path

import psutil

from robust_train.host.cgroups import memory_folders

# "no limit" in cgroup v1 is the largest multiple of the page size
_UNLIMITED = 2**60


@dataclass(frozen=True)
class HostMemory:
    """The host's memory, in bytes."""

    resident: int  # memory of this process that is in RAM
    peak: int  # the most that ever was, since the process began or the peak was reset
    data: int  # writable private memory, which RLIMIT_DATA limits
    available: int  # what a new program could get, here and within the cgroup
    total: int  # of the machine, or of the cgroup where that has less


def read_host_memory() -> HostMemory:
    """Return the figures of this moment for this process."""
    own = own_memory()
    machine = psutil.virtual_memory()
    rooms = [(machine.total, machine.available), *cgroup_rooms()]
    return HostMemory(
        resident=own.get("VmRSS", 0),
        peak=own.get("VmHWM", 0),
        data=own.get("VmData", 0),
        available=min(available for _, available in rooms),
        total=min(total for total, _ in rooms),
    )


def own_memory(status: Path = Path("/proc/self/status")) -> dict[str, int]:
    """Return this process's sizes as ``/proc/self/status`` names them: ``VmRSS``, ``VmHWM`` …
    psutil has neither the peak nor what of the resident memory is anonymous."""
    sizes = {}
    for line in status.read_text(errors="replace").splitlines():
        key, _, value = line.partition(":")
        words = value.split()
        if len(words) == 2 and words[1] == "kB" and words[0].isdigit():
            sizes[key] = int(words[0]) * 1024  # "kB" there are KiB
    return sizes


def room_left() -> int:
    """Return what this process can still take, within its limits and the machine's memory."""
    own, rooms = own_memory(), [read_host_memory().available]
    rooms += [max(most - own.get(used, 0), 0) for most, used, _ in process_limits()]
    return min(rooms)


def process_limits() -> list[tuple[int, str, str]]:
    """Return each limit of this process: bytes, what it limits, and the command that sets it."""
    kinds = (
        (resource.RLIMIT_DATA, "VmData", "ulimit -d"),
        (resource.RLIMIT_AS, "VmSize", "ulimit -v"),
    )
    limits = (
        (resource.getrlimit(kind)[0], used, command) for kind, used, command in kinds
    )
    return [limit for limit in limits if limit[0] != resource.RLIM_INFINITY]


def resident_bytes(process: psutil.Process | None = None) -> tuple[int, int]:
    """Return what of a process is in RAM, and what of that is its own; by default this one's. Not
    its own are pages of files and memory shared with other processes."""
    memory = (process or psutil.Process()).memory_info()
    return memory.rss, memory.rss - memory.shared


def resident_bytes_of_tree(process: psutil.Process) -> tuple[int, int]:
    """Return :func:`resident_bytes` of a process and its descendants. Pages of files count once, as
    those of the process that has most. Pages that a fork still shares with its parent count for
    both: only a walk through all of them could separate them."""
    own, shared = 0, 0
    for member in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            resident, anonymous = resident_bytes(member)
            own, shared = own + anonymous, max(shared, resident - anonymous)
    return own + shared, own


def largest_resident() -> int:
    """Return the most of this process that ever was in RAM."""
    # ru_maxrss is in KiB on Linux, see getrusage(2)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def reset_peak(clear_refs: Path = Path("/proc/self/clear_refs")) -> bool:
    """Let the peak of resident memory start over; return False where the kernel refuses. Writing 5
    there is described in proc(5); it needs Linux 4.0 and CONFIG_PROC_PAGE_MONITOR."""
    try:
        clear_refs.write_text("5")
    except OSError:
        return False
    return True


def cgroup_rooms(root: Path = Path("/")) -> list[tuple[int, int]]:
    """Return limit and rest of it, for every cgroup above this process that has a limit. The
    inactive page cache counts as usage there and gives way when memory is requested."""
    rooms = []
    for folder in memory_folders(root):
        for limit_file, usage_file, cached in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            with contextlib.suppress(OSError, ValueError):  # no such file; "max"
                limit = int((folder / limit_file).read_text())
                used = int((folder / usage_file).read_text())
                if limit < _UNLIMITED:
                    rooms.append((limit, max(limit - used + _pages(folder, cached), 0)))
    return rooms


def _pages(folder: Path, name: str) -> int:
    with contextlib.suppress(OSError, ValueError):
        for line in (folder / "memory.stat").read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    return 0
