"""GPUs that have no memory of their own: their figures are the host's."""

from __future__ import annotations

from pathlib import Path


def host_memory(meminfo: Path = Path("/proc/meminfo")) -> tuple[int, int] | None:
    """Total bytes of the host's memory and what a new program could get; None if untold.

    ``MemAvailable`` rather than ``MemFree``: the page cache gives way when memory is asked for.
    """
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        # "kB" there are KiB
        total, available = (int(lines[key].split()[0]) for key in ("MemTotal", "MemAvailable"))
    except (OSError, KeyError, ValueError):
        return None
    return total * 1024, available * 1024
