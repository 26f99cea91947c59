"""Checkpoints on the disk: written whole or not at all, each named by a manifest.

A manifest is a small file beside a checkpoint that names its job, step, size and checksum.
Manifests decide which checkpoint a job resumes from and which it may remove. A full disk may have
prevented a manifest. A checkpoint without a manifest is never removed, and a job resumes from it if
it is whole and its name has a later step. A manifest whose checkpoint is missing, or has another
size or checksum, does not name a whole checkpoint.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
import re
import shutil
import struct
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any, Literal, cast

from robust_train.files import replacing, sync, write_json
from robust_train.model.json import Json, from_json
from robust_train.readable import first_line

log = logging.getLogger("robust_train")

_IN_TEXT = re.compile(r"/[^\s'\":;,]+")
_LEAST_BYTES = 1 << 20

SUFFIX = ".manifest.json"
SCHEMA = 1
_MOST = 1000
_BLOCK_BYTES = 1 << 20
_END_BYTES = 1 << 16
_GONE = (FileNotFoundError, NotADirectoryError)

State = Literal["whole", "changed", "torn", "gone"]
"""State of a checkpoint. ``changed`` means changed since its manifest, in a form that hides its
content."""


@dataclass(frozen=True)
class Position:
    """Where ``run.batches`` was in the data."""

    batches: int = 0  # given since the job began, 0 if it is not used
    in_pass: int = 0  # batches of the present pass over the loader
    samples: int | None = None  # samples of the present pass, None if not counted
    size: int | None = None  # samples in the largest of them
    # samples that they were to have: the loader's batch size, else the config's; 0 if neither
    asked: int = 0
    workers: int = 1  # those that take turns to read a stream
    ranks: int = 1
    order: int | None = None  # a checksum of what shuffled the pass
    loader: Json = None  # the state dict of a loader that has one


START = Position()
"""Before all data."""


USELESS = frozenset({"diverged", "damaged"})
"""Values of `loss` of a checkpoint that no attempt resumes from."""


@dataclass(frozen=True)
class Manifest:
    """One checkpoint."""

    job: str  # identity of the job that saved it, see identity
    attempt: int  # number of the attempt that saved it
    step: int | None  # optimizer steps done, None if the trainer reported none
    # absolute; in the file relative to the manifest where it lies beside it
    path: Path
    time: float = 0.0  # when it was complete, seconds since the epoch
    bytes: int = 0  # the size of its files altogether
    # Seconds for which saving held up training, None if not measured.
    seconds: float | None = None
    # what the loss was then: `finite`, and `proven` once it stayed so; `diverged`, also if that
    # came out later; `unknown`. `damaged`: its script could not read it
    loss: str = "unknown"
    position: Position = START
    checksum: int | None = None  # see checksum_of; None of what an earlier version saved
    # see content_of; None if it was not read back
    content: int | None = None

    @property
    def order(self) -> tuple[int, int, float]:
        """Return what sorts a job's checkpoints, the newest last: those of a later attempt are
        later, whatever steps its trainer counts."""
        return self.attempt, -1 if self.step is None else self.step, self.time


def record_checkpoint(folder: Path, new: Manifest) -> None:
    """Write the manifest of a complete checkpoint, once the checkpoint itself is on the disk, with
    its time, size and checksum. It is in ``folder``, the run's folder of checkpoints, or anywhere
    else. Raises OSError if it is not there, or the manifest cannot be written."""
    path = new.path.absolute()
    sync_all(path)
    # the clock may have been set back
    latest = max((manifest.time for manifest in of_job(folder, new.job)), default=0.0)
    manifest = replace(
        new,
        path=path,
        time=round(max(time.time(), latest + 1e-6), 6),
        bytes=size_of(path),
        checksum=checksum_of(path),
    )
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder, manifest)
    sync(folder.parent)
    for newer, other in enumerate(reversed(of_job(folder, new.job))):
        # removed by a trainer's own rotation; or a trainer that keeps all of them
        if other.order < manifest.order and (newer >= _MOST or not other.path.exists()):
            _file_of(folder, other.path).unlink(missing_ok=True)


def _write(folder: Path, manifest: Manifest) -> None:
    path = manifest.path
    beside = path.parent == folder.absolute()
    where = path.name if beside else str(path)
    content = {"schema": SCHEMA, **asdict(manifest), "path": where}
    write_json(_file_of(folder, path), content, durable=True)


def mark(folder: Path, job: str, loss_of: Callable[[Manifest], str]) -> None:
    """Write down what is known by now of the loss at each checkpoint of ``job``."""
    for manifest in of_job(folder, job):
        loss = loss_of(manifest)
        if loss != manifest.loss:
            _write(folder, replace(manifest, loss=loss))


def spoil(folder: Path, job: str, good_step: int, since: float = math.inf) -> None:
    """Exclude checkpoints of diverged training from resumption. These are checkpoints after
    ``good_step`` or, if their step is unknown, written at ``since`` or later. Proven checkpoints
    stay proven, and finite checkpoints before that step become proven."""

    def loss_of(manifest: Manifest) -> str:
        is_after = manifest.time >= since if manifest.step is None else manifest.step > good_step
        if is_after and manifest.loss != "proven":
            return "diverged"
        is_followed = manifest.step is not None and manifest.step < good_step
        return "proven" if is_followed and manifest.loss == "finite" else manifest.loss

    mark(folder, job, loss_of)


def damage_in(path: Path, *, reads: bool) -> str:
    """Return what is wrong with a checkpoint, empty if nothing is known to be. With ``reads``, all
    that has checksums of its own is read and compared with them. Raises OSError."""
    for file in _files_of(path):
        if _file_by_form(file) is False:
            return f"{file.name} is torn"
        if reads and (bad := _bad_part(file)):
            return bad
    return ""


def _bad_part(file: Path) -> str:
    """Return what is wrong with a zip file whose parts are compared with their checksums."""
    try:
        if not _is_zip(file):
            return ""
        with zipfile.ZipFile(file) as archive:
            bad = archive.testzip()
    except MemoryError:
        raise
    except Exception as error:
        # a damaged header makes it raise nearly anything, EINVAL for a bad offset
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise
        return f"{file.name}: {first_line(error)}"
    return f"the checksum of {bad} is wrong" if bad else ""


def content_of(path: Path) -> int:
    """Return a checksum of all files that have none of their own, such as those of safetensors.
    Raises OSError."""
    checksum = 0
    for file in _files_of(path):
        if not _is_zip(file):
            with file.open("rb") as opened:
                while block := opened.read(_BLOCK_BYTES):
                    checksum = zlib.crc32(block, checksum)
    return checksum


def pass_over_damaged(folder: Path, job: str, path: Path, *, lacks_file: bool = False) -> bool:
    """Exclude a checkpoint that its script could not read from resumption, if an earlier checkpoint
    exists, and return whether it does. A checkpoint that can be read here is not damaged, unless it
    is a folder that ``lacks_file``."""
    with contextlib.suppress(OSError):
        if not lacks_file and is_readable(path):
            return False
        manifests = of_job(folder, job)
        others = (manifest for manifest in manifests if manifest.path != path)
        before = (manifest for manifest in others if manifest.loss not in USELESS)
        if any(state_of(manifest) == "whole" for manifest in before):
            mark(
                folder, job, lambda manifest: "damaged" if manifest.path == path else manifest.loss
            )
            return True
    return False


def is_readable(path: Path) -> bool:
    """Return whether a checkpoint shows that it is whole, by its form and its own checksums."""
    return bool(whole_by_form(path)) and not damage_in(path, reads=True)


def newest_checkpoint(folder: Path, job: str) -> Manifest | None:
    """Return the newest whole checkpoint of ``job``, None if it has none. All of it is read: a
    library may load wrong bytes without a word. Raises OSError if the folder, a manifest or a
    checkpoint cannot be read just now."""
    changed: Manifest | None = None
    for manifest in reversed(of_job(folder, job)):
        if manifest.loss in USELESS:
            continue
        path = manifest.path
        state = state_of(manifest)
        damage = "torn" if state == "torn" else ""
        if state == "whole":
            # where one without a manifest was in the data is not known
            counts_batches = manifest.position != START
            if not counts_batches and (newer := _unlisted(folder, manifest)):
                return newer
            # now all of it is read; without a checksum to compare with, nothing is read for one
            damage = damage_in(path, reads=True)
            content = manifest.content
            is_same = damage or content is None or content == content_of(path)
            state = "whole" if is_same else "changed"
        if damage:
            log.warning("checkpoint %s is damaged (%s) and is skipped", path, damage)
        elif state == "changed":
            changed = changed or manifest
        elif state == "whole":
            if changed is not None:
                text = "checkpoint %s has changed since it was reported and is skipped"
                log.warning(text, changed.path)
            return manifest
    if changed is not None:
        text = "checkpoint %s has changed since it was reported; using it"
        log.warning(text, changed.path)
        return changed
    return _unlisted(folder, Manifest(job, 0, -1, folder / _OURS))


_OURS = "step-0.pt"


def _unlisted(folder: Path, newest: Manifest) -> Manifest | None:
    """Return the newest whole checkpoint without a manifest whose name is like ``newest`` but with
    greater numbers, or None. Raises OSError as above."""
    listed = read_manifests(folder)
    if any(manifest.loss == "diverged" for manifest in listed):
        return None  # it may be spoiled as well
    listed_paths = {manifest.path for manifest in listed}
    shape, numbers = _shape(newest.path.name)
    unlisted = []
    for path in folder.absolute().iterdir() if folder.is_dir() else ():
        its_shape, its_numbers = _shape(path.name)
        if its_shape == shape and its_numbers > numbers and path not in listed_paths:
            unlisted.append((its_numbers, path))
    for its_numbers, path in sorted(unlisted, reverse=True):
        if is_readable(path):
            log.warning("checkpoint %s has no manifest, but is whole: using it", path)
            step = None if newest.step is None else max(its_numbers[-1], newest.step + 1)
            return replace(newest, step=step, path=path)
    return None


def _shape(name: str) -> tuple[str, list[int]]:
    """Return a name without its numbers, and these."""
    return re.sub(r"[0-9]+", "#", name), [int(number) for number in re.findall("[0-9]+", name)]


def is_read_only(path: Path) -> bool:
    """Return whether nothing can be written on the disk of a path."""
    with contextlib.suppress(OSError):
        return bool(os.statvfs(path).f_flag & os.ST_RDONLY)
    return False


def why_full(run_dir: Path, message: str, needed_bytes: int = 0) -> str:
    """Name the disk that is full: that of a path in a failure's ``message``, or the run folder's,
    which has to take another checkpoint. Returns an empty string if there is room.

    Args:
        run_dir: the run folder.
        message: the reason why a write failed.
        needed_bytes: the size of the failed write, 0 if unknown.
    """
    named = full_folder(paths_in(message))
    if named is not None:
        return f"no space is left in {named}"
    try:
        folder = run_dir / "checkpoints"
        size = max((manifest.bytes for manifest in read_manifests(folder)), default=0)
        size = max(needed_bytes or size, _LEAST_BYTES)
        place = folder if folder.is_dir() else run_dir
        disk = os.statvfs(place)
        # else others would have no space while it is tried, and where a disk cannot reserve any
        # (NFS before 4.2) what is left would be written full each time
        if disk.f_blocks and disk.f_bavail * disk.f_frsize < size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        # what counts space, inodes and a quota
        with tempfile.TemporaryFile(dir=place) as file:
            os.posix_fallocate(file.fileno(), 0, size)
            os.fsync(file.fileno())
    except OSError as error:
        return f"no checkpoint fits into {run_dir} ({error.strerror})"
    return ""


def paths_in(message: str) -> list[Path]:
    """Return the absolute paths in a message."""
    return [Path(text) for text in _IN_TEXT.findall(message)]


def full_folder(paths: Iterable[Path]) -> Path | None:
    """Return the folder of the first of these paths whose disk is full, itself if it is a folder;
    None without any."""
    for path in paths:
        with contextlib.suppress(OSError):
            folder = path if path.is_dir() else path.parent
            disk = os.statvfs(folder)
            is_counted = disk.f_blocks and not disk.f_flag & os.ST_RDONLY
            is_full = disk.f_bavail * disk.f_frsize < _LEAST_BYTES
            if is_counted and (is_full or (disk.f_files and not disk.f_favail)):
                return folder
    return None


def rotate(folder: Path, job: str, keep: int) -> None:
    """Remove all but the newest ``keep`` whole checkpoints of ``job`` that have a manifest. The
    last written checkpoint stays, as does every file without a manifest of this job. The newest
    checkpoint that is proven to be good stays too. Until a checkpoint is proven, the oldest that
    may be good stays."""
    try:
        manifests = [
            manifest
            for manifest in of_job(folder, job)
            if manifest.path.parent == folder.absolute() and manifest.path.name.startswith("step-")
        ]
        whole = [
            manifest
            for manifest in manifests
            if manifest.loss not in USELESS and state_of(manifest) == "whole"
        ]
        good = [manifest for manifest in whole if manifest.loss == "proven"][-1:]
        if not good:
            good = [manifest for manifest in whole if manifest.loss == "finite"][:1]
        kept = good + whole[-keep:] + sorted(manifests, key=lambda manifest: manifest.time)[-1:]
        for manifest in manifests:
            is_older = whole and manifest.order < whole[-1].order
            is_of_no_use = is_older or manifest.loss in USELESS
            if is_of_no_use and manifest not in kept:
                if manifest.path.is_dir():
                    shutil.rmtree(manifest.path)
                manifest.path.unlink(missing_ok=True)
                # after it: killed in between, it counts as not whole
                _file_of(folder, manifest.path).unlink(missing_ok=True)
    except OSError as error:
        log.warning("surplus checkpoints cannot be removed: %s", error)


def of_job(folder: Path, job: str) -> list[Manifest]:
    """Return the manifests of ``job``, the newest checkpoint last. Raises OSError as below."""
    manifests = (manifest for manifest in read_manifests(folder) if manifest.job == job)
    return sorted(manifests, key=lambda manifest: manifest.order)


def read_manifests(folder: Path) -> list[Manifest]:
    """Return all manifests in a folder of checkpoints. Raises OSError if a manifest cannot be read
    just now."""
    try:
        names = os.listdir(folder)
    except _GONE:
        return []
    manifests = []
    for name in names:
        if name.endswith(SUFFIX) and not name.startswith("."):
            with contextlib.suppress(FileNotFoundError):
                manifests.append(_read(folder.absolute() / name))
    return list(filter(None, manifests))


def state_of(manifest: Manifest) -> State:
    """Return the state of a checkpoint. Raises OSError if it cannot be read just now."""
    path = manifest.path
    try:
        is_as_large = size_of(path) == manifest.bytes
        if is_as_large and manifest.checksum in (None, checksum_of(path)):
            return "whole"
        is_whole = whole_by_form(path)
        # Only a zip file shows that a write in place has ended.
        if is_whole and is_as_large and not _is_zip(path):
            is_whole = None
    except _GONE:
        return "gone"
    if is_whole is None:
        return "changed"
    return "whole" if is_whole else "torn"


def _read(file: Path) -> Manifest | None:
    text = file.read_text(encoding="utf-8", errors="replace")
    try:
        manifest = from_json(Manifest, json.loads(text))
    except (ValueError, RecursionError):  # MalformedEventError among them
        log.warning("%s is not a manifest of a checkpoint and is skipped", file)
        return None
    return replace(manifest, path=file.parent / manifest.path)


def sync_all(path: Path) -> None:
    """Flush a file or folder, everything in it and its name to disk, so that a power cut cannot
    lose it."""
    for item in (path, *path.rglob("*"), path.parent):
        sync(item)
    with contextlib.suppress(PermissionError):  # somewhere else on the disk
        sync(path.parent.parent)


def size_of(path: Path) -> int:
    """Return the size of a file, or of all in a folder, in bytes. Raises OSError."""
    return sum(file.stat().st_size for file in _files_of(path))


def checksum_of(path: Path) -> int:
    """Return a checksum of the end of each file. A file of ``torch.save`` has the checksums of all
    its parts there, so the cost does not grow with the size. Raises OSError."""
    checksum = 0
    for file in _files_of(path):
        with file.open("rb") as opened:
            opened.seek(max(os.fstat(opened.fileno()).st_size - _END_BYTES, 0))
            checksum = zlib.crc32(opened.read(), checksum)
    return checksum


def _file_of(folder: Path, path: Path) -> Path:
    """Return the manifest of a checkpoint."""
    elsewhere = f"-{zlib.crc32(os.fsencode(path)):08x}"
    if path.parent == folder.absolute():
        elsewhere = ""
    return folder / f"{path.name}{elsewhere}{SUFFIX}"


UNFINISHED = (".tmp", ".temp", ".part", ".partial", ".incomplete", "~")
"""How names of files end that are still being written."""

_LARGEST_HEADER_BYTES = 100_000_000  # what safetensors itself accepts


def is_whole(path: Path) -> bool:
    """Return False for a checkpoint that is torn, empty, or cannot be read."""
    try:
        return whole_by_form(path) is not False
    except OSError:
        return False


def whole_by_form(path: Path) -> bool | None:
    """Return whether a file or folder is whole, None if its form does not show it.

    Zip files (what ``torch.save`` and ``numpy.savez`` write) have their directory at the end,
    safetensors their length at the beginning. Of other forms only an empty file is known to be
    torn. A folder is whole if everything in it is. Raises OSError: it cannot be read.
    """
    if not path.is_dir():
        return _file_by_form(path) if path.stat().st_size else False
    files = files_in(path)
    if not files or any(file.name.endswith(UNFINISHED) for file in files):
        return False
    answers = {_file_by_form(file) for file in files}
    if False in answers:
        return False
    return None if None in answers else True


def _files_of(path: Path) -> list[Path]:
    return sorted(files_in(path)) if path.is_dir() else [path]


def files_in(folder: Path) -> list[Path]:
    """Return all files in a folder and the folders below it."""
    return [Path(root) / name for root, _, names in os.walk(folder) for name in names]


def _is_zip(path: Path) -> bool:
    try:
        return zipfile.is_zipfile(path)
    except zipfile.BadZipFile:  # Its end is damaged.
        return False


def _file_by_form(path: Path) -> bool | None:
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        if start.startswith(b"PK\x03\x04"):
            return _is_zip(path)
        if path.suffix != ".safetensors":
            return None
        if len(start) < 8:
            return False
        (header_bytes,) = struct.unpack("<Q", start)
        if header_bytes > min(size - 8, _LARGEST_HEADER_BYTES):
            return False
        try:
            header = json.loads(file.read(header_bytes))
            ends = [v["data_offsets"][1] for k, v in header.items() if k != "__metadata__"]
        except (ValueError, TypeError, KeyError, IndexError, AttributeError):
            return False
    return bool(size == 8 + header_bytes + max(ends, default=0))


# What a checkpoint holds, by name: state dictionaries, tensors, figures
Content = dict[str, Any]


class CheckpointError(OSError):
    """A checkpoint cannot be written. The message names file and reason.

    Attributes:
        bytes: how large it would be, 0 if unknown.
    """

    bytes = 0


def save_checkpoint(content: Mapping[str, Any], path: str | Path) -> Path:
    """Save ``content`` as ``path``, whole or not at all, without a second copy on the GPU::

        save_checkpoint({"model": model, "optimizer": optimizer, "step": step}, "last.pt")

    Objects with a ``state_dict`` (modules, optimizers, schedulers, scalers) are saved as their
    state dict. ``torch.load(path, weights_only=True)`` reads the file. Storages are copied to the
    host one at a time as they are written, so the host needs room for the largest storage only.

    Args:
        content: the objects to save, by name.
        path: the file. Its folder is created.

    Raises:
        CheckpointError: the file could not be written. An earlier file at ``path`` is untouched.
    """
    states = {
        name: value.state_dict() if hasattr(value, "state_dict") else value
        for name, value in content.items()
    }
    return write_atomically(states, Path(path))


def write_atomically(content: Content, path: Path) -> Path:
    """Save such that ``path`` is always absent, the old file or the new file, even after a power
    cut.

    Tensors on a GPU are copied to the host one at a time while they are written. Raises
    CheckpointError if the write fails (no space, no permission, too large …). Then no part of it
    stays on disk.
    """
    import torch  # here: the launcher reads manifests

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, durable=True) as new, new.open("wb") as file, system_errors():
            torch.save(content, file)
    except OSError as error:
        failed = CheckpointError(f"cannot write {path}: {error.strerror or error}")
        failed.bytes = _bytes_written(content)
        raise failed from None
    return path


def _bytes_written(content: Content) -> int:
    """Return the size of a file with this content, which is written nowhere."""
    import torch

    size = _Size()
    torch.save(content, cast(IO[bytes], size))
    return size.bytes


class _Size:
    """A file that counts what is written into it."""

    def __init__(self) -> None:
        self.bytes = 0

    def write(self, data: memoryview) -> int:
        """Count these bytes."""
        written = len(data)
        self.bytes += written
        return written

    def flush(self) -> None:
        """Do nothing: nothing is kept."""


@contextlib.contextmanager
def system_errors() -> Iterator[None]:
    """Raise the system's error if torch's zip writer replaced it by its own."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise
