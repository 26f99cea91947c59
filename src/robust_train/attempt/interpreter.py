"""A plain interpreter that runs one attempt, or one rank of an attempt with several processes.

The launcher starts it early. It imports the modules that the launcher names while it waits, and
gets its attempt over a socket. This module does not import torch, which is left to the trainer.
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
from typing import Any, NoReturn

from robust_train.attempt.code import Code
from robust_train.attempt.loading import Trainer, load
from robust_train.attempt.runner import run_attempt
from robust_train.attempt.signals import stop_on_signals
from robust_train.compat import run_exit_handlers, when_cuda_starts
from robust_train.config.attempt import AttemptRequest, Begin, Preparation, for_rank
from robust_train.config.projects import Words
from robust_train.config.trainers import MAIN_MODULE
from robust_train.failures.shortage import explain_failed_import
from robust_train.gpu.cuda_order import started_driver
from robust_train.host import linux, signals
from robust_train.host.job_logging import adopt_hydra
from robust_train.host.linux import FOREVER_SECONDS, readable
from robust_train.host.loggers import change_words, speak_as_rank
from robust_train.host.memory import own_memory
from robust_train.host.screen import flush_output
from robust_train.host.votes import Votes
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
"""The modules of every interpreter. What a standby imports in addition, the next standby needs too.
"""

_STORE_HOST = "127.0.0.1"
_MOST_DESCRIPTORS = 16
_LONGEST_PAUSE_SECONDS = 1.0


def main() -> NoReturn:
    """Serve a launcher: prepare, then run an attempt and end."""
    # A signal to all processes of a job is held until the attempt can handle it.
    signal.pthread_sigmask(signal.SIG_BLOCK, signals.STOP_SIGNALS)
    signals.keep_ends_of_children()
    starter, descriptor = (int(number) for number in sys.argv[1:])
    # The reaper sends the same signal, and kills what is left.
    linux.signal_at_parents_death(signals.stop_signal(os.environ))
    if os.getppid() != starter:
        os._exit(1)
    # A trainer that is pickled by value finds its names here, and no library imports this module
    # again.
    empty = types.ModuleType("__main__")
    sys.modules["__main__"] = sys.modules[MAIN_MODULE] = empty
    os.set_inheritable(descriptor, False)
    channel = socket.socket(fileno=descriptor)
    send = EventSender(channel)
    # A failure is reported with these classes. When memory has run out, they cannot be imported.
    parts_like(Finding)
    prepared = Prepared()
    while True:
        descriptors = _receive(channel)
        if not descriptors:
            os._exit(0)  # the launcher has ended or needs no attempt
        with os.fdopen(descriptors[0], "rb") as file:
            file.seek(0)
            try:
                message = pickle.load(file)
            except Exception:
                if not prepared.refusal:
                    raise
                # The launcher knows by now that a limit leaves no room, and an import without room
                # fails in many ways: with a MemoryError, or when it lists a folder.
                os._exit(1)
        if isinstance(message, Preparation):
            prepared = _prepare(message, channel)
            send(prepared)
            if prepared.is_unfit:
                # A CUDA context takes memory of a GPU that nobody has reserved for it.
                send.flush()
                os._exit(0)
        elif isinstance(message, Begin):
            _be_attempt(message, channel, send, descriptors[1:])


def _receive(channel: socket.socket) -> list[int]:
    """Wait for the launcher's next message.

    Returns:
        Its descriptors, the first of which is the file with the message. Empty if the launcher has
        closed the channel.
    """
    readable([channel.fileno()], FOREVER_SECONDS)
    try:
        data, descriptors, _, _ = socket.recv_fds(channel, 1, _MOST_DESCRIPTORS)
    except ConnectionResetError:
        # A socket that is closed with an unread answer is reset.
        return []
    return descriptors if data else []


def _prepare(wanted: Preparation, channel: socket.socket) -> Prepared:
    """Import modules quietly until the launcher sends its next message."""
    sys.path[:] = wanted.path
    sys.argv[:] = wanted.argv
    if wanted.is_standby:
        # If a library asks at its import whether there is a GPU, it then starts no driver. The
        # attempt brings its own environment.
        os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    names = list(wanted.modules)
    try:
        if wanted.trainer is not None:
            module = wanted.trainer.path.rpartition(".")[0]
            _import_one(module)
            if started_driver() is not None:
                return Prepared(is_unfit=True, culprit=module)
            check = getattr(sys.modules.get(module), "preload_modules", None)
            names += [] if check is None else check(wanted.cfg)
        pause = 0.0
        with _silence():
            for name in names:
                if readable([channel.fileno()], pause):
                    break
                started = time.monotonic()
                _import_one(name)
                if started_driver() is not None:
                    return Prepared(is_unfit=True, culprit=name)
                if wanted.is_standby:
                    seconds = time.monotonic() - started
                    pause = min(seconds, _LONGEST_PAUSE_SECONDS)
    except ConfigError as error:
        return Prepared(str(error))
    return Prepared(is_unfit=started_driver() is not None)


def _import_one(name: str) -> None:
    """Import a module. A failure is ignored, because it comes again in the attempt and is reported
    there.

    Raises:
        ConfigError: a limit of this process leaves no room for it.
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
    """Print nothing: output of an import would stand between the lines of an attempt."""
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

    ``descriptors`` stay open here and in all child processes: they are locks on what the attempt
    uses. With several ranks two others come before them: the file of the votes, and on rank 0 the
    socket of the store.
    """
    status = 1
    request = begin.request
    try:
        os.environ.clear()
        os.environ.update(request.environ)
        os.chdir(request.cwd)
        _write_stacks(request)
        adopt_hydra(request.hydra_cfg)
        change_words(Words(request.config.theirs).of_log)
        importlib.invalidate_caches()
        report = _Reporter(request, send, begin.rank)
        if request.ranks > 1:
            status = _run_rank(begin, channel, report, descriptors)
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
    """Write the stacks of a crash or a stall to a file; the screen gets one line."""
    try:
        stacks = request.stacks_file.open("a")
    except OSError:  # the disk may be full
        faulthandler.enable()
        return
    faulthandler.enable(stacks)
    faulthandler.register(signals.DUMP_STACKS, file=stacks)


class _Reporter:
    """Sends events, and once the trainer is loaded and trains, the libraries that it has imported.
    Then it also records the user's own modules."""

    def __init__(self, request: AttemptRequest, send: EventSender, rank: int) -> None:
        self._request = request
        self._rank = rank
        self._reported = 0
        self._trains = False
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
        of = self._request.config.trainer
        folder = os.path.abspath(of.cwd or "")
        self._code.note([os.path.join(folder, word.rpartition("=")[2]) for word in of.argv or ()])
        names = _modules_to_share()
        modules = tuple(name for name in names if name not in _AT_THE_START)
        if len(modules) > self._reported:
            self._reported = len(modules)
            self.send(LibrariesImported(modules, own_memory().get("VmRSS", 0)))


def _set_start_method(request: AttemptRequest) -> None:
    """Let multiprocessing use the start method of the script at its call of ``launch``.

    A module that the launcher has not imported may have chosen a method of its own.
    """
    wanted = request.start_method
    current = multiprocessing.get_start_method(allow_none=True)
    if wanted is None or current == wanted:
        return
    if current is None or request.trainer.main is not None:
        multiprocessing.set_start_method(wanted, force=True)


def _modules_to_share() -> tuple[str, ...]:
    """Return the imported modules from site-packages, and those of this package, which an editable
    installation has elsewhere. The user's modules may change between two attempts."""
    folders = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
    names = []
    for name, module in list(sys.modules.items()):
        is_ours = name.startswith("robust_train.")
        is_installed = str(getattr(module, "__file__", None) or "").startswith(folders)
        can_be_imported = getattr(getattr(module, "__spec__", None), "name", None) == name
        if can_be_imported and (is_ours or is_installed):
            names.append(name)
    return tuple(names)


def _run_rank(
    begin: Begin, channel: socket.socket, report: _Reporter, descriptors: Sequence[int]
) -> int:
    """Run the trainer as a rank, and return the process's exit status.

    ``descriptors`` begin with the file of the votes, and on rank 0 with the socket of the store.
    """
    request = begin.request
    rank = begin.rank
    for descriptor in descriptors[: 1 if rank else 2]:
        os.set_inheritable(descriptor, False)
    votes = Votes(request.ranks, descriptors[0])
    set_environment(rank, request, begin.store_port)
    torch = set_up(rank, request)
    # The store is kept until the end, because other ranks use it.
    store = None if rank else _host_store(torch, begin.store_port, descriptors[1])
    error = run_attempt(
        replace(request, config=for_rank(request.config, rank)),
        report.load,
        report,
        stopping=stop_on_signals,
        rank=rank,
        flags=votes,
    )
    # From here on other ranks may still work, and a request to stop is for them.
    for signum in signals.STOP_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    flush_output()
    if error is not None:
        # The interpreter's normal exit may hang, because a collective's thread may wait for peers.
        return 1
    run_exit_handlers()
    report.send.flush()
    if store is not None:
        # The launcher closes the channel when all other ranks have ended.
        readable([channel.fileno()], FOREVER_SECONDS)
    return 0


def set_environment(rank: int, request: AttemptRequest, port: int) -> None:
    """Set the variables that torch's ``env://`` and other libraries read, as torchrun does."""
    for name in request.of_first_rank if rank else ():
        os.environ.pop(name, None)
    for name in ("", "ROLE_", "LOCAL_"):
        os.environ[f"{name}RANK"] = str(rank)
        os.environ[f"{name}WORLD_SIZE"] = str(request.ranks)
    os.environ |= {
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": _STORE_HOST,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "robust_train",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        # Rank 0 hosts the store before its trainer starts.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    # Gloo looks up the host's name otherwise, whose address may not exist or not be reachable.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    lightning = sys.modules.get("lightning_utilities.core.rank_zero")
    if lightning is not None:
        # Lightning read the rank when it was imported, before there was a rank.
        lightning.rank_zero_only.rank = rank


def set_up(rank: int, request: AttemptRequest) -> Any:
    """Import torch and set up one of several processes of this machine."""
    # accelerate would set another number.
    share = max(1, len(os.sched_getaffinity(0)) // request.ranks)
    os.environ.setdefault("OMP_NUM_THREADS", str(share))

    import torch
    import torch.distributed

    if rank:
        speak_as_rank(rank)
    if request.spec.gpus:
        # Trainers that say just "cuda" get this GPU.
        when_cuda_starts(torch, lambda: torch.cuda.set_device(rank))
    # The module may have been imported before the number of ranks was known.
    with contextlib.suppress(ValueError):
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    return torch


def _host_store(torch: Any, port: int, listener: int) -> Any:
    """Serve the ranks' store on a socket of the loopback device that the launcher has bound.

    It is libuv's store, because torch's older store reads in its only thread and hangs on one
    foreign byte. It accepts an open socket from torch 2.6 on.
    """
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    return torch.distributed.TCPStore(
        _STORE_HOST,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener,
        use_libuv=version >= (2, 6),
    )
