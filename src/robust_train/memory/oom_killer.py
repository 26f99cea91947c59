"""Whether the kernel's OOM killer took a process: SIGKILL itself does not tell.

::

    watch = OomKillWatch.start()
    …  # a child runs, and ends with SIGKILL
    classify_exit(-9, output, oom_killed=watch.killed(pid))

The kernel counts each kill in the memory cgroup of the process, and in ``/proc/vmstat`` for the
whole machine, before it sends the signal. ``memory.failcnt`` and ``under_oom`` of cgroup v1 are not
read: they also move when the kernel found memory after all.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from robust_train.gpu.processes import INITIAL_PID_NAMESPACE

_READ_BYTES = 65_536  # a record of the kernel's log has to fit
_LOG_LIMIT_BYTES = 16 * 1024**2
# the log's clock is not corrected while it runs; the process id has to fit as well
_CLOCK_SLACK_SECONDS = 60.0

_KILL_COUNT = re.compile(r"^oom_kill (\d+)\s*$", re.MULTILINE)
_KMSG_RECORD = re.compile(r"^\d+,\d+,(?P<microseconds>\d+),[^;]*;(?P<message>.*)$")
_KILLED = re.compile(r"\bKill(?:ed)? process (?P<pid>\d+)\b")
_OCTAL = re.compile(r"\\([0-7]{3})")


class OomKillWatch:
    """Compares the kernel's counts with those of an earlier moment.

    Holds no open file, and never raises: what cannot be read is not known.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        """See :meth:`start`; ``root`` is where the machine's files are."""
        self._root = root
        self._started_seconds = time.clock_gettime(time.CLOCK_MONOTONIC)
        self._counter = _own_counter(root)
        self._before = _count(self._counter)
        self._machine_before = _count(root / "proc/vmstat")

    @classmethod
    def start(cls, root: Path = Path("/")) -> OomKillWatch:
        """Watch this process's cgroup from now on; call it before the child is started."""
        return cls(root)

    def killed(self, pid: int) -> bool | None:
        """Return whether the OOM killer took that process, or one beside it in the cgroup.

        Returns:
            True if the kernel's log names the process or the cgroup's count rose; False if the
            counts that are known stood still; None where nothing can be read, or some process on
            the machine was killed and it cannot be seen which.
        """
        named = self._named_in_log(pid)
        if named:
            return True
        before, now = self._before, _count(self._counter)
        if before is not None and now is not None:
            return now > before
        machine = _count(self._root / "proc/vmstat")
        return False if machine is not None and machine == self._machine_before else named

    def _named_in_log(self, pid: int) -> bool | None:
        """Return whether the log names the process; None where its silence means nothing."""
        text = _read_log(self._root / "dev/kmsg")
        if text is None:
            return None
        if pid in killed_processes(text, self._started_seconds - _CLOCK_SLACK_SECONDS):
            return True
        # in a container the log has the machine's process ids, not ours
        return False if _in_first_pid_namespace(self._root) else None


# --- the kernel's texts ---------------------------------------------------------------------------


@dataclass(frozen=True)
class CgroupMount:
    """A mounted hierarchy: which part of it is seen where."""

    root: str
    mount_point: str
    is_v2: bool
    controllers: frozenset[str] = frozenset()


def parse_cgroups(text: str) -> dict[str, str]:
    """Return ``/proc/self/cgroup``: the path by controller; that of v2 under ``""``."""
    lines = (line.split(":", 2) for line in text.splitlines())
    return {
        controller: fields[2]
        for fields in lines
        if len(fields) == 3
        for controller in fields[1].split(",")
    }


def parse_mounts(text: str) -> list[CgroupMount]:
    """Return the cgroup hierarchies in ``/proc/self/mountinfo``."""
    mounts: list[CgroupMount] = []
    for line in text.splitlines():
        before, separator, after = line.partition(" - ")
        fields, kind = before.split(" "), after.split(" ")
        if not separator or len(fields) < 5 or kind[0] not in ("cgroup", "cgroup2"):
            continue
        controllers = frozenset(kind[-1].split(","))
        root, mount_point = (_unescaped(field) for field in fields[3:5])
        mounts.append(CgroupMount(root, mount_point, kind[0] == "cgroup2", controllers))
    return mounts


def memory_counters(cgroups: dict[str, str], mounts: list[CgroupMount]) -> list[PurePosixPath]:
    """Return files that may have the count, the process's own cgroup first.

    In v2 the first that exists counts the process's memory: a cgroup without a memory controller
    is counted with the one above it. In v1 a count leaves out the cgroups below.
    """
    is_v2 = "memory" not in cgroups
    path = cgroups.get("" if is_v2 else "memory")
    for mount in mounts if path is not None else ():
        if mount.is_v2 != is_v2 or (not is_v2 and "memory" not in mount.controllers):
            continue
        below = _below(path or "", mount.root)
        if below is None:
            continue
        folder = PurePosixPath(mount.mount_point) / below
        if not is_v2:
            return [folder / "memory.oom_control"]
        above = list(folder.parents)[: len(below.parts)]
        return [cgroup / "memory.events" for cgroup in (folder, *above)]
    return []


def parse_counter(text: str) -> int | None:
    """Return ``oom_kill`` of ``memory.events``, ``memory.oom_control`` or ``/proc/vmstat``."""
    found = _KILL_COUNT.search(text)
    return None if found is None else int(found[1])


def killed_processes(log: str, since_seconds: float) -> frozenset[int]:
    """Return the processes that the kernel's log (``/dev/kmsg``) says were killed for memory."""
    found: set[int] = set()
    for line in log.splitlines():
        record = _KMSG_RECORD.match(line)
        if record is None or int(record["microseconds"]) / 1e6 < since_seconds:
            continue
        killed = _KILLED.search(record["message"])
        if killed is not None:
            found.add(int(killed["pid"]))
    return frozenset(found)


def _below(path: str, root: str) -> PurePosixPath | None:
    """Return a cgroup's path below the part that is mounted; None if it is outside of it.

    In a container either may be named as the machine or as the container sees it; with a cgroup
    namespace both are mostly ``/``. A path with ``..`` leads out of the namespace.
    """
    own, mounted = PurePosixPath(path), PurePosixPath(root)
    if ".." in (*own.parts, *mounted.parts) or not own.is_relative_to(mounted):
        return None
    return own.relative_to(mounted)


def _unescaped(field: str) -> str:
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), field)


# --- the files ------------------------------------------------------------------------------------


def _own_counter(root: Path) -> Path | None:
    cgroups = parse_cgroups(_read(root / "proc/self/cgroup"))
    mounts = parse_mounts(_read(root / "proc/self/mountinfo"))
    paths = (root / str(path).lstrip("/") for path in memory_counters(cgroups, mounts))
    return next((path for path in paths if path.is_file()), None)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _count(path: Path | None) -> int | None:
    return None if path is None else parse_counter(_read(path))


def _in_first_pid_namespace(root: Path) -> bool:
    try:
        return os.readlink(root / "proc/self/ns/pid") == INITIAL_PID_NAMESPACE
    except OSError:
        return False


def _read_log(path: Path) -> str | None:
    """Return what the kernel's log holds now; None if this user may not read it."""
    try:
        log = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return b"".join(_records(log)).decode("utf-8", errors="replace")
    finally:
        os.close(log)


def _records(log: int) -> Iterator[bytes]:
    """Yield one record for each read; the end is where a read would have to wait."""
    total = 0
    while total < _LOG_LIMIT_BYTES:
        try:
            record = os.read(log, _READ_BYTES)
        except BrokenPipeError:  # overwritten meanwhile: the next read gives the next record
            continue
        except OSError:
            return
        if not record:
            return
        total += len(record)
        yield record
