"""Write locks of the kernel on whole files, which children inherit with the descriptor.

These are open-file-description locks: one belongs to an opened file, so it is free once the last
process has closed that, however it ended. Unlike ``flock`` a write lock needs a descriptor that may
write, so who may only read a file cannot hold it. A read lock of a stranger would still keep us
from *taking* a write lock: take it before others can open the file, or keep the file private.
"""

from __future__ import annotations

import fcntl
import os
import struct

# struct flock: type, whence, start, length (0: to the end), pid; padded as the compiler does
_FLOCK = struct.Struct("hhqqi0q")


def lock(fd: int) -> bool:
    """Take the write lock; return False if another opened file has a lock on it.

    Raises:
        OSError: the file system has no locks.
    """
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _request(fcntl.F_WRLCK))
    except BlockingIOError:
        return False
    return True


def unlock(fd: int) -> None:
    """Release the lock, also for the processes that have inherited the descriptor."""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _request(fcntl.F_UNLCK))


def is_locked(fd: int) -> bool:
    """Return whether another opened file holds the write lock. Read locks do not count.

    Raises:
        OSError: the file system has no locks.
    """
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _request(fcntl.F_RDLCK))
    return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)


def is_flocked(fd: int) -> bool:
    """Return whether another opened file holds an exclusive ``flock``, as version 0.2 did."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.flock(fd, fcntl.LOCK_UN)
    except BlockingIOError:
        return True
    except OSError:  # no such locks here
        return False
    return False


def _request(kind: int) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, 0, 0, 0)
