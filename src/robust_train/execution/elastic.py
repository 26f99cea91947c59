"""One attempt in several processes, under torch's elastic agent.

The attempt's own process is the agent: it forks a process for each rank, before which it has
imported nothing that must not be forked, and stays without a GPU. What the launcher does with an
attempt (output, stalls, signals, reservations, the killing of leftovers) holds for the group.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo

from robust_train.execution.child import failure_to_json
from robust_train.execution.rank import Rank, be_rank, read_account
from robust_train.execution.request import AttemptRequest
from robust_train.execution.root_cause import RankEnd, root_cause
from robust_train.execution.stall import DUMP_STACKS
from robust_train.execution.votes import Votes
from robust_train.run import STOP
from robust_train.values import Failure, FailureKind

_HERE = "127.0.0.1"
_LOOK_SECONDS = 0.05
_LAST_WORDS_SECONDS = 1.0
"""How long the others have after a failure: for an account of their own that tells more."""


def run_ranks(
    request: AttemptRequest,
    trainer: Callable[..., Any] | None,
    report: Callable[[dict[str, Any]], None],
) -> int:
    """Run the trainer in ``request.ranks`` processes, and report how that ended as one event.

    Args:
        request: the attempt.
        trainer: None where each rank has to import it first.
        report: takes the attempt's events.

    Returns:
        0 if all ranks completed, else 1.
    """
    # the agent's own account of a failure would stand beside the one that the user wants
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):  # each has a level of its own
            logging.getLogger(name).setLevel(logging.CRITICAL)
    votes = Votes(request.ranks)
    accounts = tuple(os.memfd_create(f"rank-{rank}") for rank in range(request.ranks))
    given = Rank(request, trainer, report, votes, accounts)
    spec = WorkerSpec(
        role="robust_train",
        local_world_size=request.ranks,
        entrypoint=be_rank,
        args=(given,),
        rdzv_handler=_OneHost(),
        max_restarts=0,
        monitor_interval=_LOOK_SECONDS,
    )
    # the only signal that the agent itself need take; ours are set below
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"
    agent = _Agent(spec, accounts, request.stop_grace_seconds)
    _pass_signals_on(agent, votes, stacks=request.stall_timeout_seconds > 0)
    result = agent.run()
    ends = agent.ends()
    report(_ending(ends, has_completed=not result.is_failed()))
    return 1 if result.is_failed() else 0


class _OneHost(RendezvousHandler):
    """All ranks are on this host and forked by this process: a store on a port of the kernel's
    choice, and nothing to look up."""

    def get_backend(self) -> str:
        return "one-host"

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        server = TCPStore(_HERE, 0, is_master=True, wait_for_workers=False)
        store = PrefixStore("agent", server)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(_HERE, server.port))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Nobody else can come."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return "robust_train"

    def shutdown(self) -> bool:
        return True


class _Agent(LocalElasticAgent):
    """Torch's agent, which ends a group promptly and remembers how each rank ended.

    By itself it asks the survivors of a failure to stop and waits half a minute; one that hangs in
    a collective never hears of that.
    """

    def __init__(self, spec: WorkerSpec, accounts: tuple[int, ...], grace_seconds: float) -> None:
        super().__init__(spec, DefaultLogsSpecs(), start_method="fork")
        self._accounts = accounts
        self._grace_seconds = grace_seconds
        self._dead: dict[int, RankEnd] = {}
        self._kill_at: float | None = None
        self._has_killed = False

    @property
    def pids(self) -> list[int]:
        """Of the ranks, in their order; empty before they are started."""
        return [worker.id for worker in self._worker_group.workers if isinstance(worker.id, int)]

    def ends(self) -> list[RankEnd]:
        """How each rank has ended, once all have."""
        told = (self._end(rank, pid, None) for rank, pid in enumerate(self.pids))
        return [self._dead.get(end.rank, end) for end in told]

    def signal_alive(self, signum: int) -> None:
        """Send a signal to those ranks that have not ended."""
        for rank, pid in enumerate(self.pids):
            if rank not in self._dead:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signum)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._look()
        if not any(end.is_failure for end in self._dead.values()):
            result: RunResult = super()._monitor_workers(worker_group)
            return result
        if len(self._dead) == len(self.pids):
            return RunResult(state=WorkerState.FAILED)
        if self._kill_at is not None and time.monotonic() >= self._kill_at:
            self._has_killed = True
            self.signal_alive(signal.SIGKILL)
        return RunResult(state=WorkerState.HEALTHY)

    def _look(self) -> None:
        """Note who has ended; a failure sets the time by which the others must have."""
        for rank, pid in enumerate(self.pids):
            if rank in self._dead:
                continue
            # still to be collected by the agent's own bookkeeping
            found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if found is None:
                continue
            is_signal = found.si_code in (os.CLD_KILLED, os.CLD_DUMPED)
            end = self._end(rank, pid, -found.si_status if is_signal else found.si_status)
            self._dead[rank] = end
            if end.is_failure and self._kill_at is None:
                grace = self._grace_seconds if end.others_know else _LAST_WORDS_SECONDS
                self._kill_at = time.monotonic() + grace

    def _end(self, rank: int, pid: int, returncode: int | None) -> RankEnd:
        told = read_account(self._accounts[rank])
        at, account = (time.monotonic(), None) if told is None else told
        return RankEnd(rank, pid, account, at, returncode, self._has_killed)

    def _record_worker_events(self, result: RunResult) -> None:
        """Torch's telemetry, for which it would look up this host's name."""


def _pass_signals_on(agent: _Agent, votes: Votes, *, stacks: bool) -> None:
    me = os.getpid()

    def stop(signum: int, frame: FrameType | None) -> None:
        # a rank has this handler until it has set its own
        if os.getpid() == me:
            votes.raise_flag(STOP)
            agent.signal_alive(signum)

    def dump_stacks(signum: int, frame: FrameType | None) -> None:
        agent.signal_alive(signum)

    signal.signal(signal.SIGTERM, stop)
    if stacks:
        faulthandler.unregister(DUMP_STACKS)
        signal.signal(DUMP_STACKS, dump_stacks)


def _ending(ends: Sequence[RankEnd], *, has_completed: bool) -> dict[str, Any]:
    """The event that tells the launcher how the attempt has ended."""
    accounts = [end.account for end in ends if end.account is not None]
    nothing: dict[str, int] = {}
    memory = max((account["memory"] for account in accounts), key=_peak, default=nothing)
    if has_completed and ends[0].account is not None:
        return {**ends[0].account, "memory": memory}
    root = root_cause(ends)
    if root is None:
        failure = Failure(FailureKind.BUG, "a rank's process failed after its trainer returned")
        last = {"step": None, "failure": failure_to_json(failure)}
        return {"event": "failed", **last, "memory": memory}
    if root.account is None:
        told = {"rank": root.rank, "pid": root.pid, "returncode": root.returncode}
        return {"event": "rank_died", **told, "memory": memory}
    rank = root.account.get("heard_of_rank", root.rank)
    account = {**root.account, "memory": memory}
    account["failure"] = {**account["failure"], "rank": rank}
    return account


def _peak(memory: Mapping[str, int]) -> int:
    return max(memory.get("max_allocated", 0), memory.get("max_resident", 0))
