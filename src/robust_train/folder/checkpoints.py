"""Writes checkpoints and their manifests, and finds the newest whole checkpoint.

A manifest is a small file next to a checkpoint that names its job, step, size and checksum. The
attempt's process writes both, and the launcher reads the manifests to decide from which checkpoint
the job resumes. A checkpoint that is missing, or has another size or checksum than its manifest, is
not whole. A checkpoint without a manifest, which a full disk may have prevented, is never removed.
A job resumes from it if it is whole and its name has a later step.
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

# Matches absolute paths in a message.
_IN_TEXT = re.compile(r"/[^\s'\":;,]+")
# A disk with less free space counts as full.
_LEAST_BYTES = 1 << 20

SUFFIX = ".manifest.json"
SCHEMA = 1
_MOST = 1000  # manifests that are kept, for a trainer that never removes a checkpoint
_BLOCK_BYTES = 1 << 20
_END_BYTES = 1 << 16  # how much of a file's end `checksum_of` reads
_GONE = (FileNotFoundError, NotADirectoryError)

# The state of a checkpoint. "changed": changed since its manifest was written, in a format that
# does not show whether it is whole.
State = Literal["whole", "changed", "torn", "gone"]


@dataclass(frozen=True)
class Position:
    """The position of ``run.batches`` in the data."""

    batches: int = 0  # batches since the job began, 0 if `run.batches` is not used
    in_pass: int = 0  # batches of the current pass over the loader
    samples: int | None = None  # samples of the current pass, None if not counted
    size: int | None = None  # samples in the largest batch of the pass
    # The intended samples per batch: the loader's batch size, or the config's. 0 without either.
    asked: int = 0
    workers: int = 1  # data-loader workers that take turns to read a stream
    ranks: int = 1
    order: int | None = None  # a checksum of the state that shuffled the pass
    loader: Json = None  # the loader's state dict, None if it has no state dict


# The position before the first batch.
START = Position()

# Values of `Manifest.loss` for a checkpoint from which no attempt resumes.
USELESS = frozenset({"diverged", "damaged"})


@dataclass(frozen=True)
class Manifest:
    """The description of one checkpoint."""

    job: str  # identity of the job that saved it
    attempt: int  # number of the attempt that saved it
    step: int | None  # optimizer steps done, None if the trainer reported no step
    # Absolute. In the file, the path of a checkpoint next to its manifest is relative.
    path: Path
    time: float = 0.0  # when it was complete, seconds since the epoch
    bytes: int = 0  # total size of its files
    # Seconds for which saving delayed training, None if not measured.
    seconds: float | None = None
    # The loss at that step: `finite`, `proven` if it stayed finite after that, `diverged` even if
    # that was noticed later, or `unknown`. `damaged` means that a script could not read the file.
    loss: str = "unknown"
    position: Position = START
    checksum: int | None = None  # of `checksum_of`; None if an earlier version saved it
    content: int | None = None  # of `content_of`; None if the checkpoint was not read back

    @property
    def order(self) -> tuple[int, int, float]:
        """Sort key of a job's checkpoints, the newest last.

        A checkpoint of a later attempt is newer, however its trainer counts steps.
        """
        step = -1 if self.step is None else self.step
        return self.attempt, step, self.time


def record_checkpoint(folder: Path, new: Manifest) -> None:
    """Write the manifest of a complete checkpoint, with its time, size and checksum.

    The checkpoint itself is flushed to disk first.

    Args:
        folder: the run's folder of checkpoints. The checkpoint may be somewhere else.
        new: the manifest without these figures.

    Raises:
        OSError: the checkpoint does not exist, or the manifest cannot be written.
    """
    path = new.path.absolute()
    sync_all(path)
    # The time grows even if the clock was set back.
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
        # The trainer itself may have removed an older checkpoint. A trainer that keeps all
        # checkpoints would leave too many manifests.
        is_surplus = newer >= _MOST or not other.path.exists()
        if other.order < manifest.order and is_surplus:
            _file_of(folder, other.path).unlink(missing_ok=True)


def _write(folder: Path, manifest: Manifest) -> None:
    path = manifest.path
    written_path = str(path)
    if path.parent == folder.absolute():
        written_path = path.name
    content = {"schema": SCHEMA, **asdict(manifest), "path": written_path}
    write_json(_file_of(folder, path), content, durable=True)


def mark(folder: Path, job: str, loss_of: Callable[[Manifest], str]) -> None:
    """Update the manifests of ``job`` with the current knowledge of the loss at each checkpoint.

    Args:
        folder: the folder of checkpoints.
        job: the job's identity.
        loss_of: returns the new value of `Manifest.loss`.
    """
    for manifest in of_job(folder, job):
        loss = loss_of(manifest)
        if loss != manifest.loss:
            _write(folder, replace(manifest, loss=loss))


def spoil(folder: Path, job: str, good_step: int, since: float = math.inf) -> None:
    """Mark the checkpoints of diverged training, so that no attempt resumes from them.

    Proven checkpoints stay proven, and finite checkpoints before ``good_step`` become proven.

    Args:
        folder: the folder of checkpoints.
        job: the job's identity.
        good_step: the last step at which training was good. Later checkpoints are marked.
        since: when training diverged. Checkpoints without a step are marked from then on.
    """

    def loss_of(manifest: Manifest) -> str:
        if manifest.step is None:
            is_after = manifest.time >= since
            is_before = False
        else:
            is_after = manifest.step > good_step
            is_before = manifest.step < good_step
        if is_after and manifest.loss != "proven":
            return "diverged"
        if is_before and manifest.loss == "finite":
            return "proven"
        return manifest.loss

    mark(folder, job, loss_of)


def damage_in(path: Path, *, reads: bool) -> str:
    """Return a description of the damage in a checkpoint, empty if no damage is known.

    Args:
        path: the checkpoint, a file or a folder.
        reads: whether to read the files that contain checksums, and compare them.

    Raises:
        OSError: the checkpoint cannot be read now.
    """
    for file in _files_of(path):
        if _file_by_form(file) is False:
            return f"{file.name} is torn"
        if reads:
            damage = _damage_in_zip(file)
            if damage:
                return damage
    return ""


def _damage_in_zip(file: Path) -> str:
    """Return the damage in a zip file, whose parts are compared with their checksums."""
    try:
        if not _is_zip(file):
            return ""
        with zipfile.ZipFile(file) as archive:
            bad = archive.testzip()
    except MemoryError:
        raise
    except Exception as error:
        # A damaged header may cause nearly any exception, such as EINVAL for a bad offset.
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise
        return f"{file.name}: {first_line(error)}"
    return f"the checksum of {bad} is wrong" if bad else ""


def content_of(path: Path) -> int:
    """Return a checksum of all files that contain no checksums, such as safetensors files.

    Raises:
        OSError: the checkpoint cannot be read now.
    """
    checksum = 0
    for file in _files_of(path):
        if not _is_zip(file):
            with file.open("rb") as opened:
                while block := opened.read(_BLOCK_BYTES):
                    checksum = zlib.crc32(block, checksum)
    return checksum


def pass_over_damaged(folder: Path, job: str, path: Path, *, lacks_file: bool = False) -> bool:
    """Mark a checkpoint that its script could not read, so that no attempt resumes from it.

    Args:
        folder: the folder of checkpoints.
        job: the job's identity.
        path: the checkpoint.
        lacks_file: whether it is a folder that lacks a file. Otherwise a checkpoint that can be
            read here is not damaged.

    Returns:
        Whether the checkpoint was marked, because the job has another whole checkpoint.
    """

    def loss_of(manifest: Manifest) -> str:
        return "damaged" if manifest.path == path else manifest.loss

    with contextlib.suppress(OSError):
        if not lacks_file and is_readable(path):
            return False
        for manifest in of_job(folder, job):
            is_other = manifest.path != path and manifest.loss not in USELESS
            if is_other and state_of(manifest) == "whole":
                mark(folder, job, loss_of)
                return True
    return False


def is_readable(path: Path) -> bool:
    """Return whether a checkpoint is certainly whole, by its format and the checksums in it."""
    return bool(whole_by_form(path)) and not damage_in(path, reads=True)


def newest_checkpoint(folder: Path, job: str) -> Manifest | None:
    """Return the newest whole checkpoint of ``job``, None if it has no whole checkpoint.

    The whole checkpoint is read, because a library may load damaged bytes without an error.

    Raises:
        OSError: the folder, a manifest or a checkpoint cannot be read now.
    """
    changed: Manifest | None = None
    for manifest in reversed(of_job(folder, job)):
        if manifest.loss in USELESS:
            continue
        path = manifest.path
        state = state_of(manifest)
        damage = "torn" if state == "torn" else ""
        if state == "whole":
            # A checkpoint without a manifest has no position in the data, so it is not used if the
            # trainer counts batches.
            if manifest.position == START:
                unlisted = _find_unlisted(folder, manifest)
                if unlisted is not None:
                    return unlisted
            damage = damage_in(path, reads=True)
            content = manifest.content
            if not damage and content is not None and content != content_of(path):
                state = "changed"
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
    return _find_unlisted(folder, Manifest(job, 0, -1, folder / _OURS))


# A name of this package's own checkpoints.
_OURS = "step-0.pt"


def _find_unlisted(folder: Path, newest: Manifest) -> Manifest | None:
    """Return the newest whole checkpoint that has no manifest, or None.

    Its name differs from the name of ``newest`` only by greater numbers.

    Raises:
        OSError: the folder, a manifest or a checkpoint cannot be read now.
    """
    listed = read_manifests(folder)
    if any(manifest.loss == "diverged" for manifest in listed):
        return None  # training may have diverged before the checkpoint without a manifest
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
    """Return a name with ``#`` in place of its numbers, and the numbers."""
    numbers = [int(number) for number in re.findall("[0-9]+", name)]
    return re.sub(r"[0-9]+", "#", name), numbers


def is_read_only(path: Path) -> bool:
    """Return whether the disk of a path is mounted read-only."""
    with contextlib.suppress(OSError):
        return bool(os.statvfs(path).f_flag & os.ST_RDONLY)
    return False


def why_full(run_dir: Path, message: str, needed_bytes: int = 0) -> str:
    """Return which disk is full, empty if no disk is.

    The disks of paths in ``message`` are checked first, then whether the run folder's disk has
    space for another checkpoint.

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
        # Without this check the test below would take the last space from other programs. A disk
        # that cannot reserve space (NFS before 4.2) would even be written full each time.
        if disk.f_blocks and disk.f_bavail * disk.f_frsize < size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        # Reserving space also fails for a lack of inodes and for a quota.
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
    """Return the folder of the first path whose disk is full, None if no disk is full.

    The folder of a path that is itself a folder is that path.
    """
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
    """Remove old checkpoints of ``job`` that have a manifest.

    The newest ``keep`` whole checkpoints stay, and so does the last checkpoint that was written.
    The newest proven checkpoint stays as well, or the oldest finite checkpoint if no checkpoint is
    proven yet.
    """
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
                # The manifest is removed last, so that a checkpoint without a manifest, from which
                # a job may resume, was never half removed.
                _file_of(folder, manifest.path).unlink(missing_ok=True)
    except OSError as error:
        log.warning("surplus checkpoints cannot be removed: %s", error)


def of_job(folder: Path, job: str) -> list[Manifest]:
    """Return the manifests of ``job``, the newest checkpoint last.

    Raises:
        OSError: a manifest cannot be read now.
    """
    manifests = [manifest for manifest in read_manifests(folder) if manifest.job == job]
    return sorted(manifests, key=lambda manifest: manifest.order)


def read_manifests(folder: Path) -> list[Manifest]:
    """Return all manifests in a folder of checkpoints.

    Raises:
        OSError: a manifest cannot be read now.
    """
    try:
        names = os.listdir(folder)
    except _GONE:
        return []
    manifests = []
    for name in names:
        if name.endswith(SUFFIX) and not name.startswith("."):
            with contextlib.suppress(FileNotFoundError):
                manifest = _read(folder.absolute() / name)
                if manifest is not None:
                    manifests.append(manifest)
    return manifests


def state_of(manifest: Manifest) -> State:
    """Return the state of a checkpoint.

    Raises:
        OSError: the checkpoint cannot be read now.
    """
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
    except (ValueError, RecursionError):  # ValueError includes MalformedEventError
        log.warning("%s is not a manifest of a checkpoint and is skipped", file)
        return None
    return replace(manifest, path=file.parent / manifest.path)


def sync_all(path: Path) -> None:
    """Flush a file or folder, everything in it and its name to disk."""
    for item in (path, *path.rglob("*"), path.parent):
        sync(item)
    # A checkpoint outside of the run folder may have a parent that this user may not open.
    with contextlib.suppress(PermissionError):
        sync(path.parent.parent)


def size_of(path: Path) -> int:
    """Return the size of a file, or of all files in a folder, in bytes.

    Raises:
        OSError: the size cannot be read now.
    """
    return sum(file.stat().st_size for file in _files_of(path))


def checksum_of(path: Path) -> int:
    """Return a checksum of the end of each file, which costs the same for large and small files.

    The end of a ``torch.save`` file contains the checksums of all its parts.

    Raises:
        OSError: the checkpoint cannot be read now.
    """
    checksum = 0
    for file in _files_of(path):
        with file.open("rb") as opened:
            opened.seek(max(os.fstat(opened.fileno()).st_size - _END_BYTES, 0))
            checksum = zlib.crc32(opened.read(), checksum)
    return checksum


def _file_of(folder: Path, path: Path) -> Path:
    """Return the path of a checkpoint's manifest."""
    elsewhere = f"-{zlib.crc32(os.fsencode(path)):08x}"
    if path.parent == folder.absolute():
        elsewhere = ""
    return folder / f"{path.name}{elsewhere}{SUFFIX}"


# Suffixes of files that are still being written.
UNFINISHED = (".tmp", ".temp", ".part", ".partial", ".incomplete", "~")

_LARGEST_HEADER_BYTES = 100_000_000  # the limit of safetensors itself


def is_whole(path: Path) -> bool:
    """Return False for a checkpoint that is torn, empty, or cannot be read."""
    try:
        return whole_by_form(path) is not False
    except OSError:
        return False


def whole_by_form(path: Path) -> bool | None:
    """Return whether a file or folder is whole, None if its format does not show that.

    Zip files, which ``torch.save`` and ``numpy.savez`` write, have their directory at the end.
    Files of safetensors have their length at the beginning. In other formats, only an empty file is
    known to be torn. A folder is whole if all of its files are whole.

    Raises:
        OSError: the checkpoint cannot be read now.
    """
    if not path.is_dir():
        if path.stat().st_size == 0:
            return False
        return _file_by_form(path)
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
    except zipfile.BadZipFile:  # the end of the file is damaged
        return False


def _file_by_form(path: Path) -> bool | None:
    """Return whether a file is whole, None if its format does not show that."""
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


# The content of a checkpoint by name: state dicts, tensors and figures.
Content = dict[str, Any]


class CheckpointError(OSError):
    """A checkpoint cannot be written. The message names the file and the reason.

    Attributes:
        bytes: the size that the file would have, 0 if unknown.
    """

    bytes = 0


def save_checkpoint(content: Mapping[str, Any], path: str | Path) -> Path:
    """Save ``content`` as ``path``, completely or not at all, without a second copy on the GPU::

        save_checkpoint({"model": model, "optimizer": optimizer, "step": step}, "last.pt")

    Objects with a ``state_dict`` (modules, optimizers, schedulers, scalers) are saved as their
    state dict. ``torch.load(path, weights_only=True)`` reads the file. Storages are copied to the
    host one at a time while they are written, so the host needs room only for the largest storage.

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
    """Save ``content`` as ``path``, which never holds half a file, even after a power cut.

    Tensors on a GPU are copied to the host one at a time while they are written.

    Raises:
        CheckpointError: the file could not be written. No part of it stays on disk.
    """
    import torch  # imported here, because the launcher uses this module without torch

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
    """Return the size that a file with this content would have."""
    import torch

    size = _Size()
    torch.save(content, cast(IO[bytes], size))
    return size.bytes


class _Size:
    """A file object that only counts the bytes written to it."""

    def __init__(self) -> None:
        self.bytes = 0

    def write(self, data: memoryview) -> int:
        """Count these bytes."""
        written = len(data)
        self.bytes += written
        return written

    def flush(self) -> None:
        """Do nothing, because no bytes are kept."""


@contextlib.contextmanager
def system_errors() -> Iterator[None]:
    """Raise the system's error instead of the error with which torch's zip writer hides it."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise
