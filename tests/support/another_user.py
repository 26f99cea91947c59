"""Another user of this machine, for tests that run as root."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator

import pytest

ANOTHER_USER = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@contextlib.contextmanager
def as_another_user(act: Callable[[], object]) -> Iterator[int]:
    """A process of another user that has done something, and lives as long as the block."""
    done, says_so = os.pipe()
    goes, go = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(go)
        os.setgroups([])
        os.setgid(ANOTHER_USER)
        os.setuid(ANOTHER_USER)
        try:
            kept = act()
            os.write(says_so, b"1")
            os.read(goes, 1)
            del kept
        finally:
            os._exit(0)
    os.close(says_so)
    os.close(goes)
    try:
        assert os.read(done, 1) == b"1", "it failed"
        yield pid
    finally:
        os.close(done)
        os.close(go)
        os.waitpid(pid, 0)
