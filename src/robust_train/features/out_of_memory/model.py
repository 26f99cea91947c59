"""Remedies for a lack of memory: a smaller batch, another GPU, a wait, or a new process.

`assembly.load_remedies` orders them, and ``policy.decide`` calls them in the launcher. Pure.
"""

from __future__ import annotations

from robust_train.features.out_of_memory.record import SplitLossKnob
from robust_train.model.failure import Clue
from robust_train.model.gpu import Group, device_name
from robust_train.model.spec import Retry, Room
from robust_train.policy.context import FailureContext
from robust_train.policy.gpus import memory_taken_by_others, replace_gpus, uuids
from robust_train.policy.retries import retry_on_other_gpus, retry_with_half, untried_gpus
from robust_train.policy.settings import largest_up_to
from robust_train.readable import mib

ALIKE = 0.9
"""A GPU counts as equally large if it has at least this share of the other's free memory."""


def find_room_elsewhere(context: FailureContext) -> Retry | None:
    """If other processes took the memory, retry the same batch on a GPU with enough free memory,
    or wait until this GPU has enough again."""
    taken, needed = memory_taken_by_others(context.attempt)
    tries = 0
    for attempt in context.since_progress:
        is_same_device = attempt.spec.device_key == context.last.device_key
        if is_same_device and attempt.spec.batch_size == context.last.batch_size:
            tries += 1
    if not taken or tries > context.config.retries:
        return None
    why = f", but other processes took {mib(taken)} of its memory during the attempt"
    offers = [gpu for gpu in untried_gpus(context) if gpu.free_bytes >= needed]
    group = replace_gpus(context.last.gpus, context.failed_gpus, offers)
    if group:
        new = context.new_in(group)
        free = mib(min(gpu.free_bytes for gpu in new))
        how = f"{why}; {device_name(new)} has {free} free: same batch there"
        return context.retry("switch_gpu", how, gpus=group)
    if not context.config.wait_for_gpu:
        return None
    how = f"{why}: same batch when {mib(needed)} are free there again"
    return context.retry("wait", how, room=Room(uuids(context.failed_gpus), needed))


def halve_batch(context: FailureContext) -> Retry | None:
    """Halve the micro-batch on the same device, as long as that can help."""
    if not context.has_smaller or context.failed_before_training or context.keeps_loss:
        return None
    if _is_confirmed_by_another_gpu(context):
        return None
    # With training.batch_size=auto a job may start with the whole batch and halve it many times.
    is_last = context.smaller_batches_tried_here >= context.config.retries
    if is_last and not context.config.finds_batch_size:
        return None
    return retry_with_half(context, f"{context.what_failed}: ")


def halve_batch_for_workers(context: FailureContext) -> Retry | None:
    """Halve the micro-batch if a data-loader worker died of a lack of memory."""
    is_memory = context.evidence.clue in (Clue.KILLED, Clue.SHARED_MEMORY)
    if not is_memory and context.evidence.library != "kernel":
        return None
    return halve_batch(context)


def halve_after_internal_errors(context: FailureContext) -> Retry | None:
    """Retry once with half the micro-batch after an internal error of cuBLAS or cuDNN, which often
    means that memory ran out."""
    earlier = context.earlier_at_same_step
    if context.evidence.library not in ("cublas", "cudnn") or not earlier:
        return None
    last = context.last
    was_halved = any(attempt.spec.batch_size > last.batch_size for attempt in earlier)
    if was_halved or not context.has_smaller or not context.gpus_are_available:
        return None
    why = f"{context.what_failed}, again at this step, possibly because memory ran out: "
    return retry_with_half(context, why)


def switch_gpu(context: FailureContext) -> Retry | None:
    """Retry on the best GPU that the job has not tried, if it has more free memory than the GPU
    that ran out.

    If several GPUs share a step, all GPUs with no more memory than the failed GPU are replaced,
    because the next of them would run out at the same size.
    """
    had, too_small = _too_small_gpus(context)
    offers = [gpu for gpu in untried_gpus(context) if gpu.free_bytes > had]
    group = replace_gpus(context.last.gpus, too_small, offers)
    if not group:
        return None
    offered = min(gpu.free_bytes for gpu in group)
    # Memory grows linearly with the micro-batch from a constant part above zero. So k times the
    # memory holds at least k times the micro-batch that almost fitted.
    at_most = context.last.batch_size * offered / max(had, 1)
    size = largest_up_to(context.rank_settings, at_most)
    how = (
        f"{context.at_size}; {device_name(group)} has {mib(offered)} free "
        f"({mib(had)} were free on {device_name(context.failed_gpus)})"
    )
    return context.retry("switch_gpu", how, gpus=group, batch_size=size)


def confirm_on_another_gpu(context: FailureContext) -> Retry | None:
    """Retry the last size once on another GPU with about as much free memory, before the job falls
    back to the CPU.

    An attempt costs a minute, and training on the CPU costs days. If memory runs out there at the
    same step, the GPU is not the cause, and no more similar GPUs are tried.
    """
    had, too_small = _too_small_gpus(context)
    if _is_confirmed_by_another_gpu(context):
        return None
    offers = [gpu for gpu in untried_gpus(context) if gpu.free_bytes >= ALIKE * had]
    how = f"{context.at_size}: same size once on "
    why = ", which has about as much free memory, before the CPU"
    return retry_on_other_gpus(context, too_small, offers, how, why)


def _is_confirmed_by_another_gpu(context: FailureContext) -> bool:
    """Return whether memory also ran out on another GPU with at least as much memory, at this step
    and size."""
    had, _ = _too_small_gpus(context)
    here = set(uuids(context.failed_gpus))
    for earlier in context.earlier_at_same_step:
        there = earlier.failed_gpus
        if not here or not there or here.intersection(uuids(there)):
            continue
        # If other processes took memory, the failure does not show how much the step needs.
        taken, _ = memory_taken_by_others(earlier)
        if taken:
            continue
        had_as_much = min(gpu.free_bytes for gpu in there) >= had
        if earlier.sizes[-1] <= context.last.batch_size and had_as_much:
            return True
    return False


def _too_small_gpus(context: FailureContext) -> tuple[int, Group]:
    """Return the free memory that was too little, and the attempt's GPUs that had no more."""
    had = min((gpu.free_bytes for gpu in context.failed_gpus), default=0)
    return had, tuple(gpu for gpu in context.last.gpus if gpu.free_bytes <= had)


def repeat_after_progress(context: FailureContext) -> Retry | None:
    """Retry in a new process as long as each attempt saves a later checkpoint: memory may leak."""
    if not context.got_further or context.failed_before_training:
        return None
    how = f", but got further: the same again from {context.saved}"
    return context.retry("retry", how)


def split_despite_changed_loss(context: FailureContext) -> Retry | None:
    """Split steps although that changes the loss, if no remedy is left that keeps the loss."""
    if not context.keeps_loss or not context.has_retries:
        return None
    how = ": steps are computed in smaller parts from now on, although that changes the loss"
    return context.retry("split_loss", how, SplitLossKnob(splits_loss=True))


def try_remaining_sizes(context: FailureContext) -> Retry | None:
    """Continue with untried sizes on the device with the most memory, unless the user limits the
    tries with ``max_retries``.

    An attempt costs a minute, and training on the CPU costs days.
    """
    last = context.last
    if context.config.max_retries is not None or not last.has_batch or context.keeps_loss:
        return None
    if not context.sizes_not_tried or context.failed_before_training:
        return None
    group = _best_tried_gpus(context)
    if last.gpus and not group:
        return None
    size = context.sizes_not_tried[0]
    how = f"{context.at_size}: {size} on {device_name(group)}, which no attempt has tried yet"
    gpus = group if last.gpus else ()
    return context.retry("halve_batch", how, gpus=gpus, batch_size=size)


def _best_tried_gpus(context: FailureContext) -> Group:
    """Return the available GPUs of the earlier attempt whose smallest GPU has the most free
    memory."""
    available = {gpu.uuid: gpu for gpu in context.offers.gpus if gpu.unusable is None}
    best: Group = ()
    best_free = -1
    for attempt in context.history:
        names = uuids(attempt.spec.gpus)
        if not names or attempt.spec.ranks != context.last.ranks:
            continue
        if context.faulty.isdisjoint(names) and available.keys() >= set(names):
            group = tuple(available[name] for name in names)
            free = min(gpu.free_bytes for gpu in group)
            if free > best_free:
                best = group
                best_free = free
    return best
