"""A thread of the attempt writes a line to ``memory.jsonl`` for each sample of its memory.

The thread runs in the attempt's own process, because no other process can read that process's
caching allocator. It starts no CUDA and imports no torch.
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
_STOP_SECONDS = 2.0


class SampleFile:
    """Writes the file, which stays small however long a job runs: samples become sparser, and the
    last of them are written at the end. A full disk costs samples and one warning."""

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
def _not_while_forking() -> Any:
    """Return a lock that is held during each sample and during each fork.

    A data-loader worker is a copy of this process at a moment, including the locks of NVML's
    library. A lock that the sampler's thread held then would never be released there.
    """
    lock = threading.RLock()

    def after() -> None:
        # Only a thread that has the lock can release it.
        with contextlib.suppress(RuntimeError):
            lock.release()

    os.register_at_fork(
        # A driver that hangs must not hang the trainer.
        before=lambda: lock.acquire(timeout=1.0),
        after_in_parent=after,
        after_in_child=after,
    )
    return lock


class Sampler:
    """Takes a sample every ``interval_seconds``, from :meth:`start` to :meth:`stop`. Each sample is
    written at once, so it is on the disk however the process ends."""

    def __init__(
        self,
        # The folder of the file. Samples of earlier attempts in it are kept.
        run_dir: Path,
        attempt: int,  # number of the attempt
        # The device of the training, in this process's numbering.
        device: str,
        # Returns the last optimizer step that was reported.
        step: Callable[[], int | None],
        # All children of this process count, as for a script.
        whole_tree: bool = False,
        interval_seconds: float = _INTERVAL_SECONDS,  # see above
        # The share of the time that samples may take. Longer pauses follow expensive samples.
        cost_share: float = _COST_SHARE,
        # For this long NVML is asked for each sample, and then once in that time.
        nvml_seconds: float = _NVML_SECONDS,
    ) -> None:
        self._file = SampleFile(run_dir / FILE_NAME)
        self._attempt = attempt
        self._device = device
        self._index = device_index(device)
        self._gpu_name = ""
        self._gpu: GpuInfo | None = None
        self._nvml_seconds = nvml_seconds
        self._ask_next = 0.0  # when to ask NVML again
        self._often_until = time.monotonic() + nvml_seconds
        self._process = psutil.Process()
        self._resident = resident_bytes_of_tree if whole_tree else resident_bytes
        self._interval_seconds = interval_seconds
        self._cost_share = cost_share
        self._step = step
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, name="memory sampler", daemon=True)
        self._pid = os.getpid()

    def start(self) -> None:
        """Start the thread. A machine without room for another thread gets no samples."""
        _not_while_forking()
        try:
            self._thread.start()
        except RuntimeError as error:
            log.warning("no memory over time in %s: %s", FILE_NAME, error)
            self._ended.set()

    def stop(self) -> None:
        """Take a last sample and end. Does nothing in a forked child, which has no such thread."""
        if os.getpid() == self._pid and not self._ended.is_set():
            self._ended.set()
            self._thread.join(_STOP_SECONDS)

    def _work(self) -> None:
        try:
            self._sample_until_ended()
        except Exception as error:  # an attempt must not fail because of a figure
            why = first_line(error)
            log.warning("memory over time in %s ends: %s", FILE_NAME, why)

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
            # Waking up counts as well, so the cost is measured from one sample to the next.
            cost = time.thread_time() - spent
            spent = time.thread_time()
            is_last = self._ended.wait(max(self._interval_seconds, cost / self._cost_share))

    def _sample(self) -> Sample:
        resident, anonymous = self._resident(self._process)
        device = self._device
        cached = None
        gpu = None
        if self._index is not None:
            # NVML is asked by the UUID that CUDA has for the GPU, once that is known.
            if not self._gpu_name:
                self._gpu_name = _uuid_of(self._index)
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
        """Return the GPU's state, at most a minute old: an open session of NVML blocks a reset of
        any GPU of the machine, and an attempt may take days."""
        now = time.monotonic()
        if now >= self._ask_next:
            self._gpu = find_gpu(self._gpu_name)
            if now >= self._often_until:
                close_session()
                self._ask_next = now + self._nvml_seconds
        return self._gpu


def _uuid_of(index: int) -> str:
    """Read ``CUDA_VISIBLE_DEVICES`` if that is unambiguous, else ask torch once CUDA has
    started."""
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
