"""A follower's launcher: it takes orders from node 0's, runs this node's ranks, and reports."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import select
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from robust_train import settings
from robust_train.config.batch import settle_batch_size
from robust_train.config.schema import validate
from robust_train.errors import (
    EXIT_BAD_CONFIG,
    EXIT_NO_DEVICE,
    EXIT_NO_PROGRESS,
    ConfigError,
    JobInterrupted,
    NoDevice,
    NoProgress,
)
from robust_train.events import Event, MemoryReported
from robust_train.execution import TICK_SECONDS, sleep_with_ticks
from robust_train.execution.library_imports import find_trainer
from robust_train.execution.process import ProcessExecutor
from robust_train.execution.request import AttemptRequest, NodeSpan, request_for
from robust_train.execution.signals import SignalWatch
from robust_train.nodes.connection import (
    HOST_VARIABLE,
    Address,
    Connection,
    Lost,
    flat,
    interface_of,
    is_proof,
    is_readable,
    proof,
    read_address,
    versions,
)
from robust_train.nodes.leader import ended_by
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
)
from robust_train.nodes.place import Place
from robust_train.queue import devices
from robust_train.runfolder.summary import Summary
from robust_train.values import Group, Outcome

log = logging.getLogger("robust_train")

Trainer = str | Callable[..., Any]

_CONNECT_SECONDS = 3.0
_GREETING_SECONDS = 20.0
_FIRST_LINE_SECONDS = 10.0
_CHECKPOINT_SECONDS = 60.0
_MOST_OUTPUT, _MOST_TRACEBACK = 20_000, 100_000


class _Over(Exception):
    """The leader has ended the job, or is gone."""


class Follower:
    """One launch on a node that follows.

    Raises:
        ConfigError: config or trainer cannot be used.
    """

    def __init__(
        self, trainer: Trainer | None, cfg: DictConfig, run_dir: str | Path | None, place: Place
    ) -> None:
        self._cfg = cfg = cfg.copy()
        settings.hide_urls(cfg, {})
        settle_batch_size(cfg)
        validate(cfg)
        self._place = place
        self._settings = settings.launcher_settings(cfg)
        self._trainer, libraries, _ = find_trainer(trainer or settings.target_of(cfg), False)
        self._run_dir = settings.run_folder(run_dir)
        self._wanted = settings.device_settings(cfg, self._run_dir)
        self._signals = SignalWatch()
        resolved = cfg.copy()
        OmegaConf.resolve(resolved)
        self._executor = ProcessExecutor(
            self._trainer, libraries, resolved, self._run_dir, self._signals
        )
        self._devices = devices.Devices(self._wanted, os.environ, self._run_dir, self._sleep)
        self._group: Group = ()
        self._connection: Connection | None = None
        self._orders: list[Message] = []
        self._end_in: float | None = None
        self._done: Done | None = None
        self._asked: int | None = None  # the signal that the leader passed on, or was told of

    def run(self) -> Summary:
        """Follow to the job's end; return its status and reason.

        Raises:
            ConfigError: node 0 was started with something else, or is not there.
            JobInterrupted: the job was stopped.
        """
        with self._signals:
            try:
                self._connection = self._meet()
                while self._done is None:
                    with contextlib.suppress(_Over, JobInterrupted):  # the leader is told of it
                        self._follow()
            finally:
                with self._signals.handed_to(lambda signum: None):
                    self._executor.close(keep_server=False)
                    self._devices.release()
                    if self._connection is not None:
                        self._connection.close()
        assert self._done is not None
        done, reason = self._done, str(self._done.reason)
        if done.status == "interrupted":
            raise JobInterrupted(max(done.exit_code - 128, 1))
        if done.exit_code in (EXIT_BAD_CONFIG, EXIT_NO_PROGRESS):
            raise (NoProgress if done.exit_code == EXIT_NO_PROGRESS else ConfigError)(reason)
        log.info("node %d: %s%s", self._place.node, done.status, f": {reason}" * bool(done.reason))
        return Summary(done.status, self._run_dir, done.reason)

    # --- the leader -------------------------------------------------------------------------------

    def _meet(self) -> Connection:
        """Return a connection to the leader, once it is there."""
        started, has_said = time.monotonic(), False
        while True:
            address = read_address(self._run_dir)
            connection = None if address is None else self._greet(address)
            if connection is not None:
                return connection
            waited = time.monotonic() - started
            if not has_said and waited > _FIRST_LINE_SECONDS:
                has_said = True
                log.info("waiting for node 0, which leads: no launcher of it in %s", self._run_dir)
            if waited > self._wanted.wait_timeout_seconds:
                raise ConfigError(
                    f"node 0 did not appear in {self._run_dir}: start the same command there, with "
                    "the same hydra.run.dir on a disk that all nodes see"
                )
            time.sleep(TICK_SECONDS)

    def _greet(self, address: Address) -> Connection | None:
        """Connect and prove who we are; None where nobody listens who is the leader."""
        own = os.environ.get(HOST_VARIABLE, "")
        for host in address.hosts:
            with contextlib.suppress(OSError, Lost):
                sock = socket.create_connection((host, address.port), _CONNECT_SECONDS, (own, 0))
                connection = Connection(sock)
                with contextlib.ExitStack() as unless_welcome:
                    unless_welcome.callback(connection.close)
                    nonce = secrets.token_hex(16)
                    challenge = _first(connection)
                    if not isinstance(challenge, Challenge):
                        continue
                    mine = proof(address.secret, challenge.nonce, "follower")
                    name, node = socket.gethostname(), self._place.node
                    told = (versions(), flat(self._cfg))
                    connection.send(Hello(node, name, mine, nonce, *told))
                    welcome = _first(connection)
                    if isinstance(welcome, Welcome) and is_proof(
                        welcome.proof, address.secret, nonce, "leader"
                    ):
                        unless_welcome.pop_all()
                        return connection
        return None

    def _look(self) -> None:
        """Take in what the leader has sent."""
        assert self._connection is not None
        try:
            messages = self._connection.receive()
        except Lost as error:
            reason = f"node 0 is lost ({error}): start all nodes again"
            self._done = self._done or Done("no_device", EXIT_NO_DEVICE, reason)
            return
        for message in messages:
            if isinstance(message, Done):
                self._done = message
            elif isinstance(message, End):
                self._end_in = message.seconds
            elif isinstance(message, Stop):
                self._asked = self._asked or message.signum
                self._signals.deliver(message.signum)
            else:
                self._orders.append(message)

    def _send(self, message: Message) -> None:
        assert self._connection is not None
        self._connection.send(message)

    def _pass_signal_on(self) -> None:
        """Tell the leader of a signal that came here: it stops the job."""
        if self._signals.received is not None and self._asked is None:
            self._asked = self._signals.received
            self._send(Stop(self._asked))

    # --- orders -----------------------------------------------------------------------------------

    def _follow(self) -> None:
        """Wait for an order and obey it. A signal goes to the leader, which ends the job."""
        assert self._connection is not None
        with self._signals.handed_to(lambda signum: None) as wakeup:
            self._pass_signal_on()
            if not self._orders:
                poll = select.poll()
                for source in (self._connection.fileno(), wakeup):
                    poll.register(source, select.POLLIN)
                poll.poll(1000 * TICK_SECONDS)
                self._pass_signal_on()
                self._look()
        for order in self._orders[:1]:
            del self._orders[0]
            if self._signals.received is not None:
                continue
            if isinstance(order, Reserve):
                self._send(self._reserve())
            elif isinstance(order, Begin):
                self._run_attempt(order)

    def _reserve(self) -> Reserved:
        try:
            self._group = self._devices.acquire()
            self._executor.prepare(self._tick)
        except (ConfigError, NoDevice) as error:
            return Reserved(problem=str(error), is_refusal=isinstance(error, ConfigError))
        return Reserved(tuple(f"GPU {one.index} ({one.name}, {one.uuid})" for one in self._group))

    def _run_attempt(self, order: Begin) -> None:
        self._end_in = None
        request = self._request(order)
        run = partial(self._executor.run, request, partial(self._on_event, request))
        try:
            outcome = run(hold=self._devices.hold, tick=self._devices.tick, others=self)
        except ConfigError as error:
            self._send(Ended(order.number, refusal=str(error)))
            return
        with self._signals.handed_to(lambda signum: None):
            self._devices.ended(self._group, _on_this_node(outcome, request), ())
            ended = ended_by(order.number, outcome, was_ended=self._end_in is not None)
            output = ended.output[-_MOST_OUTPUT:]
            traceback = ended.traceback and ended.traceback[-_MOST_TRACEBACK:]
            self._send(replace(ended, output=output, traceback=traceback))

    def _request(self, order: Begin) -> AttemptRequest:
        """Return the attempt as this node's ranks run it."""
        assert self._connection is not None
        checkpoint = None if order.checkpoint is None else self._run_dir / order.checkpoint
        if checkpoint is not None:
            self._await(checkpoint)
        request = request_for(
            replace(order.spec, gpus=self._group),
            self._cfg,
            self._settings,
            trainer=self._trainer,
            device=devices.name_for_trainer(self._group, os.environ, own_process=True),
            number=order.number,
            run_dir=self._run_dir,
            job=order.job,
            checkpoint=checkpoint,
            search=None,
            longest_pause=0.0,
        )
        place, here = self._place, self._connection.here
        host, interface = self._connection.there, interface_of(here)
        return replace(
            request,
            span=NodeSpan(place.node, place.nodes, host, order.port, interface),
            stall_timeout_seconds=0.0,  # progress is reported on node 0, which ends all that hangs
            has_live_status=False,
        )

    def _await(self, checkpoint: Path) -> None:
        """Wait until a network disk shows the checkpoint here; the trainer reports what is not."""
        until = time.monotonic() + _CHECKPOINT_SECONDS
        while not checkpoint.exists() and time.monotonic() < until:
            self._tick()
            with contextlib.suppress(OSError):
                os.listdir(checkpoint.parent)
            time.sleep(0.1)

    def _on_event(self, request: AttemptRequest, event: Event) -> None:
        self._send(Reported(event.as_json()))
        if isinstance(event, MemoryReported) and event.rank is not None:
            self._devices.on_event(replace(event, rank=event.rank - request.first_rank))

    # --- what goes on meanwhile -------------------------------------------------------------------

    @property
    def descriptors(self) -> Sequence[int]:
        """What becomes readable when the leader says something."""
        return () if self._connection is None else (self._connection.fileno(),)

    def poll_nodes(self) -> float | None:
        """See :class:`robust_train.execution.fork_server.OtherNodes`."""
        self._look()
        self._pass_signal_on()
        return self._end_in if self._done is None else 0.0

    def _sleep(self, seconds: float, wake: int | None = None) -> None:
        sleep_with_ticks(seconds, wake, self._tick)

    def _tick(self) -> None:
        self._look()
        if self._done is not None:
            raise _Over


def _first(connection: Connection) -> Message | None:
    """Return the first message that comes; None if none does in time."""
    if not is_readable(connection, _GREETING_SECONDS):
        return None
    return next(iter(connection.receive()), None)


def _on_this_node(outcome: Outcome, request: AttemptRequest) -> Outcome:
    """Return the outcome with the failure's rank as a number on this node; of others beyond all."""
    if outcome.failure is None or outcome.failure.rank is None:
        return outcome
    rank = outcome.failure.rank - request.first_rank
    rank = rank if 0 <= rank < request.ranks else request.ranks
    return replace(outcome, failure=replace(outcome.failure, rank=rank))
