"""A process that has torch imported and is forked for every job of a sweep: a zygote.

Android and Chromium call theirs so. Below it is one more such process for each trainer, which has
imported that as well; the fork servers of the jobs are forks of those:

    zygote (torch) ─ nest (torch, trainer a) ─ fork server of job 0 ─ attempt
                   │                         └ fork server of job 2 ─ attempt
                   └ nest (torch, trainer b) ─ fork server of job 1 ─ attempt

What a trainer's module does when it is imported (default types, seeds, patches) is thus seen by
that trainer's jobs alone, and a module that must not be forked after its import spoils only its
nest. The zygote never sees a reservation; of what it passes on for a job nothing stays open in it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pickle
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

from robust_train.execution.cuda_guard import why_not_fork
from robust_train.execution.prctl import become_subreaper, signal_at_parents_death
from robust_train.execution.server import Server
from robust_train.execution.wire import (
    ORPHAN_GRACE_SECONDS,
    receive_packet,
    send_message,
    send_packet,
)

MOST_NESTS = 4
"""Trainers of one sweep that are kept imported; the one goes that was not asked for longest."""


class _Job:
    """A job that asked for a server.

    Args:
        descriptors: that came with the request; they are this object's now.

    Attributes:
        server: what shall serve it, once in a process of its own.
        answer: where it is told what became of its request.
    """

    def __init__(self, descriptors: Sequence[int]) -> None:
        control, events, self.stdout, self.stderr, answer = descriptors
        self.server = Server(socket.socket(fileno=control), socket.socket(fileno=events))
        self.answer = socket.socket(fileno=answer)

    def tell(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        """Answer; a job that has ended meanwhile need not know."""
        with contextlib.suppress(OSError):
            send_message(self.answer, message, descriptors)

    def let_go(self) -> None:
        """Close all but the answer."""
        self.server.close()
        os.close(self.stdout)
        os.close(self.stderr)

    def refuse(self, reason: str) -> None:
        """Have the job start a server of its own."""
        self.tell({"kind": "no", "reason": reason})
        self.let_go()
        self.answer.close()


def serve(requests: socket.socket) -> None:
    """Until nobody can ask any more: the launcher and its jobs have ended."""
    with contextlib.suppress(ImportError):  # for _new_random_numbers
        importlib.import_module("numpy.random")
    numbers = _numpy_numbers()
    reason = _why_not_serve()
    gc.freeze()
    nests: dict[Any, socket.socket] = {}  # by trainer and sys.path
    while (packet := receive_packet(requests)) is not None:
        _reap()
        wanted, descriptors = packet
        if reason is not None:
            _Job(descriptors).refuse(reason)
            continue
        nest = nests.pop(wanted, None)
        if nest is None or not _passed_on(nest, wanted, descriptors):
            try:
                nest = _start_nest(descriptors, numbers, [requests, *nests.values()])
            except OSError as error:
                _Job(descriptors).refuse(f"cannot fork: {error.strerror}")
                continue
        for descriptor in descriptors:
            os.close(descriptor)
        nests[wanted] = nest
        if len(nests) > MOST_NESTS:
            nests.pop(next(iter(nests))).close()
    for nest in nests.values():
        nest.close()
    deadline = time.monotonic() + ORPHAN_GRACE_SECONDS + 1.0
    while _reap() and time.monotonic() < deadline:
        time.sleep(0.02)


def _why_not_serve() -> str | None:
    reason = why_not_fork()
    if reason is not None:
        return f"torch {reason}"
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        return f"this kernel has no pidfd_open: {error.strerror}"
    return None


def _reap() -> bool:
    """Collect dead children; whether any is left."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
        return True
    return False


def _passed_on(nest: socket.socket, wanted: Any, descriptors: list[int]) -> bool:
    try:
        send_packet(nest, wanted, descriptors)
    except OSError:  # it has ended
        nest.close()
        return False
    return True


def _start_nest(
    first: list[int], numbers: object, not_for_it: list[socket.socket]
) -> socket.socket:
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    zygote = os.getpid()
    try:
        pid = os.fork()
    except OSError:
        ours.close()
        its.close()
        raise
    if pid == 0:
        signal_at_parents_death(signal.SIGKILL)  # also while an import hangs
        if os.getppid() != zygote:
            os._exit(1)
        with _never_returning():
            for other in (ours, *not_for_it):
                other.close()
            _Nest(its, numbers).serve(_Job(first))
    its.close()
    return ours


class _Nest:
    """Has one trainer imported.

    Args:
        requests: where the zygote passes requests on.
        numbers: the state of numpy's random numbers before the trainer was imported.
    """

    def __init__(self, requests: socket.socket, numbers: object) -> None:
        self._requests = requests
        self._numbers = numbers
        self._servers: dict[int, tuple[int, _Job]] = {}  # by pidfd

    def serve(self, first: _Job) -> None:
        """Import the trainer for the first job, then fork a server for each, while all is well."""
        with _printing_to(first):
            is_loaded = first.server.serve_until_loaded()
        if not is_loaded or first.server.unsafe is not None:
            # the first job was told; those that asked meanwhile find out for themselves
            self._refuse_all(first.server.unsafe or "the trainer was not imported for another job")
            return
        gc.freeze()
        self._fork_server(first)
        is_open = True
        while is_open or self._servers:
            poll = select.poll()
            for descriptor in self._servers:
                poll.register(descriptor, select.POLLIN)
            if is_open:
                poll.register(self._requests, select.POLLIN)
            for ready, _ in poll.poll():
                if ready in self._servers:
                    self._tell_end(ready)
                elif (packet := receive_packet(self._requests)) is None:
                    is_open = False
                else:
                    self._fork_server(_Job(packet[1]))

    def _refuse_all(self, reason: str) -> None:
        self._requests.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while (packet := receive_packet(self._requests)) is not None:
                _Job(packet[1]).refuse(reason)

    def _fork_server(self, job: _Job) -> None:
        _flush()
        try:
            pid = os.fork()
        except OSError as error:
            job.refuse(f"cannot fork: {error.strerror}")
            return
        if pid == 0:
            with _never_returning():
                self._be_server(job)
        pidfd = os.pidfd_open(pid)
        job.tell({"kind": "born"}, (pidfd,))
        job.let_go()
        self._servers[pidfd] = (pid, job)

    def _be_server(self, job: _Job) -> None:
        os.setsid()
        become_subreaper()
        self._requests.close()
        for pidfd, (_, other) in self._servers.items():
            os.close(pidfd)
            other.answer.close()
        os.dup2(job.stdout, 1)
        os.dup2(job.stderr, 2)
        os.close(job.stdout)
        os.close(job.stderr)
        job.answer.close()
        _new_random_numbers(self._numbers)
        with contextlib.suppress(ConnectionError):
            job.server.serve()

    def _tell_end(self, pidfd: int) -> None:
        pid, job = self._servers.pop(pidfd)
        _, status = os.waitpid(pid, 0)
        job.tell({"kind": "ended", "returncode": os.waitstatus_to_exitcode(status)})
        job.answer.close()
        os.close(pidfd)


@contextlib.contextmanager
def _never_returning() -> Iterator[None]:
    """For the child of a fork: its end is the process's end, and no frame above it goes on."""
    status = 1
    try:
        yield
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            _flush()
        os._exit(status)


@contextlib.contextmanager
def _printing_to(job: _Job) -> Iterator[None]:
    """What an import prints goes where it would if the job's own process imported."""
    _flush()
    own = [(number, os.dup(number)) for number in (1, 2)]
    os.dup2(job.stdout, 1)
    os.dup2(job.stderr, 2)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            _flush()
        for number, copy in own:
            os.dup2(copy, number)
            os.close(copy)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()


def _numpy_numbers() -> object:
    """The state of numpy's global random numbers; None without numpy."""
    random = sys.modules.get("numpy.random")
    return None if random is None else pickle.dumps(random.get_state())


def _new_random_numbers(before: object) -> None:
    """Have jobs draw different numbers, as processes that import numpy themselves would.

    Not where the trainer's module seeded numpy, or drew from it, when it was imported. Python's own
    ``random`` starts anew in every fork; torch starts with the same seed in every process.
    """
    if before is not None and before == _numpy_numbers():
        sys.modules["numpy.random"].seed()
