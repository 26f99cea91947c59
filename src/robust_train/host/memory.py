"""Host memory: the use of this process and its data-loader workers, the memory available to them,
and kills by the kernel for lack of it.

Sizes are in bytes. Cgroups may have version 1 or 2, on a machine or in a container.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import psutil

# "no limit" in cgroup v1 is the largest multiple of the page size
_UNLIMITED = 2**60
# Matches a line of `/proc/self/mountinfo`.
_CGROUP_MOUNT = re.compile(
    r"^(?:\S+ ){3}(?P<root>\S+) (?P<point>\S+) .*- (?P<kind>cgroup2?) \S+ (?P<options>\S+)$",
    re.MULTILINE,
)
_OCTAL = re.compile(r"\\([0-7]{3})")
_KILL_COUNT = re.compile(r"^oom_kill (\d+)\s*$", re.MULTILINE)


@dataclass(frozen=True)
class HostMemory:
    """The host's memory, in bytes."""

    resident: int  # memory of this process that is in RAM
    # the most that ever was, since the process began or the peak was reset
    peak: int
    data: int  # writable private memory, which RLIMIT_DATA limits
    available: int  # what a new program could get, here and within the cgroup
    total: int  # memory of the machine, or of the cgroup if that has less


def read_host_memory() -> HostMemory:
    """Return the figures of this moment for this process."""
    memory = own_memory()
    machine = psutil.virtual_memory()
    rooms = [(machine.total, machine.available)] + cgroup_rooms()
    return HostMemory(
        resident=memory.get("VmRSS", 0),
        peak=memory.get("VmHWM", 0),
        data=memory.get("VmData", 0),
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
    memory = own_memory()
    rooms = [read_host_memory().available]
    rooms += [max(most - memory.get(used, 0), 0) for most, used, _ in process_limits()]
    return min(rooms)


def process_limits() -> list[tuple[int, str, str]]:
    """Return each limit of this process: bytes, what it limits, and the command that sets it."""
    kinds = (
        (resource.RLIMIT_DATA, "VmData", "ulimit -d"),
        (resource.RLIMIT_AS, "VmSize", "ulimit -v"),
    )
    limits = ((resource.getrlimit(kind)[0], used, command) for kind, used, command in kinds)
    return [limit for limit in limits if limit[0] != resource.RLIM_INFINITY]


def resident_bytes(process: psutil.Process) -> tuple[int, int]:
    """Return what of a process is in RAM, and what of that is its own. Not its own are pages of
    files and memory shared with other processes."""
    memory = process.memory_info()
    return memory.rss, memory.rss - memory.shared


def resident_bytes_of_tree(process: psutil.Process) -> tuple[int, int]:
    """Return `resident_bytes` of a process and its descendants. Pages of files count once, as
    those of the process that has most. Pages that a fork still shares with its parent count for
    both: only a walk through all of them could separate them."""
    own_bytes = 0
    shared = 0
    for member in [process] + process.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            resident, anonymous = resident_bytes(member)
            own_bytes = own_bytes + anonymous
            shared = max(shared, resident - anonymous)
    return own_bytes + shared, own_bytes


def largest_resident() -> int:
    """Return the most of this process that ever was in RAM."""
    # ru_maxrss is in KiB on Linux, see getrusage(2)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def reset_peak(clear_refs: Path = Path("/proc/self/clear_refs")) -> bool:
    """Reset the peak of resident memory. Returns False if the kernel refuses. It writes 5 to
    ``clear_refs``, see proc(5), which needs Linux 4.0 and CONFIG_PROC_PAGE_MONITOR."""
    try:
        clear_refs.write_text("5")
    except OSError:
        return False
    return True


def cgroup_rooms(root: Path = Path("/")) -> list[tuple[int, int]]:
    """Return limit and rest of it, for every cgroup above this process that has a limit. The page
    cache counts as usage there and gives way when memory is requested, however often it is read."""
    rooms = []
    for folder in memory_folders(root):
        for limit_file, usage_file, prefix in (
            ("memory.max", "memory.current", ""),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
        ):
            with contextlib.suppress(ValueError):  # no such file; "max"
                limit = int(_read(folder / limit_file))
                used = int(_read(folder / usage_file))
                cached = re.findall(
                    rf"^{prefix}(?:in)?active_file (\d+)$", _read(folder / "memory.stat"), re.M
                )
                used -= sum(map(int, cached))
                if limit < _UNLIMITED:
                    rooms.append((limit, max(limit - used, 0)))
    return rooms


def memory_folders(root: Path = Path("/")) -> list[Path]:
    """Return the folders of the cgroups that account this process's memory, its own first. In
    version 2 each includes the groups below it. In version 1 only the first is known."""
    cgroups: dict[str, str] = {}
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        cgroups |= dict.fromkeys(controllers.split(","), path)
    kind = "cgroup" if "memory" in cgroups else "cgroup2"
    controller = "memory" if cgroups.get("memory") else ""
    cgroup = PurePosixPath(cgroups.get(controller, ".."))
    # In a container, a cgroup may have the name that the machine or the container sees. A path with
    # `..` leads out of the namespace.
    mounts = _CGROUP_MOUNT.finditer(_read(root / "proc/self/mountinfo"))
    for mount in mounts if ".." not in cgroup.parts else ():
        mounted = _unescaped(mount["root"])
        has_memory = kind == "cgroup2" or "memory" in mount["options"].split(",")
        if mount["kind"] == kind and has_memory and cgroup.is_relative_to(mounted):
            below = cgroup.relative_to(mounted)
            folder = root / _unescaped(mount["point"]).lstrip("/") / below
            above = len(below.parts) if kind == "cgroup2" else 0
            return [folder] + list(folder.parents)[:above]
    return []


class OomKillWatch:
    """Finds out whether the kernel's OOM killer took a process, which SIGKILL itself does not show.

    The kernel counts each kill in the memory cgroup of the process, and in ``/proc/vmstat`` for the
    machine, before it sends the signal. ``memory.failcnt`` and ``under_oom`` of version 1 are not
    read: they also move when the kernel found memory after all. Create it before the child is
    started. It holds no open file, and never raises.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        # version 2: a cgroup without a memory controller is counted with the one above it
        names = ("memory.events", "memory.oom_control")
        files = [folder / name for folder in memory_folders(root) for name in names]
        self._counter = next((path for path in files if path.is_file()), Path(os.devnull))
        self._machine_counter = root / "proc/vmstat"
        self._before = _kills(self._counter)
        self._machine_before = _kills(self._machine_counter)

    def killed(self) -> bool | None:
        """Return whether the OOM killer has taken a process of this process's cgroup since then.
        None if the counters cannot be read, or if an unknown process on the machine was killed."""
        now = _kills(self._counter)
        if self._before is not None and now is not None:
            return now > self._before
        machine = _kills(self._machine_counter)
        is_same = machine is not None and machine == self._machine_before
        return False if is_same else None


def _kills(path: Path) -> int | None:
    """Return ``oom_kill`` of ``memory.events``, ``memory.oom_control`` or ``/proc/vmstat``."""
    match = _KILL_COUNT.search(_read(path))
    return None if match is None else int(match[1])


def _unescaped(field: str) -> str:
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), field)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


# --- the data-loader workers in a process tree ------------------------------------------------

_OF_TORCH = "pt_data_worker"  # its own name for them, since 2.6
# how multiprocessing starts a process that is no fork
_STARTED = ("multiprocessing.spawn", "multiprocessing.forkserver")


@dataclass(frozen=True)
class Workers:
    """The workers at a moment."""

    count: int = 0
    # more memory of their own than all other processes of the tree
    hold_most: bool = False


def find_workers(pids: Sequence[int]) -> Workers:
    """Return the data-loader workers among the descendants of these processes.

    These are processes that torch names as workers. For other libraries and older versions, they
    are ``multiprocessing`` processes without children.
    """
    tree: dict[int, psutil.Process] = {}
    infos: dict[int, dict[str, Any]] = {}
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            root = psutil.Process(pid)
            tree[pid] = root
            tree |= {child.pid: child for child in root.children(recursive=True)}
    for pid, process in tree.items():
        with contextlib.suppress(psutil.Error):
            infos[pid] = process.as_dict(["ppid", "name", "cmdline"], ad_value="")
    started = {pid: process for pid, process in infos.items() if _is_started(process, infos)}
    workers = {pid for pid, process in started.items() if process["name"] == _OF_TORCH}
    if not workers:
        parents = {process["ppid"] for process in started.values()}
        workers = started.keys() - parents
    if not workers:
        return Workers()
    theirs = sum(_own_bytes(tree[pid], shares=False) for pid in workers)
    others = (_own_bytes(tree[pid]) for pid in tree.keys() - workers)
    return Workers(len(workers), theirs > sum(others))


def _is_started(info: Mapping[str, Any], infos: Mapping[int, Mapping[str, Any]]) -> bool:
    """Return whether multiprocessing has started it: a fork has its parent's command line."""
    words = info["cmdline"]
    parent = infos.get(info["ppid"])
    return parent is not None and (
        words == parent["cmdline"] or any(name in word for word in words for name in _STARTED)
    )


def _own_bytes(process: psutil.Process, *, shares: bool = True) -> int:
    """Return the bytes that belong to the process alone. With ``shares``, include memory that its
    forks share."""
    with contextlib.suppress(psutil.Error):
        if shares:
            return resident_bytes(process)[1]
        return int(process.memory_full_info().uss)
    return 0
