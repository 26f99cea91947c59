"""Light launchers for tests, and the simulated host that they run on."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from robust_train.queue.queue_dir import boot_name
from robust_train.queue.registry import QueuedJob, Registry
from simulated_nvml import Machine
from world import wait_until

MEMBER = Path(__file__).with_name("member.py")


class Member:
    """A running :mod:`member`, and what it has said."""

    def __init__(self, machine: Machine, *arguments: str, **environ: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(MEMBER), *arguments],
            env=machine.environment(**environ),
            cwd=machine.folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # a group of its own ends as a whole, and can be stopped also where the tests' own
            # group has no terminal any more
            preexec_fn=os.setpgrp,
        )
        self.said: list[dict[str, Any]] = []
        self.errors = ""
        self._readers = [threading.Thread(target=self._listen), threading.Thread(target=self._err)]
        for reader in self._readers:
            reader.start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.append(json.loads(line))

    def _err(self) -> None:
        assert self.process.stderr is not None
        self.errors = self.process.stderr.read()

    def heard(self, event: str) -> dict[str, Any] | None:
        """The last thing of a kind that it said."""
        return next((said for said in reversed(self.said) if said["event"] == event), None)

    def wait_for(self, event: str) -> dict[str, Any]:
        """What it says of a kind, as soon as it does."""

        def told() -> dict[str, Any] | None:
            ended = self.process.poll() is not None and self.heard(event) is None
            assert not (ended and not self._readers[0].is_alive()), self.errors
            return self.heard(event)

        return wait_until(told, f"{event} of {self.process.args}")

    def waits_at(self, position: int) -> None:
        """Until it says that it has this queue position."""
        wait_until(
            lambda: (self.heard("waiting") or {}).get("position") == position,
            f"position {position}",
        )

    def tell(self, command: str, answer: str) -> dict[str, Any]:
        """Give a command; what it answers."""
        before = sum(said["event"] == answer for said in self.said)
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        wait_until(lambda: sum(s["event"] == answer for s in self.said) > before, command)
        found = self.heard(answer)
        assert found is not None
        return found

    def kill(self) -> None:
        """SIGKILL, for the launcher alone."""
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        """End it, with its child."""
        self.tell("end", "ended")
        self.process.wait()
        for reader in self._readers:  # then all is read that it ever said
            reader.join()

    def kill_children(self) -> None:
        """After the launcher is gone: what it had started, which holds its pipes open."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for reader in self._readers:
            reader.join()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()


class Host:
    """A simulated machine on which :mod:`member` jobs run."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.members: list[Member] = []

    @property
    def base(self) -> Path:
        """The queue directory."""
        return Path(self.machine.environ["ROBUST_TRAIN_QUEUE_DIR"])

    @property
    def folder(self) -> Path:
        """The part of it that belongs to this boot."""
        return self.base / boot_name()

    def job_files(self) -> list[Path]:
        return sorted(self.folder.glob("record.*"))

    def jobs(self) -> list[QueuedJob]:
        """The living jobs."""
        registry = Registry(self.base)
        try:
            return registry.jobs()
        finally:
            registry.close()

    def start(self, need: int, **options: str | float) -> Member:
        member = Member(self.machine, str(need), *(f"{k}={v}" for k, v in options.items()))
        self.members.append(member)
        return member
