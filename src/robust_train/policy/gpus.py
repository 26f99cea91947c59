"""Facts about the GPUs of a failed attempt: who took their memory, and which to replace or exclude.

Remedies call these functions in the launcher, and the queue calls `gpus_to_exclude`. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from robust_train.model.attempt import Attempt
from robust_train.model.failure import Failure, FailureKind
from robust_train.model.gpu import GpuInfo, Group
from robust_train.readable import MIB

_NOTABLE_BYTES = 256 * MIB
"""If other processes took at least this many bytes, they are blamed for running out of memory."""

_NOTABLE_SHARE = 0.1
"""The same as a share of the GPU, used if the size of the failed request is unknown."""


def uuids(gpus: Group) -> tuple[str, ...]:
    """Return the identities of ``gpus``."""
    return tuple(gpu.uuid for gpu in gpus)


def replace_gpus(group: Group, leaving: Group, offers: Sequence[GpuInfo]) -> Group | None:
    """Return ``group`` with the best of ``offers`` in place of the GPUs in ``leaving``. None if
    there are too few offers, or if no GPU leaves because the failed GPU is on another node."""
    if len(offers) < len(leaving) or not leaving:
        return None
    best = iter(offers)
    return tuple(next(best) if gpu in leaving else gpu for gpu in group)


def memory_taken_by_others(attempt: Attempt) -> tuple[int, int]:
    """Return whether other processes caused a lack of GPU memory, as two numbers of bytes.

    Returns:
        The memory that other processes took during the attempt, and the free memory that the same
        attempt needs. Both are 0 if other processes are not the cause.
    """
    evidence = attempt.evidence
    gpus = attempt.failed_gpus
    before: int | None = attempt.noted("gpu_free_before_bytes", None)
    after: int | None = attempt.noted("gpu_free_after_bytes", None)
    # If the job reached its own limit, the memory of other processes made no difference.
    if before is None or after is None or evidence.own_limit or not gpus:
        return 0, 0
    taken = before - after
    left = evidence.free_bytes or 0
    requested = evidence.requested_bytes
    if requested is None:
        is_cause = taken >= _NOTABLE_SHARE * gpus[0].total_bytes
    else:
        is_cause = taken >= _NOTABLE_BYTES and left + taken >= requested
    if not is_cause:
        return 0, 0
    # The attempt held the memory that became free at its end.
    used = max(after - left, attempt.memory.get("max_allocated", 0))
    # If the size of the failed request is unknown, a margin takes its place.
    with_margin = max(used, after + _NOTABLE_BYTES)
    needed = with_margin if requested is None else used + requested
    return taken, min(needed, before)


def gpus_to_exclude(
    failure: Failure, suspects: Group, answering: Collection[str]
) -> dict[str, str]:
    """Return the UUIDs of GPUs on which no job of the host should start now, each with the reason.

    These are the GPU whose hardware failed, if it is known, and GPUs that no longer answer. After
    any other fault, a new process can use the same GPU.

    Args:
        failure: the attempt's failure.
        suspects: the GPUs on which it may have happened.
        answering: the UUIDs of the GPUs for which NVML answers now.
    """
    if failure.kind is not FailureKind.DEVICE_FAULT:
        return {}
    if len(suspects) == 1 and failure.evidence.is_hardware:
        return {suspects[0].uuid: failure.message}
    reason = f"does not answer after: {failure.message}"
    return {gpu.uuid: reason for gpu in suspects if gpu.uuid not in answering}
