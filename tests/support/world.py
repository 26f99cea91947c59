"""The world that end-to-end tests run in: the real command in a folder of its own."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

import real_gpus
import warm
from terminal import run_at_a_terminal

ROOT = Path(__file__).resolve().parents[2]
SUPPORT = ROOT / "tests" / "support"

_SCRIPT = """
import runpy, sys
del sys.argv[0]
sys.path[0] = sys.argv[0].rpartition("/")[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def wait_until(condition: Callable[[], Any], what: str, timeout_seconds: float = 120.0) -> Any:
    """Poll until ``condition`` holds and return its value; fail loudly if it never does."""
    deadline = time.monotonic() + timeout_seconds
    while (polled_at := time.monotonic()) < deadline:
        value = condition()
        if value:
            return value
        # whoever waits leaves the cores to what is waited for
        time.sleep(max(0.02, 3 * (time.monotonic() - polled_at)))
    raise AssertionError(f"never happened: {what}")


def wait_for_text(file: Path, what: str) -> str:
    """Wait until ``file`` has text, and return the text."""
    return str(wait_until(lambda: file.is_file() and file.read_text(), what))


def is_running(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def parent_of(pid: int) -> int:
    return psutil.Process(pid).ppid()


@dataclass
class Ended:
    """What a finished command left."""

    returncode: int
    stdout: str
    stderr: str
    run_dir: Path

    @property
    def output(self) -> str:
        return self.stdout + self.stderr

    def with_code(self, code: int | None) -> Ended:
        """Assert that it ended with this exit code, if one is given."""
        assert code in (None, self.returncode), self.output
        return self

    def was_refused(self, words: Iterable[str]) -> None:
        """Assert that it ended for a mistake of its user's, in one line that has these words."""
        assert self.returncode == 2, self.output
        assert "Traceback" not in self.output
        message = self.stderr.strip()
        assert len(message.splitlines()) == 1, message
        for word in words:
            assert word in message

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.run_dir / "summary.json").read_text())

    @property
    def journal(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run_dir / "journal.jsonl").open()]

    @property
    def attempts(self) -> list[dict[str, Any]]:
        return self.summary["attempts"]


class World:
    """A folder to run commands in. ``environ`` is what every command gets."""

    alone = False
    """Whether commands begin in an interpreter of their own, as users' do, and not as forks of one
    that has imported what they import (see :mod:`warm`)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run_dir = folder / "run"
        self.environ = warm.plain_environ() | {
            "PYTHONPATH": f"{SUPPORT}:{ROOT / 'src'}",
            "COLUMNS": "200",
            "OMP_NUM_THREADS": "1",
            "ROBUST_TRAIN_QUEUE_DIR": str(folder / "queue_of_jobs"),
            "XDG_CACHE_HOME": str(folder / "cache"),
            **real_gpus.mask(),
        }

    def command(self, *arguments: str, script: str = "train_robust.py") -> list[str]:
        return [sys.executable, str(ROOT / script), *arguments, f"hydra.run.dir={self.run_dir}"]

    def start(self, *arguments, script="train_robust.py", **options) -> subprocess.Popen[str]:
        """Start a command; the caller waits for it."""
        command = self.command(*arguments, script=script)[1:]
        return warm.start(command, self.folder, self.environ, alone=self.alone, **options)

    def end(self, process: subprocess.Popen[str], code: int | None = None) -> Ended:
        """Wait for a command that was started, and assert its exit code, if one is given."""
        stdout, stderr = process.communicate(timeout=240)
        return Ended(process.returncode, stdout, stderr, self.run_dir).with_code(code)

    def run(self, *arguments, script="train_robust.py", code=None, **options) -> Ended:
        """Run a command to its end, and assert its exit code, if one is given."""
        imports_torch = script == "train.py" or "isolation=none" in arguments
        if imports_torch and "-m" not in arguments and not self.alone and not options:
            command = self.command(*arguments, script=script)[1:]
            ended = warm.preloaded(_SCRIPT, *command, cwd=self.folder, environ=self.environ)
            outcome = Ended(ended.returncode, ended.stdout, ended.stderr, self.run_dir)
            return outcome.with_code(code)
        return self.end(self.start(*arguments, script=script, **options), code)

    def robust_train(self, *arguments, cwd=None, code=None) -> Ended:
        """Run ``robust-train arguments…`` to its end, and assert its exit code, if one is given."""
        words = ["-m", "robust_train.cli.main", *arguments]
        cwd = cwd or self.folder
        return self.end(warm.start(words, cwd, self.environ, alone=self.alone), code)

    def program(self, *words, cwd=None, code=0) -> Ended:
        """Run any program where robust-train's command is installed, and assert its exit code."""
        path = f"{Path(sys.executable).parent}:{self.environ['PATH']}"
        options = {"cwd": cwd or self.folder, "env": self.environ | {"PATH": path}, "timeout": 240}
        done = subprocess.run([*map(str, words)], capture_output=True, text=True, **options)
        return Ended(done.returncode, done.stdout, done.stderr, self.run_dir).with_code(code)

    def run_in_terminal(self, *arguments: str, columns: int = 200) -> str:
        """Run a command in a terminal of its own to a successful end; what it showed."""
        command = self.command(*arguments)
        code, shown = run_at_a_terminal(command, self.environ, columns=columns, cwd=self.folder)
        assert code == 0, shown
        return shown

    def train(self, trainer: str, *arguments: str, **options: Any) -> Ended:
        return self.run(f"trainer._target_=trainers.{trainer}", *arguments, **options)

    def with_environ(self, more: Mapping[str, str]) -> World:
        self.environ |= dict(more)
        return self

    def with_libraries(self) -> World:
        """The same world with ``support/libraries`` installed; an interpreter finds it at start."""
        self.alone = True
        base = self.folder / "installed"
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        packages = base / "lib" / version / "site-packages"
        shutil.copytree(SUPPORT / "libraries", packages)
        path = f"{self.environ['PYTHONPATH']}:{packages}"
        return self.with_environ({"PYTHONUSERBASE": str(base), "PYTHONPATH": path})
