"""Writes ``environment.json``: the command line and environment that a job ran with.

Names and values of secrets are left out. A thread writes the file during the first attempt. Git has
a time limit, because a disk may hang.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import os
import platform
import re
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from robust_train.compat import torch_cuda_version
from robust_train.config.trainers import PROGRAM_FILE
from robust_train.files import write_json
from robust_train.folder.provenance import FILE, SHORT
from robust_train.folder.secrets import (
    is_secret_variable,
    public_command,
    public_text,
    public_variables,
)
from robust_train.gpu.bounded import printed_by
from robust_train.model.events import Json

log = logging.getLogger("robust_train")

_MOST_CHANGED_FILES = 1000
GIT_SECONDS = 5.0
_LAST_CHANCE_SECONDS = 2.0
# The ways in which a shell, Hydra and Python read a variable. Positions such as $1 do not count.
_READ = re.compile(
    r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)(?![\w.]))|\boc\.env:(\w+)"
    r"|\b(?:environ(?:\.get)?|getenv)[\[(]\s*[\"'](\w+)"
)
# what a shell script sets itself
_ASSIGNED = re.compile(
    r"^\s*(?:export |local |readonly |declare )?([A-Za-z_]\w*)=(.*)", re.MULTILINE
)
_NEVER_THE_SAME = re.compile(
    r"_|PWD|OLDPWD|SHLVL|RANDOM|SECONDS|LINENO|PPID|HOSTNAME|TERM|COLUMNS|LINES|SSH_\w+"
    r"|CUDA_VISIBLE_DEVICES|ROBUST_TRAIN_\w+|TMPDIR"
    # Variables of ranks, and of the machine that a scheduler assigns.
    r"|(?:LOCAL_|NODE_|GROUP_)?RANK|(?:LOCAL_)?WORLD_SIZE|MASTER_(?:ADDR|PORT)"
    r"|(?:TORCHELASTIC|PET|OMPI|PMIX?)_\w+|SLURM_(?!JOB_ID$|ARRAY_)\w+"
)
_MOST_OF_A_PROGRAM = 1 << 18


def variables_named(
    words: Sequence[str], cwd: str | Path, environ: Mapping[str, str]
) -> dict[str, Json]:
    """Return the environment variables that a command, or a program file that it names, reads by
    their names, with their values, or None for one that is not set. Secrets are left out, and what
    a shell has filled in before us cannot be known."""
    texts = list(words)
    for word in words:
        path = Path(cwd, word)
        with contextlib.suppress(OSError, ValueError):
            if PROGRAM_FILE.search(word) and path.is_file():
                with path.open(encoding="utf-8", errors="replace") as file:
                    texts.append(file.read(_MOST_OF_A_PROGRAM))
    names: set[str] = set()
    for text in texts:
        assigned = {
            match[1]
            for match in _ASSIGNED.finditer(text)
            if not re.search(rf"\$\{{?{match[1]}\b", match[2])
        }
        used = {name for groups in _READ.findall(text) for name in groups if name}
        names |= used - assigned
    return {
        name: environ.get(name)
        for name in sorted(names)
        if not _NEVER_THE_SAME.fullmatch(name)
        and not is_secret_variable(name, environ.get(name, ""))
    }


def changed_variables(before: Mapping[str, Json], job: str, now: Mapping[str, Json]) -> str:
    """List the variables named in the command of a job that changed since its last launch, in one
    line. Empty if none has changed.

    Args:
        before: the environment of the last launch in the run folder.
        job: the identity of the job. The launch of another job is not compared.
        now: the result of `variables_named`.
    """
    earlier = before.get("command_variables")
    if before.get("job") != job or not isinstance(earlier, dict):
        return ""
    changed = [
        f"{name} was {_value_in_words(earlier[name])} and is {_value_in_words(now[name])}"
        for name in now
        if name in earlier and earlier[name] != now[name]
    ]
    return "; ".join(changed)


def _value_in_words(value: Json) -> str:
    return "not set" if value is None else repr(public_text(str(value)))


class Provenance:
    """Writes the file of one launch in the background.

    Args:
        run_dir: the run folder.
        gpus: name and UUID of each GPU of the job.
        facts: further content of the file.
    """

    def __init__(
        self, run_dir: Path, gpus: Sequence[tuple[str, str]], facts: Mapping[str, Json]
    ) -> None:
        self._run_dir = run_dir
        self._gpus = gpus
        self._known = dict(facts)
        self._short: dict[str, Json] | None = None
        self._thread = threading.Thread(target=self._write, name="environment", daemon=True)
        with contextlib.suppress(RuntimeError):  # no room for one more thread
            self._thread.start()

    def short(self) -> dict[str, Json] | None:
        """Return the part for ``summary.json``, or None if it takes too long."""
        if self._thread.ident is not None:
            self._thread.join(_LAST_CHANCE_SECONDS)
        return self._short

    def _write(self) -> None:
        try:
            packages = _packages()
            cwd = os.getcwd()
            cuda = torch_cuda_version()
            content: dict[str, Json] = {
                "schema": 1,
                "time": time.time(),
                "command": public_command(sys.orig_argv),
                "cwd": cwd,
                "host": socket.gethostname(),
                "system": platform.platform(),
                "python": platform.python_version(),
                "executable": sys.executable,
                "torch": packages.get("torch"),
                "cuda": None if cuda == "none" else cuda,
                "driver": _driver(),
                "gpus": [{"name": name, "uuid": uuid} for name, uuid in self._gpus],
                "variables": public_variables(os.environ),
                "packages": packages,
                **self._known,
            }
            content |= _code(cwd)
            short = {name: content[name] for name in SHORT}
            self._short = {**short, "gpus": [name for name, _ in self._gpus]}
            write_json(self._run_dir / FILE, content, indent=1)
        except Exception as error:  # a record is never worth a job
            log.info("no %s: %r", FILE, error)


def _code(cwd: str) -> dict[str, Json]:
    """Return commit and state of the repository that ``cwd`` is in.

    Of changed files only the names: what they hold may be secret.
    """
    commit = _git(cwd, "rev-parse HEAD")
    if commit is None:
        return {"git_commit": None, "git_dirty": None, "git_changed": []}
    status = _git(cwd, "status --porcelain --untracked-files=no")
    changed = [line[3:] for line in (status or "").splitlines()]
    return {
        "git_commit": commit.strip(),
        "git_dirty": None if status is None else bool(status),
        "git_changed": changed[:_MOST_CHANGED_FILES],
    }


def _git(folder: str, arguments: str) -> str | None:
    """Return git's output, or None if it fails. Programs that the repository configures do not
    run."""
    command = ["git", "-c", "core.fsmonitor=false", "-C", folder]
    variables = {"GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0"}
    printed = printed_by(command + arguments.split(), GIT_SECONDS, variables)
    return None if printed is None else printed.decode(errors="replace")


def _packages() -> dict[str, str]:
    versions: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        with contextlib.suppress(Exception):  # a broken one
            versions.setdefault(distribution.metadata["Name"], distribution.version)
    return dict(sorted(versions.items(), key=lambda pair: str(pair[0]).lower()))


def _driver() -> str | None:
    """Return the version of NVIDIA's driver, as the kernel has it: NVML would open a session that
    lasts as long as the job, which blocks a reset of the GPUs."""
    with contextlib.suppress(OSError):
        text = Path("/proc/driver/nvidia/version").read_text()
        match = re.search(r"Kernel Module\D*?([\d.]+)", text)
        if match is not None:
            return match[1]
    return None
