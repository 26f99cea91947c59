"""The kernel's OOM killer, for real: the launcher in a memory cgroup of its own."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from robust_train.readable import MIB
from world import wait_until

LIMIT_BYTES = 1200 * MIB


class Cgroup:
    """A memory cgroup with a limit; v2 or v1, whichever this machine has."""

    def __init__(self, limit_bytes: int) -> None:
        root = Path("/sys/fs/cgroup")
        is_v2 = "memory" in _text(root / "cgroup.controllers").split()
        self.folder = (root if is_v2 else root / "memory") / f"robust-train-{uuid.uuid4().hex}"
        self.folder.mkdir()
        limit = "memory.max" if is_v2 else "memory.limit_in_bytes"
        (self.folder / limit).write_text(str(limit_bytes))
        with contextlib.suppress(OSError):  # no swap to flee to, where the kernel counts it
            swap = "memory.swap.max" if is_v2 else "memory.memsw.limit_in_bytes"
            (self.folder / swap).write_text("0" if is_v2 else str(limit_bytes))

    def enter(self) -> None:
        """Move the calling process into it; called in the child before it becomes the launcher."""
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    def remove(self) -> None:
        wait_until(lambda: not _text(self.folder / "cgroup.procs"), "the cgroup is empty")
        self.folder.rmdir()


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


@pytest.fixture
def cgroup() -> Iterator[Cgroup]:
    try:
        made = Cgroup(LIMIT_BYTES)
    except OSError as error:
        pytest.skip(f"a memory cgroup cannot be made here: {error}")
    yield made
    made.remove()


def test_a_child_that_the_kernel_killed_for_memory_is_tried_again_with_less(world, cgroup):
    overrides = ("trainer._target_=trainers.fills_memory", "training.num_workers=0")
    ended = world.end(world.start(*overrides, preexec_fn=cgroup.enter), code=0)
    assert [attempt["outcome"] for attempt in ended.attempts] == ["host_oom", "completed"]
    assert "OOM killer" in ended.attempts[0]["message"]
    assert [attempt["batch_size"] for attempt in ended.attempts] == [64, 32]
