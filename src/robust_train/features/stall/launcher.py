"""Watches an attempt's signs of life from the launcher, and ends an attempt that hangs.

Before the end, the stacks of its processes are written. Our own Python processes write theirs at a
signal, with faulthandler. py-spy writes those of others, if it is installed and may trace them.
With several GPUs, torch keeps a record of each rank's last collectives (NCCL's flight recorder). A
thread of torch polls a pipe once a second for a request to dump it, and needs no GIL for that
(``HeartbeatMonitor`` in ``ProcessGroupNCCL.cpp``).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from robust_train.children.interpreters import Interpreter
from robust_train.config.attempt import AttemptRequest
from robust_train.failures.stack import where_it_stands
from robust_train.features.stall.model import (
    SHORTEST_SECONDS,
    WARNING_SHARE,
    Pulse,
    StallKeys,
    Standstill,
    standstill,
    worth_keeping,
)
from robust_train.features.stall.record import Stalled, StallWarning
from robust_train.gpu.bounded import printed_by
from robust_train.gpu.inventory import close_session, read_inventory
from robust_train.gpu.processes import is_shared
from robust_train.host.linux import list_children
from robust_train.host.signals import DUMP_STACKS
from robust_train.launcher.hooks import End, InLauncher, Watch
from robust_train.model.attempt import Attempt
from robust_train.model.events import (
    CheckpointFailed,
    CheckpointSaved,
    EpochEnded,
    Event,
    MicroBatchChanged,
    PauseLearned,
    Progress,
    TrainingStarted,
    UserEvent,
)
from robust_train.model.failure import Clue, Evidence, Failure, FailureKind
from robust_train.readable import duration, shorten

log = logging.getLogger("robust_train")

_OF_THE_LOOP = (
    Progress,
    EpochEnded,
    CheckpointSaved,
    CheckpointFailed,
    MicroBatchChanged,
    UserEvent,
)
"""Once progress was reported, each of these counts as progress: the training loop sends it. Other
events may come from a thread that still runs when training hangs."""

_SHORTEST_TICK_LIMIT = 1.0
_LONGEST_TICK_LIMIT = 5.0
"""Bounds of the longest time between two ticks, in seconds. It follows from the stall limit. If
more time has passed, the launcher was suspended or the machine slept: the rest does not count."""
_LOOKS = 20  # how often the processes are looked at within the limit
# Since the last look, an attempt that is alive has used this much CPU time (a share of the time and
# a constant) or moved this many bytes, or its GPU is this busy now.
_CPU_SHARE = 0.02
_CPU_GRAIN_SECONDS = 0.02
_BYTES_PER_SECOND = 200_000
_GPU_PERCENT = 5
_STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


@dataclass(frozen=True)
class _Glance:
    """The trainer's processes at a moment."""

    at: float
    cpu_seconds: float
    # Bytes read and written: a download or a copy needs little CPU time.
    moved_bytes: int
    pids: set[int]
    stopped: int  # the number of stopped processes

    def shows_life_since(self, before: _Glance) -> bool:
        seconds = self.at - before.at
        computed = self.cpu_seconds - before.cpu_seconds
        moved = self.moved_bytes - before.moved_bytes
        return (
            self.pids != before.pids
            or computed >= _CPU_GRAIN_SECONDS + _CPU_SHARE * seconds
            or moved >= _BYTES_PER_SECOND * seconds
        )


class Stall(InLauncher):
    """Passes the longest pause so far to the watch, and makes ranks record their collectives."""

    def request(self, request: AttemptRequest, attempt: Attempt) -> AttemptRequest:
        """Return the request with the longest pause so far.

        If the attempt has several GPUs, it also starts NCCL's flight recorder, which shows the
        collectives that ranks wait for.
        """
        request = replace(request, longest_pause=self.job.state.longest_pause or 0.0)
        if self.job.plan.config.of(StallKeys).timeout_seconds == 0 or len(attempt.spec.gpus) < 2:
            return request
        recorder = nccl_variables(request.environ, request.run_dir, request.attempt)
        return replace(request, environ={**request.environ, **recorder})


class StallWatch(Watch):
    """Ends an attempt that hangs. In the launcher, :class:`.process.RunningAttempt` passes it each
    event and the news of output, and polls it."""

    def __init__(
        self, request: AttemptRequest, pids: Sequence[int], send: Callable[[Event], None]
    ) -> None:
        super().__init__(request, pids, send)
        self._request = request
        self._pids = pids
        self._on_event = send
        self._limit_seconds = request.config.of(StallKeys).timeout_seconds
        self._pulse = Pulse(longest=request.longest_pause)
        self._known = request.longest_pause
        self._ticked = time.monotonic()
        tick = (self._limit_seconds or SHORTEST_SECONDS) / 10
        self._longest_tick = min(max(tick, _SHORTEST_TICK_LIMIT), _LONGEST_TICK_LIMIT)
        self._next_look = 0.0
        self._glance: _Glance | None = None  # None after an event
        self._ended_for: Standstill | None = None
        self._is_suspended = self._has_warned = False

    def event(self, event: Event) -> None:
        """Take an event of the attempt as a sign of life."""
        self._let_time_pass()
        pulse = self._pulse
        has_begun = pulse.reported is not None
        if isinstance(event, _OF_THE_LOOP if has_begun else Progress):
            pulse = pulse.after_progress()
        elif isinstance(event, TrainingStarted) and not has_begun:
            pulse = replace(pulse, begun=pulse.now)
        self._pulse = replace(pulse, alive=pulse.now)
        self._is_suspended = False
        self._glance = None
        if worth_keeping(pulse.longest, self._known):
            self._known = pulse.longest
            self._on_event(PauseLearned(round(pulse.longest, 1)))

    def output(self) -> None:
        """Take what the attempt has printed as a sign of life."""
        self._let_time_pass()
        if self._glance is None or not self._glance.stopped:
            self._pulse = replace(self._pulse, alive=self._pulse.now)

    def poll(self, living: Mapping[int, Interpreter]) -> End | None:
        """End the attempt once it hangs, with the stacks of its processes on the disk."""
        hang = self.standstill()
        if hang is None:
            return None
        self._ended_for = hang
        return End(dump_stacks(self._request, living))

    def explain(self, stacks: str) -> Failure:
        """Record the standstill, and return it as the failure."""
        ended_for = self._ended_for
        assert ended_for is not None, "it has not ended the attempt"
        self._on_event(Stalled(round(ended_for.seconds, 1), stacks))
        where = where_it_stands(stacks)
        if where:
            where = f"; {where}"
        file = self._request.stacks_file
        return Failure(
            FailureKind.COMM,
            f"stalled: {ended_for.what} (stall_timeout_minutes){where}",
            Evidence(library="robust_train", clue=Clue.STALLED),
            (f"see what the threads were doing in {file}",) if stacks else (),
        )

    def close(self) -> None:
        """Remove the pipes through which ranks are asked for their collectives."""
        remove_nccl_pipes(self._request.run_dir)

    def standstill(self) -> Standstill | None:
        """Return the standstill if the attempt hangs, else None. Warns at half of the limit."""
        self._let_time_pass()
        hang = standstill(self._limit_seconds, self._pulse)
        if hang is None or self._ticked < self._next_look:
            return None
        self._next_look = self._ticked + hang.limit_seconds / _LOOKS
        self._look()
        hang = standstill(self._limit_seconds, self._pulse) or hang
        self._warn(hang)
        return hang if hang.share >= 1 and not self._is_suspended else None

    def _let_time_pass(self) -> None:
        now = time.monotonic()
        if not self._is_suspended:
            passed = min(now - self._ticked, self._longest_tick)
            self._pulse = replace(self._pulse, now=self._pulse.now + passed)
        self._ticked = now

    def _look(self) -> None:
        before = self._glance
        now = self._take_glance()
        was_suspended = self._is_suspended
        self._glance = now
        self._is_suspended = 0 < len(now.pids) == now.stopped
        if self._is_suspended and not was_suspended:
            log.info("the attempt is stopped by a signal: this time does not count as a stall")
        if now.stopped or before is None:
            return
        if now.shows_life_since(before) or self._gpu_is_busy():
            self._pulse = replace(self._pulse, alive=self._pulse.now)

    def _take_glance(self) -> _Glance:
        cpu_seconds = 0.0
        moved_bytes = 0
        stopped = 0
        pids = set[int]()
        for process in _trainers_processes(self._pids, self._request):
            with contextlib.suppress(psutil.Error), process.oneshot():
                status = process.status()
                if status == psutil.STATUS_ZOMBIE:
                    continue
                # Collected children count too, because a shell starts many short processes.
                cpu_seconds += sum(process.cpu_times()[:4])
                stopped += status in _STOPPED
                pids.add(process.pid)
                moved_bytes += bytes_moved_by(process)
        return _Glance(time.monotonic(), cpu_seconds, moved_bytes, pids, stopped)

    def _gpu_is_busy(self) -> bool:
        uuids = {gpu.uuid for gpu in self._request.spec.gpus}
        if not uuids:
            return False
        gpus = read_inventory().gpus
        close_session()  # an open one blocks a reset of any GPU
        ours = {os.getpid()} | {process.pid for process in list_children(recursive=True)}
        return any(
            (gpu.utilization_percent or 0) >= _GPU_PERCENT and not is_shared(gpu, ours)
            for gpu in gpus
            if gpu.uuid in uuids
        )

    def _warn(self, hang: Standstill) -> None:
        if hang.share < WARNING_SHARE:
            if self._has_warned:
                log.info("the attempt continues")
            self._has_warned = False
        elif hang.share < 1 and not (self._has_warned or self._is_suspended):
            self._has_warned = True
            log.warning(
                "%s: after %s (stall_timeout_minutes) the attempt is ended, and another one "
                "resumes from its last checkpoint",
                hang.what,
                duration(hang.limit_seconds),
            )
            self._on_event(StallWarning(round(hang.seconds, 1), round(hang.limit_seconds, 1)))


def bytes_moved_by(process: psutil.Process) -> int:
    """Return the bytes that a process has read and written, or 0 if the kernel does not count."""
    with contextlib.suppress(psutil.Error, AttributeError, RuntimeError, ValueError):
        figures = process.io_counters()
        return figures.read_chars + figures.write_chars
    return 0


def _trainers_processes(pids: Sequence[int], request: AttemptRequest) -> list[psutil.Process]:
    """Return the processes that train, without the process that only supervises a script."""
    processes = []
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            if not request.config.traits.is_program:
                processes.append(process)
            processes += process.children(recursive=True)
    return processes


# --- the stacks of an attempt that hangs --------------------------------------------------------

_MOST_PROCESSES = 64
_PY_SPY_SECONDS = 3.0
_ALL_SECONDS = 10.0
_OWN_STACKS_SECONDS = 1.0
_OF_A_RANK_SECONDS = 0.3
_NCCL_DUMP_SECONDS = 5.0


def dump_stacks(
    request: AttemptRequest,
    interpreters: Mapping[int, Interpreter],  # the living interpreters, by rank
) -> float:
    """Write the stacks of an attempt's processes.

    Returns:
        The seconds that the processes need to write their own.
    """
    has_nccl = _request_nccl_dumps(request)
    until = time.monotonic() + _ALL_SECONDS
    pids = [interpreter.pid for interpreter in interpreters.values()]
    by_faulthandler = {} if request.config.traits.is_program else interpreters
    silent = [
        process
        for process in _trainers_processes(pids, request)
        if not by_faulthandler or process.pid not in pids or _status(process) in _STOPPED
    ]
    with contextlib.suppress(OSError), request.stacks_file.open("a", 1) as file:
        for process in silent[:_MOST_PROCESSES]:
            with contextlib.suppress(psutil.Error):
                command = shlex.join(process.cmdline())
                if not command:
                    command = process.name()
                command = shorten(command, 100)
                print(f"process {process.pid} ({command}, {_status(process)})", file=file)
                if time.monotonic() < until:
                    file.writelines(f"{line}\n" for line in _threads(process))
                print(file=file)
        for rank, interpreter in by_faulthandler.items():
            if request.ranks > 1:
                pid = interpreter.pid
                status = _status(psutil.Process(pid))
                print(f"rank {rank} (process {pid}, {status})", file=file)
            interpreter.signal(DUMP_STACKS)
            # They write in turn, each below its heading. A stopped process writes nothing.
            if request.ranks > 1:
                time.sleep(_OF_A_RANK_SECONDS)
    return _NCCL_DUMP_SECONDS if has_nccl else _OWN_STACKS_SECONDS


def _status(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return process.status()
    return "gone"


def _threads(process: psutil.Process) -> Iterator[str]:
    """Yield a process's threads in faulthandler's form, or nothing if py-spy finds none."""
    beside = str(Path(sys.executable).parent)
    spy = shutil.which("py-spy")
    if spy is None:
        spy = shutil.which("py-spy", path=beside)
    if spy is None:
        return
    command = [spy, "dump", "--json", "--pid", str(process.pid)]
    if _status(process) in _STOPPED:  # it cannot be paused
        command.append("--nonblocking")
    try:
        for thread in json.loads(printed_by(command, _PY_SPY_SECONDS) or b"[]"):
            is_main = thread["os_thread_id"] == process.pid
            name = "MainThread" if is_main else thread["thread_name"]
            yield f"Thread {thread['os_thread_id']} {name} (most recent call first):"
            for frame in thread["frames"]:
                yield f'  File "{frame["filename"]}", line {frame["line"]} in {frame["name"]}'
    except (ValueError, TypeError, KeyError):
        return


# --- NCCL's flight recorder -----------------------------------------------------------------------

_FILES = (
    "TORCH_NCCL_DEBUG_INFO_PIPE_FILE",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
    "TORCH_FR_DUMP_TEMP_FILE",
)
# Recent versions record anyway. Their record has this size.
_NEWER_SIZE = "TORCH_FR_BUFFER_SIZE"
_RECORD = {"TORCH_NCCL_TRACE_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}


def nccl_variables(environ: Mapping[str, str], run_dir: Path, attempt: int) -> dict[str, str]:
    """Return variables with which each rank dumps to ``attempt-<n>.nccl-<rank>`` on request.

    torch dumps there at its own time-out as well. Empty if the user has set any of them, or if the
    disk has no pipes, which would end the ranks.
    """
    stem = str(run_dir.absolute() / f"attempt-{attempt}.nccl-")
    variables = {name: value for name, value in _RECORD.items() if name not in environ}
    if _NEWER_SIZE in environ:
        variables.pop("TORCH_NCCL_TRACE_BUFFER_SIZE", None)
    with contextlib.suppress(OSError):
        probe = f"{stem}.pipe"
        os.mkfifo(probe)
        os.unlink(probe)
        if not any(name in environ for name in _FILES):
            return variables | dict.fromkeys(_FILES, stem)
    return {}


def _request_nccl_dumps(request: AttemptRequest) -> bool:
    """Ask every rank that uses NCCL for its dump, and return whether any rank does."""
    has_requested = False
    for pipe in request.run_dir.glob(f"attempt-{request.attempt}.nccl-*.pipe"):
        with contextlib.suppress(OSError):  # no one reads it
            with open(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK), "wb") as writer:
                writer.write(b"1")
            has_requested = True
    return has_requested


def remove_nccl_pipes(run_dir: Path) -> None:
    """Remove the pipes of the attempt that has ended, and of those whose launcher was killed."""
    for pipe in run_dir.glob("attempt-*.nccl-*.pipe"):
        with contextlib.suppress(OSError):
            pipe.unlink()
