"""The directory in which this host's jobs see each other; its files are opened safely.

Anybody may write there, so nothing in it is trusted: what another user puts there can make a job
wait, never crash, kill or over-commit. Only the directory's owner could remove others' files.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "ROBUST_TRAIN_QUEUE_DIR"
"""Names the directory where ``gpu_queue_dir`` does not; beats the default."""

RUNTIME = Path("/run/lock")
_TEMPORARY = Path("/tmp")  # not $TMPDIR: schedulers give each job another one
_NAME = "robust-train"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
MOUNTS = Path("/proc/self/mounts")
_SHARED_MODE = 0o1777

# their locks may hang, or end at another host
_NOT_LOCAL = re.compile(r"nfs|smb|cifs|fuse|lustre|ceph|k?afs|9p|gpfs|beegfs|gfs2|ocfs2|panfs|coda")


class QueueProblem(Exception):
    """The queue directory cannot be used. The message names it, the trouble and a way out."""


@dataclass(frozen=True)
class QueueDir:
    """An opened, checked queue directory of this boot of this host."""

    path: Path  # for people; files are opened through `fd`
    fd: int  # the directory's descriptor
    file_system: str  # its type, `tmpfs` …
    owner: int = 0  # a user other than root who may remove any file in it, 0 if there is none

    def close(self) -> None:
        """Close the descriptor, which also releases the queue lock."""
        os.close(self.fd)

    def names(self) -> list[str]:
        """Return the names in it, in no order."""
        return os.listdir(self.fd)

    def open(self, name: str, access: int = os.O_RDONLY) -> int | None:
        """Return a descriptor of a plain file, for reading; None if there is none."""
        # O_NONBLOCK: a FIFO planted under the name must not block the open
        flags = access | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            fd = os.open(name, flags, dir_fd=self.fd)
        except OSError:
            return None
        if stat.S_ISREG(os.fstat(fd).st_mode):
            return fd
        os.close(fd)
        return None

    def files(
        self, pattern: re.Pattern[str], limit_bytes: int = 32768
    ) -> Iterator[tuple[str, os.stat_result, bytes]]:
        """Yield name, status and content of the plain files with such names."""
        for name in filter(pattern.fullmatch, self.names()):
            if (found := self.read(name, limit_bytes)) is not None:
                yield name, *found

    def read(self, name: str, limit_bytes: int) -> tuple[os.stat_result, bytes] | None:
        """Return a plain file's status, and what :func:`read_small` returns; None without one."""
        if (fd := self.open(name)) is None:
            return None
        try:
            return os.fstat(fd), read_small(fd, limit_bytes)
        finally:
            os.close(fd)

    def create(self, name: str, mode: int) -> int:
        """Return a descriptor of a new file, for reading and writing.

        Raises:
            OSError: it cannot be made (full, read-only, the name is taken).
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(name, flags, mode, dir_fd=self.fd)
        try:
            os.fchmod(fd, mode)  # whatever the umask
        except OSError:
            os.close(fd)
            self.remove(name)
            raise
        return fd

    def remove(self, name: str) -> bool:
        """Remove a file; False if that is not possible (another user's)."""
        try:
            os.unlink(name, dir_fd=self.fd)
        except OSError:
            return False
        return True

    def is_still(self, name: str, fd: int) -> bool:
        """Return whether ``name`` still is the file of ``fd``: a cleaner may have removed it."""
        return _is_same(name, fd, self.fd)

    def exists_still(self) -> bool:
        """Return whether the path still leads to the directory behind ``fd``."""
        return _is_same(self.path, self.fd)


def _is_same(path: Path | str, fd: int, dir_fd: int | None = None) -> bool:
    try:
        there, here = os.stat(path, dir_fd=dir_fd, follow_symlinks=False), os.fstat(fd)
    except OSError:
        return False
    return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)


def read_small(fd: int, limit_bytes: int) -> bytes:
    """Return what a file holds; nothing if it holds more than the limit or cannot be read."""
    try:
        data = os.pread(fd, limit_bytes + 1, 0)
    except OSError:
        return b""
    return b"" if len(data) > limit_bytes else data


def directory_for(setting: str | None, environ: Mapping[str, str]) -> Path:
    """Return this host's queue directory: the key ``gpu_queue_dir``, the variable, or a default."""
    chosen = setting or environ.get(VARIABLE)
    if chosen:
        return Path(os.path.expanduser(chosen)).absolute()
    runtime = RUNTIME / _NAME
    # all users of the host have to arrive at the same answer, whoever comes first
    if runtime.is_dir() or _everybody_may_create_in(RUNTIME):
        return runtime
    return _TEMPORARY / _NAME


def open_queue_dir(path: Path) -> QueueDir:
    """Open the part of the directory that belongs to this boot; make and check both.

    Raises:
        QueueProblem: it must not or cannot be used.
    """
    name = boot_name()
    base = _open_checked(path, None, path)
    try:
        fd = _open_checked(name, base, path / name)
        try:
            kind = file_system_of(fd)
            if _NOT_LOCAL.match(kind):
                trouble = f"is on {kind}, where a lock may hang or not reach other processes"
                raise problem_with(path, trouble)
            if not os.access(name, os.W_OK | os.X_OK, dir_fd=base, effective_ids=True):
                raise problem_with(path / name, "is not writable")
            _try_lock(fd, path)
            owner = os.fstat(base).st_uid or os.fstat(fd).st_uid
        except BaseException:
            os.close(fd)
            raise
    finally:
        os.close(base)
    return QueueDir(path / name, fd, kind, owner)


def tmpfiles_line(path: Path) -> str:
    """Return the line for tmpfiles.d(5) that makes the directory at each boot and gives it to root.

    systemd writes the boot id (``%b``) as :func:`boot_name` does.
    """
    return f"d {path}/boot-%b 1777 root root -"


def file_system_of(fd: int) -> str:
    """Return the type of the file system behind a directory's descriptor, ``ext4``."""
    path = Path(os.readlink(f"/proc/self/fd/{fd}"))
    # not by psutil, which before 6.0 asks every mount: a dead network disk would hang
    # any user may mount FUSE, under a name that is no text or has line ends of Unicode in it
    mounts = [line.split(b" ") for line in MOUNTS.read_bytes().split(b"\n") if line]
    types = {Path(os.fsdecode(w[1].replace(b"\\040", b" "))): os.fsdecode(w[2]) for w in mounts}
    return next((types[place] for place in (path, *path.parents) if place in types), "unknown")


def boot_name() -> str:
    """Return the name of this boot of this host, the same in every container of it."""
    try:
        boot_id = _BOOT_ID.read_text().strip().replace("-", "")
    except OSError:
        boot_id = ""
    if not re.fullmatch(r"[0-9a-f]{8,64}", boot_id):
        boot_id = re.sub(r"[^\w.-]", "_", os.uname().nodename) or "host"
    return f"boot-{boot_id}"


def _open_checked(path: Path | str, dir_fd: int | None, shown: Path) -> int:
    """Return a trusted directory's descriptor; make the directory if need be."""
    try:
        fd = _open_or_make(path, dir_fd)
    except OSError as error:
        why = why_not_written(error) or f"cannot be used ({error.strerror})"
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            why = "is a symbolic link or no directory"
        raise problem_with(shown, why) from error
    status = os.fstat(fd)
    is_sticky = bool(status.st_mode & stat.S_ISVTX)
    trouble = None
    if status.st_mode & 0o022 and not is_sticky:
        trouble = f"may be written by others without a sticky bit (chmod 1777 {shown})"
    elif status.st_uid not in (0, os.geteuid()) and not (is_sticky and status.st_mode & 0o002):
        trouble = f"belongs to user {status.st_uid} and is not shared"
    if trouble is not None:
        os.close(fd)
        raise problem_with(shown, trouble)
    return fd


def _open_or_make(path: Path | str, dir_fd: int | None) -> int:
    if dir_fd is None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
    is_new = True
    try:
        os.mkdir(path, _SHARED_MODE, dir_fd=dir_fd)
    except FileExistsError:
        is_new = False
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)
    if is_new:
        try:
            os.fchmod(fd, _SHARED_MODE)  # whatever the umask
        except OSError:
            os.close(fd)
            raise
    return fd


def why_not_written(error: OSError) -> str | None:
    """Return the end of a sentence about missing room; None for any other error."""
    if error.errno == errno.ENOSPC:
        return f"is on a file system that is full ({error.strerror}): make room there"
    if error.errno == errno.EDQUOT:
        return f"is beyond your quota ({error.strerror}): remove files of yours there"
    return None


def _try_lock(fd: int, path: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.flock(fd, fcntl.LOCK_UN)
    except BlockingIOError:
        pass  # another process holds it right now: locks work
    except OSError as error:
        raise problem_with(path, f"has no working locks ({error.strerror})") from error


def _everybody_may_create_in(folder: Path) -> bool:
    try:
        status = folder.lstat()
    except OSError:
        return False
    is_shared = status.st_mode & _SHARED_MODE == _SHARED_MODE
    return stat.S_ISDIR(status.st_mode) and is_shared and os.access(folder, os.W_OK | os.X_OK)


def problem_with(path: Path, trouble: str) -> QueueProblem:
    """Return the error for a directory; ``trouble`` follows its name in the sentence."""
    return QueueProblem(
        f"the queue directory {path} {trouble}; name another one with gpu_queue_dir=… or {VARIABLE}"
    )
