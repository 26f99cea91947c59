"""A follower's launcher: it takes orders from node 0's, runs this node's ranks, and reports."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from robust_train import errors, settings
from robust_train.config.batch import settle
from robust_train.errors import ConfigError, JobInterrupted, NoDevice, NoProgress
from robust_train.events import Event, MemoryReported, Stalled
from robust_train.execution import TICK_SECONDS, sleep_with_ticks
from robust_train.execution.library_imports import find_trainer
from robust_train.execution.process import ProcessExecutor
from robust_train.execution.request import AttemptRequest, NodeSpan, request_for
from robust_train.execution.signals import SignalWatch, forwarded
from robust_train.execution.stall import Standstill
from robust_train.nodes import messages
from robust_train.nodes.connection import connect, hello, interface_of, started_with
from robust_train.nodes.leader import ended_by
from robust_train.nodes.place import Place
from robust_train.queue import devices
from robust_train.runfolder.summary import Summary
from robust_train.values import Failure, FailureKind, Group, Outcome

log = logging.getLogger("robust_train")

_FIRST_LINE_SECONDS = 10.0
_CHECKPOINT_SECONDS = 60.0
_MOST_OUTPUT = 50_000


class _Over(Exception):
    """The leader has ended the job, or is gone."""


class Follower:
    """One launch on a node that follows. Raises ConfigError: config or trainer cannot be used."""

    def __init__(
        self,
        trainer: str | Callable[..., Any] | None,
        cfg: DictConfig,
        run_dir: str | Path | None,
        place: Place,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        self._cfg = cfg = cfg.copy()
        settings.hide_urls(cfg, {})
        settle(cfg)
        self._place, self._signals, self._is_over = place, SignalWatch(), is_over
        self._settings = settings.launcher_settings(cfg)
        trainer = trainer or settings.target_of(cfg)
        self._trainer, libraries, _ = find_trainer(trainer, False)
        name = settings.job_name(cfg, trainer)
        self._run_dir = settings.run_folder(run_dir, name)
        self._wanted = settings.device_settings(cfg, name)
        self._devices = devices.Devices(self._wanted, os.environ, self._run_dir, self._sleep)
        resolved = cfg.copy()
        OmegaConf.resolve(resolved)
        about = (self._trainer, libraries, resolved, self._run_dir, self._signals)
        self._executor = ProcessExecutor(*about)
        self._group: Group = ()
        self._orders: list[messages.Message] = []
        self._end_in: float | None = None
        self.stalled: Standstill | None = None  # what the leader has seen
        self._done: messages.Done | None = None
        self._knows_of_stop = False  # the leader

    def run(self) -> Summary:
        """Follow to the job's end; return its status and reason.

        Raises:
            ConfigError: node 0 was started with something else, or is not there.
            JobInterrupted: the job was stopped.
            TrainerFailed: it failed.
        """
        with self._signals, contextlib.ExitStack() as stack:
            # the leader is sent a signal, and ends the job
            stack.enter_context(self._signals.handed_to(lambda signum: None))
            stack.callback(self._devices.release)
            stack.callback(self._executor.close, keep_server=False)
            if self._meet():
                stack.callback(self._connection.close)
            while (done := self._done) is None:
                with contextlib.suppress(_Over):
                    self._follow()
        if done.status == "interrupted":
            raise JobInterrupted(max(done.exit_code - 128, 1))
        if done.exit_code == errors.EXIT_FAILED:
            raise errors.TrainerFailed(f"node {self._place.node}: {done.status}: {done.reason}")
        for refusal in (ConfigError, NoProgress):
            if done.exit_code == refusal.exit_code:
                raise refusal(str(done.reason))
        reason = f": {done.reason}" if done.reason else ""
        log.info("node %d: %s%s", self._place.node, done.status, reason)
        return Summary(done.status, self._run_dir, done.reason)

    # --- the leader -------------------------------------------------------------------------------

    def _meet(self) -> bool:
        """Connect to the leader, once it is there; return False if it does not come."""
        started, has_said = time.monotonic(), False
        while (connection := connect(self._run_dir)) is None:
            waited = time.monotonic() - started
            self._signals.raise_if_received()  # there is nobody to send it to
            if self._is_over():
                self._done = messages.Done("completed", 0, "node 0 does not run this job")
                return False
            if waited > self._wanted.wait_timeout_seconds:
                reason = (
                    f"node 0 did not appear in {self._run_dir}: start the same command there, with "
                    "the same hydra.run.dir on a disk that all nodes see"
                )
                self._done = messages.Done("no_device", errors.EXIT_NO_DEVICE, reason)
                return False
            if waited > _FIRST_LINE_SECONDS and not has_said:
                has_said = True
                log.info("waiting for node 0, which leads: no launcher of it in %s", self._run_dir)
            time.sleep(TICK_SECONDS)
        self._connection = connection
        connection.send(hello(self._place.node, started_with(self._cfg)))
        return True

    def _look(self) -> None:
        """Take in what the leader has sent, and send it a signal: it stops the job."""
        for message in self._connection.receive():
            match message:
                case messages.Done():
                    self._done = message
                case messages.End():
                    self._end_in = message.seconds
                case messages.Hang():
                    self.stalled = message.found
                case messages.Stop():
                    self._knows_of_stop = True
                    self._signals.deliver(forwarded(message.signum))
                case _:
                    self._end_in = self.stalled = None  # what was to end has ended
                    self._orders.append(message)
        if self._connection.lost is not None and self._done is None:
            reason = f"node 0 is lost ({self._connection.lost}): start all nodes again"
            self._done = messages.Done("no_device", errors.EXIT_NO_DEVICE, reason)
        if self._signals.received is not None and not self._knows_of_stop:
            self._knows_of_stop = True
            self._connection.send(messages.Stop(self._signals.received))

    @property
    def descriptors(self) -> Sequence[int]:
        """What becomes readable when the leader sends something."""
        return (self._connection.fileno(),)

    def poll_nodes(self) -> float | None:
        """Follow :class:`robust_train.execution.fork_server.OtherNodes`."""
        self._look()
        return self._end_in if self._done is None else 0.0

    def on_stall(self, found: Standstill) -> None:
        """Do nothing: it is the leader who sees it."""

    def _sleep(self, seconds: float, wake: int | None = None) -> None:
        sleep_with_ticks(seconds, wake, self._tick)

    def _tick(self) -> None:
        self._look()
        if self._done is not None:
            raise _Over

    # --- orders -----------------------------------------------------------------------------------

    def _follow(self) -> None:
        """Wait for an order and obey it; after a signal only for the end."""
        with self._signals.handed_to(lambda signum: None) as wakeup:
            self._look()
            if not self._orders and self._done is None:
                wait([*self.descriptors, wakeup], TICK_SECONDS)
        orders, self._orders = self._orders, []
        for order in orders:
            if isinstance(order, messages.Reserve) and self._signals.received is None:
                self._connection.send(self._reserve())
            elif isinstance(order, messages.Begin):
                self._connection.send(self._run_attempt(order))

    def _reserve(self) -> messages.Reserved:
        try:
            self._group = self._devices.acquire()
            self._executor.prepare(self._tick)
        except (ConfigError, NoDevice) as error:
            return messages.Reserved((), str(error), isinstance(error, ConfigError))
        names = (f"GPU {one.index} ({one.name}, {one.uuid})" for one in self._group)
        return messages.Reserved(tuple(names))

    def _run_attempt(self, order: messages.Begin) -> messages.Ended:
        try:
            self._signals.raise_if_received()
            request = self._request(order)
            run = partial(self._executor.run, request, partial(self._on_event, request))
            outcome = run(hold=self._devices.hold, tick=self._devices.tick, others=self)
        except ConfigError as error:
            return messages.Ended(order.number, refusal=str(error))
        except JobInterrupted as error:  # before it had begun
            return messages.Ended(order.number, Failure(FailureKind.INTERRUPTED, str(error)))
        self._devices.ended(self._group, _on_this_node(outcome, request), ())
        traceback = outcome.traceback and outcome.traceback[-_MOST_OUTPUT:]
        outcome = replace(outcome, output=outcome.output[-_MOST_OUTPUT:], traceback=traceback)
        return ended_by(order.number, outcome, was_ended=self._end_in is not None)

    def _request(self, order: messages.Begin) -> AttemptRequest:
        """Return the attempt as this node's ranks run it."""
        checkpoint = None if order.checkpoint is None else self._run_dir / order.checkpoint
        until = time.monotonic() + _CHECKPOINT_SECONDS
        while checkpoint is not None and not checkpoint.exists() and time.monotonic() < until:
            self._sleep(TICK_SECONDS)
            with contextlib.suppress(OSError):
                os.listdir(checkpoint.parent)  # a network disk asks its server anew
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
        where = self._connection.there, order.port, interface_of(self._connection.here)
        span = NodeSpan(self._place.node, self._place.nodes, *where)
        # progress is reported on node 0, which ends all that hangs
        return replace(request, span=span, stall_timeout_seconds=0.0, has_live_status=False)

    def _on_event(self, request: AttemptRequest, event: Event) -> None:
        if not isinstance(event, Stalled):  # the leader has seen it, and gets the stacks at the end
            self._connection.send(messages.Reported(event.as_json()))
        if isinstance(event, MemoryReported) and event.rank is not None:
            self._devices.on_event(replace(event, rank=event.rank - request.first_rank))


def _on_this_node(outcome: Outcome, request: AttemptRequest) -> Outcome:
    """Return the outcome with the failure's rank as a number on this node; of others beyond all."""
    if outcome.failure is None or outcome.failure.rank is None:
        return outcome
    rank = outcome.failure.rank - request.first_rank
    rank = rank if 0 <= rank < request.ranks else request.ranks
    return replace(outcome, failure=replace(outcome.failure, rank=rank))
