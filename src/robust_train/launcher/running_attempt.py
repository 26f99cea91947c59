"""Watches the interpreters of one attempt from its start to its end.

:class:`.process.ProcessExecutor` calls :meth:`RunningAttempt.run` in the launcher's process. At
least twice a second, it passes on the attempt's events, handles signals, and polls the features'
watches. It sets a time to kill the attempt when its processes have to end: after a signal, after
the trainer's report, or because a watch or another rank demands it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from robust_train.children.interpreters import Interpreter, Interpreters
from robust_train.config.attempt import AttemptRequest, Begin
from robust_train.failures.memory_messages import find_last_shortage
from robust_train.host.linux import TICK_SECONDS, wait_until_readable
from robust_train.host.memory import OomKillWatch
from robust_train.host.screen import show_waiting
from robust_train.host.signals import SignalWatch, choose_stop_signal
from robust_train.host.votes import STOP, Votes
from robust_train.launcher.hooks import Watch
from robust_train.launcher.rank_ends import RankEnd, merge_ends
from robust_train.launcher.script_output import strip_escapes
from robust_train.model.events import CheckpointSaved, Event, Failed, Finished
from robust_train.model.exit import Exit
from robust_train.model.feature import load_named
from robust_train.readable import duration, shorten

log = logging.getLogger("robust_train")

# How long a process may take to end after its trainer returned. Exit handlers may upload results.
AFTER_FINISHED_SECONDS = 300.0
# How long a process may take to end after its attempt reported a failure.
AFTER_FAILURE_SECONDS = 10.0
# How long the other ranks get after a failure, to report an error that explains more.
_LAST_REPORT_SECONDS = 1.0
# Time between SIGTERM and SIGKILL for an attempt that hangs on a GPU of MPS.
_MPS_GRACE_SECONDS = 30.0
# How long after SIGKILL a process that still exists is left behind, because it hangs in the kernel.
_AFTER_KILL_SECONDS = 8.0
# How long to wait for a signal that reached the attempt before it reached the launcher.
_SIGNAL_SECONDS = 0.5
# How many events are read at once, so that a burst of events delays neither signals nor requests.
_MOST_EVENTS = 1000
_LONGEST_BETWEEN_CHECKS_SECONDS = 60.0
# How much of a script's log is searched for an earlier lack of memory, from its end.
_SEARCHED_BYTES = 1 << 20
# How much of an attempt's log is searched for torch's warning that CUDA does not start.
_HEAD_BYTES = 1 << 16
_CUDA_WARNING = re.compile(r"UserWarning: CUDA initialization: (.*)")
_LONGEST_WARNING = 300  # in characters


class RunningAttempt:
    """Runs an attempt in one interpreter, or in one interpreter per rank.

    Args:
        interpreters: all interpreters of the job.
        processes: the interpreters of this attempt, in the order of their ranks.
        request: the request for the attempt.
        on_event: called with each event. The ends of several ranks are merged into one event.
    """

    def __init__(
        self,
        interpreters: Interpreters,
        processes: Sequence[Interpreter],
        request: AttemptRequest,
        on_event: Callable[[Event], None],
    ) -> None:
        self._ended_by: Watch | None = None
        self._interpreters = interpreters
        self._processes = processes
        self._request = request
        self._on_event = on_event
        self._grace_seconds = request.config.stop_grace_seconds
        self._was_hurried = False
        # Whether the trainer saves checkpoints, as far as this or an earlier attempt has shown.
        self._saves = request.resume_checkpoint is not None
        self._oom_kills = OomKillWatch()
        interpreters.pump.start_log(request.log_file)
        pids = [interpreter.pid for interpreter in processes]
        self._watches: list[Watch] = [
            load_named(name)(request, pids, on_event) for name in request.watches
        ]
        self._votes = Votes(request.ranks) if request.ranks > 1 else None
        self._ends = [RankEnd(rank, pid) for rank, pid in enumerate(pids)]
        # When the attempt will be killed, or killed again, by the monotonic clock.
        self._kill_at = math.inf
        self._killed_at = math.inf  # when it was first killed
        self._is_stopping = False
        self._limits_others = False  # whether the other ranks have a time limit because one ended
        self._was_warned = False
        self._started = time.monotonic()
        self._check_at = self._started + TICK_SECONDS
        # Signals whose message is still to be logged: a signal handler must not log.
        self._unannounced: list[int] = []

    def run(
        self,
        signals: SignalWatch,
        # File descriptors that the attempt and all its children keep open.
        hold: Sequence[int],
        tick: Callable[[], None],  # called at least twice a second
    ) -> Exit:
        """Run the attempt to its end. The exit's ``pid`` is None if its process hangs.

        The first signal asks the attempt to stop, the second kills it. The attempt is also killed
        if it does not stop in time, if a watch ends it, or if its process does not end after its
        report.
        """
        try:
            with signals.hand_signals_to(self._on_signal):
                signals.raise_if_received()
                self._send_request(hold)
                while not self._poll():
                    show_waiting()
                    tick()
                return self._end(signals)
        finally:
            if self._votes is not None:
                self._votes.close()

    def _send_request(self, hold: Sequence[int]) -> None:
        """Send each interpreter its part of the request."""
        if self._votes is None:
            self._processes[0].begin(Begin(self._request), hold)
            return
        # The launcher binds the port for rank 0, so that no other process can take it first.
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            for rank, interpreter in enumerate(self._processes):
                descriptors = [self._votes.descriptor]
                if rank == 0:
                    descriptors.append(listener.fileno())
                begin = Begin(self._request, rank, port)
                interpreter.begin(begin, descriptors + list(hold))

    def _poll(self) -> bool:
        """Wait for something to happen, handle it, and return whether the attempt is over."""
        interpreters = self._interpreters
        processes = self._processes
        running = [
            interpreter.channel.fileno() for interpreter in processes if interpreter.is_running
        ]
        seconds = min(max(self._kill_at - time.monotonic(), 0.0), TICK_SECONDS)
        wait_until_readable(interpreters.pump.descriptors + running, seconds)
        while self._unannounced:
            log.info("%s", self._describe_stop(self._unannounced.pop()))
        now = time.monotonic()
        self._kill_if_due(now)
        is_given_up = now >= self._killed_at + _AFTER_KILL_SECONDS
        # A process sends its last events before it ends. So if its end is read first, all of its
        # events can be read after that.
        if interpreters.poll():
            for watch in self._watches:
                watch.output()
        for rank, interpreter in enumerate(processes):
            most_events = _MOST_EVENTS
            if is_given_up or not interpreter.is_running:
                most_events = sys.maxsize
            self._read_events(rank, most_events)
            if not interpreter.is_running and self._ends[rank].returncode is None:
                self._record_end(rank, interpreter)
        if self._votes is not None:
            self._limit_other_ranks()
        if now >= self._check_at:
            self._check_processes(now)
        if is_given_up or not any(interpreter.is_running for interpreter in processes):
            return True
        if self._kill_at == math.inf:
            self._poll_watches()
        return False

    def _kill_if_due(self, now: float) -> None:
        """Send SIGKILL once the attempt's time is over, and again each second after that."""
        if now < self._kill_at:
            return
        if self._killed_at == math.inf and not self._is_stopping:
            self._warn_of_exit_handlers()
        self._killed_at = min(self._killed_at, now)
        self._kill_at = now + 1.0
        self._signal_all(signal.SIGKILL)

    def _record_end(self, rank: int, interpreter: Interpreter) -> None:
        """Record that a rank's process has ended."""
        end = self._ends[rank]
        at = end.at
        if not at:
            at = time.monotonic()
        self._ends[rank] = replace(
            end, returncode=interpreter.returncode, at=at, was_killed=self._killed_at < math.inf
        )

    def _poll_watches(self) -> None:
        """End the attempt if a watch demands that."""
        living = {
            rank: interpreter
            for rank, interpreter in enumerate(self._processes)
            if interpreter.is_running
        }
        for watch in self._watches:
            end = watch.poll(living)
            if end is not None:
                self._ended_by = watch
                self._kill_gently(end.kill_in_seconds)
                return

    def _kill_gently(self, seconds: float) -> None:
        """Kill the attempt in this many seconds. On a GPU of MPS, send SIGTERM first."""
        if any(gpu.mps for gpu in self._request.spec.gpus):
            # SIGKILL while a kernel runs may break the MPS server for its other clients.
            self._signal_all(signal.SIGTERM)
            seconds = max(seconds, _MPS_GRACE_SECONDS)
        self._kill_in(seconds)

    def _read_events(self, rank: int, most: int) -> None:
        """Pass on a rank's events. After the rank's last event its process has to end."""
        for event in self._processes[rank].read(most):
            self._saves |= isinstance(event, CheckpointSaved)
            for watch in self._watches:
                watch.event(event)
            if isinstance(event, (Finished, Failed)):
                end = self._ends[rank]
                self._ends[rank] = replace(end, ending=event, at=event.at)
                if self._votes is not None:
                    continue
                seconds = AFTER_FINISHED_SECONDS
                if isinstance(event, Failed):
                    seconds = AFTER_FAILURE_SECONDS
                self._kill_in(seconds)
            self._on_event(event)

    def _check_processes(self, now: float) -> None:
        """Collect orphans and look for a warning about CUDA, at growing intervals."""
        if not self._was_warned and self._request.spec.gpus:
            self._warn_of_cuda()
        self._interpreters.collect_orphans()
        pause = max(now - self._started, TICK_SECONDS)
        self._check_at = now + min(pause, _LONGEST_BETWEEN_CHECKS_SECONDS)

    def _warn_of_cuda(self) -> None:
        """Warn if the log shows that CUDA did not start, because many programs then use the CPU."""
        request = self._request
        head = b""
        with contextlib.suppress(OSError), request.log_file.open("rb") as file:
            head = file.read(_HEAD_BYTES)
        warning = _CUDA_WARNING.search(head.decode(errors="replace"))
        if warning:
            self._was_warned = True
            log.warning(
                "CUDA does not work for this attempt, which may train on the CPU although it has "
                "%s: %s",
                request.spec.device,
                shorten(warning[1].strip(), _LONGEST_WARNING),
            )

    def _warn_of_exit_handlers(self) -> None:
        """Warn that a trainer has returned and its processes are about to be killed."""
        if all(isinstance(end.ending, Finished) for end in self._ends):
            log.warning(
                "the trainer has returned, but its process has not ended in %s: killing it, so "
                "the work of its exit handlers and threads is lost",
                duration(AFTER_FINISHED_SECONDS),
            )

    def _limit_other_ranks(self) -> None:
        """Set a time limit once a rank has failed, or once all ranks have reported their end."""
        if all(end.returncode is not None for end in self._ends[1:]):
            # Rank 0 keeps the store that the other ranks used, and waits for this end of file.
            with contextlib.suppress(OSError):
                self._processes[0].channel.shutdown(socket.SHUT_WR)
        if self._limits_others:
            return
        failed = [end for end in self._ends if end.is_failure]
        if failed:
            seconds = _LAST_REPORT_SECONDS
            if all(end.others_know for end in failed):
                seconds = self._grace_seconds
        elif all(end.is_over for end in self._ends):
            seconds = AFTER_FINISHED_SECONDS
        else:
            return
        self._limits_others = True
        self._kill_in(seconds)

    def _end(self, signals: SignalWatch) -> Exit:
        """Kill the attempt's remaining processes, and return how the attempt ended."""
        processes = self._processes
        request = self._request
        ended_by = self._ended_by
        for interpreter in processes:
            self._interpreters.forget(interpreter)
        left = self._interpreters.kill_leftovers()
        pump = self._interpreters.pump
        pump.drain()
        pump.end_log()
        if self._votes is not None:
            event = merge_ends(self._ends)
            if event is not None:
                self._on_event(event)
        is_hung = any(interpreter.is_running for interpreter in processes)
        if is_hung:
            log.warning("the attempt's process hangs in the kernel; it is left behind")
        elif left:
            log.warning("processes %s of the attempt cannot be ended", left)
        for watch in self._watches:
            watch.close()
        if any(end.was_stopped for end in self._ends):
            _await_signal(signals)
        pid: int | None = processes[0].pid
        returncode = processes[0].returncode
        shortage = _find_shortage(request) if returncode else ""
        if is_hung:
            pid = None
            returncode = -signal.SIGKILL
        stacks = self._take_stacks()
        return Exit(
            returncode=returncode,
            pid=pid,
            max_resident_bytes=max(interpreter.max_resident_bytes for interpreter in processes),
            output=pump.tail,
            shortage=shortage,
            stacks=stacks,
            failure=None if ended_by is None else ended_by.explain(stacks),
            was_stopped=bool(signals.received),
            was_hurried=self._was_hurried,
            oom_killed=self._oom_kills.has_killed(),
        )

    def _take_stacks(self) -> str:
        """Return the stacks that a crash or a stall left in a file. Remove an empty file."""
        stacks = ""
        file = self._request.stacks_file
        with contextlib.suppress(OSError):
            if self._request.config.traits.raises or self._ended_by is not None:
                stacks = file.read_text(errors="replace")
            if not stacks:
                file.unlink()
        return stacks

    def _on_signal(self, signum: int) -> None:
        """Ask the attempt to stop at the first signal, and kill it at the second."""
        if self._is_stopping:
            self._was_hurried = True
            self._kill_in(0.0)
            return
        self._is_stopping = True
        self._unannounced.append(signum)
        self._kill_in(self._grace_seconds)
        if self._votes is not None:
            self._votes.raise_flag(STOP)
        # An attempt that has not started yet postpones the signal until it can handle it.
        self._signal_all(choose_stop_signal(os.environ))
        self._signal_all(signal.SIGCONT)  # otherwise a suspended process would not get the signal

    def _describe_stop(self, signum: int) -> str:
        """Return the message about a stop that this signal requested."""
        config = self._request.config
        # The message does not promise a checkpoint that may not come.
        action = "the trainer is asked to end"
        if config.traits.is_program:
            action = f"SIG{config.trainer.stop_signal} to the script"
        elif self._saves:
            action = "saving a checkpoint"
        again = f"send {signal.Signals(signum).name}"
        if signum == signal.SIGINT:
            again = "press Ctrl-C"
        return f"stopping: {action}, at most {self._grace_seconds:g} s; {again} again to kill"

    def _kill_in(self, seconds: float) -> None:
        """Kill the attempt in this many seconds, unless an earlier time is set."""
        self._kill_at = min(self._kill_at, time.monotonic() + seconds)

    def _signal_all(self, signum: int) -> None:
        for interpreter in self._processes:
            interpreter.signal(signum)


def _await_signal(signals: SignalWatch) -> None:
    """Wait a moment for a signal to the launcher.

    If someone stopped all processes, the signal may have reached the attempt first.
    """
    until = time.monotonic() + _SIGNAL_SECONDS
    while not signals.received and time.monotonic() < until:
        time.sleep(0.02)


def _find_shortage(request: AttemptRequest) -> str:
    """Return the last lack of memory that a script's log reports, empty if it reports none.

    The log is searched far back, because the allocator's tables may follow the report.
    """
    if request.config.traits.raises:
        return ""
    try:
        with request.log_file.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - _SEARCHED_BYTES, 0))
            log_end = file.read().decode(errors="replace")
    except OSError:
        return ""
    return find_last_shortage(strip_escapes(log_end))
