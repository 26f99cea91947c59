"""One attempt while it runs, from the launcher's side: its ranks, signals, time and end."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from robust_train.config.request import AttemptRequest, Begin
from robust_train.host.screen import show_waiting
from robust_train.host.signals import SignalWatch, stop_signal
from robust_train.host.votes import STOP, Votes
from robust_train.host.waiting import TICK_SECONDS, readable
from robust_train.launcher.attempt_clock import AttemptClock
from robust_train.launcher.interpreters import Interpreter, Interpreters
from robust_train.launcher.root_cause import RankEnd, event_of
from robust_train.launcher.stall import Standstill
from robust_train.launcher.stall_stacks import dump_stacks
from robust_train.launcher.stall_watch import StallWatch
from robust_train.model.events import Event, Failed, Finished

log = logging.getLogger("robust_train")

_MOST_EVENTS = 1000
_LAST_REPORT_SECONDS = 1.0
"""Time of the other ranks after a failure: for a report of their own that explains more."""


@dataclass(frozen=True)
class Exited:
    """How an attempt's process ended; with several ranks that of the first."""

    pid: int | None  # None if that is not known
    returncode: int  # as subprocess has it
    max_resident_bytes: int = 0  # the largest peak of a process's resident memory
    stalled: Standstill | None = None  # it was killed because it hung


class RunningAttempt:
    """Runs one attempt in one interpreter, or in one for each rank.

    Args:
        interpreters: of the job.
        processes: those that run this attempt, in the order of their ranks.
        on_event: called with each event; with several ranks with one event of the end.
    """

    def __init__(
        self,
        interpreters: Interpreters,
        processes: Sequence[Interpreter],
        request: AttemptRequest,
        on_event: Callable[[Event], None],
    ) -> None:
        self._interpreters = interpreters
        self._processes = processes
        self._request = request
        self._on_event = on_event
        self._clock = AttemptClock(request.config.stop_grace_seconds)
        pids = [one.pid for one in processes]
        self._watch = StallWatch(request, pids, on_event)
        self._votes = Votes(request.ranks) if request.ranks > 1 else None
        self._endings: dict[int, Finished | Failed] = {}
        self._dead: dict[int, RankEnd] = {}
        self._stalled: Standstill | None = None
        self._is_begun = self._is_stop_sent = self._limits_others = False
        self._unanswered: list[int] = []

    def run(
        self,
        signals: SignalWatch,
        hold: Sequence[
            int
        ],  # descriptors that the attempt and all that it starts keep open
        tick: Callable[[], None],  # called at least twice a second
    ) -> Exited:
        """Run it to its end, whatever that is.

        The first signal asks the attempt to stop, the second kills it. It is also killed when it
        does not stop in time, when it stalls, and when its process does not end after its report.

        Raises:
            ReaperDied: the reaper ended, and with it the attempt.
        """
        try:
            with signals.handed_to(self._on_signal) as wakeup:
                signals.raise_if_received()
                self._begin(hold)
                while (exited := self._poll(wakeup)) is None:
                    show_waiting()
                    tick()
                return exited
        finally:
            if self._votes is not None:
                self._votes.close()

    def unread_events(self) -> None:
        """Pass on what was sent before the reaper ended."""
        for rank, one in enumerate(self._processes):
            self._read(rank, one, None)
        reported = [end for end in self._ends() if end.ending is not None]
        if reported and (event := event_of(reported)) is not None:
            self._on_event(event)

    def _begin(self, hold: Sequence[int]) -> None:
        request = self._request
        if self._votes is None:
            self._processes[0].begin(Begin(request), hold)
        else:
            # bound here and not in rank 0: no other process can take the port in between
            with socket.create_server(("127.0.0.1", 0)) as listener:
                port = listener.getsockname()[1]
                for rank, one in enumerate(self._processes):
                    own = [
                        self._votes.descriptor,
                        *(() if rank else (listener.fileno(),)),
                    ]
                    one.begin(Begin(request, rank, port), (*own, *hold))
        self._is_begun = True
        if self._clock.is_set:  # a signal that came before there was something to stop
            self._send_stop()

    def _poll(self, wakeup: int) -> Exited | None:
        """Wait for something to happen and see to it; return how the attempt ended, if it did."""
        interpreters, clock = self._interpreters, self._clock
        channels = [
            one.channel.fileno() for one in self._processes if one.ended is None
        ]
        seconds = clock.seconds_left(TICK_SECONDS)
        readable([wakeup, *interpreters.descriptors, *channels], seconds)
        with contextlib.suppress(BlockingIOError):
            os.read(wakeup, 4096)
        while self._unanswered:
            log.info(
                "%s",
                _stopping(
                    self._unanswered.pop(), self._request.config.stop_grace_seconds
                ),
            )
        if clock.kills_now():
            self._signal_all(signal.SIGKILL)
        # ends before events and output: what a process sent before it ended is then there already
        interpreters.poll()
        if interpreters.pump.move():
            self._watch.on_output()
        for rank, one in enumerate(self._processes):
            # at its end all; before, a burst must hold up neither signals nor requests
            is_over = one.ended is not None or clock.gives_up
            self._read(rank, one, None if is_over else _MOST_EVENTS)
            if one.ended is not None and rank not in self._dead:
                self._dead[rank] = self._end(rank)
        if self._votes is not None:
            self._limit_other_ranks()
        if len(self._dead) == len(self._processes) or clock.gives_up:
            return self._exited()
        if not clock.is_set and (stalled := self._watch.poll()) is not None:
            self._stalled = stalled
            clock.kill_in(
                dump_stacks(self._request, self._interpreters, self._processes)
            )
        return None

    def _read(self, rank: int, one: Interpreter, most: int | None) -> None:
        for event in one.read(most):
            self._watch.on_event(event)
            if self._votes is not None and isinstance(event, (Finished, Failed)):
                self._endings[rank] = event
                continue
            self._clock.on_event(event)
            self._on_event(event)

    def _limit_other_ranks(self) -> None:
        """Limit the time of the others once a rank has failed, or all have reported their end."""
        ends = self._ends()
        known = [
            end for end in ends if end.ending is not None or end.returncode is not None
        ]
        if all(end.returncode is not None for end in ends[1:]):
            # the first has served the store of the others, and may go now
            with contextlib.suppress(OSError):
                self._processes[0].channel.shutdown(socket.SHUT_WR)
        if self._limits_others:
            return
        failed = [end for end in known if end.is_failure]
        if failed:
            knows = all(end.others_know for end in failed)
            grace = self._request.config.stop_grace_seconds
            self._clock.kill_in(grace if knows else _LAST_REPORT_SECONDS)
        elif len(known) == len(ends):
            self._clock.kill_in(self._request.config.stop_grace_seconds)
        self._limits_others = bool(failed) or len(known) == len(ends)

    def _exited(self) -> Exited:
        interpreters = self._interpreters
        has_ended = len(self._dead) == len(self._processes)
        kept = [
            one for one in interpreters.running.values() if one not in self._processes
        ]
        left = interpreters.kill_leftovers(kept)
        interpreters.pump.drain()
        for one in self._processes:
            interpreters.forget(one)
        if self._votes is not None and (event := event_of(self._ends())) is not None:
            self._on_event(event)
        if not has_ended:
            log.warning("the attempt's process hangs in the kernel; it is left behind")
            return Exited(None, -signal.SIGKILL, stalled=self._stalled)
        if left:
            log.warning("processes %s of the attempt cannot be ended", left)
        ended = [one.ended for one in self._processes if one.ended is not None]
        return Exited(
            self._processes[0].pid,
            ended[0].returncode,
            max(one.max_resident_bytes for one in ended),
            self._stalled,
        )

    def _ends(self) -> list[RankEnd]:
        return [
            self._dead.get(rank) or self._end(rank)
            for rank in range(len(self._processes))
        ]

    def _end(self, rank: int) -> RankEnd:
        one, ending = self._processes[rank], self._endings.get(rank)
        return RankEnd(
            rank=rank,
            pid=one.pid,
            ending=ending,
            at=time.monotonic() if ending is None else ending.at,
            returncode=None if one.ended is None else one.ended.returncode,
            was_killed=self._clock.has_killed,
        )

    def _on_signal(self, signum: int) -> None:
        if not self._clock.is_stopping:
            self._unanswered.append(signum)
        self._clock.stop()
        self._send_stop()

    def _send_stop(self) -> None:
        if not self._is_begun or self._is_stop_sent:
            return
        self._is_stop_sent = True
        if self._votes is not None:
            self._votes.raise_flag(STOP)
        self._signal_all(stop_signal(os.environ))

    def _signal_all(self, signum: int) -> None:
        for one in self._living():
            self._interpreters.signal(one, signum)

    def _living(self) -> list[Interpreter]:
        return [one for one in self._processes if one.ended is None]


def _stopping(signum: int, grace_seconds: float) -> str:
    again = (
        "press Ctrl-C"
        if signum == signal.SIGINT
        else f"send {signal.Signals(signum).name}"
    )
    return f"stopping: saving a checkpoint, at most {grace_seconds:g} s; {again} again to kill"
