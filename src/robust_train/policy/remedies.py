"""The remedies after a failure: one rule each, from the context to a retry or None."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from robust_train.model.failure import Clue, FailureKind
from robust_train.model.gpu import GpuInfo, Group, device_name
from robust_train.model.spec import Retry, Room
from robust_train.policy.context import FailureContext, blamed_on_others, exchanged, uuids
from robust_train.policy.sizes import largest_up_to, sizes
from robust_train.readable import mib

ALIKE = 0.9
"""Share of a GPU's free memory that another must have to count as much like it."""

_LONGEST_PAUSE_SECONDS = 3600.0
_RATE_LIMIT_FACTOR = 30.0
_LESS_LEARNING = 0.5
"""The first pause is then as long as the periods in which servers count requests: 5 minutes."""

Rule = Callable[[FailureContext], "Retry | None"]


# --- memory ---------------------------------------------------------------------------------------


def room_taken_by_others(context: FailureContext) -> Retry | None:
    """Retry the same batch where others left room, or when there is room again."""
    taken, needed = blamed_on_others(context.attempt)
    here = (context.last.device_key, context.last.batch_size)
    tries = sum(
        (one.spec.device_key, one.spec.batch_size) == here for one in context.since_progress
    )
    if not taken or tries > context.config.retries:
        return None
    why = f", but others took {mib(taken)} of it meanwhile"
    offers = [gpu for gpu in _untried(context) if gpu.free_bytes >= needed]
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


def expandable_segments(context: FailureContext) -> Retry | None:
    """Retry without fragmentation: the allocator holds enough memory in pieces too small."""
    last = context.last
    refusals = (Clue.DRIVER, Clue.SEGMENTS)
    is_refused = any(one.evidence.clue in refusals for one in context.history)
    if is_refused or not context.settings.may_use_expandable_segments:
        return None
    if not last.gpus or last.expandable_segments or not context.evidence.fragmented:
        return None
    unused = mib(context.evidence.reserved_unallocated_bytes or 0)
    how = f" with {unused} reserved but unused: fragmentation; same batch with expandable segments"
    return context.retry("expandable_segments", how, expandable_segments=True)


def fewer_workers(context: FailureContext) -> Retry | None:
    """Halve the data-loader workers where they hold the memory, each with less ahead.

    One is left: many programs cannot load in the training process. The built-in trainer can.
    """
    last, evidence = context.last, context.evidence
    is_host = context.failure.kind is FailureKind.HOST_OOM
    # where a worker died there were some
    has_none = evidence.no_workers or (is_host and evidence.workers == 0)
    holds_little = is_host and evidence.workers_hold_most is False
    if has_none or holds_little or _workers_are_fixed(context):
        return None
    if evidence.clue in (Clue.IMPORT, Clue.MODEL):
        return None
    workers, prefetch = last.num_workers // 2, last.prefetch_factor
    if context.config.theirs is None:  # a project has no key for it
        prefetch = max(prefetch // 2, 1)
    workers = workers if context.config.is_built_in else max(workers, 1)
    if workers >= last.num_workers:
        return None
    how = f": {last.num_workers} → {workers} data-loader workers"
    if workers and prefetch != last.prefetch_factor:
        how += f", {last.prefetch_factor} → {prefetch} batches ahead"
    return context.retry("fewer_workers", how, num_workers=workers, prefetch_factor=prefetch)


def _workers_are_fixed(context: FailureContext) -> bool:
    """Return whether the trainer had as many workers although it was given fewer."""
    seen, given = context.evidence.workers, context.last.num_workers
    return bool(seen) and any(
        one.spec.num_workers > given and one.evidence.workers == seen
        for one in context.history[:-1]
    )


def less_for_workers(context: FailureContext) -> Retry | None:
    """Halve the micro-batch where memory was what a data-loader worker died of."""
    is_memory = context.evidence.clue in (Clue.KILLED, Clue.SHARED_MEMORY)
    if not is_memory and context.evidence.library != "kernel":
        return None
    return halve_batch(context)


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
    return halved(context, "halve_batch", f"{context.what_failed}: ")


def switch_gpu(context: FailureContext) -> Retry | None:
    """Take the best GPU not tried yet, if it offers more memory than the one that failed.

    Of several GPUs that share a step, all that offer no more than the failed one are exchanged:
    the next one of them would run out at the same size.
    """
    had, short = _shortest(context)
    offers = [gpu for gpu in _untried(context) if gpu.free_bytes > had]
    group = exchanged(context.last.gpus, short, offers)
    if not group:
        return None
    offered = min(gpu.free_bytes for gpu in group)
    # memory is near-affine in the micro-batch with a constant part above zero, so k times the
    # memory holds at least k times the micro-batch that almost fitted
    at_most = context.last.batch_size * offered / max(had, 1)
    how = (
        f"{context.at_size}; {device_name(group)} has {mib(offered)} free "
        f"({mib(had)} were free on {device_name(context.failed_gpus)})"
    )
    return context.retry(
        "switch_gpu", how, gpus=group, batch_size=largest_up_to(context.sizes, at_most)
    )


def second_opinion(context: FailureContext) -> Retry | None:
    """Try one more GPU with about as much free memory, at the last size, before the CPU.

    An attempt costs a minute, the CPU days. Where memory runs out there at the same step,
    the GPU is not the cause, and others like it are not tried.
    """
    had, short = _shortest(context)
    if _confirmed_by_another_gpu(context):
        return None
    offers = [gpu for gpu in _untried(context) if gpu.free_bytes >= ALIKE * had]
    how = f"{context.at_size}: same size once on "
    return _exchange(
        context, short, offers, how, ", which has about as much memory free, before the CPU"
    )


# --- devices --------------------------------------------------------------------------------------


def without_expandable_segments(context: FailureContext) -> Retry | None:
    """Retry once without them: WSL2 and some vGPUs fail at the first allocation."""
    last = context.last
    may_choose = context.settings.may_use_expandable_segments
    if not last.gpus or not last.expandable_segments or not may_choose:
        return None
    clue = context.evidence.clue
    if clue == Clue.SEGMENTS:
        how = ": the same again without expandable segments, which alone cause this"
    elif clue == Clue.DRIVER and not context.attempt.has_begun:
        how = (
            " before the first step: the same again without expandable segments, which this driver "
            "may not support"
        )
    else:
        return None
    return context.retry("no_expandable_segments", how, expandable_segments=False)


def half_after_internal_errors(context: FailureContext) -> Retry | None:
    """Retry with half the micro-batch once: cuBLAS and cuDNN often report a lack of memory so."""
    earlier = context.earlier_at_same_step
    if context.evidence.library not in ("cublas", "cudnn") or not earlier:
        return None
    last = context.last
    was_halved = any(one.spec.batch_size > last.batch_size for one in earlier)
    if was_halved or not context.has_smaller or not context.gpus_are_available:
        return None
    why = f"{context.what_failed}, again at this step, as it may for lack of memory: "
    return halved(context, "halve_batch", why)


def same_gpu_again(context: FailureContext) -> Retry | None:
    """Start over on the same GPU: most faults break the process's context, not the GPU."""
    failed = context.failed_gpus
    if not context.gpus_are_available or context.faulty.intersection(uuids(failed)):
        return None
    return context.retry("retry", f": a new process on {device_name(failed)}")


def fault_without_a_gpu_once_more(context: FailureContext) -> Retry | None:
    """Retry once from a checkpoint if a program without a GPU reports a device fault, of which
    nobody can say whose it is."""
    if context.last.gpus or not context.has_saved or not context.has_retries:
        return None
    if context.failures_without_progress > 1:
        return None
    return context.retry("retry", f": once more, from {context.saved}")


def other_gpu(context: FailureContext) -> Retry | None:
    """Retry the same batch on the best GPU not tried yet."""
    return _exchange(context, context.failed_gpus, _untried(context), ": same batch on ")


def wait_for_other_gpu(context: FailureContext) -> Retry | None:
    """Wait for the first GPU that becomes free: others have those that would do."""
    config, count = context.config, len(context.last.gpus)
    others = [gpu for gpu in context.offers.held if gpu.uuid not in context.faulty]
    if len(others) < len(context.failed_gpus) or not count:
        return None
    if not config.wait_for_gpu or not config.picks_gpu:
        return None
    exclude = tuple(sorted(context.faulty))
    room = Room((), config.min_gpu_memory_bytes, exclude, (count,))
    how = ": same batch on the next GPU that becomes free"
    return context.retry("wait", how, room=room)


def fewer_gpus(context: FailureContext) -> Retry | None:
    """Go on with fewer GPUs at the same effective batch, where the user allows it."""
    excluded = {*context.faulty}
    if context.failure.rank is not None:
        excluded.update(uuids(context.failed_gpus))
    counts = context.settings.fewer_ranks(len(context.last.gpus))
    if not counts:
        return None
    least = context.config.min_gpu_memory_bytes
    room = Room((), least, tuple(sorted(excluded)), counts)
    how = (
        " and no other GPU is available: on with fewer GPUs "
        f"(min_num_gpus={context.config.min_num_gpus})"
    )
    return context.retry("fewer_gpus", how, room=room)


def busy_gpu_again(context: FailureContext) -> Retry | None:
    """Retry after a pause: it refused a context although it is free."""
    if context.evidence.clue != Clue.BUSY or not context.gpus_are_available:
        return None
    return same_again(context)


def wait_for_turn(context: FailureContext) -> Retry | None:
    """Retry on the next available GPU: another job was faster on this one."""
    config, ours = context.config, uuids(context.last.gpus)
    is_taken = bool(ours) and not {*uuids(context.offers.gpus)}.issuperset(ours)
    if not is_taken or not config.wait_for_gpu or not context.has_retries:
        return None
    only = () if config.picks_gpu else ours
    room = Room(only, config.min_gpu_memory_bytes, counts=(len(ours),))
    how = ", and someone else has it: same batch on the next available GPU"
    return context.retry("wait", how, room=room)


def same_again(context: FailureContext) -> Retry | None:
    """Retry after a pause that doubles each time: peers, networks and devices come back."""
    if not context.has_retries:
        return None
    pause = pause_before(context, context.failures_without_progress)
    if context.evidence.clue == Clue.RATE_LIMIT:
        longer = min(pause * _RATE_LIMIT_FACTOR, _LONGEST_PAUSE_SECONDS)
        pause = max(pause, longer)
    return context.retry(
        "retry", f": the same again in {pause:g} s, from {context.saved}", pause_seconds=pause
    )


def killed_again(context: FailureContext) -> Retry | None:
    """Retry from the last checkpoint: someone, and not the kernel, killed the process or a
    data-loader worker without a request."""
    if context.evidence.clue != Clue.KILLED or not context.has_retries:
        return None
    where = device_name(context.last.gpus)
    return context.retry("retry", f": the same again on {where} from {context.saved}")


def crashed_once_more(context: FailureContext) -> Retry | None:
    """Retry once after a segmentation fault, which may be a cosmic ray; twice it is a bug."""
    crashes = [one.evidence.clue == Clue.CRASHED for one in context.since_progress]
    if context.evidence.clue != Clue.CRASHED or sum(crashes) > 1:
        return None
    return context.retry("retry", f": once more, from {context.saved}")


def unknown_once_more(context: FailureContext) -> Retry | None:
    """Retry once from a checkpoint after a failure of which nobody can say whose it is: if it comes
    again before the next checkpoint, it is the program's."""
    if context.evidence.clue != Clue.UNKNOWN or context.config.retries < 1:
        return None
    if not context.has_saved or context.unknown_before:
        return None
    why = "neither a known failure nor certainly a bug"
    return context.retry("retry", f": {why}, so once more, from {context.saved}")


def earlier_checkpoint(context: FailureContext) -> Retry | None:
    """Retry once from the checkpoint before the one that the script could not read."""
    if context.evidence.clue != Clue.DAMAGED or not context.evidence.has_checkpoint:
        return None
    if context.failures_without_progress > 1:
        return None
    file = context.attempt.checkpoint or context.attempt.resumed_from
    how = f": {file} cannot be read: again from the checkpoint before it"
    return context.retry("earlier_checkpoint", how)


def before_it_diverged(context: FailureContext) -> Retry | None:
    """Retry from the last checkpoint before it, once: data or chance may have been the cause."""
    if not context.evidence.has_checkpoint or context.failures_without_progress > 1:
        return None
    return _back(context, "before_it_diverged", context.last.lr_factor, "")


def lower_learning_rate(context: FailureContext) -> Retry | None:
    """Retry from the last checkpoint before it with a lower learning rate."""
    tries = context.failures_without_progress - context.evidence.has_checkpoint
    if not context.evidence.reads_lr:
        return None
    if tries > context.config.retries:
        return None
    lower = context.last.lr_factor * _LESS_LEARNING
    return _back(context, "lower_learning_rate", lower, f" with {lower:g} times the learning rate")


def _back(context: FailureContext, action: str, lr_factor: float, with_less: str) -> Retry:
    bad = context.evidence.bad_step or 0
    skips = bad if context.evidence.passes_over else 0
    data = f"; the data up to step {skips} is skipped" if skips else ""
    where = "from it" if context.evidence.has_checkpoint else "from the beginning"
    how = f": again {where}{with_less}{data}"
    return context.retry(action, how, lr_factor=lr_factor, skips_to=skips)


def same_fault_elsewhere(context: FailureContext) -> str:
    """Return why the device is not to blame: the same fault at the same step on two devices."""
    is_fault = context.failure.kind is FailureKind.DEVICE_FAULT
    if not is_fault or context.evidence.is_hardware:
        return ""
    here = context.failed_gpus
    for earlier in context.earlier_at_same_step:
        there = earlier.failed_gpus
        if uuids(there) != uuids(here):
            step = context.attempt.end_step
            where = "before the first step" if step is None else f"at step {step}"
            return (
                f"the same failure {where} on two devices ({device_name(there)} and "
                f"{device_name(here)}) is not the device's: {context.failure.message}"
            )
    return ""


# --- the last ones -------------------------------------------------------------------------------


def checkpoint_gradients(context: FailureContext) -> Retry | None:
    """Retry the smallest micro-batch, with activations recomputed instead of kept.

    A loss that splitting changes keeps the micro-batch that it has.
    """
    last, config = context.last, context.config
    is_possible = config.may_checkpoint_gradients and context.settings.can_checkpoint
    if not is_possible or last.gradient_checkpointing or context.failed_before_training:
        return None
    # activations lie on the GPU, if there is one
    if context.failure.kind is FailureKind.HOST_OOM and last.gpus:
        return None
    *_, size = sizes(context.sizes)
    if context.keeps_loss:
        size = last.batch_size
    change = f"{context.at_size}: {size if last.has_batch else 'again'}"
    how = (
        f"{change} with gradient checkpointing: the same gradients in about a third more time "
        "(training.gradient_checkpointing)"
    )
    return context.retry(
        "gradient_checkpointing", how, batch_size=size, gradient_checkpointing=True
    )


def again_after_progress(context: FailureContext) -> Retry | None:
    """Repeat in a new process as long as each attempt saves a later checkpoint: memory leaks."""
    if not context.got_further or context.failed_before_training:
        return None
    how = f", but got further: the same again from {context.saved}"
    return context.retry("retry", how)


def split_all_the_same(context: FailureContext) -> Retry | None:
    """Split steps although that changes the loss, when no remedy is left that keeps it."""
    if not context.keeps_loss or not context.has_retries:
        return None
    how = ": steps are computed in smaller parts from here on, although that changes this loss"
    return context.retry("split_loss", how, splits_loss=True)


def sizes_left(context: FailureContext) -> Retry | None:
    """Go on with sizes that no one has tried, on the device with the most memory: an attempt costs
    a minute, the CPU days. Not where ``max_retries`` is given."""
    last = context.last
    if context.config.max_retries is not None or not last.has_batch:
        return None
    if context.keeps_loss:
        return None
    if not context.sizes_not_tried or context.failed_before_training:
        return None
    now = {gpu.uuid: gpu for gpu in context.offers.gpus if gpu.unusable is None}
    tried = [
        tuple(now[gpu.uuid] for gpu in one.spec.gpus)
        for one in context.history
        if one.spec.gpus
        and one.spec.ranks == last.ranks
        and context.faulty.isdisjoint(uuids(one.spec.gpus))
        and now.keys() >= {*uuids(one.spec.gpus)}
    ]
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


def cpu_fallback(context: FailureContext) -> Retry | None:
    """Take the CPU at the requested batch, once, where the user allows it."""
    if not context.config.allow_cpu_fallback or "cpu" in context.tried_devices:
        return None
    asked = context.settings.for_ranks(context.settings.cpu_ranks).asked
    how = " and no other GPU is available: on the CPU"
    if context.failure.kind is FailureKind.DEVICE_OOM:
        how = f"{context.at_size} and no GPU has more to offer"
    return context.retry(
        "cpu_fallback",
        how,
        gpus=(),
        ranks=asked.ranks,
        batch_size=asked.batch_size,
        gradient_checkpointing=asked.gradient_checkpointing,
    )


# --- what rules share -----------------------------------------------------------------------------


def _untried(context: FailureContext) -> list[GpuInfo]:
    """Return GPUs to take now that had no attempt since progress, best first."""
    if not context.config.picks_gpu:
        return []
    left = context.tried_devices | context.faulty
    return [
        gpu
        for gpu in context.offers.gpus
        if gpu.uuid not in left
        and gpu.unusable is None
        and gpu.free_bytes >= context.config.min_gpu_memory_bytes
    ]


def _exchange(
    context: FailureContext, leaving: Group, offers: Sequence[GpuInfo], how: str, why: str = ""
) -> Retry | None:
    """Return the retry of the same batch on offered GPUs, whose names stand between two texts."""
    group = exchanged(context.last.gpus, leaving, offers)
    if not group:
        return None
    new = device_name(context.new_in(group))
    return context.retry("switch_gpu", f"{how}{new}{why}", gpus=group)


def _shortest(context: FailureContext) -> tuple[int, Group]:
    """Return the free memory that did not suffice, and the attempt's GPUs that had no more."""
    had = min((gpu.free_bytes for gpu in context.failed_gpus), default=0)
    return had, tuple(gpu for gpu in context.last.gpus if gpu.free_bytes <= had)


def _confirmed_by_another_gpu(context: FailureContext) -> bool:
    """Return whether memory ran out so on another GPU with no less, at this step and size."""
    (had, _), here = _shortest(context), {*uuids(context.failed_gpus)}
    for earlier in context.earlier_at_same_step:
        there = earlier.failed_gpus
        if not here or not there or here.intersection(uuids(there)):
            continue
        # that shows how much others took, not how much the step needs
        if blamed_on_others(earlier)[0]:
            continue
        had_no_less = min(gpu.free_bytes for gpu in there) >= had
        if earlier.sizes[-1] <= context.last.batch_size and had_no_less:
            return True
    return False


def pause_before(context: FailureContext, tries: int) -> float:
    """Return the seconds before a try of the same: they double each time, up to an hour."""
    first = context.config.retry_pause_seconds
    return min(first * 2.0 ** min(tries - 1, 30), max(first, _LONGEST_PAUSE_SECONDS))


def halved(context: FailureContext, action: str, why: str) -> Retry:
    """Return the retry with the next smaller micro-batch; its reason begins with ``why``."""
    last, spec = context.last, context.smaller
    reason = f"{why}micro-batch {last.batch_size} → {spec.batch_size}"
    was, now = (last.gradient_accumulation_steps, spec.gradient_accumulation_steps)
    if now != was:
        reason += f", accumulation {was} → {now}"
    return Retry(spec, action, reason, context.warning_about(spec))
