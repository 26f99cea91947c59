"""Node 0's launcher: it decides, and runs each attempt on all nodes. No thread, no process more."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from pathlib import Path

from omegaconf import DictConfig

from robust_train.errors import ConfigError, NoDevice
from robust_train.events import Event, MalformedEvent, parse
from robust_train.execution import TICK_SECONDS
from robust_train.execution.process import ProcessExecutor
from robust_train.execution.request import AttemptRequest, NodeSpan
from robust_train.execution.signals import SignalWatch, forwarded
from robust_train.execution.stall import Standstill
from robust_train.failures.stack import where_it_stands
from robust_train.nodes import messages
from robust_train.nodes.connection import (
    HOST_VARIABLE,
    Address,
    Connection,
    addresses,
    family_of,
    interface_of,
    started_with,
)
from robust_train.nodes.messages import Ended
from robust_train.queue.queue_dir import boot_name
from robust_train.runfolder.folder import RunFolder
from robust_train.values import Clue, Failure, FailureKind, Group, Outcome

log = logging.getLogger("robust_train")

Tick = Callable[[], None]

_LAST_REPORT_SECONDS = 1.0
"""Time of the other nodes after a failure: for reports of their own that explain more."""
_LATE_SECONDS = 30.0  # for a node's end after its ranks had all their time
_FIRST_LINE_SECONDS = 10.0
_GREETING_SECONDS = 5.0


@dataclass
class _Follower:
    """A node that follows; what it has reserved, and how its part of the attempt ended."""

    node: int
    host: str
    connection: Connection
    machine: str = ""
    reserved: messages.Reserved | None = None
    ended: Ended | None = None

    @property
    def name(self) -> str:
        """Its name for people."""
        return f"node {self.node} ({self.host})"


class Leader:
    """Finds the followers, then is the job's executor; a context manager."""

    _local: ProcessExecutor  # of this node's ranks

    def __init__(
        self,
        cfg: DictConfig,  # has to be the same on all nodes
        nodes: int,
        wait_seconds: float,  # for the others to appear
        run_dir: Path,
        signals: SignalWatch,
        folder: RunFolder,
    ) -> None:
        self._nodes, self._wait_seconds, self._run_dir = nodes, wait_seconds, run_dir
        self._signals, self._folder = signals, folder
        self._started_with = started_with(cfg)
        self._hosts, self._secret = addresses(), secrets.token_hex(16)
        self._listeners: list[socket.socket] = []  # one until all nodes are there
        self._followers: list[_Follower] = []
        self._on_event: Callable[[Event], None] = lambda event: None
        self._number, self._grace_seconds = 0, 0.0
        self._has_sent_stop = False

    def __enter__(self) -> Leader:
        return self

    def __exit__(self, kind: object, error: BaseException | None, frames: object) -> None:
        state = self._folder.state
        code = getattr(error, "exit_code", 1) if state.exit_code is None else state.exit_code
        for follower in self._followers:
            follower.connection.send(messages.Done(state.state, code, state.reason))
            follower.connection.close()

    # --- before the first attempt -----------------------------------------------------------------

    def gather(self) -> None:
        """Wait until all nodes are there.

        Raises:
            ConfigError: one was started with something else, or refuses.
            NoDevice: some do not appear.
        """
        host = self._hosts[0] if len(self._hosts) == 1 else ""
        try:
            listener = socket.create_server((host, 0), family=family_of(self._hosts[0]))
        except OSError as error:
            raise ConfigError(
                f"num_nodes={self._nodes}: cannot listen at {host or 'any address'} "
                f"({error.strerror}); {HOST_VARIABLE} is for an address of node 0"
            ) from None
        listener.setblocking(False)  # whoever came may be gone again
        # a node that sends nothing holds nobody up, for an hour
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, 3600)
        address = Address(self._hosts, listener.getsockname()[1], self._secret)
        with listener, address.shown_in(self._run_dir):
            self._listeners.append(listener)
            self._await_all()
        self._listeners.clear()
        log.info("leads %s", ", ".join(one.name for one in self._followers))

    def _await_all(self) -> None:
        started, has_said = time.monotonic(), False
        while missing := {*range(1, self._nodes)}.difference(one.node for one in self._followers):
            self._look(TICK_SECONDS, self._folder.tick)
            self._followers = [one for one in self._followers if one.connection.lost is None]
            waited = time.monotonic() - started
            who = f"node {', '.join(map(str, sorted(missing)))} of {self._nodes}"
            if waited > self._wait_seconds:
                raise NoDevice(
                    f"{who} did not appear: start the same command there with the same "
                    f"hydra.run.dir, on a disk that all nodes see ({self._run_dir})"
                )
            if waited > _FIRST_LINE_SECONDS and not has_said:
                has_said = True
                log.info("waiting for %s: the same command there, in a folder that it sees", who)

    def _greet(self, listener: socket.socket) -> None:
        """Take somebody in who knows the secret; raises ConfigError if it is no other node's."""
        try:
            connection = Connection(listener.accept()[0], self._secret, leads=True)
        except (OSError, EOFError, multiprocessing.AuthenticationError):
            return
        hello, *more = connection.receive(_GREETING_SECONDS) or (None,)
        if not isinstance(hello, messages.Hello):
            connection.close()
            return
        same = [one for one in self._followers if one.node == hello.node]
        new = _Follower(hello.node, hello.host, connection, hello.machine)
        self._followers.append(new)
        if hello.refusal is not None:
            raise ConfigError(f"{new.name}: {hello.refusal}")
        if same:
            raise ConfigError(
                f"two launchers are node {new.node} (on {same[0].host} and {new.host}): each needs "
                "a number of its own"
            )
        ours, theirs = self._started_with, hello.started_with
        for key in {**ours, **theirs}:
            if ours.get(key) != theirs.get(key):
                raise ConfigError(
                    f"{new.name} has {key}={theirs.get(key)}, node 0 has {key}={ours.get(key)}: "
                    "start the same command, with the same versions, on all nodes"
                )
        for message in more:  # a signal that came as it greeted
            self._take(new, message)

    def acquire(self, own: Callable[[], Group], tick: Tick) -> Group:
        """Return this node's GPUs once all nodes have theirs.

        Node after node in the order of their machines: two jobs cannot each hold one and wait for
        the other's.
        """
        group: Group | None = None
        here = boot_name(), socket.gethostname()
        for follower in sorted(self._followers, key=lambda one: (one.machine, one.host, one.node)):
            if group is None and here <= (follower.machine, follower.host):
                group = own()
            follower.connection.send(messages.Reserve())
            while (found := follower.reserved) is None:
                self._look(TICK_SECONDS, tick)
                self.check()
            if found.problem is not None:
                error = ConfigError if found.refuses else NoDevice
                raise error(f"{follower.name}: {found.problem}")
            log.info("%s uses %s", follower.name, ", ".join(found.gpus) or "the CPU")
        group = own() if group is None else group
        for follower in self._followers:
            if follower.reserved is None or len(follower.reserved.gpus) != len(group):
                raise NoDevice(f"{follower.name} has not as many GPUs as node 0: {len(group)}")
        return group

    # --- the executor -----------------------------------------------------------------------------

    def over(self, local: ProcessExecutor) -> Leader:
        """Return the job's executor, given that of this node's ranks."""
        self._local = local
        return self

    def prepare(self, tick: Tick = lambda: None) -> None:
        """Wait until libraries are imported here; the other nodes have done so already."""
        self._local.prepare(tick)

    def close(self, *, keep_server: bool) -> None:
        """Release what runs this node's ranks."""
        self._local.close(keep_server=keep_server)

    def poll(self) -> None:
        """Read what the nodes have sent; raises NoDevice if one is lost."""
        self._local.poll()
        self.check()

    def check(self) -> None:
        """Raise NoDevice if a node is lost."""
        self._look(0.0, lambda: None)
        if (problem := self._problem()) is not None:
            raise NoDevice(problem)

    def run(
        self,
        request: AttemptRequest,
        on_event: Callable[[Event], None],
        *,
        hold: tuple[int, ...] = (),
        tick: Tick = lambda: None,
    ) -> Outcome:
        """Run one attempt on all nodes; raises ConfigError if a trainer refuses the config."""
        self.check()
        self._on_event, self._number, self._has_sent_stop = on_event, request.attempt, False
        self._grace_seconds = request.stop_grace_seconds
        host, checkpoint = self._followers[0].connection.here, request.resume_checkpoint
        if checkpoint is not None and checkpoint.is_relative_to(self._run_dir):
            checkpoint = checkpoint.relative_to(self._run_dir)
        path = None if checkpoint is None else str(checkpoint)
        assert request.spec is not None
        with socket.create_server((host, 0), family=family_of(host)) as store:
            port = store.getsockname()[1]
            spec = replace(request.spec, gpus=())
            for follower in self._followers:
                follower.ended = None
            self._send(messages.Begin(request.attempt, spec, request.job, port, path))
            span = NodeSpan(0, self._nodes, host, port, interface_of(host))
            request = replace(request, span=span)
            hold = (*hold, store.fileno())
            outcome = self._local.run(request, on_event, hold=hold, tick=tick, others=self)
        mine = ended_by(request.attempt, outcome, was_ended=self._seconds_left() is not None)
        self._collect(mine, tick)
        if (problem := self._problem()) is not None:
            return replace(outcome, failure=Failure(FailureKind.INTERRUPTED, problem))
        for end in self._ends():
            if end.refusal is not None:
                raise ConfigError(end.refusal)
        root = messages.root_of((mine, *self._ends()), request.ranks)
        if root is None or root is mine:
            return _with_stacks(outcome, self._ends())
        return _with_failure_of(root, outcome)

    def _collect(self, mine: Ended, tick: Tick) -> None:
        """Wait for the ends on the other nodes, which are hurried if their ranks would wait."""
        until = time.monotonic() + self._grace_seconds + _LATE_SECONDS
        has_hurried = False
        with self._signals.handed_to(lambda signum: None):
            while self._problem() is None and len(self._ends()) < len(self._followers):
                if not has_hurried and any(end.is_sudden for end in (mine, *self._ends())):
                    has_hurried = True
                    self._send(messages.End(_LAST_REPORT_SECONDS))
                self._look(TICK_SECONDS, tick)
                self.poll_nodes()
                for follower in self._followers if time.monotonic() > until else ():
                    if follower.ended is None:
                        follower.connection.lost = "its ranks do not end"
        if self._problem() is not None:
            self._send(messages.End(0.0))

    def _ends(self) -> tuple[Ended, ...]:
        return tuple(one.ended for one in self._followers if one.ended is not None)

    def _problem(self) -> str | None:
        for one in self._followers:
            if one.connection.lost is not None:
                return f"{one.name} is lost ({one.connection.lost}): start all nodes again"
        return None

    # --- what goes on on other nodes --------------------------------------------------------------

    @property
    def descriptors(self) -> Sequence[int]:
        """What becomes readable when a node sends something."""
        here = [one.connection for one in self._followers if one.connection.lost is None]
        return [connection.fileno() for connection in here]

    def poll_nodes(self) -> float | None:
        """Follow :class:`robust_train.execution.fork_server.OtherNodes`."""
        self._look(0.0, lambda: None)
        if self._signals.received is not None and not self._has_sent_stop:
            self._has_sent_stop = True
            self._send(messages.Stop(int(self._signals.received)))
        return self._seconds_left()

    stalled = None  # it is this node that sees it

    def on_stall(self, found: Standstill) -> None:
        """Have the other nodes' ranks write their stacks as well."""
        self._send(messages.Hang(found))

    def _seconds_left(self) -> float | None:
        if self._problem() is not None:
            return 0.0
        failed = [end for end in self._ends() if end.failure is not None or end.is_sudden]
        if any(end.is_sudden for end in failed):
            return _LAST_REPORT_SECONDS
        return self._grace_seconds if failed else None

    def _send(self, message: messages.Message) -> None:
        for follower in self._followers:
            follower.connection.send(message)

    def _look(self, seconds: float, tick: Tick) -> None:
        """Take in what arrives within so many seconds."""
        ready = wait([*self.descriptors, *self._listeners], seconds)
        tick()
        for listener in filter(ready.__contains__, self._listeners):
            self._greet(listener)
        for follower in self._followers:
            for message in follower.connection.receive():
                self._take(follower, message)

    def _take(self, follower: _Follower, message: messages.Message) -> None:
        match message:
            case messages.Reserved():
                follower.reserved = message
            case messages.Reported():
                with contextlib.suppress(MalformedEvent):
                    self._on_event(parse(dict(message.event)))
            case Ended(number=self._number):
                follower.ended = replace(message, node=follower.node, host=follower.host)
            case messages.Stop():
                log.info("%s was asked to stop", follower.name)
                self._signals.deliver(forwarded(message.signum))


def ended_by(number: int, outcome: Outcome, *, was_ended: bool) -> Ended:
    """Return how an attempt ended on this node, as it is sent."""
    about = outcome.others_know, outcome.traceback, outcome.exceptions, outcome.output
    return Ended(number, outcome.failure, was_ended, *about)


def _with_stacks(outcome: Outcome, ends: Sequence[Ended]) -> Outcome:
    """Return the outcome of an attempt that hangs with what other nodes' ranks were doing."""
    failure, traceback = outcome.failure, outcome.traceback or ""
    for end in ends:
        if failure and end.failure and end.failure.evidence.clue == Clue.STALLED:
            where = where_it_stands(stacks := end.traceback or "")
            message = f"{failure.message}{where and '; '}{where}"
            failure = replace(failure, message=message, advice=failure.advice + end.failure.advice)
            traceback += f"\n{end.host}\n\n{stacks}"
    return replace(outcome, failure=failure, traceback=traceback or None)


def _with_failure_of(end: Ended, outcome: Outcome) -> Outcome:
    """Return this node's outcome with the failure of another."""
    assert end.failure is not None
    failure = replace(end.failure, message=f"{end.failure.message} (on {end.host})")
    outcome = replace(outcome, failure=failure, traceback=end.traceback, error=None)
    return replace(outcome, exceptions=end.exceptions, output=end.output)
