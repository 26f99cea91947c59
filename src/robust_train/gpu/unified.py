"""GPUs that have no memory of their own: their figures are the host's."""

from __future__ import annotations

import re
from pathlib import Path

# products whose GPU shares the host's memory; NVML answers Not Supported or 0 for their memory.
# A discrete card may answer so as well (no permission, a fault), so the name has to say it.
_INTEGRATED = re.compile(r"\b(GB10|Thor|Orin|Xavier|Tegra|nvgpu|Jetson|N1X)\b", re.IGNORECASE)


def is_integrated(name: str) -> bool:
    """Whether the product called ``name`` is known to share the host's memory."""
    return _INTEGRATED.search(name) is not None


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
