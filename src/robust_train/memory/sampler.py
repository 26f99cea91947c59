"""Memory over time of one attempt: a thread beside the training writes ``memory.jsonl``.

It runs in the attempt's own process, because nobody else can read that process's caching allocator.
It starts no CUDA and imports no torch.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from robust_train.gpu.nvml_session import OneGpu
from robust_train.memory.cuda import cached_on, device_index, started_torch
from robust_train.memory.host import resident_bytes, resident_bytes_of_tree
from robust_train.memory.samples import FILE_NAME, Sample, SampleFile
from robust_train.readable import first_line

log = logging.getLogger("robust_train")

_COST_SHARE = 0.0025
_STOP_SECONDS = 2.0


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
        step: Callable[[], int | None],  # returns the last optimizer step that was reported
        # all that this process has started counts, as where a script trains
        whole_tree: bool = False,
        # of the time, which samples may take: longer pauses follow expensive ones
        cost_share: float = _COST_SHARE,
    ) -> None:
        self._file = SampleFile(run_dir / FILE_NAME)
        self._attempt = attempt
        self._device = device
        self._index = device_index(device)
        self._gpu: OneGpu | None = None
        self._searched: str | None = None
        self._process = psutil.Process()
        self._resident = resident_bytes_of_tree if whole_tree else resident_bytes
        self._interval_seconds = interval_seconds
        self._cost_share = cost_share
        self._step = step
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, name="memory sampler", daemon=True)
        self._pid = os.getpid()

    def start(self) -> None:
        """Begin. A machine that has no room for one more thread goes without."""
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
        except Exception as error:  # nothing that is read here is worth an attempt
            log.warning("memory over time in %s ends: %s", FILE_NAME, first_line(error))

    def _sample_until_ended(self) -> None:
        is_last = False
        spent = time.thread_time()
        while True:
            with _not_while_forking():
                sample = self._sample()
            self._file.add(sample)
            if is_last:
                return
            # waking up counts as well, which is why it is measured from one to the next
            cost, spent = time.thread_time() - spent, time.thread_time()
            is_last = self._ended.wait(max(self._interval_seconds, cost / self._cost_share))

    def _sample(self) -> Sample:
        resident, anonymous = self._resident(self._process)
        device, cached, whole = self._device, None, None
        if self._index is not None:
            self._find_gpu(self._index)
            cached = cached_on(self._index)
            if self._gpu is not None:
                device, whole = f"cuda:{self._gpu.index}", self._gpu.memory()
        return Sample(
            time=round(time.time(), 4),
            attempt=self._attempt,
            device=device,
            step=self._step(),
            allocated=None if cached is None else cached.allocated,
            reserved=None if cached is None else cached.reserved,
            gpu_used=None if whole is None else whole[0],
            gpu_total=None if whole is None else whole[1],
            resident=resident,
            anonymous=anonymous,
        )

    def _find_gpu(self, index: int) -> None:
        """Find the GPU by the UUID that CUDA knows it by, once that is known."""
        if self._gpu is None:
            uuid = _uuid_of(index)
            if uuid is not None and uuid != self._searched:
                self._searched = uuid
                self._gpu = OneGpu.find(uuid)


def _uuid_of(index: int) -> str | None:
    """Read ``CUDA_VISIBLE_DEVICES`` where that is clear, else ask torch once CUDA has started."""
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
