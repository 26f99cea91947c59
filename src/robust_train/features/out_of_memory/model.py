"""The remedies when memory runs out: room elsewhere, smaller parts, another GPU, a new process.

`assembly.load_remedies` orders them, and ``policy.decide`` calls them in the launcher. Pure.
"""

from __future__ import annotations

from robust_train.features.out_of_memory.record import SplitLossKnob
from robust_train.model.failure import Clue
from robust_train.model.gpu import Group, device_name
from robust_train.model.spec import Retry, Room
from robust_train.policy.context import FailureContext, blamed_on_others, exchanged, uuids
from robust_train.policy.retries import exchange, halved, untried
from robust_train.policy.sizes import largest_up_to
from robust_train.readable import mib

ALIKE = 0.9
"""A GPU counts as equally large if it has at least this share of the other's free memory."""


def room_taken_by_others(context: FailureContext) -> Retry | None:
    """Retry the same batch on a GPU with room, or when this GPU has room again."""
    taken, needed = blamed_on_others(context.attempt)
    here = (context.last.device_key, context.last.batch_size)
    places = [
        (attempt.spec.device_key, attempt.spec.batch_size) for attempt in context.since_progress
    ]
    tries = places.count(here)
    if not taken or tries > context.config.retries:
        return None
    why = f", but others took {mib(taken)} of it meanwhile"
    offers = [gpu for gpu in untried(context) if gpu.free_bytes >= needed]
    group = exchanged(context.last.gpus, context.failed_gpus, offers)
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
    """Halve the micro-batch on the same device, while that can help."""
    if not context.has_smaller or context.failed_before_training:
        return None
    if context.keeps_loss:
        return None
    if _confirmed_by_another_gpu(context):
        return None
    is_last = context.smaller_batches_tried_here >= context.config.retries
    if is_last and not context.config.finds_batch_size:
        return None
    return halved(context, f"{context.what_failed}: ")


def less_for_workers(context: FailureContext) -> Retry | None:
    """Halve the micro-batch if a data-loader worker died of a lack of memory."""
    is_memory = context.evidence.clue in (Clue.KILLED, Clue.SHARED_MEMORY)
    if not is_memory and context.evidence.library != "kernel":
        return None
    return halve_batch(context)


def half_after_internal_errors(context: FailureContext) -> Retry | None:
    """Retry once with half the micro-batch: cuBLAS and cuDNN often report running out of memory
    this way."""
    earlier = context.earlier_at_same_step
    if context.evidence.library not in ("cublas", "cudnn") or not earlier:
        return None
    last = context.last
    was_halved = any(attempt.spec.batch_size > last.batch_size for attempt in earlier)
    if was_halved or not context.has_smaller or not context.gpus_are_available:
        return None
    why = f"{context.what_failed}, again at this step, as it may for lack of memory: "
    return halved(context, why)


def switch_gpu(context: FailureContext) -> Retry | None:
    """Take the best GPU not tried yet, if it offers more memory than the GPU that failed.

    If several GPUs share a step, all that offer no more than the failed GPU are exchanged, because
    the next of them would run out at the same size.
    """
    had, short = _shortest(context)
    offers = [gpu for gpu in untried(context) if gpu.free_bytes > had]
    group = exchanged(context.last.gpus, short, offers)
    if not group:
        return None
    offered = min(gpu.free_bytes for gpu in group)
    # Memory is near-affine in the micro-batch with a constant part above zero, so k times the
    # memory holds at least k times the micro-batch that almost fitted.
    at_most = context.last.batch_size * offered / max(had, 1)
    how = (
        f"{context.at_size}; {device_name(group)} has {mib(offered)} free "
        f"({mib(had)} were free on {device_name(context.failed_gpus)})"
    )
    return context.retry(
        "switch_gpu", how, gpus=group, batch_size=largest_up_to(context.sizes, at_most)
    )


def second_opinion(context: FailureContext) -> Retry | None:
    """Try another GPU with about as much free memory, at the last size, before the CPU.

    An attempt costs a minute, the CPU days. If memory runs out there at the same step, the GPU is
    not the cause, and similar GPUs are not tried.
    """
    had, short = _shortest(context)
    if _confirmed_by_another_gpu(context):
        return None
    offers = [gpu for gpu in untried(context) if gpu.free_bytes >= ALIKE * had]
    how = f"{context.at_size}: same size once on "
    return exchange(
        context, short, offers, how, ", which has about as much memory free, before the CPU"
    )


def _confirmed_by_another_gpu(context: FailureContext) -> bool:
    """Return whether memory also ran out on another GPU with no less, at this step and size."""
    had, _ = _shortest(context)
    here = set(uuids(context.failed_gpus))
    for earlier in context.earlier_at_same_step:
        there = earlier.failed_gpus
        if not here or not there or here.intersection(uuids(there)):
            continue
        # Memory that others took does not show how much the step needs.
        if blamed_on_others(earlier)[0]:
            continue
        had_no_less = min(gpu.free_bytes for gpu in there) >= had
        if earlier.sizes[-1] <= context.last.batch_size and had_no_less:
            return True
    return False


def _shortest(context: FailureContext) -> tuple[int, Group]:
    """Return the free memory that was too little, and the attempt's GPUs that had no more."""
    had = min((gpu.free_bytes for gpu in context.failed_gpus), default=0)
    return had, tuple(gpu for gpu in context.last.gpus if gpu.free_bytes <= had)


def again_after_progress(context: FailureContext) -> Retry | None:
    """Repeat in a new process while each attempt saves a later checkpoint: memory may leak."""
    if not context.got_further or context.failed_before_training:
        return None
    how = f", but got further: the same again from {context.saved}"
    return context.retry("retry", how)


def split_all_the_same(context: FailureContext) -> Retry | None:
    """Split steps although that changes the loss, if no remedy is left that keeps it."""
    if not context.keeps_loss or not context.has_retries:
        return None
    how = ": steps are computed in smaller parts from here on, although that changes this loss"
    return context.retry("split_loss", how, SplitLossKnob(splits_loss=True))


def sizes_left(context: FailureContext) -> Retry | None:
    """Continue with untried sizes on the device with the most memory, unless ``max_retries`` is
    given.

    An attempt costs a minute, the CPU days.
    """
    last = context.last
    if context.config.max_retries is not None or not last.has_batch:
        return None
    if context.keeps_loss:
        return None
    if not context.sizes_not_tried or context.failed_before_training:
        return None
    now = {gpu.uuid: gpu for gpu in context.offers.gpus if gpu.unusable is None}
    tried = []
    for attempt in context.history:
        names = uuids(attempt.spec.gpus)
        if not names or attempt.spec.ranks != last.ranks:
            continue
        if context.faulty.isdisjoint(names) and now.keys() >= {*names}:
            tried.append(tuple(now[name] for name in names))
    most = max(tried, key=lambda group: min(gpu.free_bytes for gpu in group), default=())
    if last.gpus and not most:
        return None
    size = context.sizes_not_tried[0]
    return context.retry(
        "halve_batch",
        f"{context.at_size}: on with {size} on {device_name(most)}, which no attempt has tried",
        gpus=most if last.gpus else (),
        batch_size=size,
    )
