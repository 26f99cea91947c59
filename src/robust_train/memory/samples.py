"""Memory over time, as a run folder keeps it: ``memory.jsonl``, one line for each sample."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from robust_train.files import replacing

log = logging.getLogger("robust_train")

FILE_NAME = "memory.jsonl"

_EARLIER_BYTES = 8 * 1024**2


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


_NAMES = frozenset(item.name for item in fields(Sample))


def read_samples(path: Path) -> list[Sample]:
    """Return the samples of a file in its order; none without a file, torn lines are skipped."""
    if not path.is_file():  # a device may have no end
        return []
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        return []
    samples = []
    for line in lines:
        try:
            values = json.loads(line)
            samples.append(Sample(**{k: v for k, v in values.items() if k in _NAMES}))
        except (ValueError, TypeError, AttributeError):
            continue
    return samples


@dataclass(frozen=True)
class Limits:
    """How many samples are kept of one attempt, however long it runs.

    The ``first`` of the training show how memory rises and falls with each micro-batch, the
    ``newest`` what came before an attempt's end. So many ``between`` are spread evenly, and
    ``slack`` may come on top before the record is thinned again.
    """

    first: int = 400
    between: int = 2000
    newest: int = 300
    slack: int = 1000

    @property
    def most(self) -> int:
        """Samples that a record never exceeds."""
        return self.first + self.between + self.newest + self.slack


Numbered = tuple[int, Sample]  # A sample with its number in the attempt


def thinned(samples: Sequence[Numbered], limits: Limits) -> list[Numbered]:
    """Return the samples of an attempt that stay. Pure."""
    older, newest = samples[: -limits.newest], samples[-limits.newest :]
    # before the first step nothing trains yet; a download there may take an hour
    first = [one for one in older if one[1].step is not None][: limits.first]
    numbers = {number for number, _ in first}
    between, stride = [one for one in older if one[0] not in numbers], 1
    while len(between) > limits.between:
        stride *= 2
        between = [one for one in between if one[0] % stride == 0]
    numbers.update(number for number, _ in between)
    return [*(one for one in older if one[0] in numbers), *newest]


class SampleFile:
    """The file, of bounded size: earlier attempts' samples, then this one's. A disk that is full or
    gone must not end a training run: the first failure is warned about, and the file is made whole
    once there is room again."""

    def __init__(self, path: Path, limits: Limits) -> None:
        self._path = path
        self._limits = limits
        self._kept: list[Numbered] = []
        self._count = 0
        self._earlier: int | None = None  # bytes of earlier attempts
        self._is_whole = True
        self._warned = False
        self._descriptor: int | None = None

    def close(self) -> None:
        """Close the file descriptor."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def add(self, sample: Sample) -> None:
        """Write one more sample; once in a while all anew, thinned."""
        self._kept.append((self._count, sample))
        self._count += 1
        if len(self._kept) >= self._limits.most:
            self._kept, self._is_whole = thinned(self._kept, self._limits), False
        try:
            if self._earlier is None:
                self._earlier = self._make_room()
            if self._is_whole:
                self._append(sample)
            else:
                self._rewrite(self._earlier)
        except OSError as error:
            self._is_whole = False
            if not self._warned:
                self._warned = True
                log.warning("cannot write %s: %s; training goes on", self._path, error.strerror)

    def _append(self, sample: Sample) -> None:
        data = (encode(sample) + "\n").encode()
        if self._descriptor is None:
            # it stays open: at each system call the thread has to wait for the interpreter anew
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._descriptor = os.open(self._path, flags, 0o666)
        self._is_whole = os.write(self._descriptor, data) == len(data)

    def _make_room(self) -> int:
        """Drop every other line of earlier attempts if they are many; return their bytes."""
        earlier = self._path.read_bytes() if self._path.is_file() else b""
        lines = earlier.splitlines()[:: 2 if len(earlier) > _EARLIER_BYTES else 1]
        kept = b"".join(line + b"\n" for line in lines)
        if kept != earlier:
            self._replace(kept)
        return len(kept)

    def _rewrite(self, earlier_bytes: int) -> None:
        earlier = b""
        if earlier_bytes:
            with self._path.open("rb") as file:
                earlier = file.read(earlier_bytes)
        own = "".join(encode(sample) + "\n" for _, sample in self._kept)
        self._replace(earlier + own.encode())
        self._is_whole = True

    def _replace(self, content: bytes) -> None:
        """Put the new file in the old one's place, whole or not at all."""
        self.close()
        with replacing(self._path) as temporary:
            temporary.write_bytes(content)
