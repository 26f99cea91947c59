"""Whether the kernel's OOM killer took a process, which SIGKILL itself does not show.

The kernel counts each kill in the memory cgroup of the process, and in ``/proc/vmstat`` for the
machine, before it sends the signal. ``memory.failcnt`` and ``under_oom`` of cgroup v1 are not read:
they also move when the kernel found memory after all.
"""

from __future__ import annotations

import re
from pathlib import Path

from robust_train.host.cgroups import memory_folders

_KILL_COUNT = re.compile(r"^oom_kill (\d+)\s*$", re.MULTILINE)


class OomKillWatch:
    """Compare the kernel's counts with those of the moment when this was made. Make one before the
    child is started. Holds no open file, and never raises."""

    def __init__(self, root: Path = Path("/")) -> None:
        # v2: a cgroup without a memory controller is counted with the one above it
        names = ("memory.events", "memory.oom_control")
        files = [folder / name for folder in memory_folders(root) for name in names]
        self._counter = next((path for path in files if path.is_file()), None)
        self._machine_counter = root / "proc/vmstat"
        self._before = _count(self._counter)
        self._machine_before = _count(self._machine_counter)

    def killed(self) -> bool | None:
        """Return whether the OOM killer has taken a process of this process's cgroup since then.
        None if nothing can be read, or where some process on the machine was killed and it is
        unknown which."""
        now = _count(self._counter)
        if self._before is not None and now is not None:
            return now > self._before
        machine = _count(self._machine_counter)
        return (
            False if machine is not None and machine == self._machine_before else None
        )


def _count(path: Path | None) -> int | None:
    """Return ``oom_kill`` of ``memory.events``, ``memory.oom_control`` or ``/proc/vmstat``."""
    try:
        found = (
            None
            if path is None
            else _KILL_COUNT.search(path.read_text(errors="replace"))
        )
    except OSError:
        return None
    return None if found is None else int(found[1])
