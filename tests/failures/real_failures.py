"""Failures that really happen, on any Linux machine: run as a script, named one by one.

    python real_failures.py torch_allocation worker_is_killed …

prints a line of JSON for each: what was raised, and what the classification says of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import resource
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from robust_train.failures import classify_failure

MIB = 1024**2


class Samples(Dataset):
    """A data set whose one sample is what ``action`` does in the worker."""

    def __init__(self, action: Callable[[], object]) -> None:
        self.action = action

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        self.action()
        return torch.zeros(1)


def in_worker(action: Callable[[], object]) -> None:
    for _ in DataLoader(Samples(action), num_workers=1):
        pass


@contextlib.contextmanager
def memory_limit(megabytes: int) -> Iterator[None]:
    """No more than this beyond what the process has already."""
    with open("/proc/self/statm") as statm:
        data_pages = int(statm.read().split()[5])
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = data_pages * resource.getpagesize() + megabytes * MIB
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def read_beyond_the_end_of_a_mapped_file() -> None:
    with tempfile.TemporaryFile() as file:
        file.truncate(mmap.PAGESIZE)
        mapped = mmap.mmap(file.fileno(), mmap.PAGESIZE)
        file.truncate(0)
        mapped[0]


# --- scenarios ----------------------------------------------------------------------------------


def torch_allocation() -> None:
    with memory_limit(64):
        torch.ones(256 * MIB)


def torch_backward() -> None:
    weight = torch.ones(16 * MIB, requires_grad=True)
    loss = (weight * 2).sum()
    with memory_limit(16):
        loss.backward()


def torch_more_than_the_address_space() -> None:
    torch.empty(10**15)


def numpy_allocation() -> None:
    with memory_limit(64):
        np.ones(128 * MIB)


def python_allocation() -> None:
    with memory_limit(64):
        bytearray(256 * MIB)


def mapping_without_memory() -> None:
    mmap.mmap(-1, 1 << 60)


def allocation_in_worker() -> None:
    in_worker(lambda: bytearray(1 << 62))


def torch_allocation_in_worker() -> None:
    in_worker(lambda: torch.empty(10**15))


def numpy_allocation_in_worker() -> None:
    in_worker(lambda: np.empty(10**15))


def worker_is_killed() -> None:
    in_worker(lambda: os.kill(os.getpid(), signal.SIGKILL))


def worker_segfaults() -> None:
    in_worker(lambda: ctypes.string_at(0))


def worker_has_a_bus_error() -> None:
    in_worker(read_beyond_the_end_of_a_mapped_file)


def worker_aborts() -> None:
    in_worker(os.abort)


def worker_leaves() -> None:
    in_worker(lambda: os._exit(3))


def key_error_in_worker() -> None:
    in_worker(lambda: {}["CUDA out of memory"])


def index_error_in_worker() -> None:
    in_worker(lambda: [][3])


def file_missing_in_worker() -> None:
    in_worker(lambda: Path("/nowhere/cannot allocate memory.jpg").read_bytes())


def shapes_differ() -> None:
    torch.ones(2, 3) @ torch.ones(2, 3)


def wrong_view() -> None:
    torch.ones(4, 4).t().view(16)


def label_out_of_range() -> None:
    torch.nn.functional.cross_entropy(torch.zeros(2, 3), torch.tensor([1, 7]))


def size_overflows() -> None:
    torch.empty(2**40, 2**40)


def cuda_is_absent() -> None:
    torch.zeros(1).cuda()


def backend_is_not_built() -> None:
    torch.zeros(1, device="xpu")


def torn_checkpoint() -> None:
    with tempfile.NamedTemporaryFile() as file:
        torch.save(torch.zeros(1000), file.name)
        os.truncate(file.name, 900)
        torch.load(file.name)


def peer_answers_too_late() -> None:
    with two_ranks(leave=False):
        dist.all_reduce(torch.zeros(1))


def peer_is_gone() -> None:
    with two_ranks(leave=True):
        for _ in range(100):
            dist.all_reduce(torch.zeros(1))


def peers_do_not_come() -> None:
    dist.TCPStore(
        "127.0.0.1", 0, 2, is_master=True, timeout=timedelta(seconds=1), wait_for_workers=True
    )


def store_is_not_there() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        dist.TCPStore("127.0.0.1", port, 2, is_master=False, timeout=timedelta(seconds=1))


@contextlib.contextmanager
def two_ranks(leave: bool) -> Iterator[None]:
    """This process is rank 0; rank 1 joins, and then leaves or does nothing until the end."""
    reading, writing = os.pipe()
    with tempfile.TemporaryDirectory() as folder:
        is_peer = os.fork() == 0
        with contextlib.suppress(BaseException) if is_peer else contextlib.nullcontext():
            dist.init_process_group(
                "gloo",
                init_method=f"file://{folder}/store",
                rank=int(is_peer),
                world_size=2,
                timeout=timedelta(seconds=1),
            )
        if is_peer:
            os.close(writing)
            if not leave:
                os.read(reading, 1)
            os._exit(0)
        try:
            yield
        finally:
            os.close(writing)
            os.close(reading)
            os.wait()
            dist.destroy_process_group()


def main(names: list[str]) -> None:
    for name in names:
        try:
            globals()[name]()
        except BaseException as error:
            failure = classify_failure(error)
            told = {
                "kind": failure.kind.value,
                "message": failure.message,
                "requested_bytes": failure.evidence.requested_bytes,
                "library": failure.evidence.library,
                "raised": type(error).__name__,
            }
        else:
            told = {"kind": None}
        print(json.dumps({"name": name, **told}), flush=True)


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    main(sys.argv[1:])
