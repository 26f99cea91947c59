"""Which micro-batches fit, and which do not, as earlier jobs of this user found.

One small JSON file for each combination of what memory depends on, in the user's cache directory.
If it cannot be used, the job goes on without: only a guess is lost.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.metadata
import json
import logging
import os
import resource
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from robust_train.files import from_json, parse_json, read_small, write_json
from robust_train.gpu.footprint import footprint, user_cache
from robust_train.values import GIB, GpuInfo, Pace

log = logging.getLogger("robust_train")

SCHEMA = 1
VALID_SECONDS = 30 * 86400
"""How long anything counts: trainers' own code changes, and is no part of the key."""

_MOST_BYTES = 1 << 16
_SAME_ROOM = 0.05


@dataclass(frozen=True)
class Fact:
    """One size, and how it went."""

    batch_size: int  # micro-batch, samples
    when: float  # seconds since the epoch
    room_bytes: int | None = None  # free on the GPU when the attempt began; None for the CPU
    peak_bytes: int | None = None  # used at most; None where memory ran out
    predicted: bool = False  # concluded from probes of smaller sizes, not tried


@dataclass(frozen=True)
class Known:
    """The largest micro-batch that completed training steps, the smallest that did not fit, and the
    fastest job for each number of ranks."""

    fitted: Fact | None = None
    too_large: Fact | None = None
    fastest: tuple[Pace, ...] = ()

    def at(self, now: float, room_bytes: int | None) -> Known:
        """Return what of it counts now, with so much room: what is full now holds less."""
        fitted, too_large = self.fitted, self.too_large
        if fitted is not None and not (_is_fresh(fitted, now) and _has(room_bytes, fitted)):
            fitted = None
        if too_large is not None and not (
            _is_fresh(too_large, now) and _had(too_large, room_bytes)
        ):
            too_large = None
        return Known(fitted, too_large, tuple(one for one in self.fastest if _is_fresh(one, now)))

    def fastest_with(self, ranks: int) -> Pace | None:
        """Return the fastest job with so many ranks."""
        return next((one for one in self.fastest if one.ranks == ranks), None)

    def learn_pace(self, pace: Pace) -> Known:
        """Add how fast a job was."""
        before = self.fastest_with(pace.ranks)
        if before is not None and before.samples_per_second >= pace.samples_per_second:
            return self
        others = (one for one in self.fastest if one is not before)
        return replace(self, fastest=(*others, pace))

    def learn(self, fitted: Fact | None, too_large: Fact | None) -> Known:
        """Add what an attempt taught; where facts contradict each other the newer counts."""
        largest, smallest = self.fitted, self.too_large
        if fitted is not None:
            if smallest is not None and smallest.batch_size <= fitted.batch_size:
                smallest = None
            if largest is None or largest.batch_size <= fitted.batch_size:
                largest = fitted
        if too_large is not None:
            if largest is not None and largest.batch_size >= too_large.batch_size:
                largest = fitted
            if smallest is None or smallest.batch_size >= too_large.batch_size:
                smallest = too_large
        return replace(self, fitted=largest, too_large=smallest)


def _is_fresh(known: Fact | Pace, now: float) -> bool:
    """Return whether it still counts; a clock that was wrong must not make it last for ever."""
    return now - VALID_SECONDS <= known.when <= now + 86400


def _has(room: int | None, fact: Fact) -> bool:
    if room is None or fact.room_bytes is None or room >= fact.room_bytes * (1 - _SAME_ROOM):
        return True
    return fact.peak_bytes is not None and room >= footprint(fact.peak_bytes)


def _had(fact: Fact, room: int | None) -> bool:
    return room is None or fact.room_bytes is None or room <= fact.room_bytes * (1 + _SAME_ROOM)


def memory_key(settings: object, trainer: str, gpu: GpuInfo | None, host_bytes: int) -> str:
    """Return the name of what memory depends on: model, data, precision, device, torch.

    Args:
        settings: of :func:`robust_train.config.batch.memory_settings`.
        trainer: its dotted path.
        gpu: the device, None for the CPU.
        host_bytes: the host's memory, for the CPU.
    """
    if gpu is None:
        kinds = (resource.RLIMIT_DATA, resource.RLIMIT_AS)
        # the kernel's own share of it differs a little from boot to boot
        device = ["cpu", round(host_bytes / GIB), *(resource.getrlimit(kind)[0] for kind in kinds)]
    else:
        device = [gpu.name, gpu.total_bytes]
    versions = {name: _version(name) for name in ("torch", "robust-train")}
    whole = {"config": settings, "trainer": trainer, "device": device, "versions": versions}
    text = json.dumps(whole, sort_keys=True, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def cache_directory(environ: Mapping[str, str]) -> Path | None:
    """Return ``$XDG_CACHE_HOME/robust-train/known-batches``; None without a home."""
    cache = user_cache(environ)
    return None if cache is None else cache / "known-batches"


class KnownBatches:
    """The files of :func:`cache_directory`, None for nowhere. Nothing here raises."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def read(self, key: str) -> Known:
        """Return what is known; nothing without a readable file of this user's."""
        if self._folder is None:
            return Known()
        path = self._folder / f"{key}.json"
        try:
            data, owner = read_small(path, _MOST_BYTES)
            content = parse_json(data)
            if owner == os.geteuid() and content["schema"] == SCHEMA:
                return from_json(Known, content)
            log.debug("%s: of user %d, or of another version, ignored", path, owner)
        except FileNotFoundError:
            pass
        except (OSError, ValueError, TypeError, KeyError) as error:
            log.debug("%s: %s, ignored", path, error)
        return Known()

    def write(self, key: str, known: Known, about: Mapping[str, str]) -> None:
        """Write a file, whole or not at all; ``about`` is for people who read it."""
        if self._folder is None:
            return
        content = {"schema": SCHEMA, **about, **asdict(known)}
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self._folder.stat().st_uid != os.geteuid():
                raise PermissionError(errno.EPERM, "another user's")
            write_json(self._folder / f"{key}.json", content, indent=2)
        except OSError as error:
            log.debug("%s: %s, nothing is remembered", self._folder, error)
