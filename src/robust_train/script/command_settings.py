"""``trainer=command``: its part of the config, checked before anything is started."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from robust_train.errors import ConfigError
from robust_train.script.placeholders import PLACEHOLDERS, near_misses_in


@dataclass(frozen=True)
class CommandSettings:
    """What to run."""

    argv: tuple[str, ...]  # program and arguments, with placeholders
    resume_argv: tuple[str, ...]  # appended where there is a checkpoint to go on from
    # where the script's own checkpoints lie, None if it has none; relative to `cwd`
    checkpoint_glob: str | None
    cwd: Path  # the script's working directory
    stop_grace_seconds: float  # time for a last checkpoint when stopped
    resume: bool  # whether an earlier launch's checkpoints in the same run folder count

    @classmethod
    def of(cls, cfg: Mapping[Any, Any]) -> CommandSettings:
        """Read a composed config. Raises ConfigError: there is nothing to run, or it cannot be
        found."""
        trainer = cfg["trainer"]
        if OmegaConf.is_config(trainer):
            trainer = OmegaConf.to_container(trainer, resolve=True)
        settings = cls(
            argv=_words("trainer.argv", trainer.get("argv")),
            resume_argv=_words("trainer.resume_argv", trainer.get("resume_argv")),
            checkpoint_glob=trainer.get("checkpoint_glob") or None,
            cwd=Path(trainer.get("cwd") or ".").expanduser().absolute(),
            stop_grace_seconds=float(cfg.get("stop_grace_seconds", 20.0)),
            resume=bool(cfg.get("resume", True)),
        )
        _check(settings)
        return settings


def _check(settings: CommandSettings) -> None:
    if not settings.argv:
        raise ConfigError(
            "trainer.argv: must name a program, as in "
            "'trainer.argv=[python, train.py, --batch_size, \"{batch_size}\"]'"
        )
    for key in ("argv", "resume_argv"):
        for word in getattr(settings, key):
            _refuse_near_misses(f"trainer.{key}", word)
    _refuse_near_misses("trainer.checkpoint_glob", settings.checkpoint_glob or "")
    if not settings.cwd.is_dir():
        raise ConfigError(f"trainer.cwd={settings.cwd}: no such folder")
    program = settings.argv[0]
    is_file = "/" in program
    if shutil.which(str(settings.cwd / Path(program).expanduser()) if is_file else program) is None:
        where = "an executable file" if is_file else "a program on PATH"
        raise ConfigError(f"trainer.argv: {program!r} is not {where}")


def _refuse_near_misses(key: str, text: str) -> None:
    """Refuse ``{batchsize}``, which would reach the script unchanged."""
    for name, meant in near_misses_in(text):
        raise ConfigError(
            f"{key}: {{{name}}} is no placeholder; did you mean {{{meant}}}? "
            f"There are {', '.join(PLACEHOLDERS)}"
        )


def _words(key: str, value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ConfigError(f"{key}={value}: accepted is a list, {key}=[program, argument, …]")
    return tuple(str(word) for word in value)
