"""The main program of an attempt's process, or of one rank's process.

The launcher starts the process early, in ``children.interpreters``, and sends it messages over a
socket. A :class:`Preparation` names modules to import while the process waits. A :class:`Begin` has
the attempt to run, after which the process ends. This module leaves importing torch to the trainer.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import sysconfig
import time
import types
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NoReturn

from robust_train.attempt.code import Code
from robust_train.attempt.loading import Trainer, load
from robust_train.attempt.rank import run_rank
from robust_train.attempt.runner import run_attempt
from robust_train.attempt.signals import stop_on_signals
from robust_train.compat import run_exit_handlers
from robust_train.config.attempt import AttemptRequest, Begin, Preparation
from robust_train.config.trainers import MAIN_MODULE
from robust_train.config.words import Words
from robust_train.failures.shortage import explain_failed_import
from robust_train.gpu.cuda_order import started_driver
from robust_train.host import linux, signals
from robust_train.host.job_logging import adopt_hydra
from robust_train.host.linux import FOREVER_SECONDS, wait_until_readable
from robust_train.host.loggers import change_words
from robust_train.host.memory import read_own_memory
from robust_train.host.streams import flush_output
from robust_train.host.wire import EventSender
from robust_train.model.errors import ConfigError
from robust_train.model.events import (
    Event,
    EventOfRank,
    Failed,
    Finished,
    LibrariesImported,
    Prepared,
    Progress,
    SpeedMeasured,
)
from robust_train.model.failure import Finding
from robust_train.model.parts import parts_like

_AT_THE_START = frozenset(sys.modules)
"""The modules that every interpreter imports. All other modules are reported to the launcher, which
lets the next interpreter import them early."""

_MOST_DESCRIPTORS = 16  # in one message
# After each import, a standby process pauses as long as the import took, but at most this long.
_LONGEST_PAUSE_SECONDS = 1.0


def main() -> NoReturn:
    """Import modules for the launcher until it sends an attempt, then run the attempt and end."""
    # A signal to all processes of a job stays pending until the attempt can handle it.
    signal.pthread_sigmask(signal.SIG_BLOCK, signals.STOP_SIGNALS)
    signals.keep_exit_status_of_children()
    starter, descriptor = (int(number) for number in sys.argv[1:])
    # The reaper sends the same signal, and kills the processes that remain.
    linux.signal_at_parents_death(signals.choose_stop_signal(os.environ))
    if os.getppid() != starter:
        os._exit(1)
    # A trainer that is pickled by value finds its names in this module. An empty module also keeps
    # libraries from importing this file again as the main script.
    empty = types.ModuleType("__main__")
    sys.modules["__main__"] = sys.modules[MAIN_MODULE] = empty
    os.set_inheritable(descriptor, False)
    channel = socket.socket(fileno=descriptor)
    send = EventSender(channel)
    # A failure is reported with these classes, which could not be imported after memory has run
    # out.
    parts_like(Finding)
    prepared = Prepared()
    while True:
        descriptors = _receive(channel)
        if not descriptors:
            # The launcher has ended, or needs no further attempt.
            os._exit(0)
        with os.fdopen(descriptors[0], "rb") as file:
            file.seek(0)
            try:
                message = pickle.load(file)
            except Exception:
                if not prepared.refusal:
                    raise
                # The launcher already knows that a limit leaves too little memory. Without memory,
                # the imports of this message fail with almost any error.
                os._exit(1)
        if isinstance(message, Preparation):
            prepared = _prepare(message, channel)
            send(prepared)
            if prepared.is_unfit:
                # This process has a CUDA context, which takes memory of a GPU without a
                # reservation.
                send.flush()
                os._exit(0)
        elif isinstance(message, Begin):
            _run_and_exit(message, channel, send, descriptors[1:])


def _receive(channel: socket.socket) -> list[int]:
    """Wait for the launcher's next message.

    Returns:
        The descriptors of the message. The first is the file with its content. Empty if the
            launcher has closed the channel.
    """
    wait_until_readable([channel.fileno()], FOREVER_SECONDS)
    try:
        data, descriptors, _, _ = socket.recv_fds(channel, 1, _MOST_DESCRIPTORS)
    except ConnectionResetError:
        # The launcher has closed the socket without reading an answer.
        return []
    return descriptors if data else []


def _prepare(wanted: Preparation, channel: socket.socket) -> Prepared:
    """Import modules quietly until the launcher sends its next message.

    Once an import has started the CUDA driver, the process is unfit for an attempt.
    """
    sys.path[:] = wanted.path
    sys.argv[:] = wanted.argv
    if wanted.is_standby:
        # With this variable, a library that asks for a GPU when it is imported does not start the
        # driver. The attempt has its own environment.
        os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    names = list(wanted.modules)
    try:
        if wanted.trainer is not None:
            module = wanted.trainer.path.rpartition(".")[0]
            _import_quietly(module)
            if started_driver() is not None:
                return Prepared(is_unfit=True, culprit=module)
            check = getattr(sys.modules.get(module), "preload_modules", None)
            if check is not None:
                names += check(wanted.cfg)
        pause = 0.0
        with _silence():
            for name in names:
                if wait_until_readable([channel.fileno()], pause):
                    break
                started = time.monotonic()
                _import_quietly(name)
                if started_driver() is not None:
                    return Prepared(is_unfit=True, culprit=name)
                if wanted.is_standby:
                    seconds = time.monotonic() - started
                    pause = min(seconds, _LONGEST_PAUSE_SECONDS)
    except ConfigError as error:
        return Prepared(str(error))
    return Prepared(is_unfit=started_driver() is not None)


def _import_quietly(name: str) -> None:
    """Import a module. Errors are ignored, because the attempt imports it again and reports them.

    Raises:
        ConfigError: a limit of this process leaves too little memory for the module.
    """
    if name in sys.modules:
        return
    try:
        importlib.import_module(name)
    except Exception as error:
        problem = explain_failed_import(name, error)
        if problem is not None:
            raise ConfigError(problem) from error


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Discard output within the block, so that it does not appear among another attempt's lines."""
    flush_output()
    kept = [os.dup(number) for number in (1, 2)]
    with open(os.devnull, "wb") as nothing:
        for number in (1, 2):
            os.dup2(nothing.fileno(), number)
    try:
        yield
    finally:
        flush_output()
        for number, descriptor in zip((1, 2), kept, strict=True):
            os.dup2(descriptor, number)
            os.close(descriptor)


def _run_and_exit(
    begin: Begin, channel: socket.socket, send: EventSender, descriptors: Sequence[int]
) -> NoReturn:
    """Run the attempt and end this process.

    ``descriptors`` are locks on the devices of the attempt, which stay open here and in all child
    processes. With several ranks, the descriptors of :func:`.rank.run_rank` come first.
    """
    status = 1
    request = begin.request
    try:
        os.environ.clear()
        os.environ.update(request.environ)
        os.chdir(request.cwd)
        _write_stacks(request)
        adopt_hydra(request.hydra_cfg)
        change_words(Words(request.config.theirs).for_log)
        importlib.invalidate_caches()
        report = _Reporter(request, send, begin.rank)
        if request.ranks > 1:
            status = run_rank(
                begin, channel, descriptors, load=report.load, send=report, flush=send.flush
            )
        else:
            error = run_attempt(
                request,
                report.load,
                report,
                stopping=partial(stop_on_signals, is_script=request.config.traits.takes_signals),
            )
            status = int(error is not None)
            send.flush()
            # A normal exit of the interpreter would do the same.
            flush_output()
            run_exit_handlers()
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        flush_output()
        send.flush()
        os._exit(status)


def _write_stacks(request: AttemptRequest) -> None:
    """Write the stacks of a crash or a stall to a file, because the screen gets only one line."""
    try:
        stacks = request.stacks_file.open("a")
    except OSError:  # The disk may be full.
        faulthandler.enable()
        return
    faulthandler.enable(stacks)
    faulthandler.register(signals.DUMP_STACKS, file=stacks)


class _Reporter:
    """Sends the events of an attempt.

    After the trainer was imported, and after its first step, it also sends the names of the
    imported libraries and records the user's source files.
    """

    def __init__(self, request: AttemptRequest, send: EventSender, rank: int) -> None:
        self._request = request
        self._rank = rank
        self._reported = 0  # number of libraries that were sent
        self._trains = False  # whether the first step is done
        self._code = Code(request, rank)
        self.send = send

    def __call__(self, event: Event) -> None:
        """Send an event. Ranks other than rank 0 send only their end, and events with a rank."""
        if not self._trains and isinstance(event, Progress):
            self._trains = True
            self._report_imports()
        if self._rank == 0 or isinstance(event, (Finished, Failed)):
            self.send(event)
        elif isinstance(event, (EventOfRank, SpeedMeasured)):
            self.send(replace(event, rank=self._rank))

    def load(self) -> Trainer:
        """Import the trainer."""
        trainer = load(self._request.trainer)
        _set_start_method(self._request)
        self._report_imports()
        return trainer

    def _report_imports(self) -> None:
        """Record the user's source files, and send the names of newly imported libraries."""
        trainer = self._request.config.trainer
        folder = os.path.abspath(trainer.cwd or "")
        # Any word of a script's command may be a file, even after an option: --config=rates.yaml.
        words = [word.rpartition("=")[2] for word in trainer.argv or ()]
        self._code.record([os.path.join(folder, word) for word in words])
        names = _installed_modules()
        modules = tuple(name for name in names if name not in _AT_THE_START)
        if len(modules) > self._reported:
            self._reported = len(modules)
            self.send(LibrariesImported(modules, read_own_memory().get("VmRSS", 0)))


def _set_start_method(request: AttemptRequest) -> None:
    """Let multiprocessing use the start method that the script had set when it called ``launch``.

    If the trainer is not in the script, its module may have chosen another method, which is kept.
    """
    wanted = request.start_method
    current = multiprocessing.get_start_method(allow_none=True)
    if wanted is None or current == wanted:
        return
    if current is None or request.trainer.main is not None:
        multiprocessing.set_start_method(wanted, force=True)


def _installed_modules() -> tuple[str, ...]:
    """Return the imported modules that the next interpreter may import early: those in
    site-packages and those of this package. The user's modules may change between two attempts."""
    folders = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
    names = []
    for name, module in list(sys.modules.items()):
        is_ours = name.startswith("robust_train.")
        is_installed = str(getattr(module, "__file__", None) or "").startswith(folders)
        can_be_imported = getattr(getattr(module, "__spec__", None), "name", None) == name
        if can_be_imported and (is_ours or is_installed):
            names.append(name)
    return tuple(names)
