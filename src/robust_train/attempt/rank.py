"""One of several processes that run a trainer together, from the inside."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from robust_train.attempt.runner import Trainer, new_run, run_attempt, stop_on_signals
from robust_train.compat import run_exit_handlers, when_cuda_starts
from robust_train.config.attempt import for_rank, trainer_config
from robust_train.config.request import AttemptRequest, Begin
from robust_train.host.screen import flush_output
from robust_train.host.signals import DUMP_STACKS, STOP_SIGNALS
from robust_train.host.votes import Votes
from robust_train.host.waiting import FOREVER_SECONDS, readable
from robust_train.host.wire import EventSender
from robust_train.model.events import (
    Event,
    Failed,
    Finished,
    MemoryReported,
    MemoryTight,
    MicroBatchChanged,
    MicroBatchExhausted,
    OutOfMemory,
    SpeedMeasured,
)

_STORE_HOST = "127.0.0.1"

EVENTS_OF_ANY_RANK = (
    *(MemoryReported, MemoryTight, OutOfMemory, SpeedMeasured),
    *(MicroBatchChanged, MicroBatchExhausted),
)
"""What the launcher gets of other ranks than the first, with their number."""


def run_rank(
    begin: Begin,
    channel: socket.socket,
    sender: EventSender,
    send: Callable[
        [Event], None
    ],  # ``sender``, and what else is reported with an event
    load: Callable[[], Trainer],  # imports the trainer
    descriptors: Sequence[int],
) -> int:
    """Run the trainer as one of the ranks; return the process's exit status.

    ``descriptors`` begin with the file of the votes, and on rank 0 with the socket of the store.
    """
    request, rank = begin.request, begin.rank
    for own in descriptors[: 1 if rank else 2]:
        os.set_inheritable(own, False)
    votes = Votes(request.ranks, descriptors[0])
    set_environment(rank, request, begin.store_port)
    torch = set_up(rank, request)
    # kept until the end: other ranks use it
    store = None if rank else _host_store(torch, begin.store_port, descriptors[1])
    config = for_rank(request.config, rank)
    error = run_attempt(
        replace(request, config=config, cfg=trainer_config(request.cfg, config)),
        new_run(request, report_of(rank, send), rank=rank, flags=votes),
        load,
        lambda event: send(_with_time(event)),
        stopping=stop_on_signals,
        process_ends=True,
    )
    # from here on others may still be at work, and a request to stop is for them
    for signum in STOP_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    flush_output()
    if error is not None:
        # without the interpreter's way out: a collective's thread may wait for peers
        return 1
    run_exit_handlers()
    sender.flush()
    if store is not None:
        readable(
            [channel.fileno()], FOREVER_SECONDS
        )  # the launcher closes it when all others have ended
    return 0


def report_of(rank: int, send: Callable[[Event], None]) -> Callable[[Event], None]:
    """Return what takes the events of a rank's trainer and passes on what the launcher needs."""

    def of_another(event: Event) -> None:
        if isinstance(event, EVENTS_OF_ANY_RANK):
            send(replace(event, rank=rank))

    return of_another if rank else send


def _with_time(event: Event) -> Event:
    return (
        replace(event, at=time.monotonic())
        if isinstance(event, (Finished, Failed))
        else event
    )


def set_environment(rank: int, request: AttemptRequest, port: int) -> None:
    """Set what torch's ``env://`` and other libraries read, as torch's own launcher does."""
    for name in request.of_first_rank if rank else ():
        os.environ.pop(name, None)
    for name in ("RANK", "ROLE_RANK", "LOCAL_RANK"):
        os.environ[name] = str(rank)
    for name in ("WORLD_SIZE", "ROLE_WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ[name] = str(request.ranks)
    os.environ |= {
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": _STORE_HOST,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "robust_train",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        # rank 0 hosts the store before its trainer begins
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    # no look-up of the host's name, which may have no address, or one that others do not reach
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if (lightning := sys.modules.get("lightning_utilities.core.rank_zero")) is not None:
        lightning.rank_zero_only.rank = (
            rank  # read when it was imported, before there was a rank
        )


def set_up(rank: int, request: AttemptRequest) -> Any:
    """Import torch and set up what each of several processes of one machine needs."""
    # accelerate would set another number
    share = max(1, len(os.sched_getaffinity(0)) // request.ranks)
    os.environ.setdefault("OMP_NUM_THREADS", str(share))

    import torch
    import torch.distributed

    if rank:
        # the same lines of every rank would hide what differs
        for handler in logging.getLogger().handlers:
            handler.addFilter(lambda record: _mark(rank, record))
    with contextlib.suppress(OSError):  # a full disk, perhaps
        faulthandler.register(DUMP_STACKS, file=request.stacks_file.open("a"))
    if request.gpu_uuids:
        # for trainers that say just "cuda"
        when_cuda_starts(torch, lambda: torch.cuda.set_device(rank))
    # it may have been imported before the number of ranks was known
    with contextlib.suppress(ValueError):
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    return torch


def _host_store(torch: Any, port: int, listener: int) -> Any:
    """Serve the store of the ranks on a socket of the loopback that the launcher has bound.

    libuv's store, because torch's older one reads in its only thread and hangs on one foreign byte.
    It takes an open socket from torch 2.6 on.
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


def _mark(rank: int, record: logging.LogRecord) -> bool:
    if record.levelno < logging.WARNING:
        return False
    if not getattr(record, "is_marked", False):
        record.msg, record.is_marked = f"[rank {rank}] {record.msg}", True
    return True
