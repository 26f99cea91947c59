"""Stores the measured peaks of this user's jobs in a small file.

No job depends on it: if the file is damaged, its content is lost and one line is logged.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from robust_train.files import parse_json, read_small, write_json
from robust_train.host.linux import lock

log = logging.getLogger("robust_train")

FILE_NAME = "needs.json"
MOST_JOBS = 200
MOST_SIZES = 16
MOST_DAYS = 180
_MOST_BYTES = 1 << 20
_LARGEST = 1 << 50
_LOCK_SECONDS = 1.0
_VERSION = 1


@dataclass(frozen=True)
class Need:
    """The measured peaks of a kind of job."""

    seen: float = 0.0  # seconds since the epoch
    # Bytes, by GPU model and micro-batch.
    peaks: Mapping[str, Mapping[int, int]] = field(default_factory=dict)

    def with_peak(
        self, gpu: str, micro_batch: int, peak_bytes: int, now: float, *, is_whole: bool = True
    ) -> Need:
        """Return the need with a new measurement.

        A measurement of a whole run replaces an earlier measurement at the same size. Otherwise the
        larger of the two counts, because the run may have peaked before or after the measurement.
        """
        sizes = {**self.peaks.get(gpu, {})}
        # Ordered by age, newest last.
        earlier = sizes.pop(micro_batch, 0)
        sizes[micro_batch] = peak_bytes if is_whole else max(peak_bytes, earlier)
        newest = dict(list(sizes.items())[-MOST_SIZES:])
        return Need(now, {**self.peaks, gpu: newest})

    def on(self, gpus: Collection[str] = ()) -> Mapping[int, int]:
        """Return the largest peak at each micro-batch on GPUs of these models, in bytes.

        If no peak was measured on these models, the peaks on all models count.
        """
        models = self.peaks.keys() & set(gpus)
        if not models:
            models = set(self.peaks)
        largest: dict[int, int] = {}
        for model in models:
            for size, peak in self.peaks[model].items():
                largest[size] = max(peak, largest.get(size, 0))
        return largest


def needs_file() -> Path:
    """Return the path of the file, in this user's cache.

    Raises:
        FileNotFoundError: the user has no home folder, as in some containers.
    """
    chosen = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG Base Directory Specification ignores relative paths.
    if not os.path.isabs(chosen):
        chosen = os.path.join(os.path.expanduser("~"), ".cache")
    if not os.path.isabs(chosen):
        raise FileNotFoundError("no home folder")
    return Path(chosen) / "robust-train" / FILE_NAME


def read_needs(path: Path | None = None) -> dict[str, Need]:
    """Return the needs by fingerprint. If the file is unusable, log a line and return no needs."""
    try:
        path = path or needs_file()
        return _read(path)
    except FileNotFoundError:
        return {}
    except _UNUSABLE as error:
        log.warning("%s is ignored, and memory is measured again: %s", path, error)
        return {}


def _read(path: Path) -> dict[str, Need]:
    data, status = read_small(path, _MOST_BYTES)
    if status.st_uid != os.geteuid():
        raise ValueError("it belongs to another user")
    return _decode(parse_json(data))


_UNUSABLE = (OSError, ValueError, TypeError, AttributeError, KeyError, OverflowError)
"""Errors of reading a file that anyone may have written."""


def _decode(content: Any) -> dict[str, Need]:
    if not isinstance(content, dict) or content.get("version") != _VERSION:
        raise ValueError("it is not a file of this version")
    return {str(digest): _need_of(row) for digest, row in content["jobs"].items()}


def _need_of(row: Any) -> Need:
    return Need(float(row["seen"]), {str(gpu): _sizes(on) for gpu, on in row["peaks"].items()})


def _sizes(on: Any) -> dict[int, int]:
    return {int(size): _bytes(peak) for size, peak in on.items()}


def _bytes(peak: Any) -> int:
    if type(peak) is not int or not 0 < peak < _LARGEST:
        raise ValueError(f"{peak} is not a size in bytes")
    return peak


def remember(
    digest: str,
    gpu: str,
    micro_batch: int,
    peak_bytes: int,
    path: Path | None = None,
    *,
    is_whole: bool = True,  # a run was measured from its start to its end
) -> None:
    """Store a measurement. Never raises.

    The measurement is lost if the disk is full, or if another process holds the lock for too long.
    """
    with contextlib.suppress(OSError):
        path = path or needs_file()
        path.parent.mkdir(0o700, parents=True, exist_ok=True)
        with _locked(path) as is_locked:
            if is_locked:
                now = time.time()
                needs: dict[str, Need] = {}
                # A damaged file was reported at the job's start, and is replaced here.
                with contextlib.suppress(*_UNUSABLE):
                    needs = _read(path)
                need = needs.get(digest, Need())
                needs[digest] = need.with_peak(gpu, micro_batch, peak_bytes, now, is_whole=is_whole)
                _write(path, needs, now)


def _write(path: Path, needs: Mapping[str, Need], now: float) -> None:
    """Write the file, dropping the oldest entries."""
    young = {
        name: need for name, need in needs.items() if abs(now - need.seen) < MOST_DAYS * 24 * 3600
    }
    newest = sorted(young, key=lambda name: young[name].seen)[-MOST_JOBS:]
    # The sizes become text, because keys in JSON are text.
    jobs = {name: {"seen": young[name].seen, "peaks": young[name].peaks} for name in newest}
    write_json(path, {"version": _VERSION, "jobs": jobs})


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Hold a write lock on a neighbouring file, because each writer replaces the file itself.

    Yields whether the lock became free within a second. The launcher must not wait longer.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path.with_suffix(".lock"), flags, 0o600)
    try:
        deadline = time.monotonic() + _LOCK_SECONDS
        is_mine = lock(descriptor)
        while not is_mine and time.monotonic() < deadline:
            time.sleep(0.01)
            is_mine = lock(descriptor)
        yield is_mine
    finally:
        os.close(descriptor)
