"""One attempt in several processes: the ranks of one optimizer step.

The attempt's own process forks the ranks, then starts the store in which they find each other, and
stays without a GPU. What the launcher does with an attempt (output, stalls, signals, reservations,
the killing of leftovers) holds for the group.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from types import FrameType

import psutil
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from robust_train.events import Event, Failed, RankDied
from robust_train.execution.linux import signal_at_parents_death
from robust_train.execution.rank import be_rank, read_ending
from robust_train.execution.request import AttemptRequest
from robust_train.execution.root_cause import RankEnd, root_cause
from robust_train.execution.signals import DUMP_STACKS, STOP_SIGNALS, stop_signal
from robust_train.execution.votes import Votes
from robust_train.execution.wire import EventSender
from robust_train.run import STOP
from robust_train.values import Failure, FailureKind

_POLL_SECONDS = 0.05
_LAST_REPORT_SECONDS = 1.0
"""Time of the others after a failure: for a report of their own that explains more."""
_AFTER_KILL_SECONDS = 5.0
_STACKS_SECONDS = 0.3


def run_ranks(request: AttemptRequest, send: EventSender) -> int:
    """Run the trainer in ``request.ranks`` processes, and send how that ended as one event.

    Returns:
        0 if all ranks completed, else 1.
    """
    ending, status = _ending(_Group(request, send).run())
    send(ending)
    return status


class _Group:
    """The ranks' processes, from their fork to their end."""

    def __init__(self, request: AttemptRequest, send: EventSender) -> None:
        self._grace_seconds = request.stop_grace_seconds
        self._votes = Votes(request.ranks)
        self._endings = [os.memfd_create(f"rank-{rank}") for rank in range(request.ranks)]
        self._pids: list[int] = []
        self._dead: dict[int, RankEnd] = {}
        self._kill_at: float | None = None
        self._killed_at: float | None = None
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            me = os.getpid()
            for rank in range(request.ranks):
                if (pid := os.fork()) == 0:
                    signal_at_parents_death(signal.SIGKILL)
                    if os.getppid() != me:
                        os._exit(1)
                    listener.close()
                    be_rank(rank, request, send, self._votes, self._endings[rank], port)
                self._pids.append(pid)
            # only now: its thread would not be in the ranks, which may be connecting already
            self._store = TCPStore(
                "127.0.0.1",
                port,
                is_master=True,
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
                use_libuv=False,  # before torch 2.6 that takes no open socket
            )
        self._stacks_file = request.stacks_file
        self._pass_signals_on()

    def run(self) -> list[RankEnd]:
        """Wait until all ranks have ended; the first failure limits the time of the others."""
        while len(self._dead) < len(self._pids):
            time.sleep(_POLL_SECONDS)
            for rank, pid in enumerate(self._pids):
                if rank not in self._dead and (found := os.waitpid(pid, os.WNOHANG))[0]:
                    self._dead[rank] = self._end(rank, os.waitstatus_to_exitcode(found[1]))
            now = time.monotonic()
            self._set_clock(now)
            if self._kill_at is not None and now >= self._kill_at:
                self._killed_at = self._killed_at or now
                self._signal(signal.SIGKILL)
                if now >= self._killed_at + _AFTER_KILL_SECONDS:
                    break  # one hangs in the kernel
        return self._ends()

    def _set_clock(self, now: float) -> None:
        """Set when to kill: after the first failure, or when all have reported their end."""
        if self._kill_at is not None:
            return
        known = [end for end in self._ends() if end.ending is not None or end.rank in self._dead]
        failed = [end for end in known if end.is_failure]
        if failed:
            knows = all(end.others_know for end in failed)
            self._kill_at = now + (self._grace_seconds if knows else _LAST_REPORT_SECONDS)
        elif len(known) == len(self._pids):
            self._kill_at = now + self._grace_seconds

    def _ends(self) -> list[RankEnd]:
        return [self._dead.get(rank) or self._end(rank, None) for rank in range(len(self._pids))]

    def _end(self, rank: int, returncode: int | None) -> RankEnd:
        at, ending = read_ending(self._endings[rank]) or (time.monotonic(), None)
        was_killed = self._killed_at is not None
        return RankEnd(rank, self._pids[rank], ending, at, returncode, was_killed)

    def _signal(self, signum: int) -> None:
        for rank, pid in enumerate(self._pids):
            if rank not in self._dead:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signum)

    def _dump_stacks(self) -> None:
        """Have the ranks write their stacks into one file, one after the other."""
        for rank, pid in enumerate(self._pids):
            if rank in self._dead:
                continue
            with contextlib.suppress(OSError, psutil.Error):
                heading = f"rank {rank} (process {pid}, {psutil.Process(pid).status()})\n"
                with self._stacks_file.open("a") as file:
                    file.write(heading)
                size = self._stacks_file.stat().st_size
                os.kill(pid, DUMP_STACKS)
                until = time.monotonic() + _STACKS_SECONDS
                # a stopped one writes nothing
                while self._stacks_file.stat().st_size == size and time.monotonic() < until:
                    time.sleep(_STACKS_SECONDS / 10)
                time.sleep(_STACKS_SECONDS / 10)

    def _pass_signals_on(self) -> None:
        """Pass signals on; until now they were blocked, as they are in a new rank."""

        def stop(signum: int, frame: FrameType | None) -> None:
            self._votes.raise_flag(STOP)
            self._signal(stop_signal(os.environ))

        for signum in STOP_SIGNALS:
            if signal.getsignal(signum) != signal.SIG_IGN:
                signal.signal(signum, stop)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        faulthandler.unregister(DUMP_STACKS)
        signal.signal(DUMP_STACKS, lambda signum, frame: self._dump_stacks())


def _ending(ends: Sequence[RankEnd]) -> tuple[Event, int]:
    """Return the event of the group's end, and the exit status."""
    figures = [end.ending.memory for end in ends if end.ending is not None]
    peaks = [one.get("max_allocated", one.get("max_resident", 0)) for one in figures]
    memory = figures[peaks.index(max(peaks))] if peaks else {}
    root = root_cause(ends)
    if root is None:
        if ends[0].ending is not None:
            return replace(ends[0].ending, memory=memory), 0
        failure = Failure(FailureKind.BUG, "a rank's process failed after its trainer returned")
        return Failed(failure, memory=memory), 1
    if not isinstance(root.ending, Failed):
        return RankDied(root.rank, root.pid, root.returncode or 0, memory), 1
    by = root.ending.caused_by_rank
    failure = replace(root.ending.failure, rank=root.rank if by is None else by)
    return replace(root.ending, failure=failure, memory=memory), 1
