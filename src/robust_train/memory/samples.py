"""Memory over time, and whether it is stable.

A thread beside the training writes ``memory.jsonl``, one line for each sample.
The thread runs in the attempt's own process, because no other process can read that process's
caching allocator. It starts no CUDA and imports no torch.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from robust_train.files import LineFile, Spacing, json_lines
from robust_train.gpu.inventory import close_session, find_gpu
from robust_train.host.memory import resident_bytes, resident_bytes_of_tree
from robust_train.memory.cuda import cached_on, device_index, started_torch
from robust_train.model.gpu import GpuInfo
from robust_train.model.json import MalformedEvent, from_json
from robust_train.readable import MIB, first_line

log = logging.getLogger("robust_train")

FILE_NAME = "memory.jsonl"

_COST_SHARE = 0.0025
_NVML_SECONDS = 60.0
_STOP_SECONDS = 2.0


@dataclass(frozen=True)
class Sample:
    """Memory at one moment of an attempt; None if unknown or absent."""

    time: float  # seconds since the epoch
    attempt: int  # number of the attempt
    device: str  # what the attempt trains on, `cpu` or `cuda:<index>` as NVML counts
    step: int | None = None  # last optimizer step that was reported
    allocated: int | None = None  # bytes of tensors on the GPU, of this process
    reserved: int | None = None  # bytes that this process's caching allocator holds
    gpu_used: int | None = None  # bytes in use on the whole GPU, by all processes
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
    """Return the samples of a file in its order; none without a file; torn lines are skipped."""
    samples = []
    with contextlib.suppress(OSError):
        for content in json_lines(path):
            with contextlib.suppress(MalformedEvent):
                samples.append(from_json(Sample, content))
    return samples


class SampleFile:
    """The file. It stays small however long a job runs: samples become sparser, and those just
    before the end are written then. A disk that is full costs samples and one warning."""

    _MOST_HELD = 200

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = LineFile(path)
        self._spacing = Spacing()
        self._held: deque[bytes] = deque(maxlen=self._MOST_HELD)
        self._warned = False

    def add(self, sample: Sample) -> None:
        """Write one more sample, or keep it until :meth:`flush`."""
        line = (encode(sample) + "\n").encode()
        if self._spacing.passes("sample", len(line), sample.time):
            self._held.clear()
            self._write(line)
        else:
            self._held.append(line)

    def flush(self) -> None:
        """Write the samples since the last one that is in the file."""
        self._write(b"".join(self._held))
        self._held.clear()

    def _write(self, lines: bytes) -> None:
        try:
            self._file.append(lines)
        except OSError as error:
            if not self._warned:
                self._warned = True
                log.warning(
                    "cannot write %s: %s; training goes on", self._path, error.strerror
                )


@functools.lru_cache(maxsize=1)
def _not_while_forking() -> threading.Lock:
    """Return a lock that is held during each sample and during each fork. A data-loader worker is a
    copy of this process at one moment, locks of NVML's library included; one that was taken by the
    sampler's thread would never be released there."""
    lock = threading.Lock()
    was_taken = False

    def before() -> None:
        nonlocal was_taken
        # a driver that hangs must not hang the trainer
        was_taken = lock.acquire(timeout=1.0)

    def after() -> None:
        nonlocal was_taken
        if was_taken:
            was_taken = False
            lock.release()

    os.register_at_fork(before=before, after_in_parent=after, after_in_child=after)
    return lock


class Sampler:
    """Takes a sample every ``interval_seconds``, from :meth:`start` to :meth:`stop`. Each sample is
    written as soon as it is taken, so that it is there however the process ends."""

    def __init__(
        self,
        run_dir: Path,  # where the file belongs; samples of earlier attempts in it are kept
        attempt: int,  # number of the attempt
        device: str,  # what the attempt trains on, in this process's own numbering
        interval_seconds: float,  # see above
        # returns the last optimizer step that was reported
        step: Callable[[], int | None],
        # all that this process has started counts, as where a script trains
        whole_tree: bool = False,
        # of the time, which samples may take: longer pauses follow expensive ones
        cost_share: float = _COST_SHARE,
        # so long NVML is asked for each sample, and from then on once in that time
        nvml_seconds: float = _NVML_SECONDS,
    ) -> None:
        self._file = SampleFile(run_dir / FILE_NAME)
        self._attempt = attempt
        self._device = device
        self._index = device_index(device)
        self._gpu_name = ""
        self._gpu: GpuInfo | None = None
        self._nvml_seconds = nvml_seconds
        self._ask_next = 0.0  # when NVML is to be asked again
        self._often_until = time.monotonic() + nvml_seconds
        self._process = psutil.Process()
        self._resident = resident_bytes_of_tree if whole_tree else resident_bytes
        self._interval_seconds = interval_seconds
        self._cost_share = cost_share
        self._step = step
        self._ended = threading.Event()
        self._thread = threading.Thread(
            target=self._work, name="memory sampler", daemon=True
        )
        self._pid = os.getpid()

    def start(self) -> None:
        """Begin. On a machine without room for one more thread there are no samples."""
        _not_while_forking()
        try:
            self._thread.start()
        except RuntimeError as error:
            log.warning("no memory over time in %s: %s", FILE_NAME, error)
            self._ended.set()

    def stop(self) -> None:
        """Take one last sample and end; in a forked child, where there is no thread, nothing."""
        if os.getpid() == self._pid and not self._ended.is_set():
            self._ended.set()
            self._thread.join(_STOP_SECONDS)

    def _work(self) -> None:
        try:
            self._sample_until_ended()
        except Exception as error:  # no figure is worth an attempt
            log.warning("memory over time in %s ends: %s", FILE_NAME, first_line(error))

    def _sample_until_ended(self) -> None:
        is_last = False
        spent = time.thread_time()
        while True:
            with _not_while_forking():
                sample = self._sample()
            self._file.add(sample)
            if is_last:
                self._file.flush()
                return
            # waking up counts as well, which is why it is measured from one to the next
            cost, spent = time.thread_time() - spent, time.thread_time()
            is_last = self._ended.wait(
                max(self._interval_seconds, cost / self._cost_share)
            )

    def _sample(self) -> Sample:
        resident, anonymous = self._resident(self._process)
        device, cached, gpu = self._device, None, None
        if self._index is not None:
            # by the UUID that CUDA knows it by, once that is known
            self._gpu_name = self._gpu_name or _uuid_of(self._index) or ""
            cached = cached_on(self._index)
            gpu = self._as_nvml_has_it() if self._gpu_name else None
            if gpu is not None:
                device = f"cuda:{gpu.index}"
        return Sample(
            time=round(time.time(), 4),
            attempt=self._attempt,
            device=device,
            step=self._step(),
            allocated=None if cached is None else cached.allocated,
            reserved=None if cached is None else cached.reserved,
            gpu_used=None if gpu is None else gpu.used_bytes,
            gpu_total=None if gpu is None else gpu.total_bytes,
            resident=resident,
            anonymous=anonymous,
        )

    def _as_nvml_has_it(self) -> GpuInfo | None:
        """Return the GPU as it is, or was a minute ago at most: an open session of NVML blocks
        a reset of any GPU of the machine, and an attempt may take days."""
        now = time.monotonic()
        if now >= self._ask_next:
            self._gpu = find_gpu(self._gpu_name)
            if now >= self._often_until:
                close_session()
                self._ask_next = now + self._nvml_seconds
        return self._gpu


def _uuid_of(index: int) -> str | None:
    """Read ``CUDA_VISIBLE_DEVICES`` if that is clear, else ask torch once CUDA has started."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    name = visible[index].strip() if index < len(visible) else ""
    by_pci = os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    if name.startswith(("GPU-", "MIG-")) or (name.isdecimal() and by_pci):
        return name
    torch = started_torch()
    if torch is None:
        return None
    try:
        return f"GPU-{torch.cuda.get_device_properties(index).uuid}"
    except (AttributeError, RuntimeError, AssertionError):
        return None


# --- is it stable? ---

_WARM_UP_SHARE = 0.2
_SPANS = 6
_SAMPLES_A_SPAN = 5
_OF_THE_SLOPE = 0.25
_SHARE = 0.01
_GPU_BYTES = 1 * MIB
_HOST_BYTES = 6 * MIB


@dataclass(frozen=True)
class Stability:
    """What the samples of one attempt show."""

    kind: str  # `stable`, `growing`, `fragmenting` or `unknown`
    sentence: str  # the same for people, with figures
    mib_per_100_steps: float | None = None  # how fast it grows, None unless it does


def attempt_stability(run_dir: Path, attempt: int) -> Stability | None:
    """Return and log :func:`stability` of one attempt of a run folder; None without samples."""
    samples = [s for s in read_samples(run_dir / FILE_NAME) if s.attempt == attempt]
    if not samples:
        return None
    found = stability(samples)
    if found.kind not in ("unknown", "stable"):  # the summary has these
        log.warning("attempt %d: memory is %s", attempt, found.sentence)
    return found


def stability(samples: Sequence[Sample]) -> Stability:
    """Return whether the memory of the last attempt in ``samples`` is stable.

    Memory rises and falls within each step, jumps when a checkpoint is written, and needs some
    steps to settle, so neither its mean nor its peak shows a leak; the floor does. On a GPU,
    tensors that accumulate are a leak, and memory that the caching allocator accumulates although
    tensors do not is fragmentation. The process's own host memory counts on the CPU and on the GPU.
    """
    own = [
        s for s in samples if s.attempt == samples[-1].attempt and s.step is not None
    ]
    if not own:
        reason = "the trainer reported no steps" if samples else "no samples"
        return Stability("unknown", f"unknown ({reason})")
    own.sort(key=lambda sample: sample.step or 0)
    on_gpu = any(sample.allocated is not None for sample in own)
    allocated = _floors([(s.step, s.allocated) for s in own])
    reserved = _floors([(s.step, s.reserved) for s in own])
    # a data set that is mapped into memory makes `resident` grow as it is read
    host = _floors(
        [(s.step, s.resident if s.anonymous is None else s.anonymous) for s in own]
    )
    if not (allocated if on_gpu else host):
        return Stability("unknown", "unknown (too few samples after the warm-up)")
    where = "host memory " if on_gpu else ""
    for floors, least, kind, what in (
        (allocated, _GPU_BYTES, "growing", "leak suspected: "),
        (reserved, _GPU_BYTES, "fragmenting", "reserved but not in use: "),
        (host, _HOST_BYTES, "growing", f"leak suspected: {where}"),
    ):
        slope = _slope(floors, least)
        if slope:
            # rounded before it is put into words, so that both agree to the last digit
            rate = round(slope * 100 / MIB, 3)
            return Stability(
                kind, f"{kind} ({what}{rate:+.1f} MiB per 100 steps)", rate
            )
    return Stability("stable", "stable")


def _floors(
    samples: Sequence[tuple[int | None, int | None]],
) -> list[tuple[int, int]]:
    """Return step and value of the floor of each sixth of the steps after the warm-up; empty if a
    sixth has too few samples. A tenth of the samples may lie below: the last one often does."""
    known = [
        (step, size) for step, size in samples if step is not None and size is not None
    ]
    spans: list[list[tuple[int, int]]] = [[] for _ in range(_SPANS)]
    first, last = (known[0][0], known[-1][0]) if known else (0, 0)
    begin = first + _WARM_UP_SHARE * (last - first)
    for step, size in known:
        if step > begin:
            span = int(_SPANS * (step - begin) / (last - begin))
            spans[min(span, _SPANS - 1)].append((size, step))
    if min(map(len, spans)) < _SAMPLES_A_SPAN:
        return []
    return [sorted(span)[len(span) // 10] for span in spans]


def _slope(floors: Sequence[tuple[int, int]], least_bytes: float) -> float:
    """Return the bytes a step by which the floors rise; 0 if they do not, or hardly.

    A leak rises in each third of the time. A jump to another level, such as a larger batch makes,
    rises in one third or two.
    """
    if not floors:
        return 0.0
    (low, first), (high, last) = floors[0], floors[-1]
    slope = (high - low) / (last - first)
    rises = [
        after - before >= _OF_THE_SLOPE * slope * (ended - began)
        for (before, began), (after, ended) in zip(
            floors[::2], floors[1::2], strict=True
        )
    ]
    is_large = high - low >= max(least_bytes, _SHARE * low)
    return slope if is_large and all(rises) else 0.0
