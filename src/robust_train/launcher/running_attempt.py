"""One attempt while it runs, from the launcher's side: its ranks, signals, time and end."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from robust_train.config.attempt import AttemptRequest, Begin
from robust_train.host.screen import show_waiting
from robust_train.host.signals import DUMP_STACKS, SignalWatch, stop_signal
from robust_train.host.votes import STOP, Votes
from robust_train.host.waiting import TICK_SECONDS, readable
from robust_train.launcher.ending import RankEnd, event_of
from robust_train.launcher.interpreters import Interpreter, Interpreters
from robust_train.launcher.stall import Standstill
from robust_train.launcher.stall_watch import StallWatch, dump_stacks
from robust_train.model.attempt import Exit
from robust_train.model.events import Event, Failed, Finished

log = logging.getLogger("robust_train")

AFTER_FAILURE_SECONDS = 10.0
"""How long the process of an attempt that has reported its failure may take to end."""

_MOST_EVENTS = 1000
_LAST_REPORT_SECONDS = 1.0
"""Time of the other ranks after a failure: for a report of their own that explains more."""
_AFTER_KILL_SECONDS = 8.0


class RunningAttempt:
    """Runs one attempt in one interpreter, or in one for each rank.

    Args:
        interpreters: of the job.
        processes: those that run this attempt, in the order of their ranks.
        on_event: called with each event; with several ranks with one event of the end.

    Attributes:
        stalled: why it was killed, if it hung.
    """

    def __init__(
        self,
        interpreters: Interpreters,
        processes: Sequence[Interpreter],
        request: AttemptRequest,
        on_event: Callable[[Event], None],
    ) -> None:
        self.stalled: Standstill | None = None
        self._interpreters = interpreters
        self._processes = processes
        self._request = request
        self._on_event = on_event
        self._grace_seconds = request.config.stop_grace_seconds
        pids = [one.pid for one in processes]
        self._watch = StallWatch(request, pids, on_event)
        self._votes = Votes(request.ranks) if request.ranks > 1 else None
        self._ends = [RankEnd(rank, pid) for rank, pid in enumerate(pids)]
        # by the monotonic clock: when it is killed (again), and when it was first
        self._kill_at = self._killed_at = math.inf
        self._is_begun = self._is_stopping = self._limits_others = False
        self._unannounced: list[int] = []

    def run(
        self,
        signals: SignalWatch,
        hold: Sequence[int],  # descriptors that it and all that it starts keep open
        tick: Callable[[], None],  # called at least twice a second
    ) -> Exit:
        """Run it to its end, whatever that is; ``pid`` is None if its process hangs.

        The first signal asks the attempt to stop, the second kills it. It is also killed when it
        does not stop in time, when it stalls, and when its process does not end after its report.

        Raises:
            ReaperDied: the reaper ended, and with it the attempt.
        """
        try:
            with signals.handed_to(self._on_signal) as wakeup:
                signals.raise_if_received()
                self._begin(hold)
                while not self._poll(wakeup):
                    show_waiting()
                    tick()
                return self._exit()
        finally:
            if self._votes is not None:
                self._votes.close()

    def unread_events(self) -> None:
        """Pass on what was sent before the reaper ended."""
        for rank in range(len(self._processes)):
            self._read(rank, None)
        self._send_end([end for end in self._ends if end.ending is not None])

    def _begin(self, hold: Sequence[int]) -> None:
        if self._votes is None:
            self._processes[0].begin(Begin(self._request), hold)
        else:
            # bound here and not in rank 0: no other process can take the port in between
            with socket.create_server(("127.0.0.1", 0)) as listener:
                port = listener.getsockname()[1]
                for rank, one in enumerate(self._processes):
                    own = [self._votes.descriptor]
                    if rank == 0:
                        own.append(listener.fileno())
                    one.begin(Begin(self._request, rank, port), (*own, *hold))
        self._is_begun = True
        if self._is_stopping:  # a signal that came before there was something to stop
            self._send_stop()

    def _poll(self, wakeup: int) -> bool:
        """Wait for something to happen and see to it; return whether the attempt is over."""
        interpreters = self._interpreters
        running = [one.channel.fileno() for one in self._processes if one.is_running]
        seconds = min(max(self._kill_at - time.monotonic(), 0.0), TICK_SECONDS)
        readable([wakeup, *interpreters.descriptors, *running], seconds)
        with contextlib.suppress(BlockingIOError):
            os.read(wakeup, 4096)
        while self._unannounced:
            log.info("%s", _stopping(self._unannounced.pop(), self._grace_seconds))
        now = time.monotonic()
        if now >= self._kill_at:
            self._kill_at, self._killed_at = now + 1.0, min(self._killed_at, now)
            self._signal_all(signal.SIGKILL)
        is_given_up = now >= self._killed_at + _AFTER_KILL_SECONDS
        # ends before events and output: what a process sent before it ended is then there already
        interpreters.poll()
        if interpreters.pump.move():
            self._watch.on_output()
        for rank, one in enumerate(self._processes):
            # at its end all; before, a burst must hold up neither signals nor requests
            self._read(
                rank, _MOST_EVENTS if one.is_running and not is_given_up else None
            )
            end = self._ends[rank]
            if not one.is_running and end.returncode is None:
                self._ends[rank] = replace(
                    end,
                    returncode=one.returncode,
                    at=end.at or time.monotonic(),
                    was_killed=self._killed_at < math.inf,
                )
        if self._votes is not None:
            self._limit_other_ranks()
        if is_given_up or not any(one.is_running for one in self._processes):
            return True
        if self._kill_at == math.inf and (stalled := self._watch.poll()) is not None:
            self.stalled = stalled
            self._kill_in(self._dump_stacks())
        return False

    def _read(self, rank: int, most: int | None) -> None:
        for event in self._processes[rank].read(most):
            self._watch.on_event(event)
            if isinstance(event, (Finished, Failed)):
                if self._votes is not None:
                    end = self._ends[rank]
                    self._ends[rank] = replace(end, ending=event, at=event.at)
                    continue
                is_failure = isinstance(event, Failed)
                self._kill_in(
                    AFTER_FAILURE_SECONDS if is_failure else self._grace_seconds
                )
            self._on_event(event)

    def _limit_other_ranks(self) -> None:
        """Limit the time of the others once a rank has failed, or all have reported their end."""
        if all(end.returncode is not None for end in self._ends[1:]):
            # the first has served the store of the others, and may go now
            with contextlib.suppress(OSError):
                self._processes[0].channel.shutdown(socket.SHUT_WR)
        failed = [end for end in self._ends if end.is_failure]
        if self._limits_others or not (failed or all(e.is_over for e in self._ends)):
            return
        self._limits_others = True
        know = all(end.others_know for end in failed)
        self._kill_in(self._grace_seconds if know else _LAST_REPORT_SECONDS)

    def _exit(self) -> Exit:
        interpreters, own = self._interpreters, self._processes
        kept = [one for one in interpreters.running.values() if one not in own]
        left = interpreters.kill_leftovers(kept)
        interpreters.pump.drain()
        for one in own:
            interpreters.forget(one)
        if self._votes is not None:
            self._send_end(self._ends)
        if any(one.is_running for one in own):
            log.warning("the attempt's process hangs in the kernel; it is left behind")
            return Exit(-signal.SIGKILL)
        if left:
            log.warning("processes %s of the attempt cannot be ended", left)
        return Exit(
            own[0].returncode,
            own[0].pid,
            max(one.max_resident_bytes for one in own),
        )

    def _send_end(self, ends: Sequence[RankEnd]) -> None:
        if ends and (event := event_of(ends)) is not None:
            self._on_event(event)

    def _dump_stacks(self) -> float:
        running = {
            rank: one.pid for rank, one in enumerate(self._processes) if one.is_running
        }
        return dump_stacks(
            self._request,
            running,
            lambda rank: self._interpreters.signal(self._processes[rank], DUMP_STACKS),
        )

    def _on_signal(self, signum: int) -> None:
        if self._is_stopping:
            self._kill_in(0.0)
            return
        self._is_stopping = True
        self._unannounced.append(signum)
        self._kill_in(self._grace_seconds)
        if self._is_begun:
            self._send_stop()

    def _send_stop(self) -> None:
        if self._votes is not None:
            self._votes.raise_flag(STOP)
        self._signal_all(stop_signal(os.environ))

    def _kill_in(self, seconds: float) -> None:
        """Have it killed after so long, unless that is due earlier."""
        self._kill_at = min(self._kill_at, time.monotonic() + seconds)

    def _signal_all(self, signum: int) -> None:
        for one in self._processes:
            if one.is_running:
                self._interpreters.signal(one, signum)


def _stopping(signum: int, grace_seconds: float) -> str:
    again = f"send {signal.Signals(signum).name}"
    if signum == signal.SIGINT:
        again = "press Ctrl-C"
    return f"stopping: saving a checkpoint, at most {grace_seconds:g} s; {again} again to kill"
