"""Requests about memory to a live run, carried out by the attempt between two steps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from robust_train.memory.clearing import clear_gpu_memory
from robust_train.memory.limits import set_memory_fraction
from robust_train.memory.snapshots import write_snapshot
from robust_train.memory.stats import get_gpu_memory_stats, reset_peak_memory_stats
from robust_train.readable import mib

_OPTIONS = {
    "memory_info": (),
    "memory_clear": ("force",),
    "memory_reset": (),
    "memory_fraction": ("fraction",),
    "memory_snapshot": (),
}


def perform(
    verb: str, options: Mapping[str, object], run_dir: Path
) -> dict[str, object]:
    """Carry out a request in this process.

    Returns:
        ``before`` and ``after`` (the fields of :class:`robust_train.memory.MemoryStats`),
        ``sentence`` for people, and what else the verb returns; all in JSON's types.

    Raises:
        ValueError: an unknown verb or option, or an invalid value; one line for the user.
        OSError: the snapshot cannot be written.
    """
    if verb not in _OPTIONS:
        raise ValueError(f"no such request: {verb}; accepted are {', '.join(_OPTIONS)}")
    accepted = _OPTIONS[verb]
    for name in options:
        if name not in accepted:
            known = f"accepted is {accepted[0]}" if accepted else "it has none"
            raise ValueError(f"{verb} has no option {name}: {known}")
    before = get_gpu_memory_stats()
    answer: dict[str, object] = {}
    if verb == "memory_clear":
        force = options.get("force", False)
        if not isinstance(force, bool):
            raise ValueError(f"force={force!r}: accepted is true or false")
        cleared = clear_gpu_memory(force)
        answer = {
            "sentence": cleared.description,
            "freed": cleared.freed,
            "dropped": cleared.dropped_bytes,
            "held": [str(tensor) for tensor in cleared.held],
        }
    elif verb == "memory_reset":
        now = reset_peak_memory_stats().description
        answer = {"sentence": f"reset the peak, which was {mib(before.peak, 1)}; {now}"}
    elif verb == "memory_fraction":
        if "fraction" not in options:
            raise ValueError("the option fraction is missing: e.g. fraction=0.8")
        limit = set_memory_fraction(options["fraction"])  # type: ignore[arg-type]
        answer = {"sentence": limit.description, "limit": limit.bytes}
    elif verb == "memory_snapshot":
        written, sentence = write_snapshot(run_dir)
        answer = {"sentence": sentence, "written": [str(path) for path in written]}
    after = get_gpu_memory_stats()
    return {
        "before": before.as_dict(),
        "after": after.as_dict(),
        "sentence": after.description,
        **answer,
    }
