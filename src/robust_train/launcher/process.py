"""``isolation=process``: each attempt runs in an interpreter of its own, started early."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from omegaconf import DictConfig

from robust_train.config.attempt import AttemptRequest, Preparation, early_imports
from robust_train.config.trainers import TrainerRef
from robust_train.failures.shortage import no_room_to_import
from robust_train.host.memory import read_host_memory
from robust_train.host.oom_killer import OomKillWatch
from robust_train.host.signals import SignalWatch
from robust_train.launcher.interpreters import (
    Interpreter,
    Interpreters,
    ReaperDied,
    preparation,
    take_early,
    wait_until_prepared,
)
from robust_train.launcher.running_attempt import RunningAttempt
from robust_train.launcher.stall_watch import remove_nccl_pipes
from robust_train.model.attempt import Exit
from robust_train.model.errors import ConfigError
from robust_train.model.events import Event, Failed, LibrariesImported, Stalled
from robust_train.model.failure import FailureKind

log = logging.getLogger("robust_train")

_SIGNAL_SECONDS = 0.5
_STANDBY_SHARE = 0.05  # of the memory that programs can still get, within the cgroup


class ProcessExecutor:
    """Runs attempts in processes of their own.

    Args:
        trainer: what they run.
        cfg: the resolved config.
        ranks: in how many processes the first attempt will run.
        has_standby: while an attempt trains, an interpreter for the next one imports what it has.

    Raises:
        ConfigError: ``trainer.preload_modules`` is not a list.
    """

    def __init__(
        self,
        trainer: TrainerRef,
        cfg: DictConfig,
        *,
        ranks: int = 1,
        has_standby: bool,
    ) -> None:
        self._trainer = trainer
        self._cfg = cfg
        self._has_standby = has_standby
        self._modules = tuple(early_imports(cfg))
        self._ranks = ranks
        self._standby_bytes = 0
        self._interpreters = take_early()
        with contextlib.suppress(ReaperDied, OSError):  # tried again for the attempt
            self._import_early(os.environ, ranks, self._preparation())

    def poll(self) -> None:
        """Raise ConfigError if the trainer has refused the config meanwhile."""
        if not self._interpreters.is_alive:
            return
        with contextlib.suppress(ReaperDied):  # found when the attempt is to begin
            self._interpreters.poll()
            self._interpreters.pump.move()
            for one in self._interpreters.running.values():
                list(one.read())
                if one.refusal is not None:
                    raise ConfigError(one.refusal)

    def prepare(self, tick: Callable[[], None] = lambda: None) -> None:
        """Wait until the trainer has checked the config; raises ConfigError if it refuses."""
        self._ready(os.environ, self._ranks, tick)

    def run(
        self,
        request: AttemptRequest,
        on_event: Callable[[Event], None],
        signals: SignalWatch,
        *,
        hold: tuple[int, ...] = (),
        tick: Callable[[], None] = lambda: None,
    ) -> Exit:
        """Run one attempt and return how its process ended.

        Raises:
            ConfigError: the trainer cannot be imported, or refuses the configuration.
        """
        oom_kills = OomKillWatch()
        was_interrupted = False

        def take(event: Event) -> None:
            nonlocal was_interrupted
            if isinstance(event, LibrariesImported):
                self._begin_standby(request, event)
                return
            if isinstance(event, Failed):
                was_interrupted = event.is_interruption
                if _may_be_retried(event):
                    self._prepare_next(request, self._preparation())
            on_event(event)

        def tick_with_standby() -> None:
            self._check_standby()
            tick()

        running: RunningAttempt | None = None
        try:
            processes = self._ready(request.environ, request.ranks, tick)
            pump = self._interpreters.pump
            pump.start_log(request.log_file)
            running = RunningAttempt(self._interpreters, processes, request, take)
            found = running.run(signals, hold, tick_with_standby)
            pump.end_log()
            if found.pid is None:
                self.close()
        except ReaperDied as death:
            found = Exit(death.returncode)
            if running is not None:
                running.unread_events()  # what was reported counts, whichever process was killed
            self.close()
        remove_nccl_pipes(request.run_dir)
        if was_interrupted:
            _await_signal(signals)
        stalled = None if running is None else running.stalled
        stacks = _stacks(request, keep=not request.runs_script or stalled is not None)
        if stalled is not None:
            on_event(Stalled(round(stalled.seconds, 1), stacks))
        return replace(
            found,
            output=self._interpreters.pump.tail,
            stacks=stacks,
            stalled=None if stalled is None else stalled.what,
            was_stopped=signals.received is not None,
            oom_killed=oom_kills.killed(),
        )

    def close(self) -> None:
        """End all interpreters; later attempts start others."""
        self._interpreters.close()

    def _ready(
        self, environ: Mapping[str, str], count: int, tick: Callable[[], None]
    ) -> list[Interpreter]:
        """Return interpreters that can be given an attempt now."""
        while True:
            try:
                found = self._waiting(environ, count)
                interpreters = self._interpreters
                interpreters.pump.hold()  # what dies at an import is named in a line of ours
                for one in found:
                    # those that import break off: the rest comes with the trainer
                    one.prepare(
                        preparation(()) if one.is_asked else self._preparation()
                    )
                wait_until_prepared(interpreters, found, tick)
            except ReaperDied as death:
                self._on_death_at_import(death.returncode)
                continue
            for one in found:
                if one.refusal is not None:
                    raise ConfigError(one.refusal)
                if one.returncode is not None:
                    self._on_death_at_import(one.returncode)
            if all(one.suits(environ) for one in found):
                interpreters.pump.release()
                return found
            # they did before they imported: a library has started CUDA, and would again
            if not self._modules:
                raise ConfigError(
                    "an attempt's interpreter starts CUDA before its trainer runs"
                )
            log.info(
                "importing %s early starts CUDA: attempts import by themselves",
                ", ".join(self._modules),
            )
            self._modules = ()

    def _waiting(self, environ: Mapping[str, str], count: int) -> list[Interpreter]:
        """Return interpreters without an attempt; those that wait first, then new ones."""
        if not self._interpreters.is_alive:
            self.close()
            self._interpreters = Interpreters()
        interpreters = self._interpreters
        interpreters.poll()
        waiting = [one for one in interpreters.running.values() if not one.is_begun]
        for one in waiting:
            if not one.suits(environ):
                interpreters.end(one)
        found = [one for one in waiting if one.suits(environ)][:count]
        return found + [interpreters.start(environ) for _ in range(count - len(found))]

    def _preparation(self) -> Preparation:
        """Return what an interpreter imports while it waits."""
        wanted = preparation(self._modules)
        if not self._trainer.is_ours:
            return wanted
        return replace(wanted, trainer=self._trainer, cfg=self._cfg)

    def _on_death_at_import(self, returncode: int) -> None:
        """See to an import that has ended its process.

        Raises:
            ConfigError: a limit of this process leaves no room for it.
        """
        problem = no_room_to_import(next(iter(self._modules), "Python"), None)
        if problem is not None or not self._modules:
            raise ConfigError(
                problem or f"an interpreter ends at its start ({returncode})"
            )
        log.warning(
            "importing libraries early ended the process (%d): attempts import by themselves",
            returncode,
        )
        self._modules = ()
        self.close()

    def _begin_standby(
        self, request: AttemptRequest, imported: LibrariesImported
    ) -> None:
        """Have the interpreters of the next attempt import what this one has, if there is room."""
        self._modules = imported.modules
        self._standby_bytes = imported.resident_bytes * request.ranks
        if self._has_standby and has_room_for_standby(self._standby_bytes):
            self._prepare_next(request, preparation(self._modules, is_standby=True))

    def _check_standby(self) -> None:
        """End the standby when memory becomes short."""
        if not has_room_for_standby(self._standby_bytes):
            for one in list(self._interpreters.running.values()):
                if not one.is_begun:
                    self._interpreters.end(one)

    def _prepare_next(self, request: AttemptRequest, wanted: Preparation) -> None:
        """Have the next attempt's interpreters import while the present one runs or ends."""
        if self._interpreters.is_alive:
            # the attempt itself comes first
            with contextlib.suppress(ReaperDied, OSError):
                self._import_early(request.environ, request.ranks, wanted)

    def _import_early(
        self, environ: Mapping[str, str], count: int, wanted: Preparation
    ) -> None:
        for one in self._waiting(environ, count):
            if wanted.is_standby or not one.is_asked:
                one.prepare(wanted)


def has_room_for_standby(needed_bytes: int) -> bool:
    """Return whether a standby takes at most a small share of what programs can still get.

    It only waits, so it is worth a little memory.
    """
    return needed_bytes <= _STANDBY_SHARE * read_host_memory().available


def _may_be_retried(event: Failed) -> bool:
    is_over = event.failure.kind in (FailureKind.BUG, FailureKind.INTERRUPTED)
    return not is_over or event.stopped_for is not None


def _await_signal(signals: SignalWatch) -> None:
    """Wait a moment for our own signal: a stop of all processes may reach the attempt first."""
    deadline = time.monotonic() + _SIGNAL_SECONDS
    while signals.received is None and time.monotonic() < deadline:
        time.sleep(0.02)


def _stacks(request: AttemptRequest, *, keep: bool) -> str:
    """Return what the attempt wrote of its threads, if that is to be kept; remove an empty file."""
    try:
        text = request.stacks_file.read_text(errors="replace") if keep else ""
        if not text:
            request.stacks_file.unlink()
    except OSError:
        return ""
    return text
