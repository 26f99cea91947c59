"""``isolation=process``: each attempt runs in an interpreter of its own, started early."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from omegaconf import DictConfig

from robust_train.config.attempt import early_imports
from robust_train.config.request import AttemptRequest, Preparation
from robust_train.config.trainer_ref import TrainerRef
from robust_train.failures.shortage import no_room_to_import
from robust_train.host.memory import read_host_memory
from robust_train.host.oom_killer import OomKillWatch
from robust_train.host.signals import SignalWatch
from robust_train.launcher.flight_recorder import remove_pipes
from robust_train.launcher.interpreters import (
    Interpreter,
    Interpreters,
    ReaperDied,
    preparation,
    take_early,
    wait_until_prepared,
)
from robust_train.launcher.running_attempt import Exited, RunningAttempt
from robust_train.model.attempt import Exit
from robust_train.model.errors import ConfigError
from robust_train.model.events import (
    Event,
    Failed,
    LibrariesImported,
    ScriptStarted,
    Stalled,
)
from robust_train.model.failure import FailureKind

log = logging.getLogger("robust_train")

_SIGNAL_SECONDS = 0.5
_STANDBY_SHARE = 0.05  # of the memory that programs can still get, within the cgroup
_STANDBY_CHECK_SECONDS = 5.0


class ProcessExecutor:
    """Runs attempts in processes of their own.

    Args:
        trainer: what they run.
        cfg: the resolved config.
        signals: what asks the job to stop.
        ranks: in how many processes the first attempt will run.
        has_standby: while an attempt trains, an interpreter for the next one imports what it has.

    Raises:
        ConfigError: ``trainer.preload_modules`` is not a list.
    """

    def __init__(
        self,
        trainer: TrainerRef,
        cfg: DictConfig,
        signals: SignalWatch,
        *,
        ranks: int = 1,
        has_standby: bool,
    ) -> None:
        self._trainer = trainer
        self._cfg = cfg
        self._signals = signals
        self._has_standby = has_standby
        self._modules: Sequence[str] = early_imports(cfg)
        self._ranks = ranks
        self._standby = Standby(0)
        self._interpreters: Interpreters | None = take_early()
        with contextlib.suppress(ReaperDied, OSError):  # tried again for the attempt
            for one in self._waiting(os.environ, self._ranks):
                one.prepare(self._preparation())

    def poll(self) -> None:
        """Raise ConfigError if the trainer has refused the config meanwhile."""
        interpreters = self._interpreters
        if interpreters is None:
            return
        with contextlib.suppress(ReaperDied):  # found when the attempt is to begin
            interpreters.poll()
            interpreters.pump.move()
            for one in interpreters.running.values():
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
        *,
        hold: tuple[int, ...] = (),
        tick: Callable[[], None] = lambda: None,
    ) -> Exit:
        """Run one attempt and return how its process ended.

        Raises:
            ConfigError: the trainer cannot be imported, or refuses the configuration.
        """
        oom_kills = OomKillWatch()
        reported: list[Event] = []

        def take(event: Event) -> None:
            if isinstance(event, LibrariesImported):
                self._begin_standby(request, event)
                return
            if isinstance(event, Failed) and _may_be_retried(event):
                self._import_early(request, self._preparation())
            if isinstance(event, (ScriptStarted, Failed)):
                reported.append(event)
            on_event(event)

        def tick_with_standby() -> None:
            self._check_standby()
            tick()

        running: RunningAttempt | None = None
        try:
            processes = self._ready(request.environ, request.ranks, tick)
            interpreters = self._interpreters
            assert interpreters is not None
            interpreters.pump.start_log(request.log_file)
            running = RunningAttempt(interpreters, processes, request, take)
            exited = running.run(self._signals, hold, tick_with_standby)
            interpreters.pump.end_log()
            output = interpreters.pump.tail
            if exited.pid is None:
                self._end()
        except ReaperDied as death:
            exited = Exited(None, death.returncode)
            if running is not None:
                running.unread_events()  # what was reported counts, whichever process was killed
            output = self._end()
        remove_pipes(request.run_dir)
        if any(
            isinstance(event, Failed) and event.is_interruption for event in reported
        ):
            self._await_signal()
        runs_script = any(isinstance(event, ScriptStarted) for event in reported)
        stacks = _stacks(request, keep=not runs_script or exited.stalled is not None)
        if exited.stalled is not None:
            on_event(Stalled(round(exited.stalled.seconds, 1), stacks))
        return Exit(
            returncode=exited.returncode,
            pid=exited.pid,
            max_resident_bytes=exited.max_resident_bytes,
            output=output,
            stacks=stacks,
            stalled=None if exited.stalled is None else exited.stalled.what,
            was_stopped=self._signals.received is not None,
            oom_killed=oom_kills.killed(),
        )

    def close(self) -> None:
        """End all interpreters."""
        self._end()

    def _await_signal(self) -> None:
        """Wait a moment for our own signal: a stop of all processes may reach the attempt first."""
        deadline = time.monotonic() + _SIGNAL_SECONDS
        while self._signals.received is None and time.monotonic() < deadline:
            time.sleep(0.02)

    def _ready(
        self, environ: Mapping[str, str], count: int, tick: Callable[[], None]
    ) -> list[Interpreter]:
        """Return interpreters that can be given an attempt now."""
        while True:
            try:
                found = self._waiting(environ, count)
                interpreters = self._interpreters
                assert interpreters is not None
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
                if one.ended is not None:
                    self._on_death_at_import(one.ended.returncode)
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
        interpreters = self._interpreters
        if interpreters is None or not interpreters.is_alive:
            self._end()
            self._interpreters = interpreters = Interpreters()
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
        self._end()

    def _begin_standby(
        self, request: AttemptRequest, imported: LibrariesImported
    ) -> None:
        """Have the interpreters of the next attempt import what this one has, if there is room."""
        self._modules = imported.modules
        self._standby = Standby(imported.resident_bytes * request.ranks)
        if not self._has_standby or not self._standby.has_room():
            return
        self._import_early(request, preparation(self._modules, is_standby=True))

    def _import_early(self, request: AttemptRequest, wanted: Preparation) -> None:
        """Have the next attempt's interpreters import while the present one runs or ends."""
        interpreters = self._interpreters
        if interpreters is None or not interpreters.is_alive:
            return
        with contextlib.suppress(ReaperDied, OSError):  # the attempt itself comes first
            for one in self._waiting(request.environ, request.ranks):
                if wanted.is_standby or not one.is_asked:
                    one.prepare(wanted)

    def _check_standby(self) -> None:
        """End the standby when memory becomes short."""
        interpreters = self._interpreters
        if interpreters is None or self._standby.has_room():
            return
        for one in list(interpreters.running.values()):
            if not one.is_begun:
                interpreters.end(one)

    def _end(self) -> str:
        """End all interpreters; return what the last attempt printed last."""
        interpreters, self._interpreters = self._interpreters, None
        if interpreters is None:
            return ""
        interpreters.close()
        return interpreters.pump.tail


def _may_be_retried(event: Failed) -> bool:
    is_over = event.failure.kind in (FailureKind.BUG, FailureKind.INTERRUPTED)
    return not is_over or event.stopped_for is not None


class Standby:
    """Whether there is room for an interpreter that only waits: it is worth a little memory."""

    def __init__(self, needed_bytes: int) -> None:
        self._needed_bytes = needed_bytes
        self._next_check = 0.0
        self._had_room = True

    def has_room(self) -> bool:
        """Return whether it takes at most a small share of what programs can still get."""
        now = time.monotonic()
        if self._needed_bytes and now >= self._next_check:
            self._next_check = now + _STANDBY_CHECK_SECONDS
            available = read_host_memory().available
            self._had_room = self._needed_bytes <= _STANDBY_SHARE * available
        return self._had_room


def _stacks(request: AttemptRequest, *, keep: bool) -> str:
    """Return what the attempt wrote of its threads, if that is to be kept; remove an empty file."""
    try:
        text = request.stacks_file.read_text(errors="replace") if keep else ""
        if not text:
            request.stacks_file.unlink()
    except OSError:
        return ""
    return text
