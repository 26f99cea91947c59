"""One of several processes that run a trainer together, from the inside."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import NoReturn

from robust_train.compat import run_exit_handlers, when_cuda_starts
from robust_train.config.attempt import rank_config
from robust_train.events import (
    Event,
    Failed,
    Finished,
    MemoryReported,
    MemoryTight,
    MicroBatchChanged,
    MicroBatchExhausted,
    OutOfMemory,
    SpeedMeasured,
    parse,
)
from robust_train.execution.attempt_output import flush_output
from robust_train.execution.request import AttemptRequest
from robust_train.execution.runner import new_run, run_attempt, stop_on_signals
from robust_train.execution.signals import DUMP_STACKS, STOP_SIGNALS
from robust_train.execution.votes import Votes
from robust_train.execution.wire import EventSender

EVENTS_OF_ANY_RANK = (
    *(MemoryReported, MemoryTight, OutOfMemory, SpeedMeasured),
    *(MicroBatchChanged, MicroBatchExhausted),
)
"""What the launcher gets of other ranks than the first, with their number."""


def be_rank(
    local: int, request: AttemptRequest, send: EventSender, votes: Votes, ending: int, port: int
) -> NoReturn:
    """Run the trainer as one of the ranks, in a process that was forked for it.

    ``local`` is its number on this node; ``ending`` is a file in memory for the event of its end.
    """
    status = 1
    rank = request.first_rank + local
    try:
        set_environment(local, request, port)
        set_up(local, rank, request)
        votes.begin(rank)
        error = run_attempt(
            replace(request, cfg=rank_config(request.cfg, rank, local)),
            new_run(request, report_of(rank, send), rank=rank, flags=votes),
            request.trainer.load,
            _ending_to(ending),
            stopping=stop_on_signals,
            process_ends=True,
        )
        status = int(error is not None)
        # from here on others may still be at work, and a request to stop is for them
        for signum in STOP_SIGNALS:
            signal.signal(signum, signal.SIG_IGN)
        flush_output()
        # after a failure not the interpreter's way out: a collective's thread may wait for peers
        if status == 0:
            run_exit_handlers()
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        flush_output()
        send.flush()
        os._exit(status)


def read_ending(descriptor: int) -> tuple[float, Finished | Failed] | None:
    """Return when and how a rank has ended by its own report; None where it made none so far."""
    data = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
    with contextlib.suppress(ValueError):
        found = json.loads(data)
        event = parse(found["event"])
        if isinstance(event, (Finished, Failed)):
            return found["at"], event
    return None


def _ending_to(descriptor: int) -> Callable[[Event], None]:
    def send(event: Event) -> None:
        data = {"at": time.monotonic(), "event": event.as_json()}
        with open(descriptor, "w", closefd=False) as file:
            json.dump(data, file, default=repr)

    return send


def report_of(rank: int, send: EventSender) -> Callable[[Event], None]:
    def of_another(event: Event) -> None:
        if isinstance(event, EVENTS_OF_ANY_RANK):
            send(replace(event, rank=rank))

    return of_another if rank else send


def set_environment(local: int, request: AttemptRequest, port: int) -> None:
    """Set what torch's ``env://`` and other libraries read, as torch's own launcher does."""
    rank, span = request.first_rank + local, request.span
    for name in request.of_first_rank if rank else ():
        os.environ.pop(name, None)
    for name in ("RANK", "ROLE_RANK"):
        os.environ[name] = str(rank)
    for name in ("WORLD_SIZE", "ROLE_WORLD_SIZE"):
        os.environ[name] = str(request.world_size)
    os.environ |= {
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(request.ranks),
        "GROUP_RANK": str(span.node),
        "GROUP_WORLD_SIZE": str(span.nodes),
        "MASTER_ADDR": span.host,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "robust_train",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        # the store lives in the attempt's own process
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    # no look-up of the host's name, which may have no address, or one that others do not reach
    os.environ.setdefault("GLOO_SOCKET_IFNAME", span.interface)
    if (lightning := sys.modules.get("lightning_utilities.core.rank_zero")) is not None:
        lightning.rank_zero_only.rank = rank  # read when it was imported, before there was a rank


def set_up(local: int, rank: int, request: AttemptRequest) -> None:
    """Set up what each of several processes of one machine needs."""
    if rank:
        # the same lines of every rank would hide what differs
        for handler in logging.getLogger().handlers:
            handler.addFilter(lambda record: _mark(rank, record))
    with contextlib.suppress(OSError):  # a full disk, perhaps
        faulthandler.register(DUMP_STACKS, file=request.stacks_file.open("a"))
    torch = sys.modules["torch"]
    if request.gpu_uuids:
        # for trainers that say just "cuda"
        when_cuda_starts(torch, lambda: torch.cuda.set_device(local))
    threads = torch.get_num_threads()
    if "OMP_NUM_THREADS" not in os.environ:
        threads = max(1, len(os.sched_getaffinity(0)) // request.ranks)
        os.environ["OMP_NUM_THREADS"] = str(threads)  # accelerate would set another number
    # in any case: two threads at once must not be the first to use torch's pool after a fork
    torch.set_num_threads(threads)


def _mark(rank: int, record: logging.LogRecord) -> bool:
    if record.levelno < logging.WARNING:
        return False
    if not getattr(record, "is_marked", False):
        record.msg, record.is_marked = f"[rank {rank}] {record.msg}", True
    return True
