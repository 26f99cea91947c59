"""Checks a script's command before it runs, so that a mistake costs one line and no device.

The trainer behind ``trainer=command`` does this in the attempt's process, and ``robust-train run``
does it in the command's process.
"""

from __future__ import annotations

import difflib
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from robust_train.config.placeholders import near_miss_in
from robust_train.config.schema import RobustConfig
from robust_train.config.trainers import PROGRAM_FILE
from robust_train.model.errors import ConfigError

_INTERPRETER = re.compile(r"python[\d.]*$|(ba|z)?sh$|Rscript$|julia$|perl$|ruby$|node$")


def check_command(config: RobustConfig) -> Path:
    """Check the command, and return the script's working directory.

    Raises:
        ConfigError: the command is empty, its program cannot be found, or a placeholder is
            misspelt.
    """
    trainer = config.trainer
    if not trainer.argv:
        raise ConfigError(
            "trainer.argv: must name a program, as in "
            "'trainer.argv=[python, train.py, --batch_size, \"{batch_size}\"]'"
        )
    _check_placeholders("argv", trainer.argv)
    _check_placeholders("resume_argv", trainer.resume_argv)
    _check_placeholders("checkpoint_glob", [trainer.checkpoint_glob or ""])
    cwd = Path(os.path.expanduser(trainer.cwd or ".")).absolute()
    if not cwd.is_dir():
        raise ConfigError(f"trainer.cwd={cwd}: no such folder")
    _check_program(cwd, trainer.argv[0])
    _check_script(cwd, trainer.argv)
    return cwd


def _check_placeholders(key: str, words: Sequence[str]) -> None:
    """Check that no placeholder is misspelt: ``{batchsize}`` would reach the script unchanged. In
    ``resume_argv``, every unknown name is refused."""
    for word in words:
        miss = near_miss_in(word, every=key == "resume_argv")
        if miss:
            raise ConfigError(
                f"trainer.{key}: {{{miss[0]}}} is not a placeholder; did you mean "
                f"{{{miss[1]}}}? robust-train run --help lists all"
            )


def _check_program(cwd: Path, program: str) -> None:
    """Check that the program of a command exists and is executable."""
    path = cwd / os.path.expanduser(program)
    interpreter = "python" if path.suffix == ".py" else "bash"
    command = f"{interpreter} {program}"
    if "/" in program:
        if not path.exists():
            raise ConfigError(f"trainer.argv: {program}: no such file in {cwd}")
        if path.is_dir():
            raise ConfigError(f"trainer.argv: {program} is a folder")
        if shutil.which(path) is None:
            raise ConfigError(
                f"trainer.argv: {program} is not an executable file: chmod +x {program}, or name "
                f"its interpreter: {command}"
            )
    elif shutil.which(program, path=user_path(os.environ)) is None:
        hint = ""
        if "=" in program:
            hint = f"; write env {program} PROGRAM"
        elif path.is_file():
            hint = f"; write {command}"
        raise ConfigError(f"trainer.argv: {program!r} is not a program on PATH{hint}")


def _check_script(cwd: Path, argv: Sequence[str]) -> None:
    """Check that an interpreter, such as python, will find its script."""
    if len(argv) < 2 or not _INTERPRETER.match(Path(argv[0]).name):
        return
    script = argv[1]
    path = cwd / os.path.expanduser(script)
    if not PROGRAM_FILE.search(script) or "{" in script or os.path.lexists(path):
        return
    names = [neighbour.name for neighbour in path.parent.glob(f"*{path.suffix}")]
    similar = difflib.get_close_matches(path.name, names, n=1)
    hint = f" in {cwd}"
    if similar:
        hint = f"; did you mean {similar[0]}?"
    raise ConfigError(f"trainer.argv: {script}: no such file{hint}")


def user_path(environ: Mapping[str, str]) -> str:
    """Return the PATH for a script's programs: PATH without the environment of a uv tool.

    ``uvx robust-train`` puts the tool's environment in front of PATH, and the ``python`` in there
    has none of the user's packages.
    """
    folders = environ.get("PATH", os.defpath).split(os.pathsep)
    prefix = Path(sys.prefix)
    # uv installs a tool with a receipt, or into its cache. An environment that the user activated
    # is the user's, wherever it is.
    is_in_cache = any((folder / "CACHEDIR.TAG").exists() for folder in prefix.parents[:2])
    is_of_tool = (prefix / "uv-receipt.toml").exists() or is_in_cache
    if is_of_tool and environ.get("VIRTUAL_ENV") != sys.prefix:
        folders = [folder for folder in folders if Path(folder) != prefix / "bin"]
    return os.pathsep.join(folders)
