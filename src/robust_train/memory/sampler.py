"""Memory over time of one attempt: a thread beside the training writes ``memory.jsonl``.

It runs in the attempt's own process, because nobody else can ask that process's caching allocator.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from robust_train.files import replacing
from robust_train.memory.probe import Probe
from robust_train.memory.record import Kept, Limits, thinned
from robust_train.memory.samples import FILE_NAME, Sample, encode

log = logging.getLogger("robust_train")

_COST_SHARE = 0.0025
_EARLIER_BYTES = 8 * 1024**2
_STOP_SECONDS = 2.0


class _NotWhileForking:
    """Held during each sample and during each fork.

    A data-loader worker is a copy of this process at one moment, locks of NVML's library included;
    one that was taken by the sampler's thread would never be released over there.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held = False
        self._is_registered = False

    def __enter__(self) -> None:
        if not self._is_registered:
            self._is_registered = True
            os.register_at_fork(
                before=self._before, after_in_parent=self._after, after_in_child=self._after
            )
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def _before(self) -> None:
        # a driver that hangs must not hang the trainer
        self._held = self._lock.acquire(timeout=1.0)

    def _after(self) -> None:
        if self._held:
            self._held = False
            self._lock.release()


_sampling = _NotWhileForking()


class Sampler:
    """Takes a sample every ``interval_seconds``, from :meth:`start` to :meth:`stop`.

    Each sample is written as soon as it is taken, so that it is there however the process ends. The
    pauses grow where a sample is dear: it never takes more than a quarter of a percent of the time.

    Args:
        run_dir: where the file belongs; samples of earlier attempts in it are kept.
        attempt: number of the attempt.
        device: what the attempt trains on, in this process's own numbering.
        interval_seconds: see above.
        step: the last optimizer step that was reported.
        limits: how many samples are kept.
        whole_tree: see :class:`robust_train.memory.probe.Probe`.
    """

    def __init__(
        self,
        run_dir: Path,
        attempt: int,
        device: str,
        interval_seconds: float,
        step: Callable[[], int | None],
        limits: Limits | None = None,
        whole_tree: bool = False,
    ) -> None:
        self._file = SampleFile(run_dir / FILE_NAME, limits or Limits())
        self._attempt = attempt
        self._device = device
        self._interval_seconds = interval_seconds
        self._step = step
        self._whole_tree = whole_tree
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, name="memory sampler", daemon=True)
        self._pid = os.getpid()

    def start(self) -> None:
        """Begin. A machine that has no room for one more thread goes without."""
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
            probe = Probe(self._device, whole_tree=self._whole_tree)
        except OSError:  # no /proc
            return
        with contextlib.closing(probe), contextlib.closing(self._file):
            is_last = False
            spent = time.thread_time()
            while True:
                with _sampling:
                    sample = Sample(
                        time=round(time.time(), 4),
                        attempt=self._attempt,
                        step=self._step(),
                        **probe.read(),
                    )
                self._file.add(sample)
                if is_last:
                    return
                # waking up counts as well, which is why it is measured from one to the next
                cost, spent = time.thread_time() - spent, time.thread_time()
                is_last = self._ended.wait(max(self._interval_seconds, cost / _COST_SHARE))


class SampleFile:
    """The file, of bounded size: earlier attempts' samples, then this one's.

    A disk that is full or gone must not end a training run: the first failure is warned about, and
    the file is made whole once there is room again.

    Args:
        path: the file.
        limits: how many samples of this attempt are kept.
    """

    def __init__(self, path: Path, limits: Limits) -> None:
        self._path = path
        self._limits = limits
        self._kept = Kept()
        self._newest: list[Sample] = []
        self._earlier: int | None = None
        self._is_torn = False
        self._warned = False
        self._descriptor: int | None = None

    def close(self) -> None:
        """Give the file descriptor back."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def add(self, sample: Sample) -> None:
        """Write one more sample; once in a while all anew, without those that are too many."""
        self._newest.append(sample)
        try:
            if self._earlier is None:
                self._earlier = self._make_room()
            if len(self._newest) >= self._limits.newest + self._limits.slack:
                self._kept = thinned(replace(self._kept, newest=tuple(self._newest)), self._limits)
                self._newest = list(self._kept.newest)
                self._rewrite()
            else:
                self._append(sample)
        except OSError as error:
            self._is_torn = True
            if not self._warned:
                self._warned = True
                log.warning("cannot write %s: %s; training goes on", self._path, error.strerror)

    def _append(self, sample: Sample) -> None:
        data = (encode(sample) + "\n").encode()
        if self._is_torn:
            data = b"\n" + data
        if self._descriptor is None:
            # it stays open: at each system call the thread has to wait for the interpreter anew
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._descriptor = os.open(self._path, flags, 0o666)
        self._is_torn = os.write(self._descriptor, data) < len(data)

    def _make_room(self) -> int:
        """Bytes of earlier attempts, after every other of their lines has gone if they are many."""
        if not self._path.is_file():
            return 0
        earlier = self._path.read_bytes()
        is_whole = earlier.endswith(b"\n") or not earlier
        lines = earlier.splitlines(keepends=True)
        if len(earlier) <= _EARLIER_BYTES and is_whole:
            return len(earlier)
        lines = lines[:: 1 if len(earlier) <= _EARLIER_BYTES else 2]
        if not lines[-1].endswith(b"\n"):
            lines[-1] += b"\n"
        self._replace(b"".join(lines))
        return sum(map(len, lines))

    def _rewrite(self) -> None:
        with self._path.open("rb") as file:
            earlier = file.read(self._earlier or 0)
        own = "".join(encode(sample) + "\n" for sample in self._kept.samples())
        self._replace(earlier + own.encode())
        self._is_torn = False

    def _replace(self, content: bytes) -> None:
        """Put the new file in the old one's place, whole or not at all."""
        self.close()
        with replacing(self._path) as temporary:
            temporary.write_bytes(content)
