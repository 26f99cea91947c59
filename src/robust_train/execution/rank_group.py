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
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from robust_train.events import Event, Failed, Finished, RankDied
from robust_train.execution.linux import signal_at_parents_death
from robust_train.execution.node_votes import NodeVotes
from robust_train.execution.rank import be_rank, read_ending
from robust_train.execution.request import AttemptRequest
from robust_train.execution.root_cause import RankEnd, root_cause
from robust_train.execution.signals import DUMP_STACKS, STOP_SIGNALS, stop_signal
from robust_train.execution.votes import Votes
from robust_train.execution.wire import EventSender
from robust_train.run import STOP
from robust_train.values import UNDER_SUBMITIT, Failure, FailureKind

_POLL_SECONDS = 0.05
_LAST_REPORT_SECONDS = 1.0
"""Time of the others after a failure: for a report of their own that explains more."""
_AFTER_KILL_SECONDS = 5.0
_STACKS_SECONDS = 0.3
_BEGIN_SECONDS = 300.0  # from the start until all ranks of all nodes are up


def run_ranks(request: AttemptRequest, send: EventSender, hold: Sequence[int] = ()) -> int:
    """Run the trainer in ``request.ranks`` processes, and send how that ended as one event; return
    0 if all completed, else 1. On the first of several nodes the last descriptor in ``hold`` is the
    store's socket."""
    group = _Group(request, send, hold)
    ending, status = _ending(group.run())
    if status and group.missing:
        nodes = ", ".join(map(str, group.missing))
        message = f"not all ranks have begun within {_BEGIN_SECONDS:g} s: node {nodes} is missing"
        ending = Failed(Failure(FailureKind.COMM, message))
    send(ending)
    return status


class _Group:
    """The ranks' processes, from their fork to their end."""

    def __init__(self, request: AttemptRequest, send: EventSender, hold: Sequence[int]) -> None:
        span, is_first = request.span, request.first_rank == 0
        self.missing: list[int] = []  # nodes that were not there in time
        self._grace_seconds, self._first = request.stop_grace_seconds, request.first_rank
        self._votes = Votes(request.ranks, request.first_rank, is_part=span.nodes > 1)
        self._endings = [os.memfd_create(f"rank-{rank}") for rank in range(request.ranks)]
        self._pids: list[int] = []
        self._dead: dict[int, RankEnd] = {}
        self._kill_at: float | None = None
        self._killed_at: float | None = None
        listener = None
        if is_first and span.nodes > 1:
            listener = socket.socket(fileno=os.dup(hold[-1]))
        elif is_first:
            listener = socket.create_server(("127.0.0.1", 0))
        port = span.port if listener is None else listener.getsockname()[1]
        me = os.getpid()
        for rank in range(request.ranks):
            if (pid := os.fork()) == 0:
                signal_at_parents_death(signal.SIGKILL)
                if os.getppid() != me:
                    os._exit(1)
                if listener is not None:
                    listener.close()
                be_rank(rank, request, send, self._votes, self._endings[rank], port)
            self._pids.append(pid)
        # only now: its thread would not be in the ranks, which may be connecting already
        self._store = TCPStore(
            span.host,
            port,
            is_master=is_first,
            wait_for_workers=False,
            master_listen_fd=None if listener is None else listener.detach(),
            use_libuv=False,  # before torch 2.6 that takes no open socket
        )
        store = PrefixStore("robust_train", self._store)
        votes = NodeVotes(self._votes, store, span.node, span.nodes)
        self._nodes = votes if span.nodes > 1 else None
        self._begin_at = time.monotonic() + _BEGIN_SECONDS
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
            self._meet_other_nodes(now)
        if all(isinstance(end.ending, Finished) for end in self._ends()):
            self._await_other_nodes()
        return self._ends()

    def _await_other_nodes(self) -> None:
        """Keep the store for as long as ranks of other nodes need it; the launcher may kill us."""
        with contextlib.suppress(RuntimeError):
            if self._nodes is not None:
                self._nodes.end()
            while self._nodes is not None and not self._nodes.is_over:
                time.sleep(_POLL_SECONDS)
                self._nodes.poll(len(self._pids))

    def _meet_other_nodes(self, now: float) -> None:
        """Agree with other nodes on flags; end where one of them does not begin."""
        if self._nodes is None or self._killed_at is not None:
            return
        try:
            self._nodes.poll(len(self._pids))
            if self._begin_at and now >= self._begin_at and self._first == 0:
                self.missing, self._begin_at = self._nodes.missing(), 0.0
                self._kill_at = now if self.missing else None
        except RuntimeError:  # the store is gone, and so is the attempt
            self._nodes = None

    def _set_clock(self, now: float) -> None:
        """Set when to kill: after the first failure, or when all have reported their end."""
        if self._kill_at is not None:
            return
        ends = self._ends()
        known = [end for end in ends if end.ending is not None or end.returncode is not None]
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
        number = self._first + rank
        return RankEnd(number, self._pids[rank], ending, at, returncode, was_killed)

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
                number = self._first + rank
                heading = f"rank {number} (process {pid}, {psutil.Process(pid).status()})\n"
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

        if UNDER_SUBMITIT in os.environ:  # comes with every preemption
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
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
