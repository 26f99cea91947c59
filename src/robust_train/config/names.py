"""What jobs and trainers are called."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from robust_train.model.errors import ConfigError

if TYPE_CHECKING:
    from robust_train.config.schema import RobustConfig

Trainer = str | Callable[..., Any]


def target_of(config: RobustConfig) -> str:
    """Return the dotted path of the trainer that the config names. Raises ConfigError: none."""
    if config.target is None:
        raise ConfigError(
            "trainer._target_: missing; give the dotted path of a function "
            "trainer(cfg) or trainer(cfg, run)"
        )
    return config.target


def name_of(trainer: Trainer) -> str:
    """Return a trainer's dotted path; of a callable its module and qualified name."""
    if isinstance(trainer, str):
        return trainer
    module, name = (getattr(trainer, key, "") for key in ("__module__", "__qualname__"))
    return f"{module}.{name}" if name else f"__main__.{type(trainer).__name__}"


def job_name_of(config: RobustConfig, trainer: Trainer) -> str:
    """Return how queue, tables and run folder call the job."""
    target = name_of(trainer)
    if target.startswith("__main__."):
        script = getattr(
            sys.modules["__main__"], "__file__", None
        )  # None in a notebook
        target = target.replace(
            "__main__.", f"{Path(script).stem}." if script else "", 1
        )
    return job_name(
        config.job_name,
        config.model.name,
        config.dataset.name,
        target,
        config.trainer.argv,
    )


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
    # our defaults, which the config of a user's own trainer has as well
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
