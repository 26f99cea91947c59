"""Writes ``environment.json``: the command line and environment of a job, without secrets.

The launcher creates a `Provenance` once the job has a device. A thread then writes the file while
the first attempt starts. Git has a time limit, because a disk may hang.
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
GIT_SECONDS = 5.0  # the time limit of a git command
_WRITE_SECONDS = 2.0  # the longest wait for the file at the end of a job
# The ways in which a shell, Hydra and Python read a variable. Positions such as $1 do not count.
_READ = re.compile(
    r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)(?![\w.]))|\boc\.env:(\w+)"
    r"|\b(?:environ(?:\.get)?|getenv)[\[(]\s*[\"'](\w+)"
)
# Variables that a shell script sets itself.
_ASSIGNED = re.compile(
    r"^\s*(?:export |local |readonly |declare )?([A-Za-z_]\w*)=(.*)", re.MULTILINE
)
# Variables that change from launch to launch.
_CHANGING = re.compile(
    r"_|PWD|OLDPWD|SHLVL|RANDOM|SECONDS|LINENO|PPID|HOSTNAME|TERM|COLUMNS|LINES|SSH_\w+"
    r"|CUDA_VISIBLE_DEVICES|ROBUST_TRAIN_\w+|TMPDIR"
    # Variables that describe ranks, or the machine that a scheduler assigns.
    r"|(?:LOCAL_|NODE_|GROUP_)?RANK|(?:LOCAL_)?WORLD_SIZE|MASTER_(?:ADDR|PORT)"
    r"|(?:TORCHELASTIC|PET|OMPI|PMIX?)_\w+|SLURM_(?!JOB_ID$|ARRAY_)\w+"
)
_MOST_OF_A_PROGRAM = 1 << 18  # characters read of a program file


def find_variables_read(
    words: Sequence[str], cwd: str | Path, environ: Mapping[str, str]
) -> dict[str, Json]:
    """Return the environment variables that a command and its program files read by name, with
    their values. The value is None if a variable is not set.

    Secrets are left out. Variables that the user's shell replaced in the command are unknown.
    """
    texts = list(words)
    for word in words:
        path = Path(cwd, word)
        with contextlib.suppress(OSError, ValueError):
            if PROGRAM_FILE.search(word) and path.is_file():
                with path.open(encoding="utf-8", errors="replace") as file:
                    texts.append(file.read(_MOST_OF_A_PROGRAM))
    names: set[str] = set()
    for text in texts:
        names |= _names_read_in(text)
    variables: dict[str, Json] = {}
    for name in sorted(names):
        is_secret = is_secret_variable(name, environ.get(name, ""))
        if not is_secret and not _CHANGING.fullmatch(name):
            variables[name] = environ.get(name)
    return variables


def _names_read_in(text: str) -> set[str]:
    """Return the names of the variables that a text reads and does not set itself."""
    used: set[str] = set()
    for groups in _READ.findall(text):
        used.update(name for name in groups if name)
    for assignment in _ASSIGNED.finditer(text):
        name, value = assignment.groups()
        # PATH="$PATH:/opt" still reads the variable.
        if not re.search(rf"\$\{{?{name}\b", value):
            used.discard(name)
    return used


def describe_changes(before: Mapping[str, Json], job: str, now: Mapping[str, Json]) -> str:
    """Return a line about the variables that a job's command reads and that changed since its last
    launch. Empty if none changed.

    Args:
        before: the environment of the last launch in the run folder.
        job: the identity of the job. The launch of another job is not compared.
        now: the result of `find_variables_read`.
    """
    earlier = before.get("command_variables")
    if before.get("job") != job or not isinstance(earlier, dict):
        return ""
    changed = [
        f"{name} was {_describe_value(earlier[name])} and is {_describe_value(now[name])}"
        for name in now
        if name in earlier and earlier[name] != now[name]
    ]
    return "; ".join(changed)


def _describe_value(value: Json) -> str:
    return "not set" if value is None else repr(public_text(str(value)))


class Provenance:
    """Writes the file of a launch in the background.

    Args:
        run_dir: the run folder.
        gpus: the name and the UUID of each GPU of the job.
        facts: more content for the file.
    """

    def __init__(
        self, run_dir: Path, gpus: Sequence[tuple[str, str]], facts: Mapping[str, Json]
    ) -> None:
        self._run_dir = run_dir
        self._gpus = gpus
        self._facts = dict(facts)
        self._summary: dict[str, Json] | None = None
        self._thread = threading.Thread(target=self._write, name="environment", daemon=True)
        with contextlib.suppress(RuntimeError):  # The machine allows no more threads.
            self._thread.start()

    def read_summary(self) -> dict[str, Json] | None:
        """Return the record's part for ``summary.json``, or None if the thread takes too long."""
        if self._thread.ident is not None:
            self._thread.join(_WRITE_SECONDS)
        return self._summary

    def _write(self) -> None:
        try:
            packages = _list_packages()
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
                "driver": _read_driver_version(),
                "gpus": [{"name": name, "uuid": uuid} for name, uuid in self._gpus],
                "variables": public_variables(os.environ),
                "packages": packages,
                **self._facts,
            }
            content |= _read_repository(cwd)
            summary = {name: content[name] for name in SHORT}
            self._summary = {**summary, "gpus": [name for name, _ in self._gpus]}
            write_json(self._run_dir / FILE, content, indent=1)
        except Exception as error:  # A record must not end the job.
            log.info("no %s: %r", FILE, error)


def _read_repository(cwd: str) -> dict[str, Json]:
    """Return the commit of the repository that contains ``cwd``, and the names of changed files.
    Their content is not recorded, because it may be secret."""
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
    """Return git's output, or None if git fails. Git runs no programs that the repository
    configures."""
    command = ["git", "-c", "core.fsmonitor=false", "-C", folder]
    variables = {"GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0"}
    printed = printed_by(command + arguments.split(), GIT_SECONDS, variables)
    return None if printed is None else printed.decode(errors="replace")


def _list_packages() -> dict[str, str]:
    versions: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        with contextlib.suppress(Exception):  # An installed package may be broken.
            versions.setdefault(distribution.metadata["Name"], distribution.version)
    return dict(sorted(versions.items(), key=lambda pair: str(pair[0]).lower()))


def _read_driver_version() -> str | None:
    """Return the version of NVIDIA's driver. The kernel is asked instead of NVML, whose session
    would last as long as the job and block a reset of the GPUs."""
    with contextlib.suppress(OSError):
        text = Path("/proc/driver/nvidia/version").read_text()
        match = re.search(r"Kernel Module\D*?([\d.]+)", text)
        if match is not None:
            return match[1]
    return None
