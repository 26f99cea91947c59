"""A plain interpreter that runs one attempt, or one rank of it.

It is started early, imports what the launcher asks for while it waits, and is given its attempt
over a socket. Nothing here imports torch: that is left to the trainer.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import pickle
import signal
import socket
import sys
import sysconfig
import time
import types
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NoReturn

from robust_train.attempt.loading import load
from robust_train.attempt.runner import Trainer, new_run, run_attempt, stop_on_signals
from robust_train.compat import run_exit_handlers
from robust_train.config.request import AttemptRequest, Begin, Preparation
from robust_train.failures.shortage import no_room_to_import
from robust_train.gpu.cuda_order import started_driver
from robust_train.host import linux, signals
from robust_train.host.job_logging import adopt_hydra
from robust_train.host.memory import own_memory
from robust_train.host.screen import flush_output
from robust_train.host.waiting import FOREVER_SECONDS, readable
from robust_train.host.wire import EventSender
from robust_train.model.errors import ConfigError
from robust_train.model.events import Event, LibrariesImported, Prepared, Progress

_MOST_DESCRIPTORS = 16
_LONGEST_PAUSE_SECONDS = 1.0


def main() -> NoReturn:
    """Serve one launcher: prepare, then run one attempt and end."""
    # a signal to all processes of a job waits until the attempt can handle it
    signal.pthread_sigmask(signal.SIG_BLOCK, signals.STOP_SIGNALS)
    starter, descriptor = (int(number) for number in sys.argv[1:])
    linux.signal_at_parents_death(signal.SIGKILL)
    if os.getppid() != starter:
        os._exit(1)
    # a trainer that is pickled by value finds its names there; and no library imports us again
    sys.modules["__main__"] = types.ModuleType("__main__")
    os.set_inheritable(descriptor, False)
    channel = socket.socket(fileno=descriptor)
    send = EventSender(channel)
    while True:
        readable([channel.fileno()], FOREVER_SECONDS)
        data, descriptors, _, _ = socket.recv_fds(channel, 1, _MOST_DESCRIPTORS)
        if not data:
            os._exit(0)  # the launcher is gone or needs no attempt
        with os.fdopen(descriptors[0], "rb") as file:
            file.seek(0)
            message = pickle.load(file)
        if isinstance(message, Preparation):
            send(_prepare(message, channel))
        elif isinstance(message, Begin):
            _be_attempt(message, channel, send, descriptors[1:])


def _prepare(wanted: Preparation, channel: socket.socket) -> Prepared:
    """Import modules quietly until the launcher sends its next message."""
    sys.path[:] = wanted.path
    sys.argv[:] = wanted.argv
    names = list(wanted.modules)
    try:
        if wanted.trainer is not None:
            module = wanted.trainer.path.rpartition(".")[0]
            _import_one(module)
            check = getattr(sys.modules.get(module), "preload_modules", None)
            names += [] if check is None else check(wanted.cfg)
        pause = 0.0
        with _silence():
            for name in names:
                if readable([channel.fileno()], pause):
                    break
                started = time.monotonic()
                _import_one(name)
                seconds = time.monotonic() - started
                pause = (
                    min(seconds, _LONGEST_PAUSE_SECONDS) if wanted.is_standby else 0.0
                )
    except ConfigError as error:
        return Prepared(str(error))
    return Prepared(is_unfit=started_driver() is not None)


def _import_one(name: str) -> None:
    """Import a module; what fails will fail in the attempt as well, and is reported there.

    Raises:
        ConfigError: a limit of this process leaves no room for it.
    """
    if name in sys.modules:
        return
    try:
        importlib.import_module(name)
    except Exception as error:
        if (problem := no_room_to_import(name, error)) is not None:
            raise ConfigError(problem) from error


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Print nothing: what a library prints at its import comes between the lines of an attempt."""
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


def _be_attempt(
    begin: Begin, channel: socket.socket, send: EventSender, descriptors: Sequence[int]
) -> NoReturn:
    """Run the attempt and end this process.

    ``descriptors`` stay open here and in all that is started: locks on what the attempt uses. With
    several ranks two come before them: their votes, and on rank 0 the socket of their store.
    """
    status = 1
    request = begin.request
    try:
        marker = os.environ.get(linux.JOB_MARKER, "")
        os.environ.clear()
        os.environ.update({**request.environ, linux.JOB_MARKER: marker})
        os.chdir(request.cwd)
        _write_stacks(request)
        adopt_hydra(request.hydra_cfg)
        importlib.invalidate_caches()
        report = _Reporter(request, send)
        if request.ranks > 1:
            from robust_train.attempt.rank import run_rank

            status = run_rank(begin, channel, send, report, report.load, descriptors)
        else:
            error = run_attempt(
                request,
                new_run(request, report),
                report.load,
                report,
                stopping=partial(stop_on_signals, is_script=request.runs_script),
                process_ends=True,
            )
            status = int(error is not None)
            send.flush()
            # what a normal interpreter exit would do
            flush_output()
            run_exit_handlers()
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        flush_output()
        send.flush()
        os._exit(status)


def _write_stacks(request: AttemptRequest) -> None:
    """Have the stacks of a crash or a stall written; not on the screen, which gets a line."""
    try:
        stacks = request.stacks_file.open("a")
    except OSError:  # a full disk, perhaps
        faulthandler.enable()
        return
    faulthandler.enable(stacks)
    faulthandler.register(signals.DUMP_STACKS, file=stacks)


class _Reporter:
    """Sends events, and which libraries the trainer has imported: when it is loaded and trains."""

    def __init__(self, request: AttemptRequest, send: EventSender) -> None:
        self._request = request
        self._send = send
        self._before = set(sys.modules)
        self._reported = 0
        self._trains = False

    def __call__(self, event: Event) -> None:
        """Send an event."""
        if not self._trains and isinstance(event, Progress):
            self._trains = True
            self._report_libraries()
        self._send(event)

    def load(self) -> Trainer:
        """Import the trainer."""
        trainer = load(self._request.trainer)
        self._report_libraries()
        return trainer

    def _report_libraries(self) -> None:
        modules = tuple(
            name for name in _installed_modules() if name not in self._before
        )
        if len(modules) > self._reported:
            self._reported = len(modules)
            self._send(LibrariesImported(modules, own_memory().get("VmRSS", 0)))


def _installed_modules() -> tuple[str, ...]:
    """Return the imported modules that lie in site-packages; not those of the user or of ours."""
    folders = tuple({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
    return tuple(
        name
        for name, module in list(sys.modules.items())
        if str(getattr(module, "__file__", None) or "").startswith(folders)
        and getattr(getattr(module, "__spec__", None), "name", None) == name
    )
