"""Failures that really happen, on any Linux machine: run as a script, named one by one.

    python real_failures.py torch_allocation worker_is_killed …

prints a line of JSON for each: what was raised, and what the classification says of it.
"""

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
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from robust_train.failures import classify_failure

MIB = 1024**2
SECOND = timedelta(seconds=1)


class Samples(Dataset):
    """A data set whose samples are what ``action`` does in the worker."""

    def __init__(self, action):
        self.action = action

    def __len__(self):
        return 4

    def __getitem__(self, index):
        self.action()
        return torch.zeros(1)


def in_worker(action):
    return lambda: list(DataLoader(Samples(action), num_workers=1))


def limited(megabytes, action):
    """The action, with no more memory than this beyond what the process has already."""

    def run():
        with open("/proc/self/statm") as statm:
            data_pages = int(statm.read().split()[5])
        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        limit = data_pages * resource.getpagesize() + megabytes * MIB
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
        try:
            action()
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))

    return run


def read_beyond_the_end_of_a_mapped_file():
    with tempfile.TemporaryFile() as file:
        file.truncate(mmap.PAGESIZE)
        mapped = mmap.mmap(file.fileno(), mmap.PAGESIZE)
        file.truncate(0)
        mapped[0]


def torch_backward():
    loss = (torch.ones(16 * MIB, requires_grad=True) * 2).sum()
    limited(16, loss.backward)()


def torn_checkpoint():
    with tempfile.NamedTemporaryFile() as file:
        torch.save(torch.zeros(1000), file.name)
        os.truncate(file.name, 900)
        torch.load(file.name)


def reduce_with_a_peer(*, leaves, times):
    """This process is rank 0; rank 1 joins, and then leaves or does nothing until the end."""
    reading, writing = os.pipe()
    with tempfile.TemporaryDirectory() as folder:
        is_peer = os.fork() == 0
        with contextlib.suppress(BaseException) if is_peer else contextlib.nullcontext():
            where = {"init_method": f"file://{folder}/store", "rank": int(is_peer), "world_size": 2}
            dist.init_process_group("gloo", timeout=SECOND, **where)
        if is_peer:
            os.close(writing)
            if not leaves:
                os.read(reading, 1)
            os._exit(0)
        try:
            for _ in range(times):
                dist.all_reduce(torch.zeros(1))
        finally:
            os.close(writing)
            os.close(reading)
            os.wait()
            dist.destroy_process_group()


def store(port=0, **more):
    return dist.TCPStore("127.0.0.1", port, 2, timeout=SECOND, **more)


def store_is_not_there():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        store(free.getsockname()[1], is_master=False)


SCENARIOS = {
    "host_oom": {
        "torch_allocation": limited(64, lambda: torch.ones(256 * MIB)),
        "torch_backward": torch_backward,
        "torch_more_than_the_address_space": lambda: torch.empty(10**15),
        "numpy_allocation": limited(64, lambda: np.ones(128 * MIB)),
        "python_allocation": limited(64, lambda: bytearray(256 * MIB)),
        "mapping_without_memory": lambda: mmap.mmap(-1, 1 << 60),
        "allocation_in_worker": in_worker(lambda: bytearray(1 << 62)),
        "torch_allocation_in_worker": in_worker(lambda: torch.empty(10**15)),
        "numpy_allocation_in_worker": in_worker(lambda: np.empty(10**15)),
    },
    "worker_death": {
        "worker_is_killed": in_worker(lambda: os.kill(os.getpid(), signal.SIGKILL)),
        "worker_segfaults": in_worker(lambda: ctypes.string_at(0)),
        "worker_has_a_bus_error": in_worker(read_beyond_the_end_of_a_mapped_file),
        "worker_aborts": in_worker(os.abort),
        "worker_leaves": in_worker(lambda: os._exit(3)),
    },
    "setup": {
        "cuda_is_absent": lambda: torch.zeros(1).cuda(),
        "backend_is_not_built": lambda: torch.zeros(1, device="xpu"),
    },
    "comm": {
        "peer_answers_too_late": lambda: reduce_with_a_peer(leaves=False, times=1),
        "peer_is_gone": lambda: reduce_with_a_peer(leaves=True, times=100),
        "peers_do_not_come": lambda: store(is_master=True, wait_for_workers=True),
        "store_is_not_there": store_is_not_there,
    },
    "bug": {
        "key_error_in_worker": in_worker(lambda: {}["CUDA out of memory"]),
        "index_error_in_worker": in_worker(lambda: [][3]),
        "file_missing_in_worker": in_worker(Path("/nowhere/cannot allocate memory.jpg").read_bytes),
        "shapes_differ": lambda: torch.ones(2, 3) @ torch.ones(2, 3),
        "wrong_view": lambda: torch.ones(4, 4).t().view(16),
        "label_out_of_range": lambda: torch.nn.functional.cross_entropy(
            torch.zeros(2, 3), torch.tensor([1, 7])
        ),
        "size_overflows": lambda: torch.empty(2**40, 2**40),
        "torn_checkpoint": torn_checkpoint,
    },
}
"""What happens, by what it is called and by its kind of failure."""


def main(names):
    scenarios = {name: act for named in SCENARIOS.values() for name, act in named.items()}
    for name in names:
        told = {"name": name, "kind": None}
        try:
            scenarios[name]()
        except BaseException as error:
            failure = classify_failure(error)
            told |= {
                "kind": failure.kind.value,
                "message": failure.message,
                "requested_bytes": failure.evidence.requested_bytes,
                "library": failure.evidence.library,
                "raised": type(error).__name__,
            }
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    main(sys.argv[1:])
