"""Runs each attempt in new interpreters, which start early (``isolation=process``).

:class:`.driver.ProcessDriver` uses :class:`ProcessExecutor` in the launcher's process. Importing
torch takes seconds, so an interpreter for the next attempt waits as a standby. It imports the same
modules while the current attempt trains. Modules that start CUDA when imported are left out.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

from omegaconf import DictConfig

from robust_train.children.interpreters import (
    Interpreter,
    Interpreters,
    request_imports,
    take_early,
)
from robust_train.config.attempt import AttemptRequest, Preparation, early_imports
from robust_train.config.trainers import TrainerRef
from robust_train.failures.exits import signal_of
from robust_train.failures.shortage import explain_failed_import
from robust_train.host.memory import read_host_memory
from robust_train.host.signals import SignalWatch
from robust_train.launcher.running_attempt import RunningAttempt
from robust_train.model.errors import ConfigError
from robust_train.model.events import Event, Failed, LibrariesImported
from robust_train.model.exit import Exit
from robust_train.model.failure import FailureKind
from robust_train.readable import signal_name

log = logging.getLogger("robust_train")

# Share of the memory still available to programs that waiting interpreters may take, within the
# cgroup.
_STANDBY_SHARE = 0.05
# After these failures no interpreter is prepared for the next attempt. HOST_OOM: the memory that a
# standby needs is short, and the failed attempt may still hold some of it.
_NO_STANDBY_AFTER = (FailureKind.BUG, FailureKind.INTERRUPTED, FailureKind.HOST_OOM)


class ProcessExecutor:
    """Runs attempts in separate processes.

    Args:
        trainer: the trainer to run.
        cfg: the resolved config.
        ranks: number of processes of the first attempt.
        has_standby: whether interpreters for the next attempt start while an attempt trains.
        job: the job's id, or its last part, which marks the interpreters.

    Raises:
        ConfigError: ``trainer.preload_modules`` is not a list.
    """

    def __init__(
        self, trainer: TrainerRef, cfg: DictConfig, *, ranks: int = 1, has_standby: bool, job: str
    ) -> None:
        self._trainer = trainer
        self._cfg = cfg
        self._job = job
        self._ranks = ranks
        self._has_standby = has_standby
        self._modules = tuple(early_imports(cfg))  # the modules that interpreters import early
        self._starts_cuda: set[str] = set()  # the modules that start CUDA when they are imported
        # Whether a standby imported modules while the earlier attempt had GPUs. Libraries may
        # remember GPUs that the next attempt does not have.
        self._has_seen_gpus = False
        self._standby_bytes = 0
        self._has_lost_interpreter = False  # whether an interpreter died before its attempt
        self._interpreters = take_early()
        with contextlib.suppress(OSError):  # `prepare` tries again
            for interpreter in self._find_waiting():
                interpreter.prepare(self._build_preparation())

    def poll(self) -> None:
        """Check on the waiting interpreters.

        Raises:
            ConfigError: the trainer has refused the config.
        """
        if self._interpreters.is_open:
            self._interpreters.poll()
            for interpreter in self._interpreters.running.values():
                list(interpreter.read())

    def run(
        self,
        request: AttemptRequest,
        on_event: Callable[[Event], None],
        signals: SignalWatch,
        *,
        hold: tuple[int, ...] = (),
        tick: Callable[[], None] = lambda: None,
    ) -> Exit:
        """Run an attempt and return how its process ended.

        Raises:
            ConfigError: the trainer cannot be imported, or refuses the configuration.
        """

        def take(event: Event) -> None:
            if isinstance(event, LibrariesImported):
                self._start_standby(event, request)
                return
            if isinstance(event, Failed) and event.failure.kind not in _NO_STANDBY_AFTER:
                self._prepare_next(self._build_preparation())
            on_event(event)

        def tick_with_standby() -> None:
            self._end_standbys_if_memory_is_short()
            self._end_unfit()
            tick()

        self._ranks = request.ranks
        if self._has_seen_gpus and not request.spec.gpus:
            self._import_nothing_early()
        processes = self.prepare(tick)
        running = RunningAttempt(self._interpreters, processes, request, take)
        process_exit = running.run(signals, hold, tick_with_standby)
        if process_exit.pid is None:
            self.close()
        return process_exit

    def close(self) -> None:
        """End all interpreters. A later attempt starts new interpreters."""
        self._interpreters.close()

    def prepare(self, tick: Callable[[], None]) -> list[Interpreter]:
        """Return interpreters that can take an attempt now.

        Raises:
            ConfigError: the trainer refuses the config.
        """
        while True:
            ready = self._find_waiting()
            interpreters = self._interpreters
            # The launcher reports an interpreter that dies at an import in one line, so the
            # interpreter's output is not shown before its imports have succeeded.
            interpreters.pump.hold()
            new = [interpreter for interpreter in ready if not interpreter.is_asked]
            for interpreter in ready:
                wanted = self._build_preparation()
                if interpreter.is_asked:
                    # It stops importing after the current module; the trainer imports the rest.
                    wanted = request_imports(())
                interpreter.prepare(wanted)
            interpreters.await_prepared(ready, tick)
            unfit = [interpreter for interpreter in ready if interpreter.is_unfit]
            if unfit:
                self._leave_out_culprits(unfit, new)
                continue
            ends = [
                interpreter.returncode
                for interpreter in ready
                if interpreter.returncode is not None
            ]
            if ends:
                self._handle_death_at_import(ends[0])
                continue
            if all(interpreter.is_usable for interpreter in ready):
                interpreters.pump.release()
                return ready

    def _leave_out_culprits(
        self,
        unfit: Sequence[Interpreter],  # the interpreters that started CUDA
        new: Sequence[Interpreter],  # the interpreters that were prepared with the current modules
    ) -> None:
        """Leave out the modules that started CUDA in these interpreters.

        Raises:
            ConfigError: CUDA starts, but no module is the cause.
        """
        for interpreter in unfit:
            # An interpreter that was prepared earlier may have had more modules.
            if interpreter in new and interpreter.culprit not in self._modules:
                raise ConfigError("an attempt's interpreter starts CUDA before its trainer runs")
        self._leave_to_attempts({interpreter.culprit for interpreter in unfit})

    def _start_standby(self, imported: LibrariesImported, request: AttemptRequest) -> None:
        """Start interpreters for the next attempt, which import the same modules as this one."""
        self._modules = self._select_harmless(imported.modules)
        self._standby_bytes = imported.resident_bytes * self._ranks
        if self._has_standby:
            self._has_seen_gpus |= bool(request.spec.gpus)
            self._prepare_next(request_imports(self._modules, is_standby=True))

    def _end_standbys_if_memory_is_short(self) -> None:
        waiting = self._interpreters.waiting
        if waiting and not has_room_for_standby(self._standby_bytes):
            for interpreter in waiting:
                self._interpreters.end(interpreter)

    def _end_unfit(self) -> None:
        """End standbys that started CUDA, if they have not ended by themselves yet."""
        for interpreter in self._interpreters.waiting:
            try:
                list(interpreter.read())
            except ConfigError:
                # The next attempt's interpreter meets the same error and reports it.
                self._interpreters.end(interpreter)
            if interpreter.is_unfit:
                self._leave_to_attempts({interpreter.culprit})
                self._interpreters.end(interpreter)

    def _leave_to_attempts(self, culprits: set[str]) -> None:
        """Stop importing early the modules that started CUDA, and all modules after them.

        The list is in the order in which the modules were imported, so a later module may import
        the culprit as well.
        """
        for name in sorted(culprits - self._starts_cuda - {""}):
            log.info(
                "importing %s early would start CUDA, so each attempt imports it itself, and the "
                "modules after it",
                name,
            )
        self._starts_cuda |= culprits
        self._modules = self._select_harmless(self._modules)

    def _select_harmless(self, modules: Sequence[str]) -> tuple[str, ...]:
        """Return the modules before the first module that starts CUDA."""
        return tuple(itertools.takewhile(lambda name: name not in self._starts_cuda, modules))

    def _import_nothing_early(self) -> None:
        """End the standbys before an attempt on the CPU: their libraries may remember GPUs."""
        self._has_seen_gpus = False
        self._modules = ()
        for interpreter in self._interpreters.waiting:
            self._interpreters.end(interpreter)

    def _find_waiting(self) -> list[Interpreter]:
        """Return an interpreter without an attempt for each rank, and start missing interpreters.

        Interpreters that are already waiting come first.
        """
        if not self._interpreters.is_open:
            self._interpreters = Interpreters()
        interpreters = self._interpreters
        interpreters.mark(self._job)
        interpreters.poll()
        for interpreter in interpreters.waiting:
            if not interpreter.is_usable:
                interpreters.end(interpreter)
        while len(interpreters.waiting) < self._ranks:
            interpreters.start()
        return interpreters.waiting[: self._ranks]

    def _build_preparation(self) -> Preparation:
        """Return the modules and the built-in trainer that an interpreter imports early."""
        wanted = request_imports(self._modules)
        if self._trainer.is_ours:
            wanted = replace(wanted, trainer=self._trainer, cfg=self._cfg)
        return wanted

    def _handle_death_at_import(self, returncode: int) -> None:
        """Close all interpreters after one of them ended before its attempt, and import less.

        Either an import ended the interpreter, or someone killed it, which may not happen again.

        Raises:
            ConfigError: a limit of this process leaves no room for an interpreter, or an
                interpreter that imports nothing has ended for the second time.
        """
        problem = explain_failed_import(next(iter(self._modules), "Python"), None)
        if problem:
            raise ConfigError(problem)
        number = signal_of(returncode)
        how = f"exit code {returncode}"
        if number:
            how = signal_name(number)
        if self._modules:
            log.warning(
                "importing libraries early ended the process (%s), so each attempt imports them "
                "itself",
                how,
            )
        elif self._has_lost_interpreter:
            raise ConfigError(
                f"two interpreters ended before their attempt started ({how}); run "
                f"{sys.executable} -c pass to check whether Python starts here"
            )
        else:
            self._has_lost_interpreter = True
            log.warning("an interpreter ended before its attempt started (%s); retrying", how)
        self._modules = ()
        self.close()

    def _prepare_next(self, wanted: Preparation) -> None:
        """Let interpreters for the next attempt import while the current attempt runs or ends.

        Does nothing if memory is short.
        """
        if not has_room_for_standby(self._standby_bytes):
            return
        with contextlib.suppress(OSError):  # a standby that cannot start must not end the attempt
            for interpreter in self._find_waiting():
                if wanted.is_standby or not interpreter.is_asked:
                    interpreter.prepare(wanted)


def has_room_for_standby(needed_bytes: int) -> bool:
    """Return whether a standby takes only a small share of the memory available to programs."""
    return needed_bytes <= _STANDBY_SHARE * read_host_memory().available
