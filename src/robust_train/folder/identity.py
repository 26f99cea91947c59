"""Decides which job a run folder belongs to, and from which checkpoint the job resumes.

The launcher calls :func:`begin_job` at the start of each launch. ``job.json`` holds the job's
identity, which stays the same in all launches until the job has completed. A launch after that, or
with ``resume=false``, starts a new job and sets the content of ``checkpoints/`` aside. The
checkpoint is always the newest on the disk, regardless of what an earlier process reported.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeVar

from robust_train.files import read_object, set_aside, sync, write_json
from robust_train.folder.checkpoint_files import damage_in
from robust_train.folder.checkpoints import USELESS, Manifest, newest_checkpoint, read_manifests
from robust_train.folder.journal import attempts_in
from robust_train.folder.provenance import changed_sources
from robust_train.folder.state import read_summary
from robust_train.model.errors import (
    ConfigError,
    NoProgressError,
    find_limit_error,
    make_folder_error,
)
from robust_train.model.events import SCHEMA, from_json
from robust_train.readable import shorten

log = logging.getLogger("robust_train")

T = TypeVar("T")

# Pauses between attempts to read a disk that is unreachable.
PAUSES_SECONDS = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0)
_NEW_LEVELS = 3  # the levels of outputs/<date>/<time>
_ID_LENGTH = 8
_LONGEST_NAMES = 200


@dataclass(frozen=True)
class Identity:
    """The content of ``job.json``. Times are seconds since the epoch."""

    id: str
    started: float
    completed: float | None = None  # None while the job is unfinished
    # Whether the checkpoints of the folder's earlier job were set aside.
    cleared: bool = True
    # Launches in a row that started an attempt and saved no checkpoint beyond `reached`.
    launches: int = 0
    # The step of the newest checkpoint at the start of the last launch, or the time at which that
    # checkpoint was saved if its step is unknown. None without a checkpoint.
    reached: float | None = None


def shown_id(job: str) -> str:
    """Return the short id that people see of a job, the same in all its launches."""
    return job[:_ID_LENGTH]


@dataclass(frozen=True)
class Beginning:
    """The job of a launch, and its progress before the launch."""

    job: str  # the job's identity
    attempts: int  # the highest number of an attempt so far, 0 before the first attempt
    checkpoint: Path | None  # the checkpoint from which the launch resumes


def wait_until_readable(read: Callable[[], T], *, sleep: Callable[[float], None] = time.sleep) -> T:
    """Return the result of ``read``. If it raises OSError, try again for a minute.

    A network disk that is unreachable for a moment is not a reason to start the job over.

    Raises:
        ConfigError: the folder is still unreadable after a minute (see `make_folder_error`).
    """
    pauses = iter(PAUSES_SECONDS)
    while True:
        try:
            return read()
        except OSError as error:
            limit = find_limit_error(error)
            if limit is not None:
                raise limit from error
            path = error.filename or "the run folder"
            problem = f"{path}: cannot be read now ({error.strerror or error})"
            pause = next(pauses, None)
            if pause is None:
                problem += "; nothing was changed"
                # With a stale handle, or with another folder on another node, the file is intact.
                if error.errno != errno.ESTALE:
                    problem += "; if it stays unreadable, remove it"
                raise make_folder_error(problem, error) from error
        log.warning("%s; trying again in %g s", problem, pause)
        sleep(pause)


def refuse_other_version(run_dir: Path, *, resume: bool) -> None:
    """Refuse a folder that holds an unfinished job of another version of this package.

    Raises:
        ConfigError: the folder holds such a job, and ``resume`` is true.
    """
    schema = read_object(run_dir / "state.json").get("schema", SCHEMA)
    job = None if schema == SCHEMA or not resume else read_identity(run_dir)
    if job is not None and job.completed is None:
        raise ConfigError(
            f"{run_dir}: holds an unfinished job of another version of robust-train (state.json "
            f"has schema {schema}, this version {SCHEMA}); finish it with that version, or start "
            "over with resume=false, which sets its checkpoints aside in checkpoints/earlier-N"
        )


def begin_job(
    run_dir: Path,
    *,
    resume: bool,
    max_launches: int = 0,
    sleep: Callable[[float], None] = time.sleep,
) -> Beginning:
    """Decide which job a launch in ``run_dir`` runs, and write ``job.json``.

    Args:
        run_dir: the run folder.
        resume: whether to resume an unfinished job in the folder.
        max_launches: the maximum number of launches in a row without a new checkpoint, 0 for no
            limit.
        sleep: waits for an unreachable disk. An exception that it raises ends the wait.

    Raises:
        ConfigError: part of the folder stays unreadable, or a new job cannot be written. Resuming
            does not need to write. RunFolderUnavailableError is such an error.
        NoProgressError: the last ``max_launches`` launches saved no new checkpoint.
    """
    folder = run_dir / "checkpoints"
    journal = run_dir / "journal.jsonl"
    attempts = wait_until_readable(lambda: attempts_in(journal), sleep=sleep)
    job = wait_until_readable(lambda: read_identity(run_dir), sleep=sleep)
    if job is not None and job.completed is not None and resume:
        log.info("job %s of this run folder has completed: starting a new job", shown_id(job.id))
    if job is None or job.completed is not None or not resume:
        job = Identity(uuid.uuid4().hex, time.time(), cleared=False)
        _write(run_dir, job)
        for parent in run_dir.parents[:_NEW_LEVELS]:
            with contextlib.suppress(OSError):
                sync(parent)
    if not job.cleared:
        _set_aside(folder)
        job = replace(job, cleared=True)
        _write(run_dir, job)
    manifests = wait_until_readable(lambda: read_manifests(folder), sleep=sleep)
    _check_progress(run_dir, job, manifests, max_launches)
    most = max([attempts] + [manifest.attempt for manifest in manifests])
    return Beginning(job.id, most, resume_from(run_dir, job.id, sleep=sleep))


def _check_progress(
    run_dir: Path, job: Identity, all_manifests: Sequence[Manifest], max_launches: int
) -> None:
    """Check that the job makes progress, and reset the count of launches if it does.

    The count is also reset if the number of launches is not limited, or if code or config files
    have changed.

    Raises:
        NoProgressError: the last ``max_launches`` launches saved no new checkpoint.
    """
    manifests = [
        manifest
        for manifest in all_manifests
        if manifest.job == job.id and manifest.loss not in USELESS
    ]
    newest = max(manifests, key=lambda manifest: manifest.order, default=None)
    reached = None
    if newest is not None:
        reached = newest.time if newest.step is None else float(newest.step)
    if reached != job.reached or (job.launches and not max_launches):
        _change(run_dir, job.id, lambda identity: replace(identity, launches=0, reached=reached))
    elif 0 < max_launches <= job.launches:
        changed = changed_sources(run_dir)
        if changed:
            log.info(
                "the count of launches without a new checkpoint is reset, because files have "
                "changed: %s",
                shorten(", ".join(changed), _LONGEST_NAMES),
            )
            _change(run_dir, job.id, lambda identity: replace(identity, launches=0))
            return
        last = read_summary(run_dir)
        why = ""
        if last is not None and last.reason:
            why = f" (the last: {shorten(last.reason, 160)})"
        if newest is None:
            why += ", and no checkpoint was ever reported (for a script, use --checkpoint)"
        raise NoProgressError(
            f"launches in a row without a new checkpoint in {run_dir}: {job.launches}{why}; "
            "nothing was started: fix the cause, then robust-train resume "
            f"{shown_id(job.id)} max_launches=0, or repeat the command with max_launches=0"
        )


def resume_from(
    run_dir: Path,
    job: str,
    reported: Path | None = None,
    *,
    sleep: Callable[[float], None] = time.sleep,
) -> Path | None:
    """Return the checkpoint from which ``job`` resumes: the newest whole checkpoint on the disk.

    Args:
        run_dir: the run folder.
        job: the job's identity.
        reported: the last checkpoint that the trainer reported. It is returned instead if it has no
            manifest and is not damaged.
        sleep: waits for an unreachable disk.

    Raises:
        ConfigError: the folder stays unreadable.
    """
    folder = run_dir / "checkpoints"

    def read() -> Path | None:
        listed = {manifest.path for manifest in read_manifests(folder)}
        if reported is not None and is_usable(reported, listed):
            return reported
        newest = newest_checkpoint(folder, job)
        return None if newest is None else newest.path

    def is_usable(path: Path, listed: set[Path]) -> bool:
        is_unlisted = path.absolute() not in listed and path.exists()
        return is_unlisted and not damage_in(path, reads=True)

    return wait_until_readable(read, sleep=sleep)


def is_of_job(run_dir: Path, job: str) -> bool:
    """Return whether a folder belongs to ``job``, as far as is known.

    It may belong to another job if it was removed and created again.
    """
    # A folder that cannot be read now still counts as this job's folder.
    with contextlib.suppress(OSError, ConfigError):
        identity = read_identity(run_dir)
        return identity is None or identity.id == job
    return True


def complete_job(run_dir: Path, job: str) -> None:
    """Record that ``job`` has completed, so that the next launch in its folder starts a new job."""
    _change(run_dir, job, lambda identity: replace(identity, completed=time.time()))


def count_launch(run_dir: Path, job: str, by: int) -> None:
    """Add ``by`` to the number of consecutive launches of ``job`` that saved no new checkpoint."""

    def change(identity: Identity) -> Identity:
        return replace(identity, launches=max(identity.launches + by, 0))

    _change(run_dir, job, change)


def _change(run_dir: Path, job: str, change: Callable[[Identity], Identity]) -> None:
    """Change ``job.json`` if it is the file of ``job``. If that fails, log a warning."""
    try:
        identity = read_identity(run_dir)
        if identity is not None and identity.id == job:
            _write(run_dir, change(identity))
    except (OSError, ConfigError) as error:
        log.warning("%s", error)


def read_identity(run_dir: Path) -> Identity | None:
    """Return the content of ``job.json``, None if the file does not exist.

    Raises:
        OSError: the file cannot be read now.
        ConfigError: the file is damaged.
    """
    path = run_dir / "job.json"
    try:
        return from_json(Identity, json.loads(path.read_text(encoding="utf-8")))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError:  # MalformedEventError among them
        raise ConfigError(
            f"{path}: is damaged; remove it to start over, which sets the old checkpoints aside"
        ) from None


def _write(run_dir: Path, identity: Identity) -> None:
    path = run_dir / "job.json"
    try:
        write_json(path, asdict(identity), durable=True)
    except OSError as error:
        problem = f"cannot write {path}: {error.strerror or error}"
        way_out = "; choose another run folder (hydra.run.dir=…, --run-dir)"
        raise make_folder_error(problem + way_out, error) from error


def _set_aside(folder: Path) -> None:
    """Move the checkpoints of an earlier job to a subfolder, where they are kept but not used."""
    try:
        aside = set_aside(folder)
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        why = f"the checkpoints of an earlier job cannot be set aside ({error.strerror})"
        raise make_folder_error(f"{folder}: {why}; move it", error) from error
    if aside is not None:
        log.info("%s now holds the checkpoints of an earlier job in this run folder", aside)
