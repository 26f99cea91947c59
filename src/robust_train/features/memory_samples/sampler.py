"""Samples the memory of an attempt in a thread, and writes a line to ``memory.jsonl`` for each
sample.

The thread runs in the process that trains, because another process cannot read torch's caching
allocator. It neither starts CUDA nor imports torch.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from robust_train.files import LineFile, Spacing
from robust_train.folder.memory_samples import FILE_NAME, Sample, encode
from robust_train.gpu.inventory import close_session, find_gpu
from robust_train.host.memory import resident_bytes, resident_bytes_of_tree
from robust_train.memory.cuda import cached_on, device_index, gpu_uuid, started_torch
from robust_train.model.gpu import GpuInfo
from robust_train.readable import first_line

log = logging.getLogger("robust_train")

_INTERVAL_SECONDS = 0.1
_COST_SHARE = 0.0025
_NVML_SECONDS = 60.0
_STOP_SECONDS = 2.0  # the longest wait for the last sample


class SampleFile:
    """Writes samples to a file that stays small however long a job runs.

    Samples become sparser over time, but the last of them are always written at the end. A full
    disk costs samples and causes a single warning.
    """

    _MOST_HELD = 200

    def __init__(self, path: Path) -> None:
        self._file = LineFile(path)
        self._spacing = Spacing()
        self._held: deque[bytes] = deque(maxlen=self._MOST_HELD)

    def add(self, sample: Sample) -> None:
        """Write a sample, or keep it until `flush`."""
        line = (encode(sample) + "\n").encode()
        if self._spacing.passes("sample", len(line)):
            self._held.clear()
            self._file.try_append(line)
        else:
            self._held.append(line)

    def flush(self) -> None:
        """Write the samples that are not in the file yet."""
        self._file.try_append(b"".join(self._held))
        self._held.clear()


@functools.cache
def _fork_lock() -> Any:
    """Return a lock that is held during each sample and during each fork.

    A data-loader worker starts as a copy of this process, including the locks of NVML's library. If
    the sampler's thread held such a lock during the fork, the worker could never release it.
    """
    lock = threading.RLock()

    def acquire() -> None:
        # The time limit is for a driver that hangs: it must not hang the trainer too.
        lock.acquire(timeout=1.0)

    def release() -> None:
        # The lock was not acquired in time, and only the thread that holds it can release it.
        with contextlib.suppress(RuntimeError):
            lock.release()

    os.register_at_fork(before=acquire, after_in_parent=release, after_in_child=release)
    return lock


class Sampler:
    """Takes samples from :meth:`start` to :meth:`stop`, and writes each at once, so that it is on
    the disk however the process ends."""

    def __init__(
        self,
        # The folder of the file. Samples of earlier attempts in the file are kept.
        run_dir: Path,
        attempt: int,  # the number of the attempt
        device: str,  # the device of the training, in this process's numbering
        # Returns the last optimizer step that was reported.
        read_step: Callable[[], int | None],
        # Whether the memory of child processes counts too, because a script trains in one of them.
        whole_tree: bool = False,
        interval_seconds: float = _INTERVAL_SECONDS,  # the shortest time between two samples
        # The share of the time that samples may take. Expensive samples are taken less often.
        cost_share: float = _COST_SHARE,
        # NVML is queried for each sample during this time, and then once in each such period.
        nvml_seconds: float = _NVML_SECONDS,
    ) -> None:
        self._file = SampleFile(run_dir / FILE_NAME)
        self._attempt = attempt
        self._device = device
        self._index = device_index(device)
        self._gpu_uuid = ""  # the name by which NVML finds the GPU, empty until it is known
        self._gpu: GpuInfo | None = None
        self._nvml_seconds = nvml_seconds
        self._next_query = 0.0  # when to query NVML again
        self._often_until = time.monotonic() + nvml_seconds
        self._process = psutil.Process()
        self._read_resident = resident_bytes_of_tree if whole_tree else resident_bytes
        self._interval_seconds = interval_seconds
        self._cost_share = cost_share
        self._read_step = read_step
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, name="memory sampler", daemon=True)
        self._pid = os.getpid()

    def start(self) -> None:
        """Start the thread. If the machine allows no more threads, no samples are taken."""
        # The first call registers the lock, before the trainer can fork.
        _fork_lock()
        try:
            self._thread.start()
        except RuntimeError as error:
            log.warning("no memory over time in %s: %s", FILE_NAME, error)
            self._ended.set()

    def stop(self) -> None:
        """Take a last sample and end the thread. Does nothing in a forked child, which has no such
        thread."""
        if os.getpid() == self._pid and not self._ended.is_set():
            self._ended.set()
            self._thread.join(_STOP_SECONDS)

    def _work(self) -> None:
        try:
            self._sample_until_ended()
        except Exception as error:  # A problem with samples must not end the attempt.
            why = first_line(error)
            log.warning("memory over time in %s ends: %s", FILE_NAME, why)

    def _sample_until_ended(self) -> None:
        is_last = False
        spent = time.thread_time()
        while True:
            with _fork_lock():
                sample = self._take_sample()
            self._file.add(sample)
            if is_last:
                self._file.flush()
                return
            # The cost is measured from one sample to the next, so it includes waking up.
            cost = time.thread_time() - spent
            spent = time.thread_time()
            is_last = self._ended.wait(max(self._interval_seconds, cost / self._cost_share))

    def _take_sample(self) -> Sample:
        resident, anonymous = self._read_resident(self._process)
        device = self._device
        cached = None
        gpu = None
        if self._index is not None:
            # The UUID may be unknown until the trainer has started CUDA.
            if not self._gpu_uuid:
                self._gpu_uuid = _find_uuid(self._index)
            cached = cached_on(self._index)
            gpu = self._query_gpu() if self._gpu_uuid else None
            if gpu is not None:
                device = f"cuda:{gpu.index}"
        return Sample(
            time=round(time.time(), 4),
            attempt=self._attempt,
            device=device,
            step=self._read_step(),
            allocated=None if cached is None else cached.allocated,
            reserved=None if cached is None else cached.reserved,
            gpu_used=None if gpu is None else gpu.used_bytes,
            gpu_total=None if gpu is None else gpu.total_bytes,
            resident=resident,
            anonymous=anonymous,
        )

    def _query_gpu(self) -> GpuInfo | None:
        """Return the GPU's state, at most a minute old.

        After the first minute, NVML is queried only once a minute. An open session of NVML blocks a
        reset of any GPU of the machine, and an attempt may take days.
        """
        now = time.monotonic()
        if now >= self._next_query:
            self._gpu = find_gpu(self._gpu_uuid)
            if now >= self._often_until:
                close_session()
                self._next_query = now + self._nvml_seconds
        return self._gpu


def _find_uuid(index: int) -> str:
    """Return the GPU's identifier for NVML, empty if it is unknown.

    It is read from ``CUDA_VISIBLE_DEVICES`` if that is unambiguous, otherwise from torch once CUDA
    has started.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    name = visible[index].strip() if index < len(visible) else ""
    by_pci = os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    if name.startswith(("GPU-", "MIG-")) or (name.isdecimal() and by_pci):
        return name
    with contextlib.suppress(AttributeError, RuntimeError, AssertionError):
        torch = started_torch()
        if torch is not None:
            return gpu_uuid(torch, index)
    return ""
