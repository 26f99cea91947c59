"""The remedies for a GPU that fails or is taken: a new process, another GPU, a wait."""

from __future__ import annotations

from robust_train.model.failure import Clue
from robust_train.model.gpu import device_name
from robust_train.model.spec import GiveUp, Retry, Room
from robust_train.policy.context import FailureContext, uuids
from robust_train.policy.retries import after_pause, exchange, pause_before, untried


def same_fault_elsewhere(context: FailureContext) -> GiveUp | None:
    """Give up if the device is not to blame: the same fault came at the same step on two
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
            f"the same failure {where} on two devices ({devices}) is not the device's: "
            f"{context.failure.message}"
        )
    return None


def same_gpu_again(context: FailureContext) -> Retry | None:
    """Start over on the same GPU: most faults break the process's context, not the GPU."""
    failed = context.failed_gpus
    if not context.gpus_are_available or context.faulty.intersection(uuids(failed)):
        return None
    return context.retry("retry", f": a new process on {device_name(failed)}")


def fault_without_a_gpu_once_more(context: FailureContext) -> Retry | None:
    """Retry once from a checkpoint if a program without a GPU reports a device fault, whose cause
    is unknown."""
    if context.last.gpus or not context.has_saved or not context.has_retries:
        return None
    if context.failures_without_progress > 1:
        return None
    return context.retry("retry", f": once more, from {context.saved}")


def other_gpu(context: FailureContext) -> Retry | None:
    """Retry the same batch on the best GPU not tried yet."""
    return exchange(context, context.failed_gpus, untried(context), ": same batch on ")


def wait_for_other_gpu(context: FailureContext) -> Retry | None:
    """Wait for the first GPU that becomes free: other jobs hold the suitable GPUs."""
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


def busy_gpu_again(context: FailureContext) -> Retry | None:
    """Retry after a pause: the GPU refused a context although it is free."""
    if context.evidence.clue != Clue.BUSY or not context.gpus_are_available:
        return None
    pause = pause_before(context, context.failures_without_progress)
    return after_pause(context, pause)


def wait_for_turn(context: FailureContext) -> Retry | None:
    """Retry on the next available GPU, because another job has taken this GPU."""
    config = context.config
    ours = uuids(context.last.gpus)
    is_taken = bool(ours) and not {*uuids(context.offers.gpus)}.issuperset(ours)
    if not is_taken or not config.wait_for_gpu or not context.has_retries:
        return None
    only = () if config.picks_gpu else ours
    room = Room(only, config.min_gpu_memory_bytes, counts=(len(ours),))
    how = ", and someone else has it: same batch on the next available GPU"
    return context.retry("wait", how, room=room)
