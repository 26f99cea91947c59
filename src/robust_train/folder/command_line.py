"""The command line of this process, and the one that goes on with its job."""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

from robust_train.config.values import is_secret

_PLAIN = re.compile(r"[\w/. @%+-]*", re.ASCII)


def this_command(key: str, folder: Path) -> str:
    """Return the command of this process with a folder for ``key``."""
    words = [word for word in command() if not word.startswith(f"{key}=")]
    path = str(folder)
    if not _PLAIN.fullmatch(path):  # a bracket or comma has a meaning in an override
        path = '"{}"'.format(path.replace('"', r"\""))
    return shlex.join([*words, f"{key}={path}"])


def resume_command(run_dir: Path) -> str | None:
    """Return :func:`how_to_go_on` for any working directory."""
    same = how_to_go_on(run_dir)
    if same is None or same.startswith("launch("):
        return same
    cwd = HydraConfig.get().runtime.cwd if HydraConfig.initialized() else os.getcwd()
    return f"cd {shlex.quote(str(cwd))} && {same}"


def how_to_go_on(run_dir: Path) -> str | None:
    """Return the command that resumes a job; None for one of a sweep."""
    words = command()
    if HydraConfig.initialized():
        if HydraConfig.get().mode == RunMode.MULTIRUN:
            return None
        return this_command("hydra.run.dir", run_dir)
    if "--" in words and "run" in words[: words.index("--")]:
        split = words.index("--")
        if not any(word.startswith("--run-dir") for word in words[:split]):
            words[split:split] = ["--run-dir", str(run_dir)]
    else:
        return f"launch(…, run_dir={str(run_dir)!r})"
    return shlex.join(words)


def command() -> list[str]:
    """Return the command line of this process, without the URLs of notifications."""
    return [word for word in sys.orig_argv if not is_secret(word)]
