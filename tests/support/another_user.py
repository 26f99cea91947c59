"""Another user of this machine, for tests that run as root."""

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Iterator

import pytest

ANOTHER_USER = 65534
_NEW_MOUNTS = 0x20000  # CLONE_NEWNS
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def hide_processes_of_others() -> None:
    """Have this process alone see a ``/proc`` that is mounted with ``hidepid=2``."""
    assert ctypes.CDLL(None).unshare(_NEW_MOUNTS) == 0
    hide = "mount --make-rprivate / && mount -t proc -o hidepid=2 proc /proc"
    subprocess.run(["sh", "-c", hide], check=True)


@contextlib.contextmanager
def as_another_user(act, *, as_root=lambda: None) -> Iterator[int]:
    """A process of another user that has done something, and lives as long as the block.

    ``as_root`` is what it does before it becomes that user.
    """
    done, says_so = os.pipe()
    goes, go = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(go)
        as_root()
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
