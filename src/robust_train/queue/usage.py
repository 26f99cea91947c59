"""GPU time by user: one small file of each user in the queue directory, GPU seconds by the hour.

A file counts for its owner, so nobody writes for another. Hours count from boot; a week of them is
kept. A job that accepts n jobs per GPU is charged 1/n of it, so that all users together are never
charged more than there is.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import re
import secrets
from collections.abc import Iterable, Mapping

from robust_train.queue.queue_dir import QueueDir
from robust_train.queue.records import JobRecord, sealed, unsealed

HOUR = 3600.0
WEEK = 7 * 24
_DAY, _HALF_LIFE = 24, 6.0
_MOST_IN_AN_HOUR, _LAST_HOUR = HOUR * 4096, 10**7
_FILE = re.compile(r"usage\.[0-9a-f]{6}", re.ASCII)


def read_usage(
    directory: QueueDir, running: Iterable[tuple[int, JobRecord]], now: float
) -> dict[int, dict[int, float]]:
    """Return the GPU seconds of each user (uid) by the hour, with those of ``running`` jobs."""
    found = {status.st_ino: (status.st_uid, data) for _, status, data in directory.files(_FILE)}
    usage: dict[int, dict[int, float]] = {}
    for user, data in found.values():  # a hard link does not double them
        _add(usage.setdefault(user, {}), _decode(data))
    for user, record in running:
        _add(usage.setdefault(user, {}), _uncharged(record, now).items())
    return usage


def add_usage(directory: QueueDir, record: JobRecord, until: float) -> None:
    """Add a job's GPU time since it was last charged to this user; only under the queue lock."""
    found = [one for one in directory.files(_FILE) if one[1].st_uid == os.geteuid()]
    hours = dict(_decode(found[0][2])) if found else {}
    _add(hours, _uncharged(record, until).items())
    kept = sealed([(hour, round(hours[hour], 1)) for hour in sorted(hours)[-WEEK:]])
    with contextlib.suppress(OSError):  # a full disk costs no job
        fd = directory.open(found[0][0], os.O_RDWR) if found else None
        if fd is None:
            fd = directory.create(f"usage.{secrets.token_hex(3)}", 0o644)
        with os.fdopen(fd, "r+b", buffering=0) as file:
            file.truncate(file.write(kept))


def recent_hours(hours: Mapping[int, float], now: float) -> float:
    """Return the GPU-hours of the last day, halved for every six hours that they lie back.

    In tenths, so that a tie is a tie at the next poll as well.
    """
    ages = {hour: max(now / HOUR - hour - 0.5, 0.0) for hour in hours}
    weights = {hour: math.pow(0.5, age / _HALF_LIFE) for hour, age in ages.items() if age < _DAY}
    return round(sum(hours[hour] * weight for hour, weight in weights.items()) / HOUR, 1)


def week_hours(hours: Mapping[int, float], now: float) -> float:
    """Return the GPU-hours of the last seven days."""
    return sum(hours[hour] for hour in hours if hour > now // HOUR - WEEK) / HOUR


def _uncharged(record: JobRecord, until: float) -> dict[int, float]:
    """Return the GPU seconds of a job that are in no file yet, by the hour."""
    share = len(record.gpus) / record.jobs_per_device
    since = max(record.charged_at, until - WEEK * HOUR)
    hours = range(int(since // HOUR), int(until // HOUR) + 1)
    return {h: share * (min((h + 1) * HOUR, until) - max(h * HOUR, since)) for h in hours}


def _add(hours: dict[int, float], more: Iterable[tuple[int, float]]) -> None:
    for hour, seconds in more:
        hours[hour] = hours.get(hour, 0.0) + seconds


@functools.lru_cache(maxsize=64)
def _decode(data: bytes) -> tuple[tuple[int, float], ...]:
    """Return the entries of a file; none of one that is damaged."""
    try:
        entries = tuple((hour, float(seconds)) for hour, seconds in unsealed(data))
    except (ValueError, TypeError, RecursionError, OverflowError):
        return ()
    well = all(
        type(hour) is int and 0 <= hour <= _LAST_HOUR and 0 <= s <= _MOST_IN_AN_HOUR
        for hour, s in entries
    )
    return entries if well and len(entries) <= WEEK else ()
