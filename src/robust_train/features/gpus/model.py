"""Remedies for a GPU that fails or that another job takes: a new process, another GPU, or a wait.

`assembly.load_remedies` orders them, and ``policy.decide`` calls them in the launcher. Pure.
"""

from __future__ import annotations

from robust_train.model.failure import Clue
from robust_train.model.gpu import device_name
from robust_train.model.spec import GiveUp, Retry, Room
from robust_train.policy.context import FailureContext
from robust_train.policy.gpus import uuids
from robust_train.policy.retries import (
    pause_before,
    retry_after_pause,
    retry_on_other_gpus,
    untried_gpus,
)


def give_up_on_repeated_fault(context: FailureContext) -> GiveUp | None:
    """Give up if the device is not to blame: the same fault happened at the same step on two
    devices."""
    if context.evidence.is_hardware:
        return None
    here = context.failed_gpus
    for earlier in context.earlier_at_same_step:
        there = earlier.failed_gpus
        if uuids(there) == uuids(here):
            continue
        step = context.attempt.end_step
        where = "before the first step" if step is None else f"at step {step}"
        devices = f"{device_name(there)} and {device_name(here)}"
        return GiveUp(
            f"the same failure {where} on two devices ({devices}), so no device is to blame: "
            f"{context.failure.message}"
        )
    return None


def retry_on_same_gpu(context: FailureContext) -> Retry | None:
    """Retry on the same GPU: most faults break the process's CUDA context, not the GPU."""
    failed = context.failed_gpus
    if not context.gpus_are_available or context.faulty.intersection(uuids(failed)):
        return None
    return context.retry("retry", f": a new process on {device_name(failed)}")


def retry_fault_without_gpu(context: FailureContext) -> Retry | None:
    """Retry once from a checkpoint if a program without a GPU reports a device fault. Its cause is
    unknown."""
    if context.last.gpus or not context.has_saved or not context.has_retries:
        return None
    if context.failures_without_progress > 1:
        return None
    return context.retry("retry", f": once more, from {context.saved}")


def retry_on_other_gpu(context: FailureContext) -> Retry | None:
    """Retry the same batch on the best GPU that the job has not tried."""
    return retry_on_other_gpus(
        context, context.failed_gpus, untried_gpus(context), ": same batch on "
    )


def wait_for_other_gpu(context: FailureContext) -> Retry | None:
    """Wait for the first GPU that becomes free, if other jobs hold suitable GPUs."""
    config = context.config
    count = len(context.last.gpus)
    others = [gpu for gpu in context.offers.held if gpu.uuid not in context.faulty]
    if len(others) < len(context.failed_gpus) or not count:
        return None
    if not config.wait_for_gpu or not config.picks_gpu:
        return None
    exclude = tuple(sorted(context.faulty))
    room = Room((), config.min_gpu_memory_bytes, exclude, (count,))
    how = ": same batch on the next GPU that becomes free"
    return context.retry("wait", how, room=room)


def retry_on_busy_gpu(context: FailureContext) -> Retry | None:
    """Retry after a pause if the GPU refused a CUDA context although it is free."""
    if context.evidence.clue != Clue.BUSY or not context.gpus_are_available:
        return None
    pause = pause_before(context, context.failures_without_progress)
    return retry_after_pause(context, pause)


def wait_for_turn(context: FailureContext) -> Retry | None:
    """Retry on the next available GPU if another job took this GPU."""
    config = context.config
    ours = uuids(context.last.gpus)
    is_taken = bool(ours) and not {*uuids(context.offers.gpus)}.issuperset(ours)
    if not is_taken or not config.wait_for_gpu or not context.has_retries:
        return None
    # A user who chose the GPU gets the same GPU again.
    only = () if config.picks_gpu else ours
    room = Room(only, config.min_gpu_memory_bytes, counts=(len(ours),))
    how = ", and another job has it: same batch on the next available GPU"
    return context.retry("wait", how, room=room)
