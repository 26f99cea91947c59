"""``isolation=process``: each attempt runs in a new interpreter, which is started early.

:class:`.driver.ProcessDriver` uses :class:`ProcessExecutor` in the launcher's process. It keeps
waiting interpreters, and :class:`RunningAttempt` polls those that run an attempt until they end.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from omegaconf import DictConfig

from robust_train.children.interpreters import Interpreter, Interpreters, preparation, take_early
from robust_train.config.attempt import AttemptRequest, Begin, Preparation, early_imports
from robust_train.config.trainers import TrainerRef
from robust_train.failures.exits import signal_of
from robust_train.failures.memory_messages import find_last_shortage
from robust_train.failures.shortage import explain_failed_import
from robust_train.host.linux import TICK_SECONDS, readable
from robust_train.host.memory import OomKillWatch, read_host_memory
from robust_train.host.screen import show_waiting
from robust_train.host.signals import SignalWatch, stop_signal
from robust_train.host.votes import STOP, Votes
from robust_train.launcher.ending import RankEnd, event_of, without_escapes
from robust_train.launcher.hooks import Watch
from robust_train.model.errors import ConfigError
from robust_train.model.events import CheckpointSaved, Event, Failed, Finished, LibrariesImported
from robust_train.model.exit import Exit
from robust_train.model.failure import FailureKind
from robust_train.model.feature import load_named
from robust_train.readable import duration, shortened, signal_name

log = logging.getLogger("robust_train")

AFTER_FINISHED_SECONDS = 300.0
"""How long a process may take to end after its trainer returned: an exit handler may upload
results."""

AFTER_FAILURE_SECONDS = 10.0
"""How long a process may take to end after its attempt reported a failure."""

_MOST_EVENTS = 1000
_LAST_REPORT_SECONDS = 1.0
"""How long the other ranks get after a failure, to report an error that explains more."""
_MPS_GRACE_SECONDS = 30.0
"""Time between SIGTERM and SIGKILL of an attempt that hangs on a GPU of MPS."""
_AFTER_KILL_SECONDS = 8.0
_SIGNAL_SECONDS = 0.5
_LONGEST_SEARCHED_BYTES = 1 << 20
_LONGEST_BETWEEN_LOOKS = 60.0
_HEAD_BYTES = 1 << 16
_HEAD_SHOWN = 300
_CUDA_WARNING = re.compile(r"UserWarning: CUDA initialization: (.*)")
# A share of the memory that programs can still get, within the cgroup.
_STANDBY_SHARE = 0.05


class ProcessExecutor:
    """Runs attempts in separate processes.

    Args:
        trainer: the trainer to run.
        cfg: the resolved config.
        ranks: number of processes of the first attempt.
        has_standby: whether an interpreter for the next attempt imports the same modules while an
            attempt trains.
        job: the job's id, or its last part.

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
        self._modules = tuple(early_imports(cfg))
        # The modules among them that start CUDA when they are imported.
        self._starts_cuda: set[str] = set()
        # Whether a standby imported modules while the earlier attempt had GPUs: libraries may
        # remember them.
        self._has_seen_gpus = False
        self._standby_bytes = 0
        self._has_lost_one = False  # whether an interpreter died before its attempt
        self._interpreters = take_early()
        with contextlib.suppress(OSError):  # the attempt tries again
            for interpreter in self._waiting():
                interpreter.prepare(self._preparation())

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
                # The next attempt's interpreters import what this one imported, if there is room.
                self._modules = self._harmless(event.modules)
                self._standby_bytes = event.resident_bytes * self._ranks
                if self._has_standby:
                    self._has_seen_gpus |= bool(request.spec.gpus)
                    self._prepare_next(preparation(self._modules, is_standby=True))
                return
            if isinstance(event, Failed) and event.failure.kind not in (
                FailureKind.BUG,
                FailureKind.INTERRUPTED,
                # The memory that a standby needs is short, and the failed attempt may hold some of
                # it.
                FailureKind.HOST_OOM,
            ):
                self._prepare_next(self._preparation())
            on_event(event)

        def tick_with_standby() -> None:
            # Waiting interpreters are ended when memory becomes short.
            waiting = self._interpreters.waiting
            if waiting and not has_room_for_standby(self._standby_bytes):
                for interpreter in waiting:
                    self._interpreters.end(interpreter)
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
        """End all interpreters. A later attempt starts others."""
        self._interpreters.close()

    def prepare(self, tick: Callable[[], None]) -> list[Interpreter]:
        """Return interpreters that can take an attempt now.

        Raises:
            ConfigError: the trainer refuses the config.
        """
        while True:
            ready = self._waiting()
            interpreters = self._interpreters
            # If an interpreter dies at an import, the launcher names the import in one line.
            interpreters.pump.hold()
            new = [interpreter for interpreter in ready if not interpreter.is_asked]
            for interpreter in ready:
                # An interpreter that is importing stops there; the trainer imports the rest.
                interpreter.prepare(
                    preparation(()) if interpreter.is_asked else self._preparation()
                )
            interpreters.await_prepared(ready, tick)
            unfit = [interpreter for interpreter in ready if interpreter.is_unfit]
            if unfit:
                # An interpreter that was prepared earlier may have had a longer list.
                if any(
                    interpreter in new and interpreter.culprit not in self._modules
                    for interpreter in unfit
                ):
                    raise ConfigError(
                        "an attempt's interpreter starts CUDA before its trainer runs"
                    )
                self._leave_to_attempts({interpreter.culprit for interpreter in unfit})
                continue
            ends = [
                interpreter.returncode
                for interpreter in ready
                if interpreter.returncode is not None
            ]
            if ends:
                self._on_death_at_import(ends[0])
                continue
            if all(interpreter.is_usable for interpreter in ready):
                interpreters.pump.release()
                return ready

    def _end_unfit(self) -> None:
        """End standbys that started CUDA, if they have not ended by themselves yet."""
        for interpreter in self._interpreters.waiting:
            try:
                list(interpreter.read())
            except ConfigError:
                # The next attempt's interpreter finds out by itself.
                self._interpreters.end(interpreter)
            if interpreter.is_unfit:
                self._leave_to_attempts({interpreter.culprit})
                self._interpreters.end(interpreter)

    def _leave_to_attempts(self, culprits: set[str]) -> None:
        """Stop importing early the modules that started CUDA, and all modules after them.

        A later module may need an earlier module, while an earlier module was imported without it.
        """
        for name in sorted(culprits - self._starts_cuda - {""}):
            log.info(
                "importing %s early would start CUDA, so each attempt imports it itself, and the "
                "modules after it",
                name,
            )
        self._starts_cuda |= culprits
        self._modules = self._harmless(self._modules)

    def _harmless(self, modules: Sequence[str]) -> tuple[str, ...]:
        """Return the modules before the first module that starts CUDA."""
        return tuple(itertools.takewhile(lambda name: name not in self._starts_cuda, modules))

    def _import_nothing_early(self) -> None:
        """Import nothing early for an attempt on the CPU, since libraries may remember that there
        are GPUs."""
        self._has_seen_gpus = False
        self._modules = ()
        for interpreter in self._interpreters.waiting:
            self._interpreters.end(interpreter)

    def _waiting(self) -> list[Interpreter]:
        """Return interpreters without an attempt, first those that wait already, then new ones."""
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

    def _preparation(self) -> Preparation:
        """Return the imports of an interpreter that waits."""
        wanted = preparation(self._modules)
        if self._trainer.is_ours:
            wanted = replace(wanted, trainer=self._trainer, cfg=self._cfg)
        return wanted

    def _on_death_at_import(self, returncode: int) -> None:
        """Handle an interpreter that ended before its attempt. Either an import ended it, or
        someone killed it, which need not happen again.

        Raises:
            ConfigError: a limit of this process leaves no room for it, or it is the second such
                end.
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
        elif self._has_lost_one:
            raise ConfigError(
                f"two interpreters have ended before their attempt began ({how}); try "
                f"{sys.executable} -c pass, which shows whether Python starts here"
            )
        else:
            self._has_lost_one = True
            log.warning("an interpreter ended before its attempt began (%s); starting another", how)
        self._modules = ()
        self.close()

    def _prepare_next(self, wanted: Preparation) -> None:
        """Let the next attempt's interpreters import while the current attempt runs or ends, if
        memory suffices."""
        if not has_room_for_standby(self._standby_bytes):
            return
        with contextlib.suppress(OSError):  # because the current attempt takes precedence
            for interpreter in self._waiting():
                if wanted.is_standby or not interpreter.is_asked:
                    interpreter.prepare(wanted)


def has_room_for_standby(needed_bytes: int) -> bool:
    """Return whether a standby takes at most a small share of the memory that programs can still
    get.

    It only waits, so it is worth little memory.
    """
    return needed_bytes <= _STANDBY_SHARE * read_host_memory().available


# --- one attempt while it runs ----------------------------------------------------------------


class RunningAttempt:
    """Runs an attempt in one interpreter, or in one interpreter per rank.

    Args:
        interpreters: all interpreters of the job.
        processes: the interpreters of this attempt, in the order of their ranks.
        on_event: called with each event; of several ranks' ends with one event for all.
    """

    def __init__(
        self,
        interpreters: Interpreters,
        processes: Sequence[Interpreter],
        request: AttemptRequest,
        on_event: Callable[[Event], None],
    ) -> None:
        self._ended_by: Watch | None = None
        self._interpreters = interpreters
        self._processes = processes
        self._request = request
        self._on_event = on_event
        self._grace_seconds = request.config.stop_grace_seconds
        self._was_hurried = False
        # Whether the trainer saves checkpoints, as far as this or an earlier attempt has shown.
        self._saves = request.resume_checkpoint is not None
        self._oom_kills = OomKillWatch()
        interpreters.pump.start_log(request.log_file)
        pids = [interpreter.pid for interpreter in processes]
        self._watches: list[Watch] = [
            load_named(name)(request, pids, on_event) for name in request.watches
        ]
        self._votes = Votes(request.ranks) if request.ranks > 1 else None
        self._ends = [RankEnd(rank, pid) for rank, pid in enumerate(pids)]
        # When it is killed (again), and when it was first killed, by the monotonic clock.
        self._kill_at = self._killed_at = math.inf
        self._is_stopping = self._limits_others = self._was_warned = False
        self._began = time.monotonic()
        self._look_at = self._began + TICK_SECONDS
        self._unannounced: list[int] = []

    def run(
        self,
        signals: SignalWatch,
        # File descriptors that the attempt and all its children keep open.
        hold: Sequence[int],
        tick: Callable[[], None],  # called at least twice a second
    ) -> Exit:
        """Run the attempt to its end. The exit's ``pid`` is None if its process hangs.

        The first signal asks the attempt to stop, the second kills it. It is also killed when it
        does not stop in time, when a watch ends it, and when its process does not end after its
        report.
        """
        try:
            with signals.handed_to(self._on_signal):
                signals.raise_if_received()
                self._begin(hold)
                while not self._poll():
                    show_waiting()
                    tick()
                return self._end(signals)
        finally:
            if self._votes is not None:
                self._votes.close()

    def _begin(self, hold: Sequence[int]) -> None:
        if self._votes is None:
            self._processes[0].begin(Begin(self._request), hold)
        else:
            # The launcher binds the port, not rank 0, so no other process can take it in between.
            with socket.create_server(("127.0.0.1", 0)) as listener:
                port = listener.getsockname()[1]
                for rank, interpreter in enumerate(self._processes):
                    descriptors = [self._votes.descriptor]
                    if rank == 0:
                        descriptors.append(listener.fileno())
                    begin = Begin(self._request, rank, port)
                    interpreter.begin(begin, descriptors + list(hold))

    def _poll(self) -> bool:
        """Wait for something to happen and handle it, and return whether the attempt is over."""
        interpreters = self._interpreters
        processes = self._processes
        running = [
            interpreter.channel.fileno() for interpreter in processes if interpreter.is_running
        ]
        seconds = min(max(self._kill_at - time.monotonic(), 0.0), TICK_SECONDS)
        readable(interpreters.pump.descriptors + running, seconds)
        while self._unannounced:
            log.info("%s", self._stopping(self._unannounced.pop()))
        now = time.monotonic()
        self._kill_if_due(now)
        is_given_up = now >= self._killed_at + _AFTER_KILL_SECONDS
        # Ends are read before events and output: a process sent its last events before it ended.
        if interpreters.poll():
            for watch in self._watches:
                watch.output()
        for rank, interpreter in enumerate(processes):
            # At the end all events are read. Before that, a burst must delay neither signals nor
            # requests.
            is_ending = is_given_up or not interpreter.is_running
            self._read(rank, sys.maxsize if is_ending else _MOST_EVENTS)
            if not interpreter.is_running and self._ends[rank].returncode is None:
                self._note_end(rank, interpreter)
        if self._votes is not None:
            self._limit_other_ranks()
        if now >= self._look_at:
            self._look(now)
        if is_given_up or not any(interpreter.is_running for interpreter in processes):
            return True
        if self._kill_at == math.inf:
            self._poll_watches()
        return False

    def _kill_if_due(self, now: float) -> None:
        """Send SIGKILL once the attempt's time is over, and again each second after that."""
        if now < self._kill_at:
            return
        if self._killed_at == math.inf and not self._is_stopping:
            self._warn_of_exit_handlers()
        self._killed_at = min(self._killed_at, now)
        self._kill_at = now + 1.0
        self._signal_all(signal.SIGKILL)

    def _note_end(self, rank: int, interpreter: Interpreter) -> None:
        """Record that a rank's process has ended."""
        end = self._ends[rank]
        self._ends[rank] = replace(
            end,
            returncode=interpreter.returncode,
            at=end.at if end.at else time.monotonic(),
            was_killed=self._killed_at < math.inf,
        )

    def _poll_watches(self) -> None:
        """End the attempt if a watch demands that."""
        living = {
            rank: interpreter
            for rank, interpreter in enumerate(self._processes)
            if interpreter.is_running
        }
        for watch in self._watches:
            end = watch.poll(living)
            if end is not None:
                self._ended_by = watch
                self._kill_gently(end.kill_in_seconds)
                return

    def _kill_gently(self, seconds: float) -> None:
        if any(gpu.mps for gpu in self._request.spec.gpus):
            # SIGKILL in the middle of a kernel may break MPS's server for its other clients.
            self._signal_all(signal.SIGTERM)
            seconds = max(seconds, _MPS_GRACE_SECONDS)
        self._kill_in(seconds)

    def _read(self, rank: int, most: int) -> None:
        for event in self._processes[rank].read(most):
            self._saves |= isinstance(event, CheckpointSaved)
            for watch in self._watches:
                watch.event(event)
            if isinstance(event, (Finished, Failed)):
                end = self._ends[rank]
                self._ends[rank] = replace(end, ending=event, at=event.at)
                if self._votes is not None:
                    continue
                self._kill_in(
                    AFTER_FAILURE_SECONDS if isinstance(event, Failed) else AFTER_FINISHED_SECONDS
                )
            self._on_event(event)

    def _look(self, now: float) -> None:
        """Check for orphans, and for CUDA's refusal to start, at growing intervals."""
        if not self._was_warned and self._request.spec.gpus:
            self._warn_of_cuda()
        self._interpreters.collect_orphans()
        pause = max(now - self._began, TICK_SECONDS)
        self._look_at = now + min(pause, _LONGEST_BETWEEN_LOOKS)

    def _warn_of_cuda(self) -> None:
        """Warn if torch warned that CUDA does not start: many programs then use the CPU."""
        request = self._request
        head = b""
        with contextlib.suppress(OSError), request.log_file.open("rb") as file:
            head = file.read(_HEAD_BYTES)
        warning = _CUDA_WARNING.search(head.decode(errors="replace"))
        if warning:
            self._was_warned = True
            log.warning(
                "CUDA does not work for this attempt, which may train on the CPU although it has "
                "%s: %s",
                request.spec.device,
                shortened(warning[1].strip(), _HEAD_SHOWN),
            )

    def _warn_of_exit_handlers(self) -> None:
        """Warn that the processes of a trainer that has returned are about to be killed."""
        if all(isinstance(end.ending, Finished) for end in self._ends):
            log.warning(
                "the trainer has returned, but its process has not ended in %s: it is killed, "
                "and the work of its exit handlers and threads is lost",
                duration(AFTER_FINISHED_SECONDS),
            )

    def _limit_other_ranks(self) -> None:
        """Limit the time of the other ranks once a rank failed, or all have reported their end."""
        if all(end.returncode is not None for end in self._ends[1:]):
            # Rank 0 served the store of the others, and may end now.
            with contextlib.suppress(OSError):
                self._processes[0].channel.shutdown(socket.SHUT_WR)
        failed = [end for end in self._ends if end.is_failure]
        if self._limits_others or not (failed or all(e.is_over for e in self._ends)):
            return
        self._limits_others = True
        seconds = _LAST_REPORT_SECONDS
        if not failed:
            seconds = AFTER_FINISHED_SECONDS
        elif all(end.others_know for end in failed):
            seconds = self._grace_seconds
        self._kill_in(seconds)

    def _end(self, signals: SignalWatch) -> Exit:
        """Kill what is left of the attempt, and return how it ended."""
        processes = self._processes
        request = self._request
        ended_by = self._ended_by
        for interpreter in processes:
            self._interpreters.forget(interpreter)
        left = self._interpreters.kill_leftovers()
        pump = self._interpreters.pump
        pump.drain()
        pump.end_log()
        if self._votes is not None and (event := event_of(self._ends)) is not None:
            self._on_event(event)
        is_left = any(interpreter.is_running for interpreter in processes)
        if is_left:
            log.warning("the attempt's process hangs in the kernel; it is left behind")
        elif left:
            log.warning("processes %s of the attempt cannot be ended", left)
        for watch in self._watches:
            watch.close()
        if any(end.was_stopped for end in self._ends):
            _await_signal(signals)
        stacks = self._take_stacks()
        return Exit(
            returncode=-signal.SIGKILL if is_left else processes[0].returncode,
            pid=None if is_left else processes[0].pid,
            max_resident_bytes=max(interpreter.max_resident_bytes for interpreter in processes),
            output=pump.tail,
            shortage=_shortage_in(request) if processes[0].returncode else "",
            stacks=stacks,
            failure=None if ended_by is None else ended_by.explain(stacks),
            was_stopped=bool(signals.received),
            was_hurried=self._was_hurried,
            oom_killed=self._oom_kills.killed(),
        )

    def _take_stacks(self) -> str:
        """Return the stacks of a crash or a stall, and remove the file if it has none."""
        stacks = ""
        file = self._request.stacks_file
        with contextlib.suppress(OSError):
            if self._request.config.traits.raises or self._ended_by is not None:
                stacks = file.read_text(errors="replace")
            if not stacks:
                file.unlink()
        return stacks

    def _on_signal(self, signum: int) -> None:
        if self._is_stopping:
            self._was_hurried = True
            self._kill_in(0.0)
            return
        self._is_stopping = True
        self._unannounced.append(signum)
        self._kill_in(self._grace_seconds)
        if self._votes is not None:
            self._votes.raise_flag(STOP)
        # An attempt that has not started yet postpones the signal until it can handle it.
        self._signal_all(stop_signal(os.environ))
        self._signal_all(signal.SIGCONT)  # else a stopped process would not get the signal

    def _stopping(self, signum: int) -> str:
        config = self._request.config
        # The message does not promise a checkpoint that may not come.
        what = "the trainer is asked to end"
        if config.traits.is_program:
            what = f"SIG{config.trainer.stop_signal} to the script"
        elif self._saves:
            what = "saving a checkpoint"
        again = f"send {signal.Signals(signum).name}"
        if signum == signal.SIGINT:
            again = "press Ctrl-C"
        return f"stopping: {what}, at most {self._grace_seconds:g} s; {again} again to kill"

    def _kill_in(self, seconds: float) -> None:
        """Kill the attempt in this many seconds, unless an earlier time is set."""
        self._kill_at = min(self._kill_at, time.monotonic() + seconds)

    def _signal_all(self, signum: int) -> None:
        for interpreter in self._processes:
            interpreter.signal(signum)


def _await_signal(signals: SignalWatch) -> None:
    """Wait a moment for a signal: a stop of all processes may reach the attempt before the
    launcher."""
    until = time.monotonic() + _SIGNAL_SECONDS
    while not signals.received and time.monotonic() < until:
        time.sleep(0.02)


def _shortage_in(request: AttemptRequest) -> str:
    """Return the last lack of memory that a script's log reports. Much may be printed below it,
    such as the allocator's tables."""
    if request.config.traits.raises:
        return ""
    with contextlib.suppress(OSError), request.log_file.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - _LONGEST_SEARCHED_BYTES, 0))
        log_end = file.read().decode(errors="replace")
        return find_last_shortage(without_escapes(log_end))
    return ""
