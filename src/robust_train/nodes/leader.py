"""Node 0's launcher: it decides, and runs each attempt on all nodes. No thread, no process more."""

from __future__ import annotations

import contextlib
import logging
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from omegaconf import DictConfig

from robust_train.errors import ConfigError, NoDevice
from robust_train.events import Event, MalformedEvent, parse
from robust_train.execution import TICK_SECONDS
from robust_train.execution.process import ProcessExecutor
from robust_train.execution.request import AttemptRequest, NodeSpan
from robust_train.execution.signals import SignalWatch
from robust_train.nodes.connection import (
    Address,
    Connection,
    Lost,
    addresses,
    flat,
    interface_of,
    is_proof,
    proof,
    versions,
)
from robust_train.nodes.messages import (
    Begin,
    Challenge,
    Done,
    End,
    Ended,
    Hello,
    Message,
    Reported,
    Reserve,
    Reserved,
    Stop,
    Welcome,
    root_of,
)
from robust_train.nodes.place import Place
from robust_train.runfolder.state import RunState
from robust_train.values import Failure, FailureKind, Group, Outcome

log = logging.getLogger("robust_train")

Tick = Callable[[], None]

LAST_REPORT_SECONDS = 1.0
"""Time of the other nodes after a failure: for reports of their own that explain more."""
_LATE_SECONDS = 30.0  # for a node's end after its ranks had all their time
_FIRST_LINE_SECONDS = 10.0


@dataclass
class Follower:
    """A node that follows."""

    node: int
    host: str
    connection: Connection
    reserved: Reserved | None = None
    ended: Ended | None = None  # of the attempt in progress
    lost: str | None = None  # how it was seen that the node is gone

    @property
    def name(self) -> str:
        """Its name for people."""
        return f"node {self.node} ({self.host})"


class Leader:
    """Finds the followers, then is the job's executor; a context manager.

    Args:
        place: this node's.
        run_dir: the job's run folder.
        cfg: the job's config.
        signals: how the job is asked to stop.
        wait_seconds: the limit for nodes to appear.
        state: returns how the job ended, when the block is left.
        environ: the launcher's environment.
    """

    def __init__(
        self,
        place: Place,
        run_dir: Path,
        cfg: DictConfig,
        signals: SignalWatch,
        wait_seconds: float,
        state: Callable[[], RunState],
        environ: Mapping[str, str],
    ) -> None:
        self._place, self._run_dir, self._cfg = place, run_dir, cfg
        self._signals, self._wait_seconds, self._state = signals, wait_seconds, state
        self._hosts, self._secret = addresses(environ), secrets.token_hex(16)
        self._followers: list[Follower] = []
        self._strangers: dict[Connection, str] = {}  # with what they were challenged
        self._local: ProcessExecutor | None = None
        self._on_event: Callable[[Event], None] = lambda event: None
        self._number = 0
        self._stop_sent = False

    def __enter__(self) -> Leader:
        bind = self._hosts[0] if len(self._hosts) == 1 else ""
        self._listener = socket.create_server((bind, 0))
        self._address = Address(self._hosts, self._listener.getsockname()[1], self._secret)
        try:
            self._address.write(self._run_dir)
        except OSError as error:
            self._listener.close()
            problem = f"{self._run_dir}: cannot be written: {error.strerror}"
            raise ConfigError(f"num_nodes={self._place.nodes}: {problem}") from None
        return self

    def __exit__(self, kind: object, error: BaseException | None, frames: object) -> None:
        self._address.remove(self._run_dir)
        state = self._state()
        code = getattr(error, "exit_code", 1) if state.exit_code is None else state.exit_code
        for follower in self._followers:
            follower.connection.send(Done(state.state, code, state.reason))
            follower.connection.close()
        for connection in self._strangers:
            connection.close()
        self._listener.close()

    # --- before the first attempt -----------------------------------------------------------------

    def gather(self, tick: Tick) -> None:
        """Wait until all nodes are there.

        Raises:
            ConfigError: one was started with something else, or some do not appear.
        """
        started, has_said = time.monotonic(), False
        while missing := self._missing():
            self._look(TICK_SECONDS, tick)
            waited = time.monotonic() - started
            who = f"node {', '.join(map(str, missing))} of {self._place.nodes}"
            if not has_said and waited > _FIRST_LINE_SECONDS:
                has_said = True
                log.info("waiting for %s: the same command there, in a folder that it sees", who)
            if waited > self._wait_seconds:
                raise ConfigError(
                    f"{who} did not appear: start the same command there with the same "
                    f"hydra.run.dir, on a disk that all nodes see ({self._run_dir})"
                )
        self._listener.close()
        log.info("leads %s", ", ".join(one.name for one in self._followers))

    def _missing(self) -> list[int]:
        here = {one.node for one in self._followers if one.lost is None}
        return [node for node in range(1, self._place.nodes) if node not in here]

    def _greet(self, connection: Connection, hello: Hello) -> None:
        """Take a follower in; raises ConfigError if it was started with something else."""
        nonce = self._strangers.pop(connection)
        if not is_proof(hello.proof, self._secret, nonce, "follower"):
            connection.close()
            return
        connection.send(Welcome(proof(self._secret, hello.nonce, "leader")))
        new = Follower(hello.node, hello.host, connection)
        same = [one for one in self._followers if one.node == hello.node and one.lost is None]
        self._followers = [one for one in self._followers if one.lost is None]
        self._followers.append(new)
        if same or hello.node == 0:
            hosts = " and ".join(one.host for one in (*same, new))
            raise ConfigError(
                f"two launchers are node {hello.node} (on {hosts}): each needs a number of its own"
            )
        for ours, theirs in ((versions(), hello.versions), (flat(self._cfg), hello.config)):
            keys = [key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key)]
            if keys:
                key = keys[0]
                raise ConfigError(
                    f"{new.name} has {key}={theirs.get(key)}, node 0 has {key}={ours.get(key)}: "
                    "start the same command, with the same versions, on all nodes"
                )

    def acquire(self, own: Callable[[], Group], tick: Tick) -> Group:
        """Return this node's GPUs once all nodes have theirs.

        Node after node in the order of the hosts' names: two jobs cannot each hold one host and
        wait for the other's.
        """
        here = socket.gethostname()
        order = sorted([(here, 0), *((one.host, one.node) for one in self._followers)])
        group: Group = ()
        for _, node in order:
            follower = next((one for one in self._followers if one.node == node), None)
            if follower is None:
                group = own()
                continue
            follower.connection.send(Reserve())
            while follower.reserved is None:
                self._look(TICK_SECONDS, tick)
                self._raise_if_lost()
            found = follower.reserved
            if found.problem is not None:
                error = ConfigError if found.is_refusal else NoDevice
                raise error(f"{follower.name}: {found.problem}")
            log.info("%s uses %s", follower.name, ", ".join(found.gpus) or "the CPU")
        for follower in self._followers:
            if follower.reserved is None or len(follower.reserved.gpus) != len(group):
                raise NoDevice(f"{follower.name} has not as many GPUs as node 0: {len(group)}")
        return group

    # --- the executor -----------------------------------------------------------------------------

    def with_local(self, executor: ProcessExecutor) -> Leader:
        """Return the job's executor, with the one for this node's ranks."""
        self._local = executor
        return self

    @property
    def local(self) -> ProcessExecutor:
        """What runs this node's ranks."""
        assert self._local is not None
        return self._local

    def prepare(self, tick: Tick = lambda: None) -> None:
        """Wait until libraries are imported here; the other nodes have done so already."""
        self.local.prepare(tick)

    def close(self, *, keep_server: bool) -> None:
        """Release what runs this node's ranks."""
        self.local.close(keep_server=keep_server)

    def check(self) -> None:
        """Raise NoDevice if a node is lost."""
        self._look(0.0, lambda: None)
        self._raise_if_lost()

    def poll(self) -> None:
        """Take in what goes on; raises NoDevice if a node is lost."""
        self.local.poll()
        self.check()

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
        self._on_event, self._number, self._stop_sent = on_event, request.attempt, False
        host = self._followers[0].connection.here
        with socket.create_server((host, 0)) as store:
            port = store.getsockname()[1]
            span = NodeSpan(0, self._place.nodes, host, port, interface_of(host))
            assert request.spec is not None
            spec, checkpoint = replace(request.spec, gpus=()), self._relative(request)
            for follower in self._followers:
                follower.ended = None
                begin = Begin(request.attempt, spec, request.job, port, checkpoint)
                follower.connection.send(begin)
            request = replace(request, span=span)
            hold = (*hold, store.fileno())
            outcome = self.local.run(request, on_event, hold=hold, tick=tick, others=self)
        mine = ended_by(request.attempt, outcome, was_ended=self._seconds_left() is not None)
        self._collect(mine, request.stop_grace_seconds, tick)
        return self._outcome(mine, outcome, request.ranks)

    @property
    def descriptors(self) -> Sequence[int]:
        """What becomes readable when a node says something."""
        return [one.connection.fileno() for one in self._followers if one.lost is None]

    def poll_nodes(self) -> float | None:
        """See :class:`robust_train.execution.fork_server.OtherNodes`."""
        self._look(0.0, lambda: None)
        if self._signals.received is not None and not self._stop_sent:
            self._stop_sent = True
            for follower in self._followers:
                follower.connection.send(Stop(int(self._signals.received)))
        return self._seconds_left()

    def _seconds_left(self) -> float | None:
        """Return the time that is left to this node's ranks by how others ended, None: no limit."""
        if any(one.lost is not None for one in self._followers):
            return 0.0
        ends = [one.ended for one in self._followers if one.ended is not None]
        if any(_is_sudden(one) for one in ends):
            return LAST_REPORT_SECONDS
        return None

    def _collect(self, mine: Ended, grace_seconds: float, tick: Tick) -> None:
        """Wait for the ends on the other nodes, which this node's end may hurry."""
        until = time.monotonic() + grace_seconds + _LATE_SECONDS
        has_said = False
        with self._signals.handed_to(lambda signum: None):
            while waiting := [o for o in self._followers if o.ended is None and o.lost is None]:
                sudden = [one for one in (mine, *self._ends()) if _is_sudden(one)]
                if (sudden or self._seconds_left() is not None) and not has_said:
                    has_said = True
                    for follower in waiting:
                        follower.connection.send(End(LAST_REPORT_SECONDS))
                self._look(TICK_SECONDS, tick)
                self.poll_nodes()
                if time.monotonic() > until:
                    for follower in waiting:
                        follower.lost = follower.lost or "its ranks do not end"

    def _ends(self) -> tuple[Ended, ...]:
        return tuple(one.ended for one in self._followers if one.ended is not None)

    def _outcome(self, mine: Ended, outcome: Outcome, ranks: int) -> Outcome:
        """Return this node's outcome, with the failure of another node if that was the cause."""
        if (problem := self._problem()) is not None:
            return replace(outcome, failure=Failure(FailureKind.INTERRUPTED, problem))
        ends = (mine, *self._ends())
        for end in ends:
            if end.refusal is not None:
                raise ConfigError(end.refusal)
        root = root_of(ends, ranks)
        if root is None or root.failure is None or root is mine:
            return outcome
        failure = replace(root.failure, message=f"{root.failure.message} (on {root.host})")
        return replace(
            outcome,
            failure=failure,
            traceback=root.traceback,
            exceptions=root.exceptions,
            output=root.output,
            error=None,
        )

    # --- what arrives -----------------------------------------------------------------------------

    def _look(self, seconds: float, tick: Tick) -> None:
        """Take in what arrives within so many seconds."""
        with selectors.DefaultSelector() as selector:
            sources = [one.connection for one in self._followers if one.lost is None]
            for source in (*sources, *self._strangers):
                selector.register(source, selectors.EVENT_READ)
            with contextlib.suppress(ValueError):  # closed: all are there
                selector.register(self._listener, selectors.EVENT_READ)
            ready = [key.fileobj for key, _ in selector.select(seconds)]
        tick()
        if self._listener in ready:
            self._accept()
        for connection in [one for one in self._strangers if one in ready]:
            self._hear(connection)
        for follower in [one for one in self._followers if one.connection in ready]:
            try:
                for message in follower.connection.receive():
                    self._take(follower, message)
            except Lost as error:
                follower.lost = str(error)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection = Connection(self._listener.accept()[0])
            self._strangers[connection] = secrets.token_hex(16)
            connection.send(Challenge(self._strangers[connection]))

    def _hear(self, connection: Connection) -> None:
        """Hear somebody who has not proved to be a follower."""
        try:
            for message in connection.receive()[:1]:
                if isinstance(message, Hello):
                    self._greet(connection, message)
                    return
        except Lost:
            pass
        del self._strangers[connection]
        connection.close()

    def _take(self, follower: Follower, message: Message) -> None:
        if isinstance(message, Reserved):
            follower.reserved = message
        elif isinstance(message, Reported):
            with contextlib.suppress(MalformedEvent):
                self._on_event(parse(dict(message.event)))
        elif isinstance(message, Ended) and message.number == self._number:
            follower.ended = replace(message, node=follower.node, host=follower.host)
        elif isinstance(message, Stop):
            log.info("%s was asked to stop", follower.name)
            self._signals.deliver(message.signum)

    def _problem(self) -> str | None:
        for follower in self._followers:
            if follower.lost is not None:
                return f"{follower.name} is lost ({follower.lost}): start all nodes again"
        return None

    def _raise_if_lost(self) -> None:
        if (problem := self._problem()) is not None:
            raise NoDevice(problem)

    def _relative(self, request: AttemptRequest) -> str | None:
        checkpoint = request.resume_checkpoint
        if checkpoint is None:
            return None
        is_inside = checkpoint.is_relative_to(self._run_dir)
        return str(checkpoint.relative_to(self._run_dir) if is_inside else checkpoint)


def ended_by(number: int, outcome: Outcome, *, was_ended: bool) -> Ended:
    """Return how an attempt ended on this node, as it is sent."""
    return Ended(
        number,
        outcome.failure,
        was_ended,
        outcome.others_know,
        outcome.traceback,
        outcome.exceptions,
        outcome.output,
    )


def _is_sudden(end: Ended) -> bool:
    """Return whether the ranks of other nodes do not know of a failure, and would wait for ever."""
    failure = end.failure
    if failure is None or end.others_know:
        return False
    was_killed = failure.evidence.clue is not None
    return failure.kind is not FailureKind.INTERRUPTED or was_killed
