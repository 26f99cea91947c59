"""What a job is called that was given no name. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def job_name(
    chosen: object,
    model: object = None,
    dataset: object = None,
    target: str | None = None,  # the trainer's dotted path
    argv: Sequence[str] | None = None,  # its program, of a script
) -> str:
    """Return ``job_name``, else ``lora_flowers102``, else ``training.train`` of the trainer's path,
    or the script; empty if there is nothing to name it by."""
    is_own = target is not None and not target.startswith("robust_train.vision.")
    # our defaults, which the config of a trainer of the user's own has too
    both = () if is_own and (model, dataset) == ("cnn", "digits") else (model, dataset)
    name = chosen or "_".join(str(one) for one in both if one not in (None, "", "none"))
    path = [part for part in (target or "").split(".") if part != "<locals>"]
    return str(name or (name_of_program(argv) if argv else ".".join(path[-2:])))


def name_of_program(program: Sequence[str]) -> str:
    """Return what people would call it: ``train_clip`` of ``python src/train_clip.py --lr 1``."""
    for word in program:
        name = Path(word).name
        if re.search(r"\w\.(?:py|sh|bash|pl|R|r|jl|rb|js|lua|m)$", name):
            return Path(name).stem
    if "-m" in program[1:-1]:
        return program[program.index("-m", 1) + 1]
    return Path(program[0]).name or "script"


def folder_name(*about: Any) -> str:
    """Return a job's name as a part of its run folder's; ``about``: that of :func:`job_name`."""
    name = re.sub(r"[^\w.-]+", "_", job_name(*about) or "job")
    return name.encode()[:200].decode(errors="ignore")  # file systems take 255 bytes
