"""The directory in which this host's jobs see each other, and the small files in it.

Launchers and commands use it. It belongs to the administrator: with its sticky bit everyone may add
files and remove only their own. A file of another user is only data: a regular file, read without
following links, limited in size, parsed or ignored.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import logging
import os
import re
import stat
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import yaml  # type: ignore[import-untyped]

from robust_train.files import parse_json, read_small
from robust_train.gpu.processes import user_name
from robust_train.model.errors import EXIT_BAD_CONFIG, NotDoneError
from robust_train.model.gpu import GpuInfo
from robust_train.model.json import from_json

log = logging.getLogger("robust_train")

VARIABLE = "ROBUST_TRAIN_QUEUE_DIR"
"""The variable that names the directory if ``gpu_queue`` does not. It takes precedence over the
default."""

RUNTIME = Path("/run/lock")
LIMITS_FILE = "queue.yaml"
NO_LIMIT = 1 << 30
EXCLUDED_SECONDS = 1800.0
MOST_FILES_PER_USER = 1000
MOST_BYTES = 32768  # the most that is read of a file that anyone may have put there

_TEMPORARY = Path("/tmp")  # not $TMPDIR: schedulers set another one for each job
_NAME = "robust-train"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_SHARED_MODE = 0o1777
_MOST_TEXT = 200
_EXCLUSION_FILE = re.compile(r"excluded\.([A-Za-z0-9-]{1,80})\.(\d{1,10})", re.ASCII)
# Locks on these file systems may hang, or not reach other hosts.
_NOT_LOCAL = re.compile(r"nfs|smb|cifs|fuse|lustre|ceph|k?afs|9p|gpfs|beegfs|gfs2|ocfs2|panfs|coda")


@functools.cache
def _warn_once(line: str) -> None:
    log.warning("%s", line)


class QueueError(NotDoneError):
    """The queue directory cannot be used. The message names it, the problem and a way out."""

    exit_code = EXIT_BAD_CONFIG

    def __init__(self, path: Path, trouble: str) -> None:
        super().__init__(
            f"the queue directory {path} {trouble}; name another one with gpu_queue=/… or "
            f"{VARIABLE}"
        )


@dataclass(frozen=True)
class Exclusion:
    """A GPU whose hardware failed a job. For half an hour it is excluded for the host's jobs. Then
    its own health decides, so no file can exclude a GPU for ever."""

    uuid: str
    by: str  # the job's user
    job: str  # its run folder
    time: float  # seconds since the epoch
    reason: str

    @property
    def seconds_left(self) -> float:
        """For how long the GPU is excluded."""
        # A clock that was set back neither ends the exclusion nor prolongs it.
        return max(EXCLUDED_SECONDS - abs(time.time() - self.time), 0.0)

    def sentence(self) -> str:
        """Return how long the GPU is excluded, by whom, and why."""
        return (
            f"excluded for another {self.seconds_left / 60:.0f} min by a job of {self.by}: "
            f"{self.reason} (robust-train doctor --include {self.uuid})"
        )


class QueueDir:
    """The part of the queue directory ``base`` that belongs to this boot of this host, opened.

    Raises:
        QueueError: it must not or cannot be used.
    """

    def __init__(self, base: Path) -> None:
        self.base = base
        self.path = base / boot_name()
        owners = _checked_owner(base), _checked_owner(self.path)
        self.owner = next(filter(None, owners), 0)
        """A user other than root who may remove any file in it, else 0."""
        with self.problems("used"):
            self.file_system = kind = file_system_of(self.path)
        if _NOT_LOCAL.match(kind):
            raise QueueError(base, f"is on {kind}, where locks may hang or not work")
        if not os.access(self.path, os.W_OK | os.X_OK, effective_ids=True):
            raise QueueError(self.path, "is not writable")
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        with self.problems("used"):
            self.fd = os.open(self.path, flags)

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self.fd)

    def matches(
        self, pattern: re.Pattern[str], without: Collection[str] = ()
    ) -> list[re.Match[str]]:
        """Return the sorted names that match.

        A user's files beyond a thousand are ignored, so they delay no other user.

        Raises:
            OSError: the directory cannot be listed.
        """
        try:
            names = os.listdir(self.fd)
        except (FileNotFoundError, NotADirectoryError):  # removed
            return []
        named = sorted({*names}.difference(without))
        matches = [match for match in map(pattern.fullmatch, named) if match]
        if len(matches) <= MOST_FILES_PER_USER:
            return matches
        counts = Counter[int]()
        kept = []
        for match in matches:
            with contextlib.suppress(OSError):
                status = os.stat(match[0], dir_fd=self.fd, follow_symlinks=False)
                counts[status.st_uid] += 1
                if counts[status.st_uid] <= MOST_FILES_PER_USER:
                    kept.append(match)
        return kept

    @contextlib.contextmanager
    def creating(self, name: str) -> Iterator[int]:
        """Yield a descriptor of a new, private file.

        After the block, the file has its name, and everyone may read it. If the block or the
        renaming raises an exception, the file is removed.

        Raises:
            OSError: the disk is full, or another user has taken the name.
        """
        temporary = f"new.{os.urandom(8).hex()}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(temporary, flags, 0o600, dir_fd=self.fd)
        try:
            yield fd
            os.fchmod(fd, 0o644)
            os.rename(temporary, name, src_dir_fd=self.fd, dst_dir_fd=self.fd)
        except BaseException:
            self.remove(temporary)
            os.close(fd)
            raise

    def remove(self, name: str) -> bool:
        """Remove a file. Returns False if that is not possible, as for another user's file."""
        try:
            os.unlink(name, dir_fd=self.fd)
        except OSError:
            return False
        return True

    def gpu_limit(self) -> int:
        """Return ``max_gpus_per_user`` of root's ``queue.yaml``, else ``NO_LIMIT``.

        A mistake in the file is one line in the log and means no limit.
        """
        path = self.base / LIMITS_FILE
        try:
            return self._read_limit() if os.path.lexists(path) else NO_LIMIT
        except ValueError as mistake:
            _warn_once(f"{path} is ignored: {mistake}")
            return NO_LIMIT

    def exclusions(self) -> list[Exclusion]:
        """Return the exclusions in force: for each GPU, the one that lasts longest."""
        exclusions = [
            exclusion
            for exclusion in map(self._read_exclusion, self._exclusion_files())
            if exclusion is not None and exclusion.seconds_left
        ]
        exclusions.sort(key=lambda exclusion: exclusion.seconds_left)
        return list({exclusion.uuid: exclusion for exclusion in exclusions}.values())

    def include(self, uuid: str) -> bool:
        """Use a GPU again like any other. Root includes it for all users.

        Returns:
            False if the caller has not excluded it.
        """
        removed = [
            self.remove(file[0])
            for file in self._exclusion_files()
            if file[1] == uuid and os.geteuid() in (0, int(file[2]))
        ]
        return any(removed)

    def marked(self, gpus: Sequence[GpuInfo]) -> tuple[GpuInfo, ...]:
        """Return the GPUs, with excluded GPUs as unusable."""
        excluded = {exclusion.uuid: exclusion.sentence() for exclusion in self.exclusions()}
        shown = []
        for gpu in gpus:
            if gpu.uuid in excluded:
                why = gpu.unusable if gpu.unusable else excluded[gpu.uuid]
                gpu = replace(gpu, unusable=why, owned=False)
            shown.append(gpu)
        return tuple(shown)

    def exclude(self, uuid: str, job: str, reason: str) -> bool:
        """Record that a GPU's hardware failed a job.

        Returns:
            False if the directory takes no more files.
        """
        name = f"excluded.{uuid}.{os.geteuid()}"
        if _EXCLUSION_FILE.fullmatch(name) is None:
            return False
        content = json.dumps(
            {"job": job[-_MOST_TEXT:], "time": time.time(), "reason": reason[: _MOST_TEXT // 2]}
        )
        with contextlib.suppress(OSError):
            with self.creating(name) as fd:
                write_whole(fd, content.encode())
            os.close(fd)
            return True
        return False

    @contextlib.contextmanager
    def problems(self, done: str) -> Iterator[None]:
        """Turn an OSError of this block, in which something is ``done``, into a QueueError."""
        try:
            yield
        except OSError as error:
            raise QueueError(self.path, why_not_done(error, done)) from error

    def _exclusion_files(self) -> list[re.Match[str]]:
        with contextlib.suppress(OSError):
            return self.matches(_EXCLUSION_FILE)
        return []

    def _read_exclusion(self, file: re.Match[str]) -> Exclusion | None:
        """Return a file's exclusion, or None if it has none or its owner is not the user in its
        name."""
        with contextlib.suppress(OSError, ValueError, TypeError, OverflowError):
            data, status = read_small(file[0], MOST_BYTES, self.fd)
            if status.st_uid != int(file[2]):
                return None
            about = {"uuid": file[1], "by": user_name(status.st_uid)}
            return from_json(Exclusion, {**parse_json(data), **about})
        return None

    def _read_limit(self) -> int:
        """Return the limit in the file.

        Raises:
            ValueError: the first mistake in it.
        """
        try:
            data, status = read_small(self.base / LIMITS_FILE, MOST_BYTES)
        except OSError:
            raise ValueError(f"it is not a regular file of at most {MOST_BYTES} bytes") from None
        if status.st_uid != 0 or status.st_mode & 0o022:
            who = user_name(status.st_uid)
            raise ValueError(f"{who} or others may write it (chown root, chmod 644)")
        content = None
        with contextlib.suppress(yaml.YAMLError, ValueError):
            content = yaml.safe_load(data) or {}
        if not isinstance(content, dict) or content.keys() - {"max_gpus_per_user"}:
            raise ValueError("its only key is max_gpus_per_user")
        limit = content.get("max_gpus_per_user", NO_LIMIT)
        if type(limit) is not int or limit < 1:
            raise ValueError("max_gpus_per_user is a number of GPUs from 1")
        return limit


def write_whole(fd: int, data: bytes) -> None:
    """Replace a file's content in place.

    Raises:
        OSError: the disk took only a part.
    """
    if os.pwrite(fd, data, 0) != len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.ftruncate(fd, len(data))


# --- where it is, and whether it can be trusted ----------------------------------------------


def directory_for(setting: str | None, environ: Mapping[str, str]) -> Path:
    """Return this host's queue directory: the path in ``gpu_queue``, the variable, or a default."""
    chosen = setting if setting else environ.get(VARIABLE)
    if chosen:
        return Path(os.path.expanduser(chosen)).absolute()
    runtime = RUNTIME / _NAME
    # All users of the host must reach the same answer, whoever comes first.
    if runtime.is_dir() or _everyone_may_create_in(RUNTIME):
        return runtime
    return _TEMPORARY / _NAME


def is_made(path: Path) -> bool:
    """Return whether a queue directory exists. True also if this user may not look."""
    try:
        path.lstat()
    except OSError as error:
        return error.errno != errno.ENOENT
    return True


def tmpfiles_line(path: Path) -> str:
    """Return the line for tmpfiles.d(5) that creates the directory at each boot and gives it to
    root.

    systemd writes the boot id (``%b``) in the same way as :func:`boot_name`.
    """
    return f"d {path}/boot-%b 1777 root root -"


def file_system_of(path: Path) -> str:
    """Return the type of the file system that a directory is on, ``ext4``."""
    # psutil before 6.0 asks every mount, so that a dead network disk would hang.
    mounts = Path("/proc/self/mounts").read_text(errors="surrogateescape")
    lines = (line.split(" ") for line in mounts.split("\n"))
    types = {words[1]: words[2] for words in lines if len(words) > 2}
    place = os.path.realpath(path).replace(" ", "\\040")
    while place not in types and place != "/":
        place = os.path.dirname(place)
    return types.get(place, "unknown")


def boot_name() -> str:
    """Return the name of this boot of this host, the same in every container of it."""
    boot_id = ""
    with contextlib.suppress(OSError):
        boot_id = _BOOT_ID.read_text().strip().replace("-", "")
    if not re.fullmatch(r"[0-9a-f]{8,64}", boot_id):
        boot_id = re.sub(r"[^\w.-]", "_", os.uname().nodename) or "host"
    return f"boot-{boot_id}"


def why_not_done(error: OSError, done: str) -> str:
    """Describe the problem of a directory in which something could not be ``done``."""
    if error.errno == errno.ENOSPC:
        return f"is on a file system that is full ({error.strerror}): make room there"
    if error.errno == errno.EDQUOT:
        return f"is beyond your quota ({error.strerror}): remove files of yours there"
    return f"cannot be {done} ({error.strerror})"


def _checked_owner(path: Path) -> int:
    """Return the owner of a directory that can be trusted. Creates the directory if needed."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            path.mkdir(_SHARED_MODE)
            path.chmod(_SHARED_MODE)  # whatever the umask
        status = path.lstat()
    except OSError as error:
        raise QueueError(path, why_not_done(error, "used")) from error
    if not stat.S_ISDIR(status.st_mode):
        raise QueueError(path, "is a symbolic link or not a directory")
    is_sticky = bool(status.st_mode & stat.S_ISVTX)
    if status.st_mode & 0o022 and not is_sticky:
        advice = f"chmod 1777 {path}"
        trouble = f"may be written by others without a sticky bit ({advice})"
        raise QueueError(path, trouble)
    is_shared = is_sticky and status.st_mode & 0o002
    if status.st_uid not in (0, os.geteuid()) and not is_shared:
        raise QueueError(path, f"belongs to user {status.st_uid} and is not shared")
    return status.st_uid


def _everyone_may_create_in(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        mode = folder.lstat().st_mode
        is_shared = stat.S_ISDIR(mode) and mode & _SHARED_MODE == _SHARED_MODE
        return is_shared and os.access(folder, os.W_OK | os.X_OK)
    return False
