"""OOMHandler, retry_on_oom and adaptive_batch_training, with real allocations that fail."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import weakref

import pytest
import torch

from robust_train import AttemptsExhausted, OOMHandler, adaptive_batch_training, retry_on_oom


def out_of_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")


def test_adaptive_batch_training_halves_until_it_fits_and_keeps_the_effective_batch():
    tried = []

    def train(batch_size: int, gradient_accumulation_steps: int) -> str:
        tried.append((batch_size, gradient_accumulation_steps))
        if batch_size > 32:
            out_of_memory()
        return "trained"

    assert adaptive_batch_training(train, initial_batch_size=128) == "trained"
    assert tried == [(128, 1), (64, 2), (32, 4)]


def test_a_function_without_named_parameters_gets_the_batch_first():
    assert adaptive_batch_training(lambda size: size, initial_batch_size=16) == 16


def test_what_is_not_memory_is_raised_at_once():
    calls = []

    def train(batch_size: int) -> None:
        calls.append(batch_size)
        raise IndexError("index out of range")

    with pytest.raises(IndexError):
        adaptive_batch_training(train)
    assert calls == [128]


def test_min_batch_size_ends_it_with_every_attempt_listed():
    handler = OOMHandler(initial_batch_size=16, min_batch_size=4)
    with pytest.raises(AttemptsExhausted, match=r"tried \(16, 8, 4\)"):
        handler.run(lambda batch_size: out_of_memory())


def test_a_loop_of_ones_own_asks_the_handler():
    handler = OOMHandler(initial_batch_size=8)
    while True:
        try:
            if handler.batch_size > 4:
                out_of_memory()
            break
        except Exception as error:
            assert handler.handle(error)  # noqa: PT017
    assert (handler.batch_size, handler.gradient_accumulation_steps) == (4, 2)


def test_retry_on_oom_changes_the_named_argument_of_functions_and_methods():
    class Experiment:
        def __init__(self) -> None:
            self.sizes: list[int] = []

        @retry_on_oom(max_retries=3, batch_argument="size")
        def train(self, lr: float, size: int = 64) -> float:
            """What it does."""
            self.sizes.append(size)
            if size > 16:
                out_of_memory()
            return lr

    experiment = Experiment()
    assert experiment.train(0.1) == 0.1
    assert experiment.sizes == [64, 32, 16]
    assert Experiment.train.__doc__ == "What it does."


def test_retry_on_oom_ends_after_max_retries():
    calls = []

    @retry_on_oom(max_retries=2)
    def train(batch_size: int) -> None:
        calls.append(batch_size)
        out_of_memory()

    with pytest.raises(AttemptsExhausted):
        train(64)
    assert calls == [64, 32, 16]


def test_retry_on_oom_refuses_generators_and_unknown_arguments():
    with pytest.raises(TypeError, match="plain function"):

        @retry_on_oom()
        def generate(batch_size):
            yield batch_size

    with pytest.raises(TypeError, match="no parameter 'batch_size'"):

        @retry_on_oom()
        def train(size):
            return size


def test_wrong_sizes_are_refused():
    with pytest.raises(ValueError, match="min_batch_size=8"):
        OOMHandler(initial_batch_size=4, min_batch_size=8)


def test_tensors_of_the_failed_pass_are_gone_before_the_next_try():
    held: list[weakref.ref[torch.Tensor]] = []
    alive_at_retry: list[bool] = []

    def train(batch_size: int) -> None:
        alive_at_retry.append(any(ref() is not None for ref in held))
        activations = torch.zeros(batch_size, 1000)
        held.append(weakref.ref(activations))
        if batch_size > 4:
            try:
                out_of_memory()
            except RuntimeError as error:
                raise RuntimeError("CUDA out of memory while training") from error

    gc.disable()  # nothing but the handler may free them
    try:
        adaptive_batch_training(train, initial_batch_size=16)
    finally:
        gc.enable()
    assert alive_at_retry == [False, False, False]


def test_a_real_allocation_failure_is_recovered_from():
    code = """
import json, resource, torch
from robust_train import adaptive_batch_training
torch.zeros(8) @ torch.zeros(8)
used = int(open("/proc/self/statm").read().split()[5]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_DATA, (used + 200 * 2**20, -1))
tried = []
def train(batch_size):
    tried.append(batch_size)
    return torch.zeros(batch_size, 2**20).shape[0]  # 4 MiB a sample
result = adaptive_batch_training(train, initial_batch_size=256)
print(json.dumps([result, tried]))
"""
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr
    result, tried = json.loads(process.stdout)
    assert tried[0] == 256
    assert len(tried) > 1
    assert result == tried[-1] < 64
