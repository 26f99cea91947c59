"""``environment.json`` and ``code.diff``: what a job ran with. Names and values of secrets are left
out. Written by a thread beside the first attempt; git has a time limit, as on a disk that hangs."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import platform
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from robust_train.events import Json
from robust_train.files import replacing
from robust_train.runfolder.notify import is_secret
from robust_train.values import Group

log = logging.getLogger("robust_train")

FILE = "environment.json"
DIFF_FILE = "code.diff"
_MOST_DIFF_BYTES = 1 << 20
_GIT_SECONDS = 5.0
_LAST_CHANCE_SECONDS = 2.0
_SHORT = ("host", "python", "torch", "cuda", "driver", "git_commit", "git_dirty")
_MATTERS = re.compile(
    r"(CUDA|NVIDIA|NCCL|GLOO|TORCH|PYTORCH|OMP|MKL|OPENBLAS|HF|TRANSFORMERS|SLURM|XLA|TRITON|"
    r"ROBUST_TRAIN)_\w+|PYTHON\w+|LD_LIBRARY_PATH|LD_PRELOAD|VIRTUAL_ENV|CONDA_DEFAULT_ENV"
)
_SECRET = re.compile(r"token|key|passw|pwd|secret|credential|auth|cookie|url", re.I)
_IN_URL = re.compile(r"(\w://)[^\s/@\"']+@")
_LITERAL = re.compile(
    r"((?:passw\w*|secret|token|api_?key)\w*[\"']?\s*[=:]\s*[\"'])[^\"'\s]{8,}(?=[\"'])", re.I
)


def public_command(words: Sequence[str]) -> list[str]:
    """Return a command line without what looks like a secret."""
    shown, hides_next = [], False
    for word in words:
        name, is_pair, _ = word.partition("=")
        if hides_next and not word.startswith("-"):
            shown.append("…")
        elif is_secret(word) or (is_pair and _SECRET.search(name)):
            shown.append(f"{name}=…")
        else:
            shown.append(public_text(word))
        hides_next = word.startswith("-") and not is_pair and bool(_SECRET.search(word))
    return shown


def public_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that matter to training, without secrets."""
    names = [one for one in environ if _MATTERS.fullmatch(one) and not _SECRET.search(one)]
    return {name: public_text(environ[name]) for name in sorted(names)}


def public_text(text: str) -> str:
    """Return a text without the credentials of URLs, and without literals named like secrets."""
    return _LITERAL.sub(r"\1…", _IN_URL.sub(r"\1…@", text))


class Provenance:
    """Writes the files of one launch in the background."""

    def __init__(self, run_dir: Path, gpus: Group) -> None:
        self._run_dir, self._cwd = run_dir, Path.cwd()
        self._gpus = [{"name": gpu.name, "uuid": gpu.uuid} for gpu in gpus]
        self._short: dict[str, Json] | None = None
        self._thread = threading.Thread(target=self._write, name="environment", daemon=True)
        self._thread.start()

    def short(self) -> dict[str, Json] | None:
        """Return what ``summary.json`` has of it; None if it takes too long."""
        self._thread.join(_LAST_CHANCE_SECONDS)
        return self._short

    def _write(self) -> None:
        try:
            packages = _packages()
            content: dict[str, Json] = {
                "schema": 1,
                "time": time.time(),
                "command": public_command(sys.orig_argv),
                "cwd": str(self._cwd),
                "host": socket.gethostname(),
                "system": platform.platform(),
                "python": platform.python_version(),
                "executable": sys.executable,
                "torch": packages.get("torch"),
                "cuda": _cuda_of_torch(),
                "driver": _driver(),
                "gpus": self._gpus,
                "variables": public_variables(os.environ),
                "packages": packages,
                **self._git(),
            }
            with replacing(self._run_dir / FILE) as temporary:
                temporary.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
            short = {name: content[name] for name in _SHORT}
            self._short = {**short, "gpus": [gpu["name"] for gpu in self._gpus]}
        except Exception as error:  # a record is never worth a job
            log.info("no %s: %s: %s", FILE, type(error).__name__, error)

    def _git(self) -> dict[str, Json]:
        """Return commit and state of the working directory's repository; keep its changes."""
        commit = _git(self._cwd, "rev-parse", "HEAD")
        changes = commit and _git(self._cwd, "status", "--porcelain", "--untracked-files=no")
        found: dict[str, Json] = {"git_commit": commit and commit.decode().strip()}
        found["git_dirty"] = None if changes is None else bool(changes)
        plain = ("diff", "--no-ext-diff", "--no-textconv", "HEAD")
        diff = _git(self._cwd, *plain) if changes else None
        path = self._run_dir / DIFF_FILE
        path.unlink(missing_ok=True)  # of an earlier launch
        if diff:
            is_cut = len(diff) > _MOST_DIFF_BYTES
            text = public_text(diff[:_MOST_DIFF_BYTES].decode(errors="replace"))
            path.write_text(text + ("\n[cut at 1 MiB]\n" if is_cut else ""))
        return found


def _git(folder: Path, *arguments: str) -> bytes | None:
    """Return what git prints, of a repository that runs no program of its own; None if it fails."""
    environ = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0"}
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(
            ["git", "-c", "core.fsmonitor=false", "-C", str(folder), *arguments],
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=_GIT_SECONDS,
            env=environ,
            start_new_session=True,
        )
        return done.stdout if done.returncode == 0 else None
    return None


def _packages() -> dict[str, str]:
    found: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        with contextlib.suppress(Exception):  # a broken one
            found.setdefault(distribution.metadata["Name"], distribution.version)
    return dict(sorted(found.items(), key=lambda pair: pair[0].lower()))


def _cuda_of_torch() -> str | None:
    """Return the CUDA version torch was built for, without importing torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = Path(spec.origin).with_name("version.py").read_text()
    found = re.search(r"^cuda\b[^=]*=\s*'([\d.]+)'", text, re.M)
    return found and found[1]


def _driver() -> str | None:
    with contextlib.suppress(OSError):
        text = Path("/proc/driver/nvidia/version").read_text()
        found = re.search(r"Kernel Module\D*?([\d.]+)", text)
        return found and found[1]
    return None
