"""Which GPUs the host's jobs leave alone after a fault: the only place that decides it."""

from __future__ import annotations

from collections.abc import Sequence

from robust_train.values import Clue, Evidence, Failure, FailureKind, Group


def is_hardware_fault(evidence: Evidence) -> bool:
    """Return whether the GPU is at fault, not the program: most faults end with the process."""
    return evidence.clue == Clue.HARDWARE


def excluded_after(
    failure: Failure, suspects: Group, free_bytes: Sequence[int | None]
) -> dict[str, str]:
    """Return the UUIDs of GPUs that no job should start on now, with the reason.

    These are a GPU whose hardware failed, if it is known which one it was, and those that no
    longer answer. After any other fault a new process works on the same GPU.

    Args:
        failure: of the attempt.
        suspects: the GPUs on which it may have been.
        free_bytes: free on each of them now, None where NVML gets no answer.
    """
    if failure.kind is not FailureKind.DEVICE_FAULT:
        return {}
    if len(suspects) == 1 and is_hardware_fault(failure.evidence):
        return {suspects[0].uuid: failure.message}
    silent = (gpu for gpu, free in zip(suspects, free_bytes, strict=True) if free is None)
    return {gpu.uuid: f"does not answer after: {failure.message}" for gpu in silent}
