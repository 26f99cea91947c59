"""Private symbols of libraries: these tests say when one has changed."""

from __future__ import annotations

import subprocess
import sys

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


def test_exit_handlers_run_as_at_an_interpreters_end():
    code = (
        "import atexit, os, threading, time\n"
        "from robust_train.compat import run_exit_handlers\n"
        "atexit.register(print, 'handler', flush=True)\n"
        "work = lambda: (time.sleep(0.1), print('thread', flush=True))\n"
        "threading.Thread(target=work).start()\n"
        "run_exit_handlers()\n"
        "os._exit(0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == ["thread", "handler"]


def test_an_action_waits_for_cuda():
    calls: list[int] = []
    compat.when_cuda_starts(torch, lambda: calls.append(1))
    assert calls == ([1] if torch.cuda.is_initialized() else [])
