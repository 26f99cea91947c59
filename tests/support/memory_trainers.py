"""Trainers that do with memory what the tests of it need."""

import gc
import os
import signal
import time
from pathlib import Path

import torch

from memory_limit import MIB, limit_growth

KEPT = []


def trains_until_told(cfg, run):
    """Reports steps until the file of the environment is there."""
    step = 0
    while not Path(os.environ["GO_FILE"]).exists():
        step += 1
        run.progress(step)
        time.sleep(0.005)


def holds_memory_until_stopped(cfg, run):
    """Holds a tensor, and another as garbage that no one collects."""
    gc.disable()
    KEPT.append(torch.ones(16 * MIB))
    cycle = [torch.ones(32 * MIB)]
    cycle.append(cycle)
    del cycle
    gc.freeze()
    run.started(0)
    step = 0
    while not run.should_stop():
        step += 1
        run.progress(step)
        time.sleep(0.02)


def runs_out_in_a_function(cfg, run):
    """Holds a large tensor two functions down, then asks for more than there may be."""
    weights = torch.ones(3 * MIB)
    run.progress(7)
    return _outer(weights)


def _outer(weights):
    activations = [torch.ones(5 * MIB)]
    return _inner(activations)


def _inner(activations):
    gradients = torch.ones(4 * MIB)
    limit_growth(64 * MIB)
    return torch.ones(200 * MIB), gradients, activations


def fills_the_memory_to_the_last_byte(cfg, run):
    """Leaves no room for another tensor, nor for another list."""
    limit_growth(64 * MIB)
    kept, small = [], []
    try:
        while True:
            kept.append(torch.ones(MIB // 4))
    except RuntimeError:
        while True:
            small.append([0] * 1000)


def ends_epochs(cfg, run):
    """As the README has it for trainers of one's own."""
    for epoch in (1, 2):
        for step in range(1, 4):
            run.progress(3 * (epoch - 1) + step)
        run.epoch_ended(epoch, val_loss=0.5 / epoch)


class _Asks(torch.utils.data.Dataset):
    """Each sample is a look at NVML from within a worker."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        from robust_train.gpu.inventory import read_inventory

        return len(read_inventory(processes=False).gpus)


def forks_workers_that_ask_nvml(cfg, run):
    """Forks data-loader workers time and again, beside a sampler that is always at it."""
    seen = 0
    for step in range(1, 9):
        loader = torch.utils.data.DataLoader(_Asks(), num_workers=2, batch_size=4)
        seen += sum(int(batch.sum()) for batch in loader)
        run.progress(step)
    return seen


def dies_at_once(cfg, run):
    run.progress(1)
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGKILL)


def has_a_spike_on_the_gpu(cfg, run):
    """Needs a GiB once, then hardly anything; returns what is reserved and free, twice."""
    kept = torch.ones(MIB, device=cfg.device)
    spike = torch.ones(256 * MIB, device=cfg.device)
    run.progress(1)
    at_spike = torch.cuda.memory_reserved(), torch.cuda.mem_get_info()[0]
    del spike
    for step in range(2, 21):
        kept += 1
        run.progress(step)
    return at_spike, (torch.cuda.memory_reserved(), torch.cuda.mem_get_info()[0])


def takes_half_of_the_gpu(cfg, run):
    """In sixteen pieces."""
    total = torch.cuda.mem_get_info(cfg.device)[1]
    kept = []
    for step in range(1, 17):
        kept.append(torch.empty(total // 32, dtype=torch.uint8, device=cfg.device))
        run.progress(step)


def leaks_on_the_gpu(cfg, run):
    """Keeps a MiB of every step, beneath activations of 256 MiB."""
    kept = []
    for step in range(1, 301):
        activations = torch.ones(64 * MIB, device=cfg.device)
        kept.append(torch.ones(MIB // 4, device=cfg.device))
        torch.cuda.synchronize()
        time.sleep(0.01)
        del activations
        time.sleep(0.01)
        run.progress(step)
