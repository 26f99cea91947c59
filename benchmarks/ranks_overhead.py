"""What agreeing on memory costs a step that several processes share: the wrapper's own step
(DistributedDataParallel, or FSDP2) against one with ``run.backward``, side by side.

Run: python benchmarks/ranks_overhead.py [--sharded] [--ranks 2] [--steps 100]   (gloo, on the CPU)
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from micro_batch_overhead import small_cnn, steps_to_compare
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from robust_train.step import ranks


def be_rank(rank: int, chosen: argparse.Namespace, port: int) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=chosen.ranks)
    torch.manual_seed(0)
    model = small_cnn()
    if chosen.sharded:
        for part in model:
            if any(True for _ in part.parameters()):
                fully_shard(part)
        fully_shard(model)
    else:
        model = DistributedDataParallel(model)
    plain, split, _ = steps_to_compare(model, torch.randn(64, 3, 32, 32), torch.randint(10, (64,)))
    group = ranks.here()
    assert group is not None
    present = (True,) * len(list(model.parameters()))
    report = ranks.RankReport(None, 64, 64.0, present)

    def seconds(step: Callable[[], object]) -> float:
        dist.barrier()
        started = time.perf_counter()
        step()
        return time.perf_counter() - started

    for _ in range(5):
        plain(), split()
    pairs = [(seconds(plain), seconds(split)) for _ in range(chosen.steps)]
    before, after = (statistics.median(times) for times in zip(*pairs, strict=True))
    alone = statistics.median(seconds(lambda: group.exchange(report)) for _ in range(chosen.steps))
    if rank == 0:
        print(f"{chosen.ranks} ranks, median of {chosen.steps} steps, interleaved")
        print(f"the wrapper's own step: {before * 1e3:.3f} ms")
        print(f"with run.backward: {after * 1e3:.3f} ms (× {after / before:.3f})")
        print(f"the agreement alone: {alone * 1e6:.0f} µs (× {alone / before:.4f} of a step)")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sharded", action="store_true", help="FSDP2")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100)
    chosen = parser.parse_args()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torch.multiprocessing.start_processes(
        be_rank, (chosen, store.port), nprocs=chosen.ranks, start_method="fork"
    )


if __name__ == "__main__":
    main()
