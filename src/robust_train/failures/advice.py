"""What may help, in the order in which to try it."""

from __future__ import annotations

from robust_train.values import Evidence, FailureKind

_SMALLER_BATCH = (
    "use a smaller training.batch_size: activations take memory for each sample",
    "use more training.gradient_accumulation_steps with it: the effective batch stays the same",
)
_SMALLER_RANK = "try a smaller model.lora_r where the model is trained with LoRA"
_DEFRAGMENT = (
    "set memory.expandable_segments=true: the allocator holds enough memory, in pieces too small"
)
_OTHERS = "see with nvidia-smi who else holds memory of this GPU, or use another"
_DEVICE_OOM = (
    *_SMALLER_BATCH,
    "set training.mixed_precision=true: activations take about half the memory",
    "set training.gradient_checkpointing=true: less memory for about a third more time",
    _SMALLER_RANK,
    _OTHERS,
)
_HOST_OOM = (
    "use fewer training.num_workers: each is a process with memory of its own",
    "use a smaller training.prefetch_factor: fewer batches wait in memory",
    *_SMALLER_BATCH,
    "give the job more memory (the container's or the scheduler's limit counts, not the machine's)",
)
_PINNED = (
    "pin less: pinned memory is bounded by the host's memory and by ulimit -l",
    *_HOST_OOM,
)
_WORKER_DEATH = (
    "use fewer training.num_workers, 0 to load in the training process",
    "use a smaller training.prefetch_factor: fewer batches wait in shared memory",
    "give the container more shared memory (docker run --shm-size=8g, or --ipc=host)",
)
_DEVICE_FAULT = (
    "run on another GPU: this one reported a fault and needs a look (nvidia-smi -q, dmesg for Xid)",
    "run once with CUDA_LAUNCH_BLOCKING=1 if it also happens there: a kernel is then at fault",
)
_DEVICE_UNAVAILABLE = (
    "check the driver and that the GPU is there: nvidia-smi",
    "check CUDA_VISIBLE_DEVICES: a wrong entry hides itself and all after it",
    "check that this torch was built for this GPU and driver: python -m torch.utils.collect_env",
    "see whether another process holds the GPU in exclusive mode",
)
_COMM = (
    "try again: a peer went away or answered too late",
    "look at the first rank that failed; the others only report that it is gone",
    "run with NCCL_DEBUG=INFO if it happens again",
)

_ADVICE: dict[FailureKind, tuple[str, ...]] = {
    FailureKind.DEVICE_OOM: _DEVICE_OOM,
    FailureKind.HOST_OOM: _HOST_OOM,
    FailureKind.WORKER_DEATH: _WORKER_DEATH,
    FailureKind.DEVICE_FAULT: _DEVICE_FAULT,
    FailureKind.DEVICE_UNAVAILABLE: _DEVICE_UNAVAILABLE,
    FailureKind.COMM: _COMM,
}


def advice_for(kind: FailureKind, evidence: Evidence) -> tuple[str, ...]:
    """Short sentences that fit the case, most promising first; none for bugs and interruptions."""
    advice = _ADVICE.get(kind, ())
    if kind is FailureKind.DEVICE_OOM:
        if evidence.fragmented:
            advice = (_DEFRAGMENT, *advice)
        if _is_others(evidence):
            advice = (_OTHERS, *(sentence for sentence in advice if sentence != _OTHERS))
        return advice
    if kind is FailureKind.HOST_OOM and evidence.library == "pinned memory":
        return _PINNED
    return advice


def _is_others(evidence: Evidence) -> bool:
    """More is held beside this process's allocator than it asked for, and than a context takes."""
    e = evidence
    if e.total_bytes is None or e.free_bytes is None or e.allocated_bytes is None:
        return False
    others = e.total_bytes - e.free_bytes - e.allocated_bytes - (e.reserved_unallocated_bytes or 0)
    return others > max(e.requested_bytes or 0, e.total_bytes // 4)
