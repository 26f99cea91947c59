"""Private symbols of libraries: these tests say when one has changed."""

from __future__ import annotations

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, register_optimizer_step_post_hook

from robust_train import compat


def step_of(optimizer: torch.optim.Optimizer) -> None:
    next(iter(optimizer.param_groups[0]["params"])).sum().backward()
    optimizer.step()


def test_optimizer_steps_are_watched_until_told_otherwise():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    steps: list[int] = []
    stop = compat.watch_optimizer_steps(lambda: steps.append(1))
    assert stop is not None
    step_of(optimizer)
    stop()
    step_of(optimizer)
    assert steps == [1]
    assert not _global_optimizer_post_hooks


def test_hooks_of_others_keep_ours_away():
    theirs = register_optimizer_step_post_hook(lambda *_: None)
    try:
        assert compat.watch_optimizer_steps(lambda: None) is None
    finally:
        theirs.remove()
