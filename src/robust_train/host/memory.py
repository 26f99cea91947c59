"""Measures host memory: of this process, of data-loader workers, and how much is available. Detects
kills by the kernel's OOM killer.

Launcher, attempts and the ``doctor`` and ``memory`` commands use it. Sizes are in bytes. Cgroups of
version 1 and 2 are read, on a machine or in a container.
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

# Cgroups of version 1 show "no limit" as the largest multiple of the page size.
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
    peak: int  # largest `resident` since the process started or the peak was reset
    data: int  # writable private memory, which RLIMIT_DATA limits
    available: int  # memory that a new program can get, on the machine and within the cgroup
    total: int  # memory of the machine, or of the cgroup if that has less


def read_host_memory() -> HostMemory:
    """Return the current figures for this process."""
    own = read_own_memory()
    machine = psutil.virtual_memory()
    limits = [(machine.total, machine.available)] + read_cgroup_limits()
    return HostMemory(
        resident=own.get("VmRSS", 0),
        peak=own.get("VmHWM", 0),
        data=own.get("VmData", 0),
        available=min(available for _, available in limits),
        total=min(total for total, _ in limits),
    )


def read_own_memory(status: Path = Path("/proc/self/status")) -> dict[str, int]:
    """Return this process's sizes by their names in ``/proc/self/status``: ``VmRSS``, ``VmHWM`` …
    psutil lacks the peak and the anonymous part of the resident memory."""
    sizes = {}
    for line in status.read_text(errors="replace").splitlines():
        key, _, value = line.partition(":")
        words = value.split()
        if len(words) == 2 and words[1] == "kB" and words[0].isdigit():
            sizes[key] = int(words[0]) * 1024  # "kB" there are KiB
    return sizes


def read_available_bytes() -> int:
    """Return how many bytes this process can still allocate, within its limits and the machine's
    memory."""
    own = read_own_memory()
    available = [read_host_memory().available]
    for limit, name, _ in read_process_limits():
        available.append(max(limit - own.get(name, 0), 0))
    return min(available)


def read_process_limits() -> list[tuple[int, str, str]]:
    """Return each memory limit of this process: its bytes, the name of the limited size in
    ``/proc/self/status``, and the command that sets the limit."""
    kinds = (
        (resource.RLIMIT_DATA, "VmData", "ulimit -d"),
        (resource.RLIMIT_AS, "VmSize", "ulimit -v"),
    )
    limits = []
    for kind, name, command in kinds:
        limit, _ = resource.getrlimit(kind)
        if limit != resource.RLIM_INFINITY:
            limits.append((limit, name, command))
    return limits


def resident_bytes(process: psutil.Process) -> tuple[int, int]:
    """Return a process's bytes in RAM, and how many of them belong to it alone: all but pages of
    files and memory shared with other processes."""
    memory = process.memory_info()
    return memory.rss, memory.rss - memory.shared


def resident_bytes_of_tree(process: psutil.Process) -> tuple[int, int]:
    """Return `resident_bytes` of a process and its descendants together.

    Shared pages count once: the largest share of any process is added. Pages that a fork still
    shares with its parent count for both, because only a walk through all pages could separate
    them.
    """
    own_bytes = 0
    shared_bytes = 0
    for member in [process] + process.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            resident, own = resident_bytes(member)
            own_bytes += own
            shared_bytes = max(shared_bytes, resident - own)
    return own_bytes + shared_bytes, own_bytes


def read_largest_resident() -> int:
    """Return the most bytes of this process that were ever in RAM."""
    # ru_maxrss is in KiB on Linux, see getrusage(2).
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def reset_peak(clear_refs: Path = Path("/proc/self/clear_refs")) -> bool:
    """Reset the peak of resident memory, and return whether the kernel accepted that. Writes 5 to
    ``clear_refs``, see proc(5), which needs Linux 4.0 and CONFIG_PROC_PAGE_MONITOR."""
    try:
        clear_refs.write_text("5")
    except OSError:
        return False
    return True


def read_cgroup_limits(root: Path = Path("/")) -> list[tuple[int, int]]:
    """Return the limit of every limited cgroup above this process, and the bytes available in it.
    A cgroup counts its page cache as usage, but the kernel drops the cache when a process requests
    memory, so the cache counts as available."""
    limits = []
    for folder in find_memory_cgroups(root):
        for limit_file, usage_file, prefix in (
            ("memory.max", "memory.current", ""),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
        ):
            # A ValueError means that the file does not exist, or contains "max".
            with contextlib.suppress(ValueError):
                limit = int(_read(folder / limit_file))
                used = int(_read(folder / usage_file))
                cached = re.findall(
                    rf"^{prefix}(?:in)?active_file (\d+)$", _read(folder / "memory.stat"), re.M
                )
                used -= sum(int(size) for size in cached)
                if limit < _UNLIMITED:
                    limits.append((limit, max(limit - used, 0)))
    return limits


def find_memory_cgroups(root: Path = Path("/")) -> list[Path]:
    """Return the folders of the cgroups that count this process's memory, from its own cgroup
    upwards. In version 1 only its own cgroup is found, and an empty list means none."""
    cgroups: dict[str, str] = {}
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        cgroups |= dict.fromkeys(controllers.split(","), path)
    kind = "cgroup" if "memory" in cgroups else "cgroup2"
    controller = "memory" if cgroups.get("memory") else ""
    cgroup = PurePosixPath(cgroups.get(controller, ".."))
    # A path with `..` leads out of the namespace.
    if ".." in cgroup.parts:
        return []
    # In a container, a cgroup may have the name that the machine or the container sees, so the
    # mount that contains it is searched for.
    for mount in _CGROUP_MOUNT.finditer(_read(root / "proc/self/mountinfo")):
        mounted = _unescape(mount["root"])
        has_memory = kind == "cgroup2" or "memory" in mount["options"].split(",")
        if mount["kind"] == kind and has_memory and cgroup.is_relative_to(mounted):
            below = cgroup.relative_to(mounted)
            folder = root / _unescape(mount["point"]).lstrip("/") / below
            # In version 2, each cgroup above includes the processes of this cgroup.
            above = len(below.parts) if kind == "cgroup2" else 0
            return [folder] + list(folder.parents)[:above]
    return []


class OomKillWatch:
    """Finds out whether the kernel's OOM killer killed a process, which SIGKILL does not show.

    The launcher creates it before it starts an attempt. Before the kernel sends the signal, it
    counts the kill in the memory cgroup of the process and, for the machine, in ``/proc/vmstat``.
    ``memory.failcnt`` and ``under_oom`` of version 1 are not read, because they also change if the
    kernel found memory after all. The watch holds no open file, and never raises.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._counter = _find_kill_counter(root)
        self._machine_counter = root / "proc/vmstat"
        self._before = _read_kills(self._counter)
        self._machine_before = _read_kills(self._machine_counter)

    def has_killed(self) -> bool | None:
        """Return whether the OOM killer killed a process of this process's cgroup since the watch
        was created. None if no one knows: the cgroup's counter is unreadable, and the machine's
        counter changed or is unreadable too."""
        now = _read_kills(self._counter)
        if self._before is not None and now is not None:
            return now > self._before
        machine = _read_kills(self._machine_counter)
        if machine is not None and machine == self._machine_before:
            return False
        return None


def _find_kill_counter(root: Path) -> Path:
    """Return the file that counts kills in this process's cgroup, ``/dev/null`` if there is none.
    In version 2, a cgroup without a memory controller is counted by the cgroup above it."""
    for folder in find_memory_cgroups(root):
        for name in ("memory.events", "memory.oom_control"):
            if (folder / name).is_file():
                return folder / name
    return Path(os.devnull)


def _read_kills(path: Path) -> int | None:
    """Return ``oom_kill`` of ``memory.events``, ``memory.oom_control`` or ``/proc/vmstat``."""
    match = _KILL_COUNT.search(_read(path))
    return None if match is None else int(match[1])


def _unescape(field: str) -> str:
    """Replace octal escapes of ``mountinfo``, such as ``\\040`` for a space."""
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), field)


def _read(path: Path) -> str:
    """Return a file's text, empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


# --- the data-loader workers in a process tree ------------------------------------------------

_TORCH_WORKER = "pt_data_worker"  # torch's process name for its workers, since 2.6
# In the command line of a multiprocessing child that is not a fork.
_STARTED = ("multiprocessing.spawn", "multiprocessing.forkserver")


@dataclass(frozen=True)
class Workers:
    """The data-loader workers of a job at one moment."""

    count: int = 0
    # The workers' own memory exceeds that of all other processes of the job.
    hold_most: bool = False


def find_workers(pids: Sequence[int]) -> Workers:
    """Count the data-loader workers among the descendants of these processes, and compare their
    memory with that of the other processes.

    Torch names its workers since 2.6. For older versions and other libraries, every
    ``multiprocessing`` child without children counts as a worker.
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
    workers = {pid for pid, process in started.items() if process["name"] == _TORCH_WORKER}
    if not workers:
        parents = {process["ppid"] for process in started.values()}
        workers = started.keys() - parents
    if not workers:
        return Workers()
    # Memory that a worker still shares with its parent counts for the parent only.
    bytes_of_workers = sum(_read_unique_bytes(tree[pid]) for pid in workers)
    bytes_of_others = sum(_read_own_bytes(tree[pid]) for pid in tree.keys() - workers)
    return Workers(len(workers), hold_most=bytes_of_workers > bytes_of_others)


def _is_started(info: Mapping[str, Any], infos: Mapping[int, Mapping[str, Any]]) -> bool:
    """Return whether multiprocessing started a process, as a fork or by a command of its own."""
    words = info["cmdline"]
    parent = infos.get(info["ppid"])
    if parent is None:
        return False
    is_fork = words == parent["cmdline"]
    return is_fork or any(name in word for word in words for name in _STARTED)


def _read_own_bytes(process: psutil.Process) -> int:
    """Return the anonymous memory of a process, including pages that its forks still share, or 0
    if the process has ended."""
    with contextlib.suppress(psutil.Error):
        _, own = resident_bytes(process)
        return own
    return 0


def _read_unique_bytes(process: psutil.Process) -> int:
    """Return the memory that no other process shares, or 0 if the process has ended."""
    with contextlib.suppress(psutil.Error):
        return int(process.memory_full_info().uss)
    return 0
