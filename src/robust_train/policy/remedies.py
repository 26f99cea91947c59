"""The remedies after a failure: one rule each, from the context to a retry or None."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from robust_train.model.decision import Retry, Room
from robust_train.model.failure import Clue, FailureKind
from robust_train.model.gpu import GpuInfo, Group, device_name
from robust_train.model.spec import AttemptSpec
from robust_train.policy.context import (
    FailureContext,
    exchanged,
    failed_gpus,
    is_hardware_fault,
    uuids,
    what_failed,
)
from robust_train.policy.sizes import PolicySettings, largest_up_to, next_smaller, sizes
from robust_train.readable import MIB, mib

NOTABLE_BYTES = 256 * MIB
"""If other processes took at least this many bytes, they are blamed for running out of memory."""

ALIKE = 0.9
"""Share of a GPU's free memory that another must have to count as much like it."""

_LONGEST_PAUSE_SECONDS = 3600.0

Rule = Callable[[FailureContext], "Retry | None"]


# --- memory ---------------------------------------------------------------------------------------


def room_taken_by_others(context: FailureContext) -> Retry | None:
    """Retry the same batch where others left room, or when there is room again."""
    settings, taken = context.settings, context.attempt.taken_by_others_bytes
    if (
        not context.last.gpus
        or taken < NOTABLE_BYTES
        or not _would_have_fitted(context, taken)
    ):
        return None
    if _tries_of_the_same(context) > settings.max_retries:
        return None
    needed = context.attempt.gpu_free_before_bytes
    assert needed is not None
    why = f"{what_failed(context)}, but others took {mib(taken)} of it meanwhile"
    offers = [gpu for gpu in _untried(context) if gpu.free_bytes >= needed]
    group = exchanged(context.last.gpus, context.failed_gpus, offers)
    if group is not None:
        new = context.new_in(group)
        free = mib(min(gpu.free_bytes for gpu in new))
        reason = f"{why}; {device_name(new)} has {free} free: same batch there"
        return Retry(replace(context.last, gpus=group), "switch_gpu", reason)
    if not settings.may_wait:
        return None
    reason = f"{why}: same batch when {mib(needed)} are free there again"
    return Retry(
        context.last, "wait", reason, room=Room(uuids(context.failed_gpus), needed)
    )


def expandable_segments(context: FailureContext) -> Retry | None:
    """Retry without fragmentation: the allocator holds enough memory in pieces too small."""
    last = context.last
    if not last.gpus or last.expandable_segments or not context.evidence.fragmented:
        return None
    if not context.settings.may_use_expandable_segments or _driver_refused_segments(
        context
    ):
        return None
    unused = mib(context.evidence.reserved_unallocated_bytes or 0)
    reason = (
        f"{what_failed(context)} with {unused} reserved but unused: fragmentation; same batch "
        "with expandable segments"
    )
    return Retry(replace(last, expandable_segments=True), "expandable_segments", reason)


def fewer_workers(context: FailureContext) -> Retry | None:
    """Halve the data-loader workers, which hold memory of their own, each with less ahead."""
    last = context.last
    has_none = last.num_workers == 0 or context.evidence.no_workers
    if has_none or context.evidence.clue in (Clue.IMPORT, Clue.MODEL):
        return None
    workers, prefetch = last.num_workers // 2, max(last.prefetch_factor // 2, 1)
    reason = (
        f"{what_failed(context)}: {last.num_workers} → {workers} data-loader workers"
    )
    if workers and prefetch != last.prefetch_factor:
        reason += f", {last.prefetch_factor} → {prefetch} batches ahead"
    spec = replace(last, num_workers=workers, prefetch_factor=prefetch)
    return Retry(spec, "fewer_workers", reason)


def halve_batch(context: FailureContext) -> Retry | None:
    """Half the micro-batch on the same device, while that can help."""
    settings, last = context.settings, context.last
    if last.batch_size <= settings.min_batch_size or context.failed_before_training:
        return None
    if _confirmed_by_another_gpu(context):
        return None
    if context.ran_out_alike_before and not settings.finds_batch_size:
        return None
    is_last = context.smaller_batches_tried_here >= settings.max_retries
    if is_last and not settings.finds_batch_size:
        return None
    why = what_failed(context)
    if context.nothing_was_reported:
        why += ", and no step was reported, so the batch may not matter"
    return halved(context, "halve_batch", f"{why}: micro-batch ")


def halve_batch_on_request(context: FailureContext) -> Retry:
    """Half the micro-batch on the same device because the user asks for it."""
    action, why = (
        "halve_batch_on_request",
        "requested by 'robust-train run halve-batch': ",
    )
    if context.last.batch_size <= context.settings.min_batch_size:
        size = context.last.batch_size
        return Retry(
            context.last, action, f"{why}micro-batch {size} is the smallest already"
        )
    return halved(context, action, f"{why}micro-batch ")


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
    batch_size, accumulation = _size_that_should_fit(context, had=had, offered=offered)
    spec = replace(context.last.with_batch(batch_size, accumulation), gpus=group)
    reason = (
        f"{what_failed(context)} at micro-batch {context.last.batch_size}; {spec.device} has "
        f"{mib(offered)} free ({mib(had)} were free on {device_name(context.failed_gpus)})"
    )
    return Retry(
        spec, "switch_gpu", reason, effective_batch_warning(context.settings, spec)
    )


def second_opinion(context: FailureContext) -> Retry | None:
    """Try one more GPU with about as much free memory, at the last size, before the CPU.

    An attempt costs a minute, the CPU days. Where memory runs out there at the same step, it is
    no matter of the GPU, and others like it are not tried.
    """
    had, short = _shortest(context)
    if _confirmed_by_another_gpu(context):
        return None
    offers = [gpu for gpu in _untried(context) if gpu.free_bytes >= ALIKE * had]
    group = exchanged(context.last.gpus, short, offers)
    if not group:
        return None
    reason = (
        f"{what_failed(context)} at micro-batch {context.last.batch_size}: same size once on "
        f"{device_name(context.new_in(group))}, which has about as much memory free, before the CPU"
    )
    return Retry(replace(context.last, gpus=group), "switch_gpu", reason)


# --- devices --------------------------------------------------------------------------------------


def without_expandable_segments(context: FailureContext) -> Retry | None:
    """Retry once without them: WSL2 and some vGPUs fail at the first allocation."""
    last = context.last
    if not last.gpus or not last.expandable_segments or context.attempt.has_begun:
        return None
    if (
        not context.settings.may_use_expandable_segments
        or context.evidence.clue != Clue.DRIVER
    ):
        return None
    reason = (
        f"{what_failed(context)} before the first step: the same again without expandable "
        "segments, which this driver may not support"
    )
    return Retry(
        replace(last, expandable_segments=False), "no_expandable_segments", reason
    )


def same_gpu_again(context: FailureContext) -> Retry | None:
    """Start over on the same GPU: most faults break the process's context, not the GPU."""
    if not context.gpus_are_available or context.faulty().intersection(
        uuids(context.failed_gpus)
    ):
        return None
    where = device_name(context.failed_gpus)
    reason = f"{what_failed(context)}: a new process on {where}"
    return Retry(context.last, "retry", reason)


def other_gpu(context: FailureContext) -> Retry | None:
    """Retry the same batch on the best GPU not tried yet."""
    group = exchanged(context.last.gpus, context.failed_gpus, _untried(context))
    if not group:
        return None
    reason = (
        f"{what_failed(context)}: same batch on {device_name(context.new_in(group))}"
    )
    return Retry(replace(context.last, gpus=group), "switch_gpu", reason)


def wait_for_other_gpu(context: FailureContext) -> Retry | None:
    """Wait for the first GPU that becomes free: others have those that would do."""
    settings, faulty = context.settings, context.faulty()
    others = [gpu for gpu in context.held if gpu.uuid not in faulty]
    if len(others) < len(context.failed_gpus) or not context.last.gpus:
        return None
    if not settings.may_wait or not settings.may_switch_gpu:
        return None
    reason = f"{what_failed(context)}: same batch on the next GPU that becomes free"
    exclude, count = tuple(sorted(faulty)), len(context.last.gpus)
    room = Room((), settings.min_gpu_memory_bytes, exclude, (count,))
    return Retry(context.last, "wait", reason, room=room)


def fewer_gpus(context: FailureContext) -> Retry | None:
    """Go on with fewer GPUs at the same effective batch, where the user allows it.

    Where memory ran out: on those of the group that had more than the GPU on which it did.
    """
    excluded, least = {*context.faulty()}, context.settings.min_gpu_memory_bytes
    most = len(context.last.gpus)
    if context.failure.kind is FailureKind.DEVICE_OOM:
        had, short = _shortest(context)
        excluded.update(uuids(short))
        most, least = most - len(short), max(least, had + 1)
    elif context.failure.rank is not None:
        excluded.update(uuids(context.failed_gpus))
    fewer = context.settings.fewer_ranks(len(context.last.gpus))
    counts = tuple(count for count in fewer if count <= most)
    if not counts:
        return None
    room = Room((), least, tuple(sorted(excluded)), counts)
    what = f"{what_failed(context)} and no other GPU is available"
    reason = f"{what}: on with fewer GPUs (min_num_gpus={context.settings.min_ranks})"
    return Retry(context.last, "fewer_gpus", reason, room=room)


def busy_gpu_again(context: FailureContext) -> Retry | None:
    """Retry after a pause: it refused a context although it is free."""
    if context.evidence.clue != Clue.BUSY or not context.gpus_are_available:
        return None
    return same_again(context)


def wait_for_turn(context: FailureContext) -> Retry | None:
    """Retry on the next available GPU: another job was faster on this one."""
    settings, ours = context.settings, uuids(context.last.gpus)
    if (
        not ours
        or not settings.may_wait
        or {gpu.uuid for gpu in context.gpus}.issuperset(ours)
    ):
        return None
    if context.failures_without_progress > settings.max_retries:
        return None
    what = what_failed(context)
    reason = f"{what}, and someone else has it: same batch on the next available GPU"
    only = () if settings.may_switch_gpu else ours
    room = Room(only, settings.min_gpu_memory_bytes, counts=(len(ours),))
    return Retry(context.last, "wait", reason, room=room)


def same_again(context: FailureContext) -> Retry | None:
    """Retry after a pause that doubles each time: peers, networks and devices come back."""
    failures = context.failures_without_progress
    if failures > context.settings.max_retries:
        return None
    pause = pause_before(context.settings, failures)
    reason = f"{what_failed(context)}: the same again in {pause:g} s"
    return Retry(context.last, "retry", reason, pause_seconds=pause)


def killed_again(context: FailureContext) -> Retry | None:
    """Retry from the last checkpoint: someone killed the process without a request."""
    if context.evidence.clue != Clue.KILLED:
        return None
    if context.failures_without_progress > context.settings.max_retries:
        return None
    where = device_name(context.last.gpus)
    reason = (
        f"{what_failed(context)}: the same again on {where} from the last checkpoint"
    )
    return Retry(context.last, "retry", reason)


def same_fault_elsewhere(context: FailureContext) -> str | None:
    """Return why the device is not to blame: the same fault at the same step on two devices."""
    if is_hardware_fault(context.evidence):
        return None
    here = uuids(context.failed_gpus)
    for earlier in context.earlier_at_same_step():
        if uuids(failed_gpus(earlier)) != here:
            step = context.attempt.end_step
            where = "before the first step" if step is None else f"at step {step}"
            return (
                f"the same failure {where} on two devices ({device_name(failed_gpus(earlier))} "
                f"and {device_name(context.failed_gpus)}) is not the device's: "
                f"{context.failure.message}"
            )
    return None


# --- the last ones -------------------------------------------------------------------------------


def checkpoint_gradients(context: FailureContext) -> Retry | None:
    """Retry the smallest micro-batch, with activations recomputed instead of kept."""
    settings, last = context.settings, context.last
    if not settings.may_checkpoint_gradients or last.gradient_checkpointing:
        return None
    # on a GPU it is there that activations lie
    is_hosts = context.failure.kind is FailureKind.HOST_OOM and bool(last.gpus)
    if context.failed_before_training or is_hosts:
        return None
    *_, (size, accumulation) = sizes(context.sizes)
    spec = replace(last.with_batch(size, accumulation), gradient_checkpointing=True)
    change = (
        f" at micro-batch {last.batch_size}: {size}" if last.has_batch else ": again"
    )
    reason = (
        f"{what_failed(context)}{change} with gradient checkpointing: the same gradients in about "
        "a third more time (allow_gradient_checkpointing)"
    )
    warning = effective_batch_warning(settings, spec)
    return Retry(spec, "gradient_checkpointing", reason, warning)


def again_after_progress(context: FailureContext) -> Retry | None:
    """Repeat in a new process as long as each attempt saves a later checkpoint: memory leaks."""
    if not context.got_further or context.failed_before_training:
        return None
    reason = f"{what_failed(context)}, but got further: the same again from the last checkpoint"
    return Retry(context.last, "retry", reason)


def cpu_fallback(context: FailureContext) -> Retry | None:
    """Take the CPU at the requested batch, once, where the user allows it."""
    if not context.settings.allow_cpu_fallback or "cpu" in context.tried_devices:
        return None
    settings = context.settings.for_ranks(context.settings.cpu_ranks)
    spec = replace(
        context.last,
        gpus=(),
        ranks=settings.ranks,
        gradient_checkpointing=settings.gradient_checkpointing,
    )
    spec = spec.with_batch(settings.batch_size, settings.gradient_accumulation_steps)
    why = f"{what_failed(context)} and no other GPU is available: on the CPU"
    if context.failure.kind is FailureKind.DEVICE_OOM:
        size = context.last.batch_size
        why = (
            f"{what_failed(context)} at micro-batch {size} and no GPU has more to offer"
        )
    return Retry(spec, "cpu_fallback", why)


# --- what rules share -----------------------------------------------------------------------------


def _untried(context: FailureContext) -> list[GpuInfo]:
    """Return GPUs to take now that had no attempt since progress, best first."""
    if not context.settings.may_switch_gpu:
        return []
    left = context.tried_devices | context.faulty()
    return [
        gpu
        for gpu in context.gpus
        if gpu.uuid not in left
        and gpu.unusable is None
        and gpu.free_bytes >= context.settings.min_gpu_memory_bytes
    ]


def _shortest(context: FailureContext) -> tuple[int, Group]:
    """Return the free memory that did not suffice, and the attempt's GPUs that had no more."""
    had = min((gpu.free_bytes for gpu in context.failed_gpus), default=0)
    return had, tuple(gpu for gpu in context.last.gpus if gpu.free_bytes <= had)


def _confirmed_by_another_gpu(context: FailureContext) -> bool:
    """Return whether memory ran out so on another GPU with no less, at this step and size."""
    (had, _), here = _shortest(context), {*uuids(context.failed_gpus)}
    for earlier in context.earlier_at_same_step():
        there = failed_gpus(earlier)
        if not here or not there or here.intersection(uuids(there)):
            continue
        # it shows how much others had, not how much the step needs
        if earlier.taken_by_others_bytes >= NOTABLE_BYTES:
            continue
        reached = earlier.micro_batch or earlier.spec.batch_size
        if (
            reached <= context.last.batch_size
            and min(gpu.free_bytes for gpu in there) >= had
        ):
            return True
    return False


def _driver_refused_segments(context: FailureContext) -> bool:
    failures = (attempt.failure for attempt in context.history)
    return any(failure and failure.evidence.clue == Clue.DRIVER for failure in failures)


def _would_have_fitted(context: FailureContext, taken: int) -> bool:
    """Return whether what others took would have sufficed; not where our limit was reached."""
    evidence = context.evidence
    if evidence.own_limit:
        return False
    return (evidence.free_bytes or 0) + taken >= (evidence.requested_bytes or 0)


def _tries_of_the_same(context: FailureContext) -> int:
    here = (context.last.device_key, context.last.batch_size)
    return sum(
        (a.spec.device_key, a.spec.batch_size) == here for a in context.since_progress
    )


def _size_that_should_fit(
    context: FailureContext, *, had: int, offered: int
) -> tuple[int, int]:
    """Return the largest size within the share by which ``offered`` bytes are more than ``had``.

    Memory is near-affine in the micro-batch with a constant part above zero, so ``k`` times the
    memory holds at least ``k`` times the micro-batch that almost fitted.
    """
    at_most = context.last.batch_size * offered / max(had, 1)
    return largest_up_to(context.sizes, at_most)


def pause_before(settings: PolicySettings, tries: int) -> float:
    """Return the seconds before a try of the same: they double each time, up to an hour."""
    first = settings.retry_pause_seconds
    return min(first * 2.0 ** min(tries - 1, 30), max(first, _LONGEST_PAUSE_SECONDS))


def halved(context: FailureContext, action: str, why: str) -> Retry:
    """Return the retry with the next smaller micro-batch; its reason begins with ``why``."""
    last = context.last
    batch_size, accumulation = next_smaller(context.sizes, last.batch_size)
    spec = last.with_batch(batch_size, accumulation)
    before = last.gradient_accumulation_steps
    reason = (
        f"{why}{last.batch_size} → {batch_size}, accumulation {before} → {accumulation}"
    )
    return Retry(spec, action, reason, effective_batch_warning(context.settings, spec))


def effective_batch_warning(settings: PolicySettings, spec: AttemptSpec) -> str | None:
    """Return a sentence where the effective batch is no longer the requested one."""
    wanted = settings.effective_batch_size
    if spec.effective_batch_size == wanted:
        return None
    if not settings.preserve_effective_batch_size:
        return (
            f"the effective batch size is now {spec.effective_batch_size} instead of {wanted}: "
            "preserve_effective_batch_size is false"
        )
    return (
        f"no micro-batch from {settings.min_batch_size} to {spec.batch_size} divides the effective "
        f"batch size {wanted}; it is now {spec.effective_batch_size}"
    )
