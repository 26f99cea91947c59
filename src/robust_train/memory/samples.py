"""Memory over time, as a run folder keeps it: ``memory.jsonl``, one line for each sample."""

from __future__ import annotations

import contextlib
import json
import logging
from dataclasses import dataclass
from pathlib import Path

from robust_train.files import LineFile, MalformedEvent, from_json, json_lines
from robust_train.runfolder.thinning import Limits, thin

log = logging.getLogger("robust_train")

FILE_NAME = "memory.jsonl"


@dataclass(frozen=True)
class Sample:
    """Memory at one moment of an attempt; None for what was not known or is not there."""

    time: float  # seconds since the epoch
    attempt: int  # number of the attempt
    device: str  # what the attempt trains on, `cpu` or `cuda:<index>` as NVML counts
    step: int | None = None  # last optimizer step that was reported
    allocated: int | None = None  # bytes of tensors on the GPU, of this process
    reserved: int | None = None  # bytes that this process's caching allocator holds
    gpu_used: int | None = None  # bytes in use on the whole GPU, by everybody
    gpu_total: int | None = None  # bytes that the GPU has
    resident: int | None = None  # bytes of host memory of this process
    # those of `resident` that are its own: no files mapped into memory, nothing shared with other
    # processes
    anonymous: int | None = None


def encode(sample: Sample) -> str:
    """Return the sample as a line of the file, without its end."""
    known = {name: value for name, value in vars(sample).items() if value is not None}
    return json.dumps(known, separators=(",", ":"))


def read_samples(path: Path) -> list[Sample]:
    """Return the samples of a file in its order; none without a file, torn lines are skipped."""
    samples = []
    with contextlib.suppress(OSError):
        for content in json_lines(path):
            with contextlib.suppress(MalformedEvent):
                samples.append(from_json(Sample, content))
    return samples


LIMITS = Limits(between=2000)


class SampleFile:
    """The file, which stays small however long a job runs. A disk that is full or gone must not end
    a training run: the first failure is warned about."""

    def __init__(self, path: Path, limits: Limits = LIMITS, slack: int = 1000) -> None:
        self._path, self._limits, self._slack = path, limits, slack
        self._file = LineFile(path)
        self._grown = slack  # earlier attempts' samples are thinned first
        self._warned = False

    def add(self, sample: Sample) -> None:
        """Write one more sample; of many once in a while remove some."""
        try:
            if self._grown >= self._slack and self._path.is_file():
                self._grown = 0
                thin(self._path, self._limits, kind_of=lambda content: "sample")
            self._file.append((encode(sample) + "\n").encode())
            self._grown += 1
        except OSError as error:
            if not self._warned:
                self._warned = True
                log.warning("cannot write %s: %s; training goes on", self._path, error.strerror)
