"""Which job a run folder belongs to, and where that job goes on: the disk decides.

``job.json`` holds the identity of the job. It stays the same through all launches until the job has
completed; a launch after that, or with ``resume=false``, begins a new job, and what lies in
``checkpoints/`` is set aside.
"""

from __future__ import annotations

import itertools
import json
import logging
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from robust_train.errors import ConfigError
from robust_train.files import replacing
from robust_train.runfolder.journal import Earlier, read_earlier
from robust_train.runfolder.manifests import (
    newest_checkpoint,
    read_manifests,
    record_checkpoint,
)

log = logging.getLogger("robust_train")

T = TypeVar("T")

PAUSES_SECONDS = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0)


@dataclass(frozen=True)
class Identity:
    """The content of ``job.json``.

    Attributes:
        id: of the job, in all of its launches.
        started: its first launch, seconds since the epoch.
        completed: when it completed, None before.
        cleared: what lay in ``checkpoints/`` before the job is out of its way.
    """

    id: str
    started: float
    completed: float | None = None
    cleared: bool = True


@dataclass(frozen=True)
class Beginning:
    """Where a launch begins.

    Attributes:
        job: the job's identity.
        attempts: the highest number of an attempt so far, 0 without any.
        found: micro-batches that probes have found, by what memory depends on.
        checkpoint: to resume from, None for a fresh start.
    """

    job: str
    attempts: int = 0
    found: Mapping[str, int] = field(default_factory=dict)
    checkpoint: Path | None = None


def wait_until_readable(
    read: Callable[[], T],
    *,
    sleep: Callable[[float], None] = time.sleep,
    pauses_seconds: tuple[float, ...] = PAUSES_SECONDS,
) -> T:
    """Return what ``read`` returns; where it raises OSError, wait and try again.

    A network disk that is away for a moment is no reason to begin anew.

    Raises:
        ConfigError: it still cannot be read after all pauses.
    """
    for pause in pauses_seconds:
        try:
            return read()
        except OSError as error:
            log.warning("%s; trying again in %g s", _problem(error), pause)
            sleep(pause)
    try:
        return read()
    except OSError as error:
        raise ConfigError(
            f"{_problem(error)}; nothing was changed: make it readable and repeat the command, or "
            "remove it to begin without it"
        ) from error


def _problem(error: OSError) -> str:
    return f"{error.filename or 'the run folder'}: cannot be read now ({error.strerror or error})"


def begin_job(run_dir: Path, *, resume: bool) -> Beginning:
    """Find out where a launch in ``run_dir`` begins, and write ``job.json``.

    Args:
        run_dir: the run folder, which no other launch uses meanwhile.
        resume: go on with the unfinished job of the folder, where there is one.

    Raises:
        ConfigError: something of the folder cannot be read or written, also after a while.
    """
    earlier = wait_until_readable(lambda: read_earlier(run_dir / "journal.jsonl"))
    before = wait_until_readable(lambda: read_identity(run_dir))
    if before is None or before.completed is not None or not resume:
        # older versions kept no identity: there the journal names the checkpoint, once
        adopted = earlier.checkpoint if before is None and resume else None
        before = _new_job(run_dir, earlier, adopted)
    if not before.cleared:
        _set_aside(run_dir / "checkpoints")
        _write(run_dir, before := replace(before, cleared=True))
    checkpoint = resume_from(run_dir, before.id)
    numbers = [manifest.attempt for manifest in read_manifests(run_dir / "checkpoints")]
    return Beginning(before.id, max(earlier.attempts, *numbers, 0), earlier.found, checkpoint)


def resume_from(
    run_dir: Path,
    job: str,
    reported: Path | None = None,
    *,
    sleep: Callable[[float], None] = time.sleep,
) -> Path | None:
    """Return the newest whole checkpoint of ``job`` on the disk.

    Args:
        run_dir: the run folder.
        job: its identity.
        reported: what a trainer reported last; it counts where its manifest could not be written.
        sleep: waits so many seconds.

    Raises:
        ConfigError: something cannot be read, also after a while.
    """
    folder = run_dir / "checkpoints"

    def read() -> Path | None:
        known = {manifest.path for manifest in read_manifests(folder)}
        if reported is not None and reported.absolute() not in known and reported.exists():
            return reported
        newest = newest_checkpoint(folder, job)
        return None if newest is None else newest.path

    return wait_until_readable(read, sleep=sleep)


def complete_job(run_dir: Path) -> None:
    """Write that the job has completed: the next launch in its folder begins a new one."""
    try:
        identity = read_identity(run_dir)
        if identity is not None:
            _write(run_dir, replace(identity, completed=time.time()))
    except (OSError, ConfigError) as error:
        log.warning("%s", error)


def read_identity(run_dir: Path) -> Identity | None:
    """Return the content of ``job.json``, None where there is none.

    Raises:
        OSError: it cannot be read just now.
        ConfigError: it is damaged.
    """
    path = run_dir / "job.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return Identity(**{key: content[key] for key in asdict(Identity("", 0.0))})
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, TypeError, KeyError):
        raise ConfigError(
            f"{path}: is damaged; remove it to go on from the journal's last checkpoint"
        ) from None


def _new_job(run_dir: Path, earlier: Earlier, adopted: Path | None) -> Identity:
    identity = Identity(uuid.uuid4().hex, time.time(), cleared=adopted is not None)
    _write(run_dir, identity)
    if adopted is not None:
        record_checkpoint(
            run_dir / "checkpoints",
            adopted,
            job=identity.id,
            attempt=earlier.attempts,
            step=None,
            seconds=None,
        )
    return identity


def _write(run_dir: Path, identity: Identity) -> None:
    path = run_dir / "job.json"
    try:
        with replacing(path, durable=True) as temporary:
            temporary.write_text(json.dumps(asdict(identity)) + "\n")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error


def _set_aside(folder: Path) -> None:
    """Move what another job has left out of the way, where it is neither resumed nor removed."""
    try:
        left = [path for path in folder.iterdir() if not path.name.startswith("earlier-")]
        if not left:
            return
        names = (folder / f"earlier-{number}" for number in itertools.count(1))
        aside = next(path for path in names if not path.exists())
        aside.mkdir()
        for path in left:
            path.rename(aside / path.name)
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise ConfigError(
            f"{folder}: what another job has left cannot be set aside ({error.strerror}); move it"
        ) from error
    log.info("%s holds what an earlier job of this run folder has left in checkpoints", aside)
