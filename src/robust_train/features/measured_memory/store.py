"""What jobs of this user have needed: one small file, which is only ever a help.

Whatever is wrong with it costs what was learned, and one line.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from robust_train.files import parse_json, read_small, write_json

log = logging.getLogger("robust_train")

FILE_NAME = "needs.json"
MOST_JOBS = 200
MOST_SIZES = 16
MOST_DAYS = 180
_MOST_BYTES = 1 << 20
_LARGEST = 1 << 50
_VERSION = 1


@dataclass(frozen=True)
class Need:
    """What one kind of job has needed."""

    seen: float = 0.0  # seconds since the epoch
    # bytes by GPU model and micro-batch
    peaks: Mapping[str, Mapping[int, int]] = field(default_factory=dict)

    def with_peak(self, gpu: str, micro_batch: int, peak_bytes: int, now: float) -> Need:
        """Return the need with a new measurement, in place of the one of the same kind."""
        sizes = {**self.peaks.get(gpu, {})}
        # the last one is the newest
        sizes.pop(micro_batch, None)
        sizes[micro_batch] = peak_bytes
        newest = dict(list(sizes.items())[-MOST_SIZES:])
        return Need(now, {**self.peaks, gpu: newest})

    def on(self, gpu: str | None) -> Mapping[int, int]:
        """Return the peaks on a GPU of this model; on any if none was measured there, each the
        largest."""
        if gpu is not None and gpu in self.peaks:
            return self.peaks[gpu]
        found: dict[int, int] = {}
        for sizes in self.peaks.values():
            for size, peak in sizes.items():
                found[size] = max(peak, found.get(size, 0))
        return found


def needs_file() -> Path:
    """Return where needs are kept, beside what else was learned of this user's GPUs."""
    chosen = os.environ.get("XDG_CACHE_HOME", "")
    # the XDG Base Directory Specification ignores relative paths
    if not os.path.isabs(chosen):
        chosen = os.path.join(os.path.expanduser("~"), ".cache")
    return Path(chosen) / "robust-train" / FILE_NAME


def read_needs(path: Path | None = None) -> dict[str, Need]:
    """Return what is known, by fingerprint; nothing after one line if the file cannot be used."""
    path = path or needs_file()
    try:
        data, status = read_small(path, _MOST_BYTES)
        if status.st_uid != os.geteuid():
            raise ValueError("it belongs to another user")
        return _decode(parse_json(data))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        log.warning("%s is ignored, and memory is measured again: %s", path, error)
        return {}


def _decode(content: Any) -> dict[str, Need]:
    if not isinstance(content, dict) or content.get("version") != _VERSION:
        raise ValueError("it is not a file of this version")
    return {str(digest): _need_of(one) for digest, one in content["jobs"].items()}


def _need_of(one: Any) -> Need:
    return Need(float(one["seen"]), {str(gpu): _sizes(on) for gpu, on in one["peaks"].items()})


def _sizes(on: Any) -> dict[int, int]:
    return {int(size): _bytes(peak) for size, peak in on.items()}


def _bytes(peak: Any) -> int:
    if type(peak) is not int or not 0 < peak < _LARGEST:
        raise ValueError(f"{peak} is not a size in bytes")
    return peak


def remember(
    digest: str, gpu: str, micro_batch: int, peak_bytes: int, path: Path | None = None
) -> None:
    """Keep a measurement. Never raises: of two jobs that end at once, one may be forgotten."""
    path = path or needs_file()
    now = time.time()
    needs = read_needs(path)
    needs[digest] = needs.get(digest, Need()).with_peak(gpu, micro_batch, peak_bytes, now)
    young = {
        one: need for one, need in needs.items() if abs(now - need.seen) < MOST_DAYS * 24 * 3600
    }
    newest = sorted(young, key=lambda one: young[one].seen)[-MOST_JOBS:]
    # sizes become text, as JSON has no other keys
    jobs = {one: {"seen": young[one].seen, "peaks": young[one].peaks} for one in newest}
    with contextlib.suppress(OSError):
        path.parent.mkdir(0o700, parents=True, exist_ok=True)
        write_json(path, {"version": _VERSION, "jobs": jobs})
