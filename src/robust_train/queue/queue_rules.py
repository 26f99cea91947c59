"""The rules of the queue: what root sets in ``queue.yaml``, and what each user has used lately."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterable
from dataclasses import replace

from robust_train.gpu.processes import user_name
from robust_train.queue.order import DEFAULT_RULES, QueueRules
from robust_train.queue.queue_dir import QueueDir
from robust_train.queue.records import JobRecord, printable
from robust_train.queue.reservations import LiveJob, boottime
from robust_train.queue.usage import read_usage, recent_hours
from robust_train.readable import meant

log = logging.getLogger("robust_train")

NAME = "queue.yaml"
_LIMIT_BYTES = 4096
_warned: set[str] = set()
_KEYS = {"max_gpus_per_user": "a number of GPUs from 1", "order": "fair or fifo"}


def read_rules(directory: QueueDir, jobs: Iterable[LiveJob]) -> QueueRules:
    """Return the rules; a mistake in root's file is one line in the log, and means the defaults."""
    rules = _of_root(directory)
    if isinstance(rules, str):
        mistake, rules = f"{directory.path.parent / NAME} is ignored: {rules}", DEFAULT_RULES
        if mistake not in _warned:
            log.warning("%s", mistake)
            _warned.add(mistake)
    now = boottime()
    usage = read_usage(directory, running(jobs), now) if rules.order == "fair" else {}
    return replace(rules, used={user: recent_hours(hours, now) for user, hours in usage.items()})


def running(jobs: Iterable[LiveJob]) -> list[tuple[int, JobRecord]]:
    """Return the jobs that have GPUs, each with the owner of its file."""
    return [(job.owner, job.record) for job in jobs if job.record is not None and job.record.gpus]


def _of_root(directory: QueueDir) -> QueueRules | str:
    found = directory.read(f"../{NAME}", _LIMIT_BYTES)
    if found is None:
        is_there = os.path.lexists(directory.path.parent / NAME)
        return "it is no plain file that everybody may read" if is_there else DEFAULT_RULES
    status, data = found
    if status.st_uid != 0 or status.st_mode & 0o022:
        return f"{user_name(status.st_uid)} or others may write it (chown root, chmod 644)"
    return _parse(data) if len(data) == status.st_size else f"it has over {_LIMIT_BYTES} bytes"


@functools.lru_cache(maxsize=4)
def _parse(data: bytes) -> QueueRules | str:
    """Return what ``key: value`` lines set, or the first mistake; ``#`` begins a comment."""
    rules = DEFAULT_RULES
    for line in data.decode(errors="replace").splitlines():
        key, _, value = (part.strip() for part in line.partition("#")[0].partition(":"))
        if key == "order" and value in ("fair", "fifo"):
            rules = replace(rules, order=value)
        elif key == "max_gpus_per_user" and value.isdecimal() and 0 < int(value) < 10**6:
            rules = replace(rules, max_gpus_per_user=int(value))
        elif key in _KEYS:
            return f"{key} is {_KEYS[key]}, not {printable(value, 40) or 'empty'}"
        elif key or value:
            return f"{printable(key, 40)}: no such key; {meant(key, _KEYS)}"
    return rules
