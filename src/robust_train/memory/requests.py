"""What a live run can be asked about its memory; carried out in the attempt, between two steps."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from robust_train.compat import (
    allocator_history_is_recorded,
    dump_allocator_snapshot,
    record_allocator_history,
)
from robust_train.files import replacing
from robust_train.memory.clearing import clear_gpu_memory
from robust_train.memory.holders import started_torch
from robust_train.memory.peaks import reset_peak_memory_stats
from robust_train.memory.settings import set_memory_fraction
from robust_train.memory.stats import get_gpu_memory_stats
from robust_train.memory.tensors import largest_tensors
from robust_train.values import MIB

# some KiB each, and several a step; the last of them are what a viewer is opened for
_HISTORY_ENTRIES = 100_000

Answer = dict[str, Any]


def perform(verb: str, options: Mapping[str, Any], run_dir: Path) -> Answer:
    """Carry out a request in this process.

    Args:
        verb: ``memory_info``, ``memory_clear`` (option ``force``), ``memory_reset``,
            ``memory_fraction`` (option ``fraction``) or ``memory_snapshot``.
        options: by name; what is not given has its default.
        run_dir: where a snapshot is written.

    Returns:
        ``before`` and ``after`` (the fields of :class:`robust_train.memory.MemoryStats`),
        ``sentence`` for people, and what the verb has beside them; all in JSON's types.

    Raises:
        ValueError: unknown verb or option, or a value that cannot be; one line for the user.
        OSError: the snapshot cannot be written.
    """
    if verb not in _VERBS:
        raise ValueError(f"no such request: {verb}; accepted are {', '.join(_VERBS)}")
    action, accepted = _VERBS[verb]
    for name in options:
        if name not in accepted:
            known = f"accepted is {accepted[0]}" if accepted else "it takes none"
            raise ValueError(f"{verb} has no option {name}: {known}")
    before = get_gpu_memory_stats().as_dict()
    answer = action(options, run_dir)
    return {"before": before, "after": get_gpu_memory_stats().as_dict(), **answer}


def _info(options: Mapping[str, Any], run_dir: Path) -> Answer:
    return {"sentence": get_gpu_memory_stats().description}


def _clear(options: Mapping[str, Any], run_dir: Path) -> Answer:
    force = options.get("force", False)
    if not isinstance(force, bool):
        raise ValueError(f"force={force!r}: accepted is true or false")
    cleared = clear_gpu_memory(force)
    return {
        "sentence": cleared.description,
        "freed": cleared.freed,
        "dropped": cleared.dropped_bytes,
        "held": [str(tensor) for tensor in cleared.held],
    }


def _reset(options: Mapping[str, Any], run_dir: Path) -> Answer:
    before, after = get_gpu_memory_stats(), reset_peak_memory_stats()
    return {
        "sentence": f"peak was {before.peak / MIB:.1f} MiB and starts anew; {after.description}"
    }


def _fraction(options: Mapping[str, Any], run_dir: Path) -> Answer:
    if "fraction" not in options:
        raise ValueError("the option fraction is missing: e.g. fraction=0.8")
    limit = set_memory_fraction(options["fraction"])
    return {"sentence": limit.description, "limit": limit.bytes}


def _snapshot(options: Mapping[str, Any], run_dir: Path) -> Answer:
    """Torch's snapshot where CUDA is, and the largest tensors; the first also starts recording."""
    number = 1
    while (tensors_path := run_dir / f"memory-tensors-{number}.json").exists():
        number += 1
    tensors = largest_tensors()
    with replacing(tensors_path) as path:
        path.write_text(json.dumps(tensors, indent=2) + "\n")
    written = [tensors_path]
    sentences = [f"the {len(tensors)} largest live tensors are in {tensors_path}"]
    torch = started_torch()
    if torch is None:
        sentences.append("no CUDA in this process, so there is no snapshot of its allocator")
    else:
        snapshot_path = run_dir / f"memory-snapshot-{number}.pickle"
        with replacing(snapshot_path) as path:
            dump_allocator_snapshot(torch, str(path))
        written.append(snapshot_path)
        sentences.append(
            f"torch's snapshot is in {snapshot_path}, for https://pytorch.org/memory_viz"
        )
        if not allocator_history_is_recorded(torch):
            record_allocator_history(torch, _HISTORY_ENTRIES)
            sentences.append(
                "it shows what is allocated now; from here on the history is recorded, for the "
                "next snapshot"
            )
    return {"sentence": "; ".join(sentences), "written": [str(path) for path in written]}


_VERBS: dict[str, tuple[Callable[[Mapping[str, Any], Path], Answer], tuple[str, ...]]] = {
    "memory_info": (_info, ()),
    "memory_clear": (_clear, ("force",)),
    "memory_reset": (_reset, ()),
    "memory_fraction": (_fraction, ("fraction",)),
    "memory_snapshot": (_snapshot, ()),
}
