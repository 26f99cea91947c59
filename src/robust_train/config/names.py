"""What a job is called that was given no name. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_DEFAULTS = ("cnn", "digits")
"""The built-in trainer's: no matter of a trainer of the user's own, whose config has them too."""
_SCRIPT = re.compile(r"\w\.(?:py|sh|bash|pl|R|r|jl|rb|js|lua|m)$")


def job_name(
    chosen: str | None,
    model: str | None,
    dataset: str | None,
    target: str | None,  # the trainer's dotted path
    argv: Sequence[str] | None = None,  # its program, of a script
) -> str:
    """Return ``job_name``, else ``lora_flowers102``, else ``training.train`` of the trainer's path,
    or the script; empty if there is nothing to name it by."""
    if chosen:
        return chosen
    is_own = target is not None and not target.startswith("robust_train.vision.")
    unused = ("none", *_DEFAULTS) if is_own else ("none",)
    parts = [part for part in (model, dataset) if part and part not in unused]
    if parts or target is None:
        return "_".join(parts)
    return name_of_program(argv) if argv else ".".join(target.split(".")[-2:])


def name_of_program(program: Sequence[str]) -> str:
    """Return what people would call it: ``train_clip`` of ``python -u src/train_clip.py --lr 1``."""
    for word in program:
        name = Path(word).name
        if _SCRIPT.search(name):
            return Path(name).stem
    if "-m" in program[1:-1]:
        return program[program.index("-m", 1) + 1]
    return Path(program[0]).name or "script"


def folder_name(chosen: str | None, group: str = "", *about: Any) -> str:
    """Return a job's name as a part of its run folder's; ``group``: its trainer's choice, the last
    resort; ``about``: more for :func:`job_name`."""
    name = (job_name(chosen, *about) if about else chosen) or group
    return re.sub(r"[^\w.-]+", "_", name)
