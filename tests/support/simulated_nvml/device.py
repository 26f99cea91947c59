"""The memory of a simulated machine's GPUs, shared by processes that take and return it.

The device, not the code under test, knows what is taken: an allocation beyond what there is fails,
and is logged. What a killed process held comes back some time after its death, as with a driver.
"""

import contextlib
import fcntl
import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MIB = 1024**2
_RETURNS_AFTER_SECONDS = 0.05  # of a dead process's memory


class OutOfMemory(Exception):
    """There is not that much on the GPU."""


class SharedDevice:
    """The GPUs of a :class:`simulated_nvml.Machine`, by its state file. ``tell`` gets each thing
    that happens, in order: ``takes``, ``refuses``, ``returns``, or ``dies`` where a dead process's
    memory came back; the ``owner``, a number that stands for this process, the GPU, and MiB."""

    def __init__(self, state, owner=-1, tell=lambda event, owner, gpu, mib: None):
        self.state = state
        self.held = state.with_name("held")
        self.lock = state.with_name("held.lock")
        self.owner = owner
        self._tell = tell
        self._happened: list[tuple[str, int, str, int]] = []

    def allocate(self, uuid: str, mib: int) -> None:
        """Take memory for this process, on top of what it has. Raises OutOfMemory."""
        with self._held() as held:
            used = sum(row["mib"] for row in held if row["uuid"] == uuid)
            total = self.totals()[uuid]
            if used + mib > total:
                self._tell("refuses", self.owner, uuid, mib)
                raise OutOfMemory(f"{uuid}: {used} + {mib} > {total} MiB")
            row = {"pid": os.getpid(), "owner": self.owner, "uuid": uuid, "mib": mib, "died": None}
            held.append(row)
            self._happened.append(("takes", self.owner, uuid, mib))

    def release(self) -> None:
        with self._held() as held:
            for row in [row for row in held if row["pid"] == os.getpid()]:
                held.remove(row)
                self._happened.append(("returns", self.owner, row["uuid"], row["mib"]))

    def collect(self) -> None:
        """What a driver does by itself: dead processes' memory comes back, with a delay."""
        with self._held() as held:
            now = time.monotonic()
            for row in held:
                if row["died"] is None and not _lives(row["pid"]):
                    row["died"] = now
            for row in list(held):
                if row["died"] is not None and now - row["died"] >= _RETURNS_AFTER_SECONDS:
                    held.remove(row)
                    self._happened.append(("dies", row["owner"], row["uuid"], row["mib"]))

    def used(self) -> dict[str, int]:
        with self._held() as held:
            uuids = {row["uuid"] for row in held}
            return {u: sum(row["mib"] for row in held if row["uuid"] == u) for u in uuids}

    def totals(self) -> dict[str, int]:
        """MiB that there are by GPU."""
        text = self.state.read_text()
        uuids = dict(re.findall(r"^gpu\.(\d+)\.uuid (\S+)$", text, re.MULTILINE))
        totals = dict(re.findall(r"^gpu\.(\d+)\.total (\d+)$", text, re.MULTILINE))
        return {uuids[i]: int(totals[i]) // MIB for i in uuids}

    @contextlib.contextmanager
    def _held(self) -> Iterator[list[dict[str, Any]]]:
        with self.lock.open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            before = self.held.read_text() if self.held.exists() else "[]"
            held = json.loads(before)
            yield held
            after = json.dumps(held)
            if after != before:
                self._publish(held)
                new = self.held.with_suffix(".new")
                new.write_text(after)
                new.replace(self.held)
            # only now can anybody see it
            happened, self._happened = self._happened, []
            for event in happened:
                self._tell(*event)

    def _publish(self, held: list[dict[str, Any]]) -> None:
        """Have NVML tell it."""
        totals = self.totals()
        lines = self.state.read_text().splitlines()
        values = {}
        for number, (uuid, total) in enumerate(totals.items()):
            used = sum(row["mib"] for row in held if row["uuid"] == uuid)
            values[f"gpu.{number}.free"] = (total - used) * MIB
            values[f"gpu.{number}.used"] = used * MIB
        for i, line in enumerate(lines):
            key = line.partition(" ")[0]
            if key in values:
                lines[i] = f"{key} {values[key]}"
        new = self.state.with_suffix(".by_device")
        new.write_text("\n".join(lines) + "\n")
        new.replace(self.state)


def _lives(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"
