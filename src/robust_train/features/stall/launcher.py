"""Watches an attempt's signs of life in the launcher, and ends an attempt that hangs.

Before the end, the stacks of its processes are written. Interpreters that robust-train started
write their own stacks at a signal, with faulthandler. py-spy writes the stacks of other processes,
if it is installed and may trace them. With several GPUs, torch records each rank's last collectives
(NCCL's flight recorder). A thread of torch polls a pipe once a second for a request to dump that
record, and needs no GIL for that (``HeartbeatMonitor`` in ``ProcessGroupNCCL.cpp``).
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
    measure_standstill,
    should_record,
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
"""Events that the training loop sends. Once progress was reported, each of them counts as progress.
Other events may come from a thread that still runs when training hangs."""

_SHORTEST_TICK_LIMIT = 1.0
_LONGEST_TICK_LIMIT = 5.0
"""Bounds of the longest time between two ticks that counts, in seconds. The value depends on the
stall limit. If more time has passed, the launcher was suspended or the machine slept."""
_LOOKS = 20  # how many times the processes are checked within the limit
# An attempt is alive if it used this much CPU time (a share of the time, and a constant) or moved
# this many bytes since the last look, or if its GPU is this busy now.
_CPU_SHARE = 0.02
_CPU_GRAIN_SECONDS = 0.02
_BYTES_PER_SECOND = 200_000
_GPU_PERCENT = 5
_STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


@dataclass(frozen=True)
class _Glance:
    """The state of the trainer's processes at one moment."""

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
    """Passes the job's longest pause to the watch, and makes ranks record their collectives."""

    def request(self, request: AttemptRequest, attempt: Attempt) -> AttemptRequest:
        """Return the request with the longest pause in the job's earlier attempts.

        If the attempt has several GPUs, the request also starts NCCL's flight recorder, which shows
        the collectives that ranks wait for.
        """
        request = replace(request, longest_pause=self.job.state.longest_pause or 0.0)
        if self.job.plan.config.of(StallKeys).timeout_seconds == 0 or len(attempt.spec.gpus) < 2:
            return request
        recorder = nccl_variables(request.environ, request.run_dir, request.attempt)
        return replace(request, environ={**request.environ, **recorder})


class StallWatch(Watch):
    """Detects that an attempt hangs. In the launcher, :class:`.process.RunningAttempt` passes each
    event to the watch, notifies it of output, and polls it."""

    def __init__(
        self, request: AttemptRequest, pids: Sequence[int], send: Callable[[Event], None]
    ) -> None:
        super().__init__(request, pids, send)
        self._request = request
        self._pids = pids
        self._send = send
        self._limit_seconds = request.config.of(StallKeys).timeout_seconds
        self._pulse = Pulse(longest=request.longest_pause)
        self._recorded_pause = request.longest_pause  # the longest pause in the job's records
        self._ticked = time.monotonic()
        tick = (self._limit_seconds or SHORTEST_SECONDS) / 10
        self._longest_tick = min(max(tick, _SHORTEST_TICK_LIMIT), _LONGEST_TICK_LIMIT)
        self._next_look = 0.0
        self._glance: _Glance | None = None  # the last look, None after an event
        self._ended_for: Standstill | None = None  # the standstill for which the attempt ended
        self._is_suspended = False  # whether all its processes are stopped by a signal
        self._has_warned = False

    def event(self, event: Event) -> None:
        """Count an event of the attempt as a sign of life, and some events as progress."""
        self._let_time_pass()
        pulse = self._pulse
        has_begun = pulse.reported is not None
        counts_as_progress = _OF_THE_LOOP if has_begun else Progress
        if isinstance(event, counts_as_progress):
            pulse = pulse.after_progress()
        elif isinstance(event, TrainingStarted) and not has_begun:
            pulse = replace(pulse, begun=pulse.now)
        self._pulse = replace(pulse, alive=pulse.now)
        self._is_suspended = False
        self._glance = None
        if should_record(pulse.longest, self._recorded_pause):
            self._recorded_pause = pulse.longest
            self._send(PauseLearned(round(pulse.longest, 1)))

    def output(self) -> None:
        """Count output of the attempt as a sign of life."""
        self._let_time_pass()
        if self._glance is None or not self._glance.stopped:
            self._pulse = replace(self._pulse, alive=self._pulse.now)

    def poll(self, living: Mapping[int, Interpreter]) -> End | None:
        """Write the stacks of the attempt's processes and ask for its end, once it hangs."""
        hang = self.detect_hang()
        if hang is None:
            return None
        self._ended_for = hang
        return End(dump_stacks(self._request, living))

    def explain(self, stacks: str) -> Failure:
        """Record the standstill, and return it as the failure."""
        ended_for = self._ended_for
        assert ended_for is not None, "the watch has not ended the attempt"
        self._send(Stalled(round(ended_for.seconds, 1), stacks))
        message = f"stalled: {ended_for.what} (stall_timeout_minutes)"
        where = where_it_stands(stacks)
        if where:
            message += f"; {where}"
        advice: tuple[str, ...] = ()
        if stacks:
            advice = (f"see in {self._request.stacks_file} what the threads were doing",)
        evidence = Evidence(library="robust_train", clue=Clue.STALLED)
        return Failure(FailureKind.COMM, message, evidence, advice)

    def close(self) -> None:
        """Remove the pipes that request a rank's record of collectives."""
        remove_nccl_pipes(self._request.run_dir)

    def detect_hang(self) -> Standstill | None:
        """Return the standstill if the attempt hangs, otherwise None. Warns at half of the limit.

        The processes are checked only a few times within the limit, because a check takes longer
        than a tick.
        """
        self._let_time_pass()
        measured = measure_standstill(self._limit_seconds, self._pulse)
        if measured is None or self._ticked < self._next_look:
            return None
        self._next_look = self._ticked + measured.limit_seconds / _LOOKS
        self._look()
        # The check may have found a sign of life.
        measured = measure_standstill(self._limit_seconds, self._pulse) or measured
        self._warn(measured)
        is_hang = measured.share >= 1 and not self._is_suspended
        return measured if is_hang else None

    def _let_time_pass(self) -> None:
        """Advance the pulse's clock, unless the attempt is suspended."""
        now = time.monotonic()
        if not self._is_suspended:
            passed = min(now - self._ticked, self._longest_tick)
            self._pulse = replace(self._pulse, now=self._pulse.now + passed)
        self._ticked = now

    def _look(self) -> None:
        """Check the attempt's processes and GPUs for signs of life."""
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
        close_session()  # An open session blocks a reset of any GPU.
        ours = {os.getpid()} | {process.pid for process in list_children(recursive=True)}
        for gpu in gpus:
            is_busy = (gpu.utilization_percent or 0) >= _GPU_PERCENT
            if gpu.uuid in uuids and is_busy and not is_shared(gpu, ours):
                return True
        return False

    def _warn(self, measured: Standstill) -> None:
        """Warn once at half of the limit, and log when the attempt continues."""
        if measured.share < WARNING_SHARE:
            if self._has_warned:
                log.info("the attempt continues")
            self._has_warned = False
        elif measured.share < 1 and not (self._has_warned or self._is_suspended):
            self._has_warned = True
            log.warning(
                "%s: after %s (stall_timeout_minutes) the attempt is ended, and another attempt "
                "resumes from its last checkpoint",
                measured.what,
                duration(measured.limit_seconds),
            )
            seconds = round(measured.seconds, 1)
            self._send(StallWarning(seconds, round(measured.limit_seconds, 1)))


def bytes_moved_by(process: psutil.Process) -> int:
    """Return the bytes that a process has read and written, 0 if the kernel does not count them."""
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


# --- the stacks of an attempt that hangs ---

_MOST_PROCESSES = 64
_PY_SPY_SECONDS = 3.0  # the time limit of a call of py-spy
_ALL_SECONDS = 10.0  # the time after which py-spy is no longer called
_OWN_STACKS_SECONDS = 1.0  # the time that faulthandler needs
_RANK_SECONDS = 0.3  # the pause between two ranks
_NCCL_DUMP_SECONDS = 5.0


def dump_stacks(
    request: AttemptRequest,
    interpreters: Mapping[int, Interpreter],  # the living interpreters, by rank
) -> float:
    """Write the stacks of an attempt's processes into its file for stacks.

    Returns:
        The seconds that the processes need to finish writing their own stacks.
    """
    has_nccl = _request_nccl_dumps(request)
    until = time.monotonic() + _ALL_SECONDS
    pids = [interpreter.pid for interpreter in interpreters.values()]
    by_faulthandler = {} if request.config.traits.is_program else interpreters
    # Processes that cannot write their own stacks.
    silent: list[psutil.Process] = []
    for process in _trainers_processes(pids, request):
        has_faulthandler = bool(by_faulthandler) and process.pid in pids
        if not has_faulthandler or _status(process) in _STOPPED:
            silent.append(process)
    with contextlib.suppress(OSError), request.stacks_file.open("a", 1) as file:
        for process in silent[:_MOST_PROCESSES]:
            with contextlib.suppress(psutil.Error):
                print(_heading_of(process), file=file)
                if time.monotonic() < until:
                    file.writelines(f"{line}\n" for line in _threads_by_py_spy(process))
                print(file=file)
        for rank, interpreter in by_faulthandler.items():
            if request.ranks > 1:
                pid = interpreter.pid
                status = _status(psutil.Process(pid))
                print(f"rank {rank} (process {pid}, {status})", file=file)
            interpreter.signal(DUMP_STACKS)
            # The ranks write in turn, each below its heading.
            if request.ranks > 1:
                time.sleep(_RANK_SECONDS)
    return _NCCL_DUMP_SECONDS if has_nccl else _OWN_STACKS_SECONDS


def _heading_of(process: psutil.Process) -> str:
    """Return a line with a process's number, command and status. `failures.stack` parses it."""
    command = shlex.join(process.cmdline())
    if not command:
        command = process.name()
    return f"process {process.pid} ({shorten(command, 100)}, {_status(process)})"


def _status(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return process.status()
    return "gone"


def _threads_by_py_spy(process: psutil.Process) -> Iterator[str]:
    """Yield a process's threads in faulthandler's format, or nothing if py-spy fails."""
    spy = shutil.which("py-spy")
    if spy is None:
        spy = shutil.which("py-spy", path=str(Path(sys.executable).parent))
    if spy is None:
        return
    command = [spy, "dump", "--json", "--pid", str(process.pid)]
    if _status(process) in _STOPPED:  # py-spy cannot pause it.
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


# --- NCCL's flight recorder ---

# Variables with the start of the names of pipes and files.
_FILES = (
    "TORCH_NCCL_DEBUG_INFO_PIPE_FILE",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
    "TORCH_FR_DUMP_TEMP_FILE",
)
_SIZE = "TORCH_NCCL_TRACE_BUFFER_SIZE"
# The size's name in recent versions, which record without a setting.
_NEWER_SIZE = "TORCH_FR_BUFFER_SIZE"
_RECORD = {_SIZE: "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}


def nccl_variables(environ: Mapping[str, str], run_dir: Path, attempt: int) -> dict[str, str]:
    """Return variables with which each rank writes its record to ``attempt-<n>.nccl-<rank>``, on
    request and at torch's own time-out.

    Empty if the user has set any of the files, or if the file system does not support pipes,
    because torch would then end the ranks.
    """
    if any(name in environ for name in _FILES):
        return {}
    stem = str(run_dir.absolute() / f"attempt-{attempt}.nccl-")
    probe = f"{stem}.pipe"
    try:
        os.mkfifo(probe)
        os.unlink(probe)
    except OSError:
        return {}
    variables = {name: value for name, value in _RECORD.items() if name not in environ}
    if _NEWER_SIZE in environ:
        variables.pop(_SIZE, None)
    return variables | dict.fromkeys(_FILES, stem)


def _request_nccl_dumps(request: AttemptRequest) -> bool:
    """Request the record of every rank that uses NCCL, and return whether any rank does."""
    has_requested = False
    for pipe in request.run_dir.glob(f"attempt-{request.attempt}.nccl-*.pipe"):
        with contextlib.suppress(OSError):  # The rank has ended.
            with open(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK), "wb") as writer:
                writer.write(b"1")
            has_requested = True
    return has_requested


def remove_nccl_pipes(run_dir: Path) -> None:
    """Remove the pipes of the attempt that has ended, and of attempts whose launcher was killed."""
    for pipe in run_dir.glob("attempt-*.nccl-*.pipe"):
        with contextlib.suppress(OSError):
            pipe.unlink()
