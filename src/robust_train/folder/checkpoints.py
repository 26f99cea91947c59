"""Records checkpoints in manifests, and finds the newest whole checkpoint of a job.

A manifest is a small file with a checkpoint's job, step, size and checksum. The attempt's process
writes checkpoints and manifests. The launcher reads the manifests to decide from which checkpoint
the job resumes. A checkpoint is not whole if it is missing, or if its size or checksum differs from
its manifest.

If the disk was full, a checkpoint may lack its manifest. Such a checkpoint is never removed, and a
job resumes from it if it is whole and its name has a later step.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import shutil
import time
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from robust_train.files import sync, write_json
from robust_train.folder.checkpoint_files import (
    checksum_of,
    content_of,
    damage_in,
    is_readable,
    is_zip,
    size_of,
    sync_all,
    whole_by_form,
)
from robust_train.model.json import Json, from_json

log = logging.getLogger("robust_train")

SUFFIX = ".manifest.json"
SCHEMA = 1
# The most manifests that are kept if a trainer never removes a checkpoint.
_MOST_MANIFESTS = 1000
_GONE = (FileNotFoundError, NotADirectoryError)

State = Literal["whole", "changed", "torn", "gone"]
"""The state of a checkpoint. ``changed``: it has changed since its manifest was written, and its
format does not show whether it is whole. ``torn``: it is incomplete. ``gone``: it does not exist.
"""


@dataclass(frozen=True)
class Position:
    """The position of ``run.batches`` in the data."""

    batches: int = 0  # batches since the job began, 0 if `run.batches` is not used
    in_pass: int = 0  # batches of the current pass over the loader
    samples: int | None = None  # samples of the current pass, None if not counted
    size: int | None = None  # samples in the largest batch of the pass
    # The intended samples per batch: the batch size of the loader or of the config, 0 if unknown.
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
    # The loss at that step: `finite`, `proven` if it stayed finite afterwards, `diverged` (also if
    # that was noticed later), or `unknown`. `damaged` means that a script could not read the file.
    loss: str = "unknown"
    position: Position = START
    checksum: int | None = None  # of `checksum_of`; None if an earlier version saved it
    content: int | None = None  # of `content_of`; None if the checkpoint was not read back

    @property
    def order(self) -> tuple[int, int, float]:
        """The sort key of a job's checkpoints, the newest last.

        A checkpoint of a later attempt is newer, whatever its step.
        """
        step = -1 if self.step is None else self.step
        return self.attempt, step, self.time


def record_checkpoint(folder: Path, new: Manifest) -> None:
    """Write the manifest of a complete checkpoint, with its time, size and checksum.

    The checkpoint itself is flushed to disk first.

    Args:
        folder: the run's folder of checkpoints. The checkpoint may be somewhere else.
        new: the manifest, still without these three values.

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
        is_surplus = newer >= _MOST_MANIFESTS or not other.path.exists()
        if other.order < manifest.order and is_surplus:
            _file_of(folder, other.path).unlink(missing_ok=True)


def _write(folder: Path, manifest: Manifest) -> None:
    """Write a manifest into its file. A checkpoint in the same folder gets a relative path."""
    path = manifest.path
    written_path = str(path)
    if path.parent == folder.absolute():
        written_path = path.name
    content = {"schema": SCHEMA, **asdict(manifest), "path": written_path}
    write_json(_file_of(folder, path), content, durable=True)


def mark(folder: Path, job: str, loss_of: Callable[[Manifest], str]) -> None:
    """Update :attr:`Manifest.loss` in the manifests of ``job``.

    Args:
        folder: the folder of checkpoints.
        job: the job's identity.
        loss_of: returns the new value for a manifest.
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
        since: when training diverged. Later checkpoints without a step are marked as well.
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


def pass_over_damaged(folder: Path, job: str, path: Path, *, lacks_file: bool = False) -> bool:
    """Mark a checkpoint that its script could not read, so that no attempt resumes from it.

    Args:
        folder: the folder of checkpoints.
        job: the job's identity.
        path: the checkpoint.
        lacks_file: whether the checkpoint is a folder that lacks a file. Otherwise a checkpoint
            that can be read here does not count as damaged.

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


def newest_checkpoint(folder: Path, job: str) -> Manifest | None:
    """Return the checkpoint from which ``job`` resumes, or None to start from the beginning.

    That is the newest whole checkpoint or, if no checkpoint is whole, the newest changed
    checkpoint. The file is read in full, because a library may load damaged bytes without an error.

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
            if not damage and _has_other_content(manifest):
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
    return _find_unlisted(folder, Manifest(job, 0, -1, folder / _OWN_NAME))


def _has_other_content(manifest: Manifest) -> bool:
    """Return whether a readable checkpoint differs from the content that was read back."""
    return manifest.content is not None and manifest.content != content_of(manifest.path)


# This package's own checkpoints have names of this form.
_OWN_NAME = "step-0.pt"


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
            is_useless = is_older or manifest.loss in USELESS
            if is_useless and manifest not in kept:
                if manifest.path.is_dir():
                    shutil.rmtree(manifest.path)
                manifest.path.unlink(missing_ok=True)
                # A job may resume from a checkpoint without a manifest. So the manifest is removed
                # last, because until then the checkpoint may be only half removed.
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
        # Only the form of a zip file shows that a write in place has ended.
        if is_whole and is_as_large and not is_zip(path):
            is_whole = None
    except _GONE:
        return "gone"
    if is_whole is None:
        return "changed"
    return "whole" if is_whole else "torn"


def _read(file: Path) -> Manifest | None:
    """Return the manifest in a file. If the file is not a manifest, warn and return None."""
    text = file.read_text(encoding="utf-8", errors="replace")
    try:
        manifest = from_json(Manifest, json.loads(text))
    except (ValueError, RecursionError):  # ValueError includes MalformedEventError
        log.warning("%s is not a manifest of a checkpoint and is skipped", file)
        return None
    return replace(manifest, path=file.parent / manifest.path)


def _file_of(folder: Path, path: Path) -> Path:
    """Return the path of a checkpoint's manifest."""
    if path.parent == folder.absolute():
        return folder / f"{path.name}{SUFFIX}"
    # Checkpoints in other folders may have the same name.
    digest = zlib.crc32(os.fsencode(path))
    return folder / f"{path.name}-{digest:08x}{SUFFIX}"
