"""The peak of a block of code, here of the host's resident memory."""

from __future__ import annotations

import gc
import logging
import threading

import pytest
import torch

from robust_train import GPUMemoryContext, reset_peak_memory_stats
from robust_train.host import memory as host
from simulated_nvml import MIB

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="tests/memory/test_memory_on_a_gpu.py has CUDA's"
)

BIG = 64 * MIB  # well over the C library's threshold, so it comes from and goes to the system
SLACK = 8 * MIB


def take(size: int = BIG) -> bytearray:
    return bytearray(b"x") * size


def assert_forgotten(memory: GPUMemoryContext) -> None:
    assert not [one for one in gc.get_referrers(memory) if isinstance(one, list)]


def test_a_block_tells_before_peak_after_and_what_it_left() -> None:
    with GPUMemoryContext(device="cpu") as memory:
        take()
        kept = take(BIG // 2)
    assert memory.device == "cpu"
    assert memory.peak - memory.before >= BIG - SLACK
    assert abs(memory.delta - BIG // 2) < SLACK
    assert memory.after == memory.before + memory.delta
    assert len(kept)


def test_an_inner_block_s_peak_is_the_outer_s_too_and_not_the_other_way() -> None:
    with GPUMemoryContext() as outer:
        take(2 * BIG)
        with GPUMemoryContext() as inner:
            take(BIG)
        with GPUMemoryContext() as second:
            pass
    assert outer.peak - outer.before >= 2 * BIG - SLACK
    assert BIG - SLACK <= inner.peak - inner.before < 2 * BIG - SLACK
    assert second.peak - second.before < SLACK


def test_a_block_that_raises_has_its_figures_and_the_error_goes_on(caplog) -> None:
    memory = GPUMemoryContext("forward")

    def fails() -> None:
        with memory:
            take()
            raise KeyError

    with caplog.at_level(logging.INFO, "robust_train"), pytest.raises(KeyError):
        fails()
    assert memory.peak - memory.before >= BIG - SLACK
    assert caplog.messages == [f"forward: {memory.description}"]
    assert "host memory (resident)" in caplog.text
    assert_forgotten(memory)


def test_a_reset_inside_of_a_block_loses_nothing_of_it(caplog) -> None:
    with GPUMemoryContext() as memory, caplog.at_level(logging.INFO, "robust_train"):
        take()
        stats = reset_peak_memory_stats()
    assert stats.peak - stats.allocated < SLACK
    assert memory.peak - memory.before >= BIG - SLACK
    assert "no CUDA in this process" in caplog.text


def test_a_kernel_that_cannot_reset_gives_at_least_what_is_certain(monkeypatch, caplog) -> None:
    biggest = take(4 * BIG)
    del biggest
    monkeypatch.setattr(host, "reset_peak", lambda: False)
    with GPUMemoryContext() as memory:
        take()
    # an earlier peak of the process is not passed off as the block's
    assert memory.peak - memory.before < 2 * BIG
    reset_peak_memory_stats()
    assert "does not let its peak be reset" in caplog.text


def test_blocks_of_several_threads_end_in_any_order() -> None:
    first, second = GPUMemoryContext(), GPUMemoryContext()
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with second:
            inside.set()
            leave.wait(30)

    thread = threading.Thread(target=other)
    with first:
        thread.start()
        inside.wait(30)
    leave.set()
    thread.join(30)
    assert second.peak >= second.after > 0
    assert_forgotten(first)
    assert_forgotten(second)
