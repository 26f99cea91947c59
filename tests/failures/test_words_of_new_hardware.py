"""Messages whose clue decides which advice comes first."""

import pytest

from robust_train.failures import classify_failure
from robust_train.failures.advice import advice_for
from robust_train.model.failure import Clue, FailureKind

OUTSIDE = (
    "CUDA ran out of memory outside PyTorch's allocator",
    "NCCL error in: ProcessGroupNCCL.cpp:94, unhandled cuda error, NCCL version 2.29.7 "
    "ncclUnhandledCudaError: Call to CUDA function failed. Last error: Cuda failure 2 "
    "'out of memory'",
)


@pytest.mark.parametrize("message", OUTSIDE)
def test_a_lower_limit_makes_room_outside_the_cache(message):
    """The cache of torch's allocator."""
    failure = classify_failure(RuntimeError(message))
    assert (failure.kind, failure.evidence.clue) == (FailureKind.DEVICE_OOM, Clue.OUTSIDE)
    assert advice_for(failure.kind, failure.evidence)[0].startswith("set a smaller memory.fraction")


@pytest.mark.parametrize(
    ("message", "kind", "clue"),
    [
        ("expandable_segments: FABRIC handle type configured", "device_fault", Clue.SEGMENTS),
        ("ptxas fatal   : Value 'sm_121a' is not defined", "setup", Clue.GPU_MODEL),
        ("nvrtc: error: invalid value for --gpu-architecture (-arch)", "setup", Clue.GPU_MODEL),
    ],
)
def test_incomplete_toolchains_or_segments_are_no_bug(message, kind, clue):
    """The message says what they lack."""
    failure = classify_failure(RuntimeError(message))
    assert (failure.kind.value, failure.evidence.clue) == (kind, clue)
