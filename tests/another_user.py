"""A run's socket served by this process, and another user to try it."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from robust_train.control.client import LiveRun, find_live_runs
from robust_train.control.protocol import Refused
from robust_train.control.server import ControlServer


class Desk:
    """A run that answers for itself; what it cannot do is for its attempt."""

    def __init__(self, run_id: str) -> None:
        self.id = run_id
        self.heard: list[Mapping[str, Any]] = []

    def about(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "pid": os.getpid(),
            "user": "somebody",
            "run_dir": f"/runs/{self.id}",
            "state": "waiting",
        }

    def carry_out(self, verb: str, options: Mapping[str, Any]) -> dict[str, Any] | None:
        if verb == "who":
            return self.about()
        if verb == "echo":
            return dict(options)
        if verb == "refuse":
            raise Refused("not today")
        return None

    def hear(self, message: Mapping[str, Any]) -> None:
        self.heard.append(message)


class Served:
    """A server of this process, and how a client finds it."""

    def __init__(self, run_id: str) -> None:
        self.desk = Desk(run_id)
        self.token = run_id.rpartition("-")[2]
        self.server = ControlServer(self.desk, self.token, os.environ)

    @property
    def path(self) -> Path:
        name = f"{os.getpid()}-{self.token}.sock"
        return Path(os.environ["ROBUST_TRAIN_RUNTIME_DIR"]) / name

    def run(self) -> LiveRun:
        return next(run for run in find_live_runs() if run.id == self.desk.id)


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def as_another_user(code: str, *arguments: str) -> tuple[int, str]:
    """Exit status and output of Python code in a process of another user.

    Forked, not started: the other user may not be able to read this interpreter's files.
    """
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            os.dup2(write_end, 1)
            sys.stdout = os.fdopen(1, "w")
            exec(code, {"arguments": arguments})
            sys.stdout.flush()
            status = 0
        finally:
            os._exit(status)
    os.close(write_end)
    with os.fdopen(read_end) as output:
        text = output.read()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), text
