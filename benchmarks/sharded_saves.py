"""A checkpoint of a sharded model: as a folder to which each rank writes its shards, against a file
of whole tensors, which rank 0 gathers on its host. Seconds, and the most host memory that a rank
needs on top, alternately.

Run: python benchmarks/sharded_saves.py [--ranks 2] [--megabytes 1024] [--saves 5]   (gloo, CPU)
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from robust_train.attempt.checkpoint_content import map_tensors
from robust_train.folder.checkpoint_writing import write_atomically
from robust_train.vision.sharding import shard, write_shards

LAYERS = 16


def peak_bytes(*, begin: bool = False) -> int:
    """The most memory this process has held since it was asked with ``begin``."""
    if begin:
        ctypes.CDLL(None).malloc_trim(0)  # or freed memory is used again unseen
        Path("/proc/self/clear_refs").write_text("5")
    found = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def write_whole(group: dist.ProcessGroup, content: dict, path: Path) -> None:
    is_first = dist.get_rank() == 0

    def gathered(_: str, tensor: torch.Tensor):
        full = tensor.full_tensor()
        return full.cpu() if is_first else None

    whole = map_tensors(gathered, content)
    if is_first:
        write_atomically(whole, path.with_suffix(".pt"))


def be_rank(rank: int, chosen: argparse.Namespace, folder: Path, port: int) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=chosen.ranks)
    side = int((chosen.megabytes * 2**20 / 4 / LAYERS) ** 0.5)
    model = nn.Sequential(*(nn.Linear(side, side, bias=False) for _ in range(LAYERS)))
    shard(model)
    content, group = {"model": model.state_dict()}, dist.new_group(backend="gloo")
    seen: dict[str, list[tuple[float, int]]] = {"file": [], "folder": []}
    for number in range(chosen.saves + 1):
        for how, write in (("file", write_whole), ("folder", write_shards)):
            dist.barrier()
            before = peak_bytes(begin=True)
            started = time.perf_counter()
            write(group, content, folder / how)
            dist.barrier()
            figures: list = [None] * chosen.ranks
            dist.all_gather_object(figures, peak_bytes() - before)
            if number:  # the first one imports and connects
                seen[how].append((time.perf_counter() - started, max(figures)))
            if rank == 0:
                shutil.rmtree(folder / "folder", ignore_errors=True)
    if rank == 0:
        print(f"{chosen.ranks} ranks, {chosen.megabytes} MiB, median of {chosen.saves} saves each")
        times, peaks = ({h: statistics.median(f[i] for f in seen[h]) for h in seen} for i in (0, 1))
        for how in seen:
            print(f"{how}: {times[how]:.2f} s, {peaks[how] / 2**20:.0f} MiB on top")
        print(f"folder / file: time × {times['folder'] / times['file']:.2f}, ", end="")
        print(f"memory × {peaks['folder'] / peaks['file']:.3f}")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument("--saves", type=int, default=5)
    chosen = parser.parse_args()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(
            be_rank, (chosen, Path(folder), store.port), nprocs=chosen.ranks, start_method="fork"
        )


if __name__ == "__main__":
    main()
