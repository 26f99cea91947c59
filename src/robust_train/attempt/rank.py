"""Runs one rank of an attempt with several processes on this machine.

:mod:`.interpreter` calls :func:`run_rank` in the process of the rank. It sets the environment
variables by which torch and other libraries find the ranks, as torchrun does. Rank 0 hosts the
store through which they meet.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from robust_train.attempt.loading import Trainer
from robust_train.attempt.runner import Send, run_attempt
from robust_train.attempt.signals import stop_on_signals
from robust_train.compat import run_exit_handlers, when_cuda_starts
from robust_train.config.attempt import AttemptRequest, Begin, for_rank
from robust_train.host import signals
from robust_train.host.linux import FOREVER_SECONDS, wait_until_readable
from robust_train.host.loggers import show_only_warnings_of_rank
from robust_train.host.streams import flush_output
from robust_train.host.votes import Votes

_STORE_HOST = "127.0.0.1"


def run_rank(
    begin: Begin,
    channel: socket.socket,
    descriptors: Sequence[int],
    *,
    load: Callable[[], Trainer],
    send: Send,
    flush: Callable[[], None],
) -> int:
    """Run the trainer as a rank.

    Args:
        begin: the attempt, and the number of the rank.
        channel: the connection to the launcher, which closes it when all other ranks have ended.
        descriptors: the file of the votes and, on rank 0 only, the socket of the store come first.
        load: imports the trainer.
        send: sends an event to the launcher.
        flush: waits until all events have been sent.

    Returns:
        The exit status of the process.
    """
    request = begin.request
    rank = begin.rank
    for descriptor in descriptors[: 1 if rank else 2]:
        os.set_inheritable(descriptor, False)
    votes = Votes(request.ranks, descriptors[0])
    set_environment(rank, request, begin.store_port)
    torch = set_up_torch(rank, request)
    store = None
    if rank == 0:
        store = _host_store(torch, begin.store_port, descriptors[1])
    error = run_attempt(
        replace(request, config=for_rank(request.config, rank)),
        load,
        send,
        stopping=stop_on_signals,
        rank=rank,
        flags=votes,
    )
    # Other ranks may still be training, and a request to stop is meant for them.
    for signum in signals.STOP_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    flush_output()
    if error is not None:
        # A normal exit of the interpreter might hang: the thread of a collective may wait for
        # ranks that have ended.
        return 1
    run_exit_handlers()
    flush()
    if store is not None:
        # Other ranks use the store until they end.
        wait_until_readable([channel.fileno()], FOREVER_SECONDS)
    return 0


def set_environment(rank: int, request: AttemptRequest, port: int) -> None:
    """Set the variables that torch's ``env://`` and other libraries read, as torchrun does."""
    if rank:
        for name in request.of_first_rank:
            os.environ.pop(name, None)
    for prefix in ("", "ROLE_", "LOCAL_"):
        os.environ[f"{prefix}RANK"] = str(rank)
        os.environ[f"{prefix}WORLD_SIZE"] = str(request.ranks)
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
    # Without a name, Gloo looks up the address of the host, which may not exist or be unreachable.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    lightning = sys.modules.get("lightning_utilities.core.rank_zero")
    if lightning is not None:
        # Lightning reads the rank when it is imported, which was before the rank was known.
        lightning.rank_zero_only.rank = rank


def set_up_torch(rank: int, request: AttemptRequest) -> Any:
    """Import torch, and set the GPU and the number of threads of this rank."""
    # Set it here, because accelerate would otherwise set another number.
    threads = max(1, len(os.sched_getaffinity(0)) // request.ranks)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))

    import torch
    import torch.distributed

    if rank:
        show_only_warnings_of_rank(rank)
    if request.spec.gpus:

        def choose_gpu() -> None:
            # A trainer that names the device "cuda" gets this GPU.
            torch.cuda.set_device(rank)

        when_cuda_starts(torch, choose_gpu)
    # torch may have been imported before the number of ranks was known.
    with contextlib.suppress(ValueError):
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    return torch


def _host_store(torch: Any, port: int, listener: int) -> Any:
    """Serve the store of the ranks on a socket of the loopback device, which the launcher has
    bound.

    It is libuv's store, because torch's older store reads in its only thread and hangs after a
    single unexpected byte. From torch 2.6 on, libuv's store accepts an open socket.
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
