"""Opens the queue directory, in which the jobs of this host see each other.

Launchers and commands use it, and :mod:`.registry` keeps the records of jobs in it. The directory
should belong to root. Everyone may add files, and its sticky bit prevents users from removing the
files of other users. A file of another user is never trusted: only a regular file of limited size
is read, without following links, and ignored if it cannot be parsed.
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

# The variable that names the directory if ``gpu_queue`` does not.
VARIABLE = "ROBUST_TRAIN_QUEUE_DIR"

RUNTIME = Path("/run/lock")
LIMITS_FILE = "queue.yaml"
NO_LIMIT = 1 << 30
EXCLUDED_SECONDS = 1800.0
MOST_FILES_PER_USER = 1000
MOST_BYTES = 32768  # largest file that is read, since anyone may have written it

_TEMPORARY = Path("/tmp")  # not $TMPDIR, which schedulers set to another directory for each job
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
            f"the queue directory {path} {trouble}; name another directory with gpu_queue=/… or "
            f"{VARIABLE}"
        )


@dataclass(frozen=True)
class Exclusion:
    """Excludes a GPU whose hardware failed a job, for all jobs of the host.

    It lasts half an hour, so that no file can exclude a GPU forever. After that, jobs use the GPU
    unless the driver reports that it is unhealthy.
    """

    uuid: str
    by: str  # the user of the job
    job: str  # the run folder of the job
    time: float  # seconds since the epoch
    reason: str

    @property
    def seconds_left(self) -> float:
        """How long the GPU will still be excluded."""
        # A clock that was set back neither ends the exclusion nor extends it.
        return max(EXCLUDED_SECONDS - abs(time.time() - self.time), 0.0)

    def sentence(self) -> str:
        """Return a sentence: how long the GPU is excluded, by which user, and why."""
        return (
            f"excluded for another {self.seconds_left / 60:.0f} min by a job of {self.by}: "
            f"{self.reason} (robust-train doctor --include {self.uuid})"
        )


class QueueDir:
    """The open folder for this boot of this host, in the queue directory ``base``.

    Raises:
        QueueError: the folder cannot be used, or must not be trusted.
    """

    def __init__(self, base: Path) -> None:
        self.base = base
        self.path = base / boot_name()
        base_owner = _make_trusted(base)
        path_owner = _make_trusted(self.path)
        # The user who may remove any file in the folder, 0 for root.
        self.owner = base_owner or path_owner
        with self.convert_errors("used"):
            self.file_system = file_system_of(self.path)
        if _NOT_LOCAL.match(self.file_system):
            raise QueueError(base, f"is on {self.file_system}, where locks may hang or not work")
        if not os.access(self.path, os.W_OK | os.X_OK, effective_ids=True):
            raise QueueError(self.path, "is not writable")
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        with self.convert_errors("used"):
            self.fd = os.open(self.path, flags)

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self.fd)

    def matches(
        self, pattern: re.Pattern[str], without: Collection[str] = ()
    ) -> list[re.Match[str]]:
        """Return the matches of the file names, sorted, except for the names in ``without``.

        Only the first thousand files of each user count, so that no user can delay other users.

        Raises:
            OSError: the directory cannot be listed.
        """
        try:
            names = os.listdir(self.fd)
        except (FileNotFoundError, NotADirectoryError):  # Someone has removed the directory.
            return []
        matches = []
        for name in sorted(set(names).difference(without)):
            match = pattern.fullmatch(name)
            if match is not None:
                matches.append(match)
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
    def create_file(self, name: str) -> Iterator[int]:
        """Create a file and yield its descriptor. Only this process can find it within the block.

        After the block, the file gets its name, and everyone may read it. If the block or the
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
        """Remove a file. Returns False if this user may not remove it."""
        try:
            os.unlink(name, dir_fd=self.fd)
        except OSError:
            return False
        return True

    def gpu_limit(self) -> int:
        """Return ``max_gpus_per_user`` from root's ``queue.yaml``, or ``NO_LIMIT`` without it.

        A file with a mistake sets no limit, after a warning.
        """
        path = self.base / LIMITS_FILE
        if not os.path.lexists(path):
            return NO_LIMIT
        try:
            return self._read_limit()
        except ValueError as mistake:
            _warn_once(f"{path} is ignored: {mistake}")
            return NO_LIMIT

    def exclusions(self) -> list[Exclusion]:
        """Return the exclusions in force. If a GPU has several, the longest exclusion counts."""
        longest: dict[str, Exclusion] = {}
        for file in self._exclusion_files():
            exclusion = self._read_exclusion(file)
            if exclusion is None or not exclusion.seconds_left:
                continue
            previous = longest.get(exclusion.uuid)
            if previous is None or exclusion.seconds_left >= previous.seconds_left:
                longest[exclusion.uuid] = exclusion
        return sorted(longest.values(), key=lambda exclusion: exclusion.seconds_left)

    def include(self, uuid: str) -> bool:
        """Remove the caller's exclusion of a GPU, or all of its exclusions if the caller is root.

        Returns:
            False if there is no such exclusion.
        """
        removed = [
            self.remove(file[0])
            for file in self._exclusion_files()
            if file[1] == uuid and os.geteuid() in (0, int(file[2]))
        ]
        return any(removed)

    def mark_excluded(self, gpus: Sequence[GpuInfo]) -> tuple[GpuInfo, ...]:
        """Return the GPUs, with excluded GPUs marked as unusable."""
        excluded = {exclusion.uuid: exclusion.sentence() for exclusion in self.exclusions()}
        marked = []
        for gpu in gpus:
            if gpu.uuid in excluded:
                why = gpu.unusable
                if not why:
                    why = excluded[gpu.uuid]
                gpu = replace(gpu, unusable=why, owned=False)
            marked.append(gpu)
        return tuple(marked)

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
            with self.create_file(name) as fd:
                write_whole(fd, content.encode())
            os.close(fd)
            return True
        return False

    @contextlib.contextmanager
    def convert_errors(self, done: str) -> Iterator[None]:
        """Convert an OSError in the ``with`` block into a QueueError.

        Args:
            done: the participle of the message, for example ``read`` for "cannot be read".
        """
        try:
            yield
        except OSError as error:
            raise QueueError(self.path, why_not_done(error, done)) from error

    def _exclusion_files(self) -> list[re.Match[str]]:
        with contextlib.suppress(OSError):
            return self.matches(_EXCLUSION_FILE)
        return []

    def _read_exclusion(self, file: re.Match[str]) -> Exclusion | None:
        """Return the exclusion in a file, or None if the file cannot be trusted.

        The owner of the file must be the user in its name.
        """
        with contextlib.suppress(OSError, ValueError, TypeError, OverflowError):
            data, status = read_small(file[0], MOST_BYTES, self.fd)
            if status.st_uid != int(file[2]):
                return None
            trusted = {"uuid": file[1], "by": user_name(status.st_uid)}
            return from_json(Exclusion, {**parse_json(data), **trusted})
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
            user = user_name(status.st_uid)
            raise ValueError(f"{user} or others may write it (chown root, chmod 644)")
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
        OSError: the disk is full.
    """
    if os.pwrite(fd, data, 0) != len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.ftruncate(fd, len(data))


# --- the path of the directory, and whether it can be trusted ---------------------------------


def directory_for(setting: str | None, environ: Mapping[str, str]) -> Path:
    """Return this host's queue directory: the path in ``gpu_queue``, the variable, or a default."""
    chosen = setting
    if not chosen:
        chosen = environ.get(VARIABLE)
    if chosen:
        return Path(os.path.expanduser(chosen)).absolute()
    runtime = RUNTIME / _NAME
    # The answer must be the same for all users of the host, whichever user is first.
    if runtime.is_dir() or _everyone_may_create_in(RUNTIME):
        return runtime
    return _TEMPORARY / _NAME


def may_exist(path: Path) -> bool:
    """Return False if a queue directory certainly does not exist, and True if it exists or if this
    user cannot look."""
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
    """Return the type of a directory's file system, such as ``ext4``."""
    # psutil before 6.0 reads every mount, and would hang at a dead network disk.
    mounts = Path("/proc/self/mounts").read_text(errors="surrogateescape")
    lines = (line.split(" ") for line in mounts.split("\n"))
    types = {words[1]: words[2] for words in lines if len(words) > 2}
    place = os.path.realpath(path).replace(" ", "\\040")
    while place not in types and place != "/":
        place = os.path.dirname(place)
    return types.get(place, "unknown")


def boot_name() -> str:
    """Return a name for this boot of this host, which is the same in every container."""
    boot_id = ""
    with contextlib.suppress(OSError):
        boot_id = _BOOT_ID.read_text().strip().replace("-", "")
    if not re.fullmatch(r"[0-9a-f]{8,64}", boot_id):
        boot_id = re.sub(r"[^\w.-]", "_", os.uname().nodename) or "host"
    return f"boot-{boot_id}"


def why_not_done(error: OSError, done: str) -> str:
    """Describe the problem of a directory that could not be ``done``, for example ``read``."""
    if error.errno == errno.ENOSPC:
        return f"is on a file system that is full ({error.strerror}): make room there"
    if error.errno == errno.EDQUOT:
        return f"is beyond your quota ({error.strerror}): remove some of your files there"
    return f"cannot be {done} ({error.strerror})"


def _make_trusted(path: Path) -> int:
    """Create a directory if it is missing, and return its owner.

    Raises:
        QueueError: it cannot be created, or must not be trusted.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            path.mkdir(_SHARED_MODE)
            path.chmod(_SHARED_MODE)  # `mkdir` applies the umask.
        status = path.lstat()
    except OSError as error:
        raise QueueError(path, why_not_done(error, "used")) from error
    if not stat.S_ISDIR(status.st_mode):
        raise QueueError(path, "is a symbolic link or not a directory")
    is_sticky = bool(status.st_mode & stat.S_ISVTX)
    if status.st_mode & 0o022 and not is_sticky:
        raise QueueError(path, f"may be written by others without a sticky bit (chmod 1777 {path})")
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
