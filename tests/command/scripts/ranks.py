"""Two ranks; one is killed in the first attempt. Under torchrun this is one of the ranks."""

import os
import signal
import sys
from pathlib import Path

import torch.multiprocessing


def rank(number: int, marker: str) -> None:
    if number == 1 and not Path(marker).exists():
        Path(marker).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    print(f"rank {number} trained")


if __name__ == "__main__":
    if "RANK" in os.environ:
        rank(int(os.environ["RANK"]), sys.argv[1])
    else:
        torch.multiprocessing.spawn(rank, (sys.argv[1],), nprocs=2)
