"""Training loops as users write them, on the CPU and with real limits of memory."""

from __future__ import annotations

import resource
from pathlib import Path

import torch
from torch import nn

MIB = 2**20


def limit_growth(growth_bytes):
    """Let the private memory of this process grow by so much and no more."""
    lines = Path("/proc/self/status").read_text().splitlines()
    used = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData"))
    resource.setrlimit(resource.RLIMIT_DATA, (used + growth_bytes, resource.RLIM_INFINITY))


def a_plain_loop(cfg):
    """Needs 4 MiB for each sample of its micro-batch, and knows nothing of micro_batches."""
    model = nn.Sequential(nn.Linear(1, 2**20, bias=False), nn.Flatten(), nn.Linear(2**20, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    torch.set_num_threads(1)
    model(torch.zeros(1, 1)).sum().backward()
    limit_growth(32 * 10 * MIB)
    for _ in range(2):
        optimizer.zero_grad()
        for _ in range(cfg.training.gradient_accumulation_steps):
            loss = model(torch.ones(cfg.training.batch_size, 1)).mean()
            (loss / cfg.training.gradient_accumulation_steps).backward()
        optimizer.step()
    return cfg.training.batch_size
