"""The command line and environment that a job ran with (``environment.json``).

Names and values of secrets are left out. A thread writes the file during the first attempt. Git has
a time limit, because a disk may hang.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import json
import logging
import os
import platform
import re
import shlex
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

from robust_train.compat import torch_cuda_version
from robust_train.config.placeholders import OVERRIDES_VARIABLE, RUN_DIR_VARIABLE
from robust_train.config.trainers import PROGRAM_FILE
from robust_train.config.values import is_secret
from robust_train.files import digest_of, json_lines, read_object, write_json
from robust_train.gpu.bounded import printed_by
from robust_train.model.events import Json

log = logging.getLogger("robust_train")

FILE = "environment.json"
CODE_FILE = "code.jsonl"
CONFIG_FILE = re.compile(r"\.(ya?ml|json|toml|ini|cfg)$")
_LARGEST_CONFIG_FILE = 1 << 20
LARGEST_SOURCE = 1 << 24
_MOST_CHANGED_FILES = 1000
GIT_SECONDS = 5.0
_LAST_CHANCE_SECONDS = 2.0
_SHORT = ("host", "python", "torch", "cuda", "driver", "git_commit", "git_dirty")
_MATTERS = re.compile(
    r"(CUDA|NVIDIA|NCCL|GLOO|TORCH|PYTORCH|OMP|MKL|OPENBLAS|HF|TRANSFORMERS|SLURM|XLA|TRITON|"
    r"ROBUST_TRAIN)_\w+|PYTHON\w+|LD_LIBRARY_PATH|LD_PRELOAD|VIRTUAL_ENV|CONDA_DEFAULT_ENV"
)
_SECRET = re.compile(r"token|key|pass|pwd|secret|credential|auth|cookie|url|jwt", re.I)
# a password may have an @ of its own
_IN_URL = re.compile(r"(\w://)[^\s/\"']+@")
_NAME = (
    r"(?:token(?!s|iz)|(?:api|access|secret|private|auth|ssh|account|service|client|db|license)"
    r"[_-]?key|pass(?:word|wd|phrase|code)?(?![a-z])|pwd|secret|credential|auth(?!or(?!iz))|cookie"
    r"|jwt|dsn|webhook|ur[il](?![a-z])|notify)"
)
_NAMED = re.compile(_NAME, re.I)
# which is a secret in `wandb.key=…`, and a column of a table in `data.image_key=pixels`
_KEY = re.compile(r"(?<![a-z])key$", re.I)
_WORD = re.compile(r"[a-z][a-z_.]*", re.I)
# A number counts as a word too.
_PASSWORD = re.compile(
    r"passw|passphrase|passcode|pwd|secret|credential|(?:api|access|private)[_-]?key", re.I
)
_FLAG = re.compile(r"(?:true|false|null|none)", re.I)
_NUMBER = rf"(?:[-+]?[\d.]+(?:e[-+]?\d+)?|{_FLAG.pattern})"
_HARMLESS = re.compile(_NUMBER, re.I)
_INSIDE = re.compile(
    rf"{_NAME}[\w-]*[\"']?\s*[:=,](?!\s*{_NUMBER}\s*[\s,}}\]])"
    rf"|(?:{_PASSWORD.pattern})[\w-]*[\"']?\s*[:=,](?!\s*{_FLAG.pattern}\b)",
    re.I,
)
# where ranks meet, or a service is: no more than a host and a port
_ADDRESS = re.compile(r"\w+://[\w.:\[\]-]*/?|(?:file|sqlite)://[^@?]*")
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


def public_command(words: Sequence[str]) -> list[str]:
    """Return a command line, or overrides, without values whose name or form is that of a
    secret."""
    shown = []
    before = ""  # an option whose value is the next word
    for word in words:
        name, is_pair, value = word.partition("=")
        is_option = word.startswith("-")
        if before and not is_option and _is_named(before, word):
            shown.append("…")
        elif is_pair and (_is_named(name, value) or _holds_secret(value)):
            shown.append(f"{name}=…")
        elif not is_pair and _holds_secret(word):
            shown.append("…")
        else:
            shown.append(_public_text(word))
        before = word if is_option and not is_pair else ""
    return shown


def _is_named(name: str, value: str) -> bool:
    """Return whether a value is a secret because of its name."""
    if _FLAG.fullmatch(value) or _ADDRESS.fullmatch(value):
        return False
    if _PASSWORD.search(name):
        return True
    if _HARMLESS.fullmatch(value):
        return False
    is_column = name.endswith("key") and _WORD.fullmatch(value) is not None
    is_key = _KEY.search(name) is not None and not is_column
    return is_key or _NAMED.search(name) is not None


def _holds_secret(text: str) -> bool:
    """Return whether part of a text is named like a secret, or looks like a secret."""
    return bool(_INSIDE.search(text) or _forms().search(text))


@functools.cache
def _forms() -> re.Pattern[str]:
    """Return the pattern that finds a token by its form. Few commands need it, so it is read on
    demand."""
    lines = (Path(__file__).parent / "secrets.txt").read_text().splitlines()
    forms = [line for line in lines if line and not line.startswith("#")]
    return re.compile(rf"(?<![A-Za-z0-9])(?:{'|'.join(forms)})")


def public_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that matter to training, without secrets."""
    names = [
        name
        for name in filter(_MATTERS.fullmatch, environ)
        if not _SECRET.search(name) and not _forms().search(environ[name])
    ]
    return {name: _public_text(environ[name]) for name in sorted(names)}


def variables_named(
    words: Sequence[str], cwd: str | Path, environ: Mapping[str, str]
) -> dict[str, Json]:
    """Return the environment variables that a command, or a program file that it names, reads by
    their names, with their values, or None for a variable that is not set. Secrets are left out,
    and what a shell has filled in before us cannot be known."""
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
        and not _NAMED.search(name)
        and not _KEY.search(name)
        and not _holds_secret(environ.get(name, ""))
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
    return "not set" if value is None else repr(_public_text(str(value)))


def _public_text(text: str) -> str:
    """Return a text without credentials in URLs."""
    return _IN_URL.sub(r"\1…@", text)


def read_environment(run_dir: Path) -> dict[str, Json]:
    """Return the content of ``environment.json``, empty if it cannot be read."""
    return read_object(run_dir / FILE)


def in_words(content: Mapping[str, Json]) -> dict[str, str]:
    """Return the short form of ``environment.json`` for people."""
    gpus = content.get("gpus")
    listed = gpus if isinstance(gpus, list) else []
    names = [str(package.get("name")) for package in listed if isinstance(package, dict)]
    words = {"gpu": ", ".join(names)} | {name: content.get(name) for name in _SHORT}
    return {name.replace("_", " "): str(value) for name, value in words.items() if value}


def config_digests(composed: Sequence[Path], command: Sequence[str] = ()) -> dict[str, Json]:
    """Return the digests of a job's config files: those it was composed of, and those that its
    command names."""
    named = [Path(word.rpartition("=")[2]) for word in command]
    named = [path for path in named if CONFIG_FILE.search(path.name)]
    digests: dict[str, Json] = {}
    for path in (*composed, *named):
        # what is large, or no file, is data
        with contextlib.suppress(OSError, ValueError):
            path = path.resolve()
            digests[str(path)] = digest_of(path, _LARGEST_CONFIG_FILE)
    return digests


def changed_files(before: Mapping[str, Json], digests: Mapping[str, Json]) -> list[str]:
    """Return the config files that were others in ``before``, the content of ``environment.json``
    of an earlier launch."""
    earlier = before.get("config_files")
    if not isinstance(earlier, dict):
        return []
    return [
        os.path.relpath(path)
        for path, digest in digests.items()
        if earlier.get(path, digest) != digest
    ]


def changed_sources(run_dir: Path) -> list[str]:
    """Return the files of code and config that changed since the last launch in this folder read
    them, without files that cannot be read now."""
    digests: dict[str, Json] = {}
    config_files = read_environment(run_dir).get("config_files")
    if isinstance(config_files, dict):
        digests |= config_files
    with contextlib.suppress(OSError):
        for content in filter(None, json_lines(run_dir / CODE_FILE)):
            digests.setdefault(str(content.get("path")), content.get("digest"))
    changed = []
    for path, digest in digests.items():
        with contextlib.suppress(OSError, ValueError):
            if digest_of(path, LARGEST_SOURCE) != digest:
                changed.append(os.path.relpath(path))
    return sorted(changed)


class Provenance:
    """Writes the file of one launch in the background.

    Args:
        run_dir: the run folder.
        gpus: name and UUID of each GPU of the job.
        details: further content of the file.
    """

    def __init__(
        self, run_dir: Path, gpus: Sequence[tuple[str, str]], details: Mapping[str, Json]
    ) -> None:
        self._run_dir = run_dir
        self._gpus = gpus
        self._known = dict(details)
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
            short = {name: content[name] for name in _SHORT}
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
        version = re.search(r"Kernel Module\D*?([\d.]+)", text)
        if version is not None:
            return version[1]
    return None


def with_overrides(command: str, run_dir: Path, overrides: Sequence[str]) -> str:
    """Return a resume command with other values for keys, which replace those that it has.

    A program that calls ``launch`` may read its arguments itself: it gets them by a variable.
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
    """Return the overrides that ``robust-train resume`` has for a ``launch`` call in this folder.
    They count once."""
    given = os.environ.get(OVERRIDES_VARIABLE)
    with contextlib.suppress(ValueError, KeyError, TypeError):
        content = json.loads(given or "")
        if Path(content["run_dir"]).resolve() == run_dir.resolve():
            del os.environ[OVERRIDES_VARIABLE]
            return [str(override) for override in content["overrides"]]
    return []


_OURS = ("robust-train", "robust_train.cli.main")
_unnamed: list[Path] = []
"""Run folders that calls of ``launch`` got in this process: the variable is for the first."""
_PLAIN = re.compile(r"[\w/. @%+-]*", re.ASCII)


def resume_command(run_dir: Path, *, is_named: bool = False) -> str | None:
    """Return the shell command that resumes this process's job from any working directory, or None
    if it holds what is not kept, for a part of a sweep, or if no command started the job.

    ``is_named`` means that the program that calls ``launch`` names the run folder itself.
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
    """Return the shell command that resumes this process's sweep, or None as `resume_command`."""
    return _with_folder("hydra.sweep.dir", folder, cwd)


def resumed_by_hand(run_dir: Path) -> str:
    """Return how the job of this process is resumed that has no resume command."""
    if HydraConfig.initialized():
        return repeated_with(f"hydra.run.dir={run_dir}")
    if arguments_of_run(command()):
        return repeated_with(f"--run-dir {run_dir}")
    return f"launch(…, run_dir={str(run_dir)!r})"


def repeated_with(folder: str) -> str:
    """Return instructions to repeat a command that is not kept. ``folder`` is the words that name
    the folder."""
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
    # a bracket or comma has a meaning in an override
    if not _PLAIN.fullmatch(path):
        path = '"{}"'.format(path.replace('"', r"\""))
    return f"{key}={path}"


def _from(words: list[str], cwd: str = "", before: Sequence[str] = ()) -> str | None:
    # the interpreter by its path, for another PATH would find another one
    same = shlex.join(list(before) + [sys.executable] + words[1:])
    if not cwd:
        cwd = os.getcwd()
    same = f"cd {shlex.quote(cwd)} && {same}"
    # whoever reads the files drops control characters: it would be another command
    return same if public_command(words) == words and same.isprintable() else None


def command() -> list[str]:
    """Return the command line of this process, without the URLs of notifications."""
    return [word for word in sys.orig_argv if not is_secret(word)]
