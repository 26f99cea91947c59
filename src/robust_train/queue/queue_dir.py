"""The directory in which this host's jobs see each other, and the small files in it.

It is the administrator's: with its sticky bit everyone may add files and remove only their own. A
file of another user is data: a regular file, not followed, limited in size, parsed or ignored.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import stat
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from robust_train.files import parse_json
from robust_train.gpu.processes import user_name
from robust_train.model.gpu import GpuInfo

log = logging.getLogger("robust_train")

VARIABLE = "ROBUST_TRAIN_QUEUE_DIR"
"""Names the directory if ``gpu_queue_dir`` does not; takes precedence over the default."""

RUNTIME = Path("/run/lock")
LIMITS_FILE = "queue.yaml"
EXCLUDED_SECONDS = 1800.0
MOST_FILES_PER_USER = 1000

_TEMPORARY = Path("/tmp")  # not $TMPDIR: schedulers give each job another one
_NAME = "robust-train"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_SHARED_MODE = 0o1777
_MOST_BYTES = 4096
_MOST_TEXT = 200
_EXCLUSION_FILE = re.compile(r"unhealthy\.([A-Za-z0-9-]{1,80})\.(\d{1,10})", re.ASCII)
# their locks may hang, or not reach other hosts
_NOT_LOCAL = re.compile(
    r"nfs|smb|cifs|fuse|lustre|ceph|k?afs|9p|gpfs|beegfs|gfs2|ocfs2|panfs|coda"
)
_warned: set[str] = set()


class QueueProblem(Exception):
    """The queue directory cannot be used. The message names it, the problem and a way out."""


@dataclass(frozen=True)
class QueueDir:
    """An opened, checked queue directory of this boot of this host."""

    path: Path  # for people; files are opened through `fd`
    fd: int
    file_system: str  # its type, `tmpfs` …
    owner: int = 0  # a user other than root who may remove any file in it, else 0

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self.fd)

    def matches(
        self, pattern: re.Pattern[str]
    ) -> tuple[list[re.Match[str]], dict[int, int]]:
        """Return the names that match, sorted, and how many are left out by user id.

        One user's files beyond a thousand are left out, so they delay no other user.
        """
        found = [
            match for name in os.listdir(self.fd) if (match := pattern.fullmatch(name))
        ]
        found.sort(key=lambda match: match[0])
        if len(found) <= MOST_FILES_PER_USER:
            return found, {}
        kept = []
        count: dict[int, int] = {}
        for match in found:
            with contextlib.suppress(OSError):
                owner = os.stat(match[0], dir_fd=self.fd, follow_symlinks=False).st_uid
                count[owner] = count.get(owner, 0) + 1
                if count[owner] <= MOST_FILES_PER_USER:
                    kept.append(match)
        most = MOST_FILES_PER_USER
        return kept, {
            owner: number - most for owner, number in count.items() if number > most
        }

    def open(self, name: str) -> int | None:
        """Return a descriptor of a regular file, for reading; None if there is none."""
        # O_NONBLOCK: a FIFO planted under the name must not block the open
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            fd = os.open(name, flags, dir_fd=self.fd)
        except OSError:
            return None
        if stat.S_ISREG(os.fstat(fd).st_mode):
            return fd
        os.close(fd)
        return None

    def read(self, name: str) -> tuple[os.stat_result, bytes] | None:
        """Return status and content of a small regular file; None if there is none."""
        fd = self.open(name)
        if fd is None:
            return None
        try:
            status, data = os.fstat(fd), os.pread(fd, _MOST_BYTES + 1, 0)
        except OSError:
            return None
        finally:
            os.close(fd)
        return (status, data) if len(data) <= _MOST_BYTES else None

    def create(self, name: str, mode: int) -> int:
        """Return a descriptor of a new file, for reading and writing.

        Raises:
            OSError: it cannot be made (full, read-only, the name is taken).
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(name, flags, mode, dir_fd=self.fd)

    def remove(self, name: str) -> bool:
        """Remove a file; return False if that is not possible (another user's)."""
        try:
            os.unlink(name, dir_fd=self.fd)
        except OSError:
            return False
        return True

    def problem(self, error: OSError) -> QueueProblem:
        """Return the error for a file that cannot be written."""
        return _problem(self.path, _why_not_written(error, "written"))


def directory_for(setting: str | None, environ: Mapping[str, str]) -> Path:
    """Return this host's queue directory: the key ``gpu_queue_dir``, the variable, or a default."""
    chosen = setting or environ.get(VARIABLE)
    if chosen:
        return Path(os.path.expanduser(chosen)).absolute()
    runtime = RUNTIME / _NAME
    # all users of the host have to arrive at the same answer, whoever comes first
    if runtime.is_dir() or _everyone_may_create_in(RUNTIME):
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
                raise _problem(path, f"is on {kind}, where locks may hang or not work")
            if not os.access(name, os.W_OK | os.X_OK, dir_fd=base, effective_ids=True):
                raise _problem(path / name, "is not writable")
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
    path = os.readlink(f"/proc/self/fd/{fd}")
    # not by psutil, which before 6.0 asks every mount: a dead network disk would hang
    mounts = Path("/proc/self/mounts").read_text(errors="surrogateescape").split("\n")
    types = {words[1]: words[2] for line in mounts if len(words := line.split(" ")) > 2}
    places = (path, *map(str, Path(path).parents))
    found = (types.get(place.replace(" ", "\\040")) for place in places)
    return next((kind for kind in found if kind is not None), "unknown")


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
        why = _why_not_written(error, "used")
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            why = "is a symbolic link or not a directory"
        raise _problem(shown, why) from error
    status = os.fstat(fd)
    is_sticky = bool(status.st_mode & stat.S_ISVTX)
    trouble = None
    if status.st_mode & 0o022 and not is_sticky:
        trouble = f"may be written by others without a sticky bit (chmod 1777 {shown})"
    elif status.st_uid not in (0, os.geteuid()) and not (
        is_sticky and status.st_mode & 0o002
    ):
        trouble = f"belongs to user {status.st_uid} and is not shared"
    if trouble is not None:
        os.close(fd)
        raise _problem(shown, trouble)
    return fd


def _open_or_make(path: Path | str, dir_fd: int | None) -> int:
    if dir_fd is None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
    is_new = True
    try:
        os.mkdir(path, _SHARED_MODE, dir_fd=dir_fd)
    except FileExistsError:
        is_new = False
    fd = os.open(
        path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd
    )
    if is_new:
        try:
            os.fchmod(fd, _SHARED_MODE)  # whatever the umask
        except OSError:
            os.close(fd)
            raise
    return fd


def _why_not_written(error: OSError, done: str) -> str:
    if error.errno == errno.ENOSPC:
        return f"is on a file system that is full ({error.strerror}): make room there"
    if error.errno == errno.EDQUOT:
        return f"is beyond your quota ({error.strerror}): remove files of yours there"
    return f"cannot be {done} ({error.strerror})"


def _everyone_may_create_in(folder: Path) -> bool:
    try:
        status = folder.lstat()
    except OSError:
        return False
    is_shared = status.st_mode & _SHARED_MODE == _SHARED_MODE
    return (
        stat.S_ISDIR(status.st_mode)
        and is_shared
        and os.access(folder, os.W_OK | os.X_OK)
    )


def _problem(path: Path, trouble: str) -> QueueProblem:
    return QueueProblem(
        f"the queue directory {path} {trouble}; name another one with gpu_queue_dir=… or {VARIABLE}"
    )


# --- limits by the administrator -------------------------------------------------------------


def read_gpu_limit(directory: QueueDir) -> int | None:
    """Return ``max_gpus_per_user`` of root's ``queue.yaml``; None if there is no limit.

    A mistake in the file is one line in the log and means no limit.
    """
    path = directory.path.parent / LIMITS_FILE
    if not os.path.lexists(path):
        return None
    found = directory.read(f"../{LIMITS_FILE}")
    if found is None:
        mistake: int | str = f"it is not a regular file of at most {_MOST_BYTES} bytes"
    elif found[0].st_uid != 0 or found[0].st_mode & 0o022:
        mistake = f"{user_name(found[0].st_uid)} or others may write it (chown root, chmod 644)"
    else:
        mistake = _parse_limit(found[1].decode(errors="replace"))
    if isinstance(mistake, str):
        line = f"{path} is ignored: {mistake}"
        if line not in _warned:
            log.warning("%s", line)
            _warned.add(line)
        return None
    return mistake or None


def _parse_limit(text: str) -> int | str:
    """Return the limit, 0 for none, or the first mistake; ``#`` begins a comment."""
    limit = 0
    for line in text.splitlines():
        key, _, value = (part.strip() for part in line.partition("#")[0].partition(":"))
        if key == "max_gpus_per_user" and value.isdecimal() and 0 < int(value) < 10**6:
            limit = int(value)
        elif key == "max_gpus_per_user":
            return f"{key} is a number of GPUs from 1"
        elif key == "order":
            return "order is gone: who holds fewer GPUs goes first, then who came first"
        elif key or value:
            return "its only key is max_gpus_per_user"
    return limit


# --- GPUs that proved unhealthy --------------------------------------------------------------


@dataclass(frozen=True)
class Exclusion:
    """A GPU that failed under a job: excluded for the host's jobs for half an hour.

    After that the GPU's own health decides, so no file can exclude a GPU for ever.
    """

    uuid: str
    reason: str
    since: float  # seconds of the host's monotonic clock
    by: str  # user whose job excluded it

    def sentence(self, now: float) -> str:
        """Return for how long the GPU is excluded, by whom, and why."""
        left = (EXCLUDED_SECONDS - (now - self.since)) / 60
        return (
            f"excluded for another {left:.0f} min by a job of {self.by}: {self.reason} "
            f"(robust-train doctor --clear {self.uuid})"
        )


def read_exclusions(directory: QueueDir) -> list[Exclusion]:
    """Return the GPUs that are excluded now; unreadable and old files do not count."""
    found, now = [], time.monotonic()
    for match in directory.matches(_EXCLUSION_FILE)[0]:
        read = directory.read(match[0])
        if read is None:
            continue
        with contextlib.suppress(ValueError, TypeError, KeyError, OverflowError):
            values = parse_json(read[1])
            since = float(values["since"])
            if 0 <= now - since < EXCLUDED_SECONDS:
                reason = str(values["reason"])[:_MOST_TEXT]
                found.append(
                    Exclusion(match[1], reason, since, user_name(read[0].st_uid))
                )
    return found


def exclude(directory: QueueDir, uuid: str, reason: str) -> bool:
    """Exclude a GPU from now on; return False if the directory takes no more files."""
    name = f"unhealthy.{uuid}.{os.geteuid()}"
    if not _EXCLUSION_FILE.fullmatch(name):
        return False
    directory.remove(name)
    content = json.dumps(
        {"reason": reason[:_MOST_TEXT], "since": time.monotonic()}
    ).encode()
    try:
        fd = directory.create(name, 0o644)
        try:
            os.fchmod(fd, 0o644)  # whatever the umask
            return os.write(fd, content) == len(content)
        finally:
            os.close(fd)
    except OSError:
        return False


def clear(directory: QueueDir, uuid: str) -> bool:
    """Use a GPU again; return False if the caller has not excluded it. Root clears for all."""
    mine = [f"unhealthy.{uuid}.{os.geteuid()}"]
    if os.geteuid() == 0:
        found = directory.matches(_EXCLUSION_FILE)[0]
        mine = [match[0] for match in found if match[1] == uuid]
    return bool([name for name in mine if directory.remove(name)])


def mark_excluded(
    gpus: Sequence[GpuInfo], excluded: Sequence[Exclusion]
) -> tuple[GpuInfo, ...]:
    """Return the GPUs, excluded ones marked as unusable."""
    now = time.monotonic()
    known = {item.uuid: item.sentence(now) for item in excluded}
    return tuple(
        replace(gpu, unusable=known[gpu.uuid])
        if gpu.uuid in known and not gpu.unusable
        else gpu
        for gpu in gpus
    )
