"""Builds the shell command that resumes a job or a sweep from any working directory.

The launcher and the sweep record the command in the run folder. ``robust-train resume`` reads it
there, adds the user's overrides, and runs it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

from robust_train.config.placeholders import OVERRIDES_VARIABLE, RUN_DIR_VARIABLE
from robust_train.config.values import is_secret
from robust_train.folder.secrets import public_command


def with_overrides(command: str, run_dir: Path, overrides: Sequence[str]) -> str:
    """Return a resume command with overrides, which replace the command's values for these keys.

    A program that calls ``launch`` may parse its arguments itself, so it gets the overrides by an
    environment variable.
    """
    _, folder, _, *words = shlex.split(command)  # cd FOLDER && …
    keys = tuple(f"{key_of(override)}=" for override in overrides)
    is_of_hydra = any(word.startswith(("hydra.run.dir=", "hydra.sweep.dir=")) for word in words)
    if is_of_hydra:
        kept = [w for w in words if not w.lstrip("+~").startswith(keys)]
        words = [*kept, *overrides]
    else:
        content = {"run_dir": str(run_dir), "overrides": list(overrides)}
        words = ["env", f"{OVERRIDES_VARIABLE}={json.dumps(content)}", *words]
    return f"cd {shlex.quote(folder)} && {shlex.join(words)}"


def key_of(override: str) -> str:
    """Return the key of ``+key=value``."""
    return override.partition("=")[0].lstrip("+~")


def resumed_overrides(run_dir: Path) -> list[str]:
    """Return the overrides that ``robust-train resume`` passes to a ``launch`` call in this folder.

    They are for the first call only, so the variable is removed.
    """
    given = os.environ.get(OVERRIDES_VARIABLE)
    with contextlib.suppress(ValueError, KeyError, TypeError):
        content = json.loads(given or "")
        if Path(content["run_dir"]).resolve() == run_dir.resolve():
            del os.environ[OVERRIDES_VARIABLE]
            return [str(override) for override in content["overrides"]]
    return []


_OURS = ("robust-train", "robust_train.cli.main")
# Run folders that ``launch`` chose in this process. A variable can name only the first of them.
_unnamed: list[Path] = []
_PLAIN = re.compile(r"[\w/. @%+-]*", re.ASCII)


def resume_command(run_dir: Path, *, is_named: bool = False) -> str | None:
    """Return the shell command that resumes this process's job from any working directory.

    Args:
        run_dir: the run folder.
        is_named: whether the program that calls ``launch`` names the run folder itself.

    Returns:
        The command. None if it contains a secret or a line break, which are not written to files,
            if the job belongs to a sweep, or if no command started it, as in a notebook.
    """
    if HydraConfig.initialized():
        hydra = HydraConfig.get()
        if hydra.mode == RunMode.MULTIRUN:
            return None
        return _with_folder("hydra.run.dir", run_dir, str(hydra.runtime.cwd))
    words = command()
    arguments = arguments_of_run(words)
    if arguments:
        if not any(word.startswith("--run-dir") for word in words):
            words[arguments:arguments] = ["--run-dir", str(run_dir)]
        return _from(words)
    if not os.path.isfile(getattr(sys.modules["__main__"], "__file__", None) or ""):
        return None  # a notebook, a prompt, standard input
    if is_named:
        return _from(words)
    _unnamed.append(run_dir)
    if run_dir != _unnamed[0]:
        return None
    variable = f"{RUN_DIR_VARIABLE}={run_dir}"
    return _from(words, before=["env", variable])


def sweep_resume_command(folder: Path, cwd: str) -> str | None:
    """Return the shell command that resumes this process's sweep.

    None if it contains a secret or a line break.
    """
    return _with_folder("hydra.sweep.dir", folder, cwd)


def resumed_by_hand(run_dir: Path) -> str:
    """Return how to resume this process's job by hand, if it has no resume command."""
    if HydraConfig.initialized():
        return repeated_with(f"hydra.run.dir={run_dir}")
    if arguments_of_run(command()):
        return repeated_with(f"--run-dir {run_dir}")
    return f"launch(…, run_dir={str(run_dir)!r})"


def repeated_with(folder: str) -> str:
    """Return instructions to repeat a command that is not recorded, because of a secret or a line
    break.

    Args:
        folder: the option or override to add, which names the folder.
    """
    return f"the same command (not kept: it holds a secret or a line break) with {folder}"


def arguments_of_run(words: Sequence[str]) -> int:
    """Return the index of the first argument of ``robust-train run``, or 0 in any other command."""
    program = 2 if words[1:2] == ["-m"] else 1
    ours = words[program : program + 2]
    is_run = ours[1:] == ["run"] and ours[0].endswith(_OURS)
    return program + 2 if is_run else 0


def _with_folder(key: str, folder: Path, cwd: str) -> str | None:
    """Return the command of this process with a folder for ``key``."""
    kept = [word for word in command() if not word.startswith(f"{key}=")]
    return _from([*kept, folder_override(key, folder)], cwd)


def folder_override(key: str, folder: Path) -> str:
    """Return the override that names a folder."""
    path = str(folder)
    # Brackets and commas have a meaning in Hydra's overrides.
    if not _PLAIN.fullmatch(path):
        path = '"{}"'.format(path.replace('"', r"\""))
    return f"{key}={path}"


def _from(words: list[str], cwd: str = "", before: Sequence[str] = ()) -> str | None:
    """Return the shell command for a command line, None if it cannot be written to a file."""
    # The interpreter is named by its path, because another PATH may find another interpreter.
    command_line = shlex.join(list(before) + [sys.executable] + words[1:])
    if not cwd:
        cwd = os.getcwd()
    shell_command = f"cd {shlex.quote(cwd)} && {command_line}"
    # Readers of the files drop control characters, which would change the command.
    if public_command(words) != words or not shell_command.isprintable():
        return None
    return shell_command


def command() -> list[str]:
    """Return the command line of this process, without the URLs of notifications."""
    return [word for word in sys.orig_argv if not is_secret(word)]
