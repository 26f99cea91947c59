"""Whether the kernel's OOM killer took a process: SIGKILL itself says nothing.

::

    watch = OomKillWatch.start()
    …  # a child runs, and ends with SIGKILL
    classify_exit(-9, output, oom_killed=watch.killed(pid))

The kernel counts each kill in the memory cgroup of the process it took, whether the cgroup's own
limit was hit, that of one above it, or the machine had no more; and in ``/proc/vmstat`` for the
whole machine. It counts before it sends the signal, so that the count is there when the process is
seen to be gone. ``memory.failcnt`` and ``under_oom`` of cgroup v1 are not read: they also move when
the kernel found memory after all.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_KEY = "oom_kill"
_READ_BYTES = 65_536  # a record of the kernel's log has to fit
_LOG_LIMIT_BYTES = 16 * 1024**2
# the log's clock is not corrected while it runs; the process id has to fit as well
_CLOCK_SLACK_SECONDS = 60.0
# the machine's first process namespace has this number on every kernel (PROC_PID_INIT_INO)
_FIRST_PID_NAMESPACE = "pid:[4026531836]"

_KMSG_RECORD = re.compile(r"^\d+,\d+,(?P<microseconds>\d+),[^;]*;(?P<message>.*)$")
_KILLED = re.compile(r"\bKill(?:ed)? process (?P<pid>\d+)\b")
_OCTAL = re.compile(r"\\([0-7]{3})")


class OomKillWatch:
    """Remembers the kernel's counts at one moment, to see later whether they rose.

    Holds no open file, and never raises: what cannot be read is not known.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        """See :meth:`start`; ``root`` is where the files of the machine are found."""
        self._root = root
        self._started_seconds = time.clock_gettime(time.CLOCK_MONOTONIC)
        self._counters = _counters(root)
        self._before = [_read_counter(path) for path in self._counters]
        self._machine_before = _read_counter(root / "proc/vmstat")

    @classmethod
    def start(cls, root: Path = Path("/")) -> OomKillWatch:
        """Begin to watch this process's cgroup; before the child is started."""
        return cls(root)

    def killed(self, pid: int) -> bool | None:
        """Whether the OOM killer took that process, or one beside it in the cgroup, since then.

        Returns:
            True if the kernel's log names the process or the cgroup's count rose; False if the
            counts that are known stood still; None where nothing can be read, or somebody on the
            machine was killed and it cannot be seen who.
        """
        named = self._named_in_log(pid)
        if named:
            return True
        after = [_read_counter(path) for path in self._counters]
        known = [
            (old, new)
            for old, new in zip(self._before, after, strict=True)
            if old is not None and new is not None
        ]
        if any(new > old for old, new in known):
            return True
        machine_after = _read_counter(self._root / "proc/vmstat")
        if known or (machine_after is not None and machine_after == self._machine_before):
            return False
        return named

    def _named_in_log(self, pid: int) -> bool | None:
        """Whether the log names the process; None where its silence means nothing."""
        text = _read_log(self._root / "dev/kmsg")
        if text is None:
            return None
        if pid in killed_processes(text, self._started_seconds - _CLOCK_SLACK_SECONDS):
            return True
        # in a container the log has the machine's process ids, not ours
        return False if _in_first_pid_namespace(self._root) else None


# --- the texts of the kernel --------------------------------------------------------------------


@dataclass(frozen=True)
class CgroupMount:
    """A mounted hierarchy: which part of it is seen where."""

    root: str
    mount_point: str
    is_v2: bool
    controllers: frozenset[str] = frozenset()


def parse_cgroups(text: str) -> dict[str, str]:
    """``/proc/self/cgroup``: the path in each hierarchy, by controller; v2's under ``""``."""
    paths: dict[str, str] = {}
    for line in text.splitlines():
        fields = line.split(":", 2)
        if len(fields) == 3:
            for controller in fields[1].split(","):
                paths[controller] = fields[2]
    return paths


def parse_mounts(text: str) -> list[CgroupMount]:
    """The cgroup hierarchies in ``/proc/self/mountinfo``."""
    mounts: list[CgroupMount] = []
    for line in text.splitlines():
        before, separator, after = line.partition(" - ")
        fields, kind = before.split(" "), after.split(" ")
        if not separator or len(fields) < 5 or kind[0] not in ("cgroup", "cgroup2"):
            continue
        mounts.append(
            CgroupMount(
                root=_unescaped(fields[3]),
                mount_point=_unescaped(fields[4]),
                is_v2=kind[0] == "cgroup2",
                controllers=frozenset(kind[-1].split(",")),
            )
        )
    return mounts


def memory_counters(cgroups: dict[str, str], mounts: list[CgroupMount]) -> list[PurePosixPath]:
    """Files that may have the count, the process's own cgroup first.

    In v2 the first of them that exists is where the process's memory is counted: a cgroup that has
    no memory controller of its own is counted with the one above it. In v1 the count of a cgroup
    leaves out those below it, so that only its own file tells.
    """
    is_v2 = "memory" not in cgroups
    path = cgroups.get("" if is_v2 else "memory")
    if path is None:
        return []
    for mount in mounts:
        if mount.is_v2 != is_v2 or (not is_v2 and "memory" not in mount.controllers):
            continue
        below = _below(path, mount.root)
        if below is None:
            continue
        folder = PurePosixPath(mount.mount_point)
        if not is_v2:
            return [folder / below / "memory.oom_control"]
        return [
            folder.joinpath(*below.parts[:depth]) / "memory.events"
            for depth in range(len(below.parts), -1, -1)
        ]
    return []


def parse_counter(text: str) -> int | None:
    """``oom_kill`` in ``memory.events``, ``memory.oom_control`` or ``/proc/vmstat``."""
    for line in text.splitlines():
        key, _, value = line.partition(" ")
        if key == _KEY and value.strip().isdigit():
            return int(value)
    return None


def killed_processes(log: str, since_seconds: float) -> frozenset[int]:
    """Processes that the kernel's log says were killed for memory, in ``/dev/kmsg``'s format."""
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
    """A cgroup's path below the part that is mounted; None if it is outside of it.

    In a container the two may be named as the machine sees them or as the container does; with a
    cgroup namespace both are mostly ``/``. A path with ``..`` leads out of the namespace.
    """
    if ".." in PurePosixPath(path).parts or ".." in PurePosixPath(root).parts:
        return None
    try:
        return PurePosixPath(path).relative_to(root)
    except ValueError:
        return None


def _unescaped(field: str) -> str:
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), field)


# --- the files ----------------------------------------------------------------------------------


def _counters(root: Path) -> list[Path]:
    cgroups = parse_cgroups(_read(root / "proc/self/cgroup") or "")
    mounts = parse_mounts(_read(root / "proc/self/mountinfo") or "")
    paths = [root / str(path).lstrip("/") for path in memory_counters(cgroups, mounts)]
    return [path for path in paths if path.is_file()][:1]


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def _read_counter(path: Path) -> int | None:
    text = _read(path)
    return None if text is None else parse_counter(text)


def _in_first_pid_namespace(root: Path) -> bool:
    try:
        return os.readlink(root / "proc/self/ns/pid") == _FIRST_PID_NAMESPACE
    except OSError:
        return False


def _read_log(path: Path) -> str | None:
    """What the kernel's log holds now; None if this user may not read it."""
    try:
        log = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return b"".join(_records(log)).decode("utf-8", errors="replace")
    finally:
        os.close(log)


def _records(log: int) -> Iterator[bytes]:
    """One record for each read; the end is where a read would have to wait."""
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
