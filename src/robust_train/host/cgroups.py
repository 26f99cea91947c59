"""The memory cgroups of this process, of version 1 and 2, on a machine and in a container."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_OCTAL = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True)
class CgroupMount:
    """A mounted hierarchy: which part of it is seen where."""

    root: str
    mount_point: str
    is_v2: bool
    has_memory: bool


def memory_folders(root: Path = Path("/")) -> list[Path]:
    """Return the folders of the cgroups that account this process's memory, its own first. In
    version 2 each counts what is below it as well; in version 1 only the first is known."""
    cgroups = parse_cgroups(_read(root / "proc/self/cgroup"))
    is_v2 = "memory" not in cgroups
    path = cgroups.get("" if is_v2 else "memory")
    if path is None:
        return []
    for mount in parse_mounts(_read(root / "proc/self/mountinfo")):
        below = _below(path, mount.root)
        if below is None or mount.is_v2 != is_v2 or not (is_v2 or mount.has_memory):
            continue
        folder = root / (mount.mount_point.lstrip("/")) / below
        return [folder, *(list(folder.parents)[: len(below.parts)] if is_v2 else ())]
    return []


def parse_cgroups(text: str) -> dict[str, str]:
    """Return ``/proc/self/cgroup``: the path by controller; that of version 2 under ``""``."""
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
        if separator and len(fields) >= 5 and kind[0] in ("cgroup", "cgroup2"):
            root, mount_point = (_unescaped(field) for field in fields[3:5])
            has_memory = "memory" in kind[-1].split(",")
            mounts.append(
                CgroupMount(root, mount_point, kind[0] == "cgroup2", has_memory)
            )
    return mounts


def _below(path: str, root: str) -> PurePosixPath | None:
    """Return a cgroup's path below the part that is mounted; None if it is outside of it. In a
    container either may be named as the machine or as the container sees it; with a cgroup
    namespace both are mostly ``/``. A path with ``..`` leads out of the namespace."""
    own, mounted = PurePosixPath(path), PurePosixPath(root)
    if ".." in (*own.parts, *mounted.parts) or not own.is_relative_to(mounted):
        return None
    return own.relative_to(mounted)


def _unescaped(field: str) -> str:
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), field)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
