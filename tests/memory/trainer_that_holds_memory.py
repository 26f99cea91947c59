"""A trainer that holds memory, and garbage that nobody collects, until it is stopped."""

from __future__ import annotations

import gc
import time

import torch

KEPT = []


class _Node:
    pass


def holds_memory_until_stopped(cfg, run):
    gc.disable()
    KEPT.append(torch.ones(16 * 2**20))
    one, other = _Node(), _Node()
    one.other, other.one, one.tensor = other, one, torch.ones(32 * 2**20)
    del one, other
    gc.freeze()
    run.started(0)
    step = 0
    while not run.stop_requested:
        step += 1
        run.progress(step)
        time.sleep(0.02)
    return step
