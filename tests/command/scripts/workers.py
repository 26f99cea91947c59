"""Loads with two workers, whatever it is given; one kills itself in the first attempt."""

import os
import signal
import sys
from pathlib import Path

import torch


class Data(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        marker = Path(sys.argv[1])
        if index == 5 and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return index


for _ in torch.utils.data.DataLoader(Data(), num_workers=2, persistent_workers=True):
    pass
