"""The job that a run folder belongs to, and the checkpoint from which that job resumes: the disk
decides.

``job.json`` holds the identity of the job. It stays the same through all launches until the job has
completed. A launch after that, or with ``resume=false``, starts a new job and sets the content of
``checkpoints/`` aside.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeVar

from robust_train.files import read_object, set_aside, sync, write_json
from robust_train.folder.checkpoints import (
    USELESS,
    Manifest,
    damage_in,
    newest_checkpoint,
    read_manifests,
)
from robust_train.folder.journal import attempts_in
from robust_train.folder.provenance import changed_sources
from robust_train.folder.state import read_summary
from robust_train.model.errors import ConfigError, NoProgressError, limit_reached, unusable_folder
from robust_train.model.events import SCHEMA, from_json
from robust_train.readable import shorten

log = logging.getLogger("robust_train")

T = TypeVar("T")

PAUSES_SECONDS = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0)
_NEW_LEVELS = 3  # the levels of outputs/<date>/<time>
_ID_LENGTH = 8
_LONGEST_NAMES = 200


@dataclass(frozen=True)
class Identity:
    """The content of ``job.json``: the job's id, when it began and completed (seconds since the
    epoch), and whether what lay in ``checkpoints/`` before it is out of its way."""

    id: str
    started: float
    completed: float | None = None
    cleared: bool = True
    # Launches in a row that started an attempt and saved no checkpoint beyond `reached`.
    launches: int = 0
    # step of the newest checkpoint when the last launch began, or time of one without a step
    reached: float | None = None


def shown_id(job: str) -> str:
    """Return the id that people see of the job with this identity, the same in all its launches."""
    return job[:_ID_LENGTH]


@dataclass(frozen=True)
class Beginning:
    """Where a launch begins: the job's identity, the highest number of an attempt so far (0 without
    any) and the checkpoint to resume from."""

    job: str
    attempts: int
    checkpoint: Path | None


def wait_until_readable(read: Callable[[], T], *, sleep: Callable[[float], None] = time.sleep) -> T:
    """Return the result of ``read``. If it raises OSError, try again for a minute, then raise the
    error of `unusable_folder`: a network disk that is unreachable for a moment is not a reason to
    start over."""
    pauses = iter(PAUSES_SECONDS)
    while True:
        try:
            return read()
        except OSError as error:
            limit = limit_reached(error)
            if limit is not None:
                raise limit from error
            what = error.filename or "the run folder"
            problem = f"{what}: cannot be read now ({error.strerror or error})"
            pause = next(pauses, None)
            if pause is None:
                problem += "; nothing was changed, and what cannot be read may be removed"
                raise unusable_folder(problem, error) from error
        log.warning("%s; trying again in %g s", problem, pause)
        sleep(pause)


def refuse_other_version(run_dir: Path, *, resume: bool) -> None:
    """Raise ConfigError if the folder holds an unfinished job of another version's."""
    schema = read_object(run_dir / "state.json").get("schema", SCHEMA)
    job = None if schema == SCHEMA or not resume else read_identity(run_dir)
    if job is not None and job.completed is None:
        raise ConfigError(
            f"{run_dir}: holds an unfinished job of another version of robust-train (state.json "
            f"has schema {schema}, this version {SCHEMA}); finish it with that version, or begin "
            "again with resume=false, which sets its checkpoints aside in checkpoints/earlier-N"
        )


def begin_job(
    run_dir: Path,
    *,
    resume: bool,
    max_launches: int = 0,
    sleep: Callable[[float], None] = time.sleep,
) -> Beginning:
    """Find out where a launch in ``run_dir`` starts, and write ``job.json``. With ``resume``, it
    continues an unfinished job in the folder. An exception of ``sleep`` ends a wait for a disk.

    Raises:
        ConfigError: part of the folder stays unreadable, or a new job cannot be written.
            RunFolderUnavailableError is among them. Resuming does not need to write.
        NoProgressError: the last ``max_launches`` launches saved no new checkpoint. Never raised if
            it is 0.
    """
    folder = run_dir / "checkpoints"
    journal = run_dir / "journal.jsonl"
    attempts = wait_until_readable(lambda: attempts_in(journal), sleep=sleep)
    job = wait_until_readable(lambda: read_identity(run_dir), sleep=sleep)
    if job is not None and job.completed is not None and resume:
        log.info("job %s of this run folder has completed: this is a new one", shown_id(job.id))
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
    """Restart the count of launches after a new checkpoint, or if their number is not limited."""
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
                "launches without a new checkpoint are counted anew, for files have changed: %s",
                shorten(", ".join(changed), _LONGEST_NAMES),
            )
            _change(run_dir, job.id, lambda identity: replace(identity, launches=0))
            return
        last = read_summary(run_dir)
        why = ""
        if last is not None and last.reason:
            why = f" (the last: {shorten(last.reason, 160)})"
        if newest is None:
            why += ", and none was ever reported (a script's: --checkpoint)"
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
    """Return the newest whole checkpoint of ``job`` on the disk, or the last checkpoint that its
    trainer ``reported`` if that has no manifest.

    Raises:
        ConfigError: as in `wait_until_readable`.
    """
    folder = run_dir / "checkpoints"

    def read() -> Path | None:
        listed = {manifest.path for manifest in read_manifests(folder)}
        if (
            reported is not None
            and reported.absolute() not in listed
            and reported.exists()
            and not damage_in(reported, reads=True)
        ):
            return reported
        newest = newest_checkpoint(folder, job)
        return None if newest is None else newest.path

    return wait_until_readable(read, sleep=sleep)


def is_of_job(run_dir: Path, job: str) -> bool:
    """Return False if a folder is known to belong to another job than ``job``, for example because
    it was removed and created again."""
    # it cannot be read just now
    with contextlib.suppress(OSError, ConfigError):
        identity = read_identity(run_dir)
        return identity is None or identity.id == job
    return True


def complete_job(run_dir: Path, job: str) -> None:
    """Record that ``job`` has completed: the next launch in its folder starts a new job."""
    _change(run_dir, job, lambda identity: replace(identity, completed=time.time()))


def count_launch(run_dir: Path, job: str, by: int) -> None:
    """Count a launch of ``job`` that starts its first attempt, or uncount it with -1."""
    _change(
        run_dir, job, lambda identity: replace(identity, launches=max(identity.launches + by, 0))
    )


def _change(run_dir: Path, job: str, change: Callable[[Identity], Identity]) -> None:
    try:
        identity = read_identity(run_dir)
        if identity is not None and identity.id == job:
            _write(run_dir, change(identity))
    except (OSError, ConfigError) as error:
        log.warning("%s", error)


def read_identity(run_dir: Path) -> Identity | None:
    """Return the content of ``job.json``, None if there is none. Raises OSError if it cannot be
    read just now, ConfigError if it is damaged."""
    path = run_dir / "job.json"
    try:
        return from_json(Identity, json.loads(path.read_text(encoding="utf-8")))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError:  # MalformedEventError among them
        raise ConfigError(
            f"{path}: is damaged; remove it to start over, with what is in checkpoints set aside"
        ) from None


def _write(run_dir: Path, identity: Identity) -> None:
    path = run_dir / "job.json"
    try:
        write_json(path, asdict(identity), durable=True)
    except OSError as error:
        problem = f"cannot write {path}: {error.strerror or error}"
        way_out = "; choose another run folder (hydra.run.dir=…, --run-dir)"
        raise unusable_folder(problem + way_out, error) from error


def _set_aside(folder: Path) -> None:
    """Move the files of another job aside, where they are neither resumed from nor removed."""
    try:
        aside = set_aside(folder)
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        why = f"what another job has left cannot be set aside ({error.strerror})"
        raise unusable_folder(f"{folder}: {why}; move it", error) from error
    if aside is not None:
        text = "%s holds what an earlier job of this run folder has left in checkpoints"
        log.info(text, aside)
