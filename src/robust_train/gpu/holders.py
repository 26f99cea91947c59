"""Who is behind the process ids that NVML lists."""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from robust_train.values import GpuInfo

# the kernel's PROC_PID_INIT_INO
_INITIAL_PID_NAMESPACE = "pid:[4026531836]"


@dataclass(frozen=True)
class Holder:
    """A process that holds GPU memory: the command's short name and its user."""

    pid: int
    command: str
    user: str


def find_holders(gpus: Iterable[GpuInfo], proc: Path = Path("/proc")) -> dict[int, Holder]:
    """Names for the processes on ``gpus``, by process id; what cannot be read is left out.

    NVML tells the ids of the host. Inside a container the same number is another process or none,
    so nothing is looked up there: no name is better than a wrong one.
    """
    if not sees_host_pids(proc):
        return {}
    found = {}
    for pid in sorted({process.pid for gpu in gpus for process in gpu.processes or ()}):
        folder = proc / str(pid)
        try:
            command = (folder / "comm").read_text(errors="replace").strip()
            found[pid] = Holder(pid, command, user_name(folder.stat().st_uid))
        except OSError:
            continue
    return found


def sees_host_pids(proc: Path = Path("/proc")) -> bool:
    """Whether this process numbers processes as the host does; in a container it does not."""
    try:
        return os.readlink(proc / "self/ns/pid") == _INITIAL_PID_NAMESPACE
    except OSError:
        return False


def user_name(uid: int) -> str:
    """The name of a user, or the number where there is none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
