"""Advice on a failure, for people, in the order in which to try it.

The launcher calls `with_advice` after each failed attempt. `advice_for` selects sentences by the
kind of the failure and its clue, and `with_advice` then adapts them to the trainer. For example, a
script has no key ``training.batch_size``. Everything but `describe_cuda_versions` is pure.
"""

from __future__ import annotations

from dataclasses import replace

from robust_train.compat import torch_cuda_version
from robust_train.config.schema import RobustConfig
from robust_train.gpu.inventory import read_inventory
from robust_train.model.attempt import Attempt
from robust_train.model.failure import Clue, Evidence, FailureKind

_SMALLER_BATCH = (
    "use a smaller training.batch_size: activations take memory for each sample",
    "raise training.gradient_accumulation_steps to match: the effective batch stays the same",
)
_DEFRAGMENT = (
    "set memory.expandable_segments=true: the allocator holds enough memory, but in small pieces"
)
_RAISE_LIMIT = (
    "set a larger memory.fraction: the GPU had free memory, but this job reached its own limit"
)
_LEAVE_ROOM = (
    "set a smaller memory.fraction: CUDA's libraries and NCCL need memory outside of torch's cache"
)
_OTHERS = "check with nvidia-smi which other processes hold memory of this GPU, or use another GPU"
_PIN_LESS = "pin less memory: the host's memory and ulimit -l limit it"
_OF_THE_MODEL = (
    "set training.mixed_precision=true: activations take about half the memory",
    "set training.gradient_checkpointing=true: less memory for about a third more time",
    "try a smaller model.lora_r if the model is trained with LoRA",
)
_FEWER_WORKERS = "use fewer training.num_workers: each worker is a process with its own memory"
_NO_WORKERS = "use fewer training.num_workers, or 0 to load data in the training process"
_LESS_AHEAD = "use a smaller training.prefetch_factor: then fewer batches wait in memory"
_MORE_MEMORY = (
    "give the job more memory (the container's or the scheduler's limit counts, not the machine's)"
)
_MORE_SHARED_MEMORY = (
    "give the container more shared memory (docker run --shm-size=8g, or --ipc=host)"
)
_ON_THE_CPU = "or train on the CPU: device=cpu"
_THE_DEVICE_GIVEN = "make the trainer use cfg.device: it has no GPU here"
_LOWER_RATE = (
    "lower the learning rate, or let robust-train lower it: read cfg.training.lr, or put "
    "{learning_rate} into the command"
)
_NEEDS_WORKERS = (_FEWER_WORKERS, _NO_WORKERS, _LESS_AHEAD)

# Replacements if the trainer is a script or a user's trainer. An empty text removes the advice.
_FOR_A_SCRIPT = {
    _SMALLER_BATCH[0]: ("use a smaller --batch-size: activations take memory for each sample"),
    _SMALLER_BATCH[1]: (
        "accumulate gradients over more batches: the effective batch stays the same"
    ),
}
_WITHOUT_A_BATCH = {
    _SMALLER_BATCH[0]: (
        "give --batch-size N and write {batch_size} for the batch size in the command: then it is "
        "halved when memory runs out"
    ),
    _SMALLER_BATCH[1]: "",
}
_IN_A_PROJECT = {_LESS_AHEAD: "", _LOWER_RATE: "lower the learning rate"}
_FOR_ANY_MODEL = {
    _OF_THE_MODEL[0]: (
        "train with mixed precision or gradient checkpointing: activations take less memory"
    ),
    **dict.fromkeys(_OF_THE_MODEL[1:], ""),
}

# The advice for each kind of failure. If advice for the clue exists, it is used instead.
_ADVICE: dict[FailureKind, tuple[str, ...]] = {
    FailureKind.DEVICE_OOM: (*_SMALLER_BATCH, *_OF_THE_MODEL, _OTHERS),
    FailureKind.HOST_OOM: (_FEWER_WORKERS, _LESS_AHEAD, *_SMALLER_BATCH, _MORE_MEMORY),
    FailureKind.WORKER_DEATH: (_NO_WORKERS, _LESS_AHEAD, _MORE_SHARED_MEMORY),
    FailureKind.DEVICE_FAULT: (
        "run once with CUDA_LAUNCH_BLOCKING=1: then the traceback names the kernel at fault",
        "if it happens on this GPU alone, check the GPU (nvidia-smi -q, dmesg for Xid)",
    ),
    FailureKind.DEVICE_UNAVAILABLE: (
        "check that nvidia-smi works and lists the GPU",
        "check CUDA_VISIBLE_DEVICES: a wrong entry hides all entries after it too",
        "check that this torch was built for this GPU and driver: "
        "python -m torch.utils.collect_env",
        "check whether another process holds the GPU in exclusive mode",
    ),
    FailureKind.SETUP: (
        "install a torch that was built for the driver's CUDA version or an older one "
        "(https://pytorch.org/get-started/locally), or install a newer driver",
        "in a container, ask for NVIDIA_DRIVER_CAPABILITIES=compute,utility",
        _ON_THE_CPU,
    ),
    FailureKind.DISK_FULL: (
        "free space on the disk that the trainer writes to, or ask for a larger quota",
        "keep fewer checkpoints",
    ),
    FailureKind.DIVERGED: (
        _LOWER_RATE,
        "clip gradients: run.step(optimizer, max_grad_norm=1.0)",
        "look for samples with values that are not finite, or too large for float16",
    ),
    FailureKind.COMM: (
        "try again: a peer disconnected or answered too late",
        "look at the first rank that failed: the other ranks only report that they lost it",
        "run with NCCL_DEBUG=INFO if it happens again",
    ),
}

_ADVICE_BY_CLUE: dict[FailureKind, dict[str, tuple[str, ...]]] = {
    FailureKind.DEVICE_FAULT: {
        Clue.HARDWARE: (
            "check this GPU: its hardware reported a fault (nvidia-smi -q, dmesg for Xid)",
            "robust-train doctor shows whether it is healthy again; "
            "a reset or reboot may be needed",
        ),
        Clue.DRIVER: (
            "set memory.expandable_segments=false: WSL2 and some vGPUs do not support them",
            "update the NVIDIA driver",
        ),
        Clue.SEGMENTS: (
            "set memory.expandable_segments=false: here, processes cannot share tensors in such "
            "segments",
        ),
    },
    FailureKind.DEVICE_UNAVAILABLE: {
        Clue.BUSY: (
            "check whether another process holds the GPU in exclusive mode: nvidia-smi",
            "with MPS, check that nvidia-cuda-mps-control runs as this user",
        )
    },
    FailureKind.SETUP: {
        Clue.GPU_MODEL: (
            "install a torch with code for this GPU model: a newer torch for a newer GPU, an older "
            "torch for an older GPU",
            _ON_THE_CPU,
        ),
        Clue.NO_CUDA_BUILD: (
            "install a torch that was built for the driver's CUDA version or an older one "
            "(https://pytorch.org/get-started/locally)",
            _ON_THE_CPU,
        ),
    },
    FailureKind.COMM: {
        Clue.SHARED_MEMORY: (
            _MORE_SHARED_MEMORY,
            "remove stale /dev/shm/nccl-* files, or run with NCCL_SHM_DISABLE=1, which is slower",
        ),
        Clue.RATE_LIMIT: (
            "send fewer requests to the server: download the files before the job, log less often, "
            "or log in",
        ),
        Clue.PORT: (
            "another process has the port: give each job its own MASTER_PORT, or let the launcher "
            "choose a free port: torchrun --standalone, accelerate launch --main_process_port 0",
            "if no job has the port, find the process that has it: ss -ltnp",
        ),
        Clue.DOWNLOAD: (
            "try again: the server did not answer in time",
            "download the files before the job, and run it with HF_HUB_OFFLINE=1",
        ),
    },
    FailureKind.HOST_OOM: {Clue.IMPORT: (_MORE_MEMORY,), Clue.MODEL: (_MORE_MEMORY,)},
    FailureKind.DEVICE_OOM: {
        Clue.MODEL: (*_OF_THE_MODEL[2:], "use a smaller model", _OTHERS),
        Clue.OUTSIDE: (_LEAVE_ROOM, *_SMALLER_BATCH, *_OF_THE_MODEL, _OTHERS),
    },
}


def advice_for(kind: FailureKind, evidence: Evidence) -> tuple[str, ...]:
    """Return short sentences, the most promising first. Empty for bugs and interruptions."""
    by_clue = _ADVICE_BY_CLUE.get(kind, {})
    advice = list(by_clue.get(evidence.clue or "", _ADVICE.get(kind, ())))
    if kind is FailureKind.HOST_OOM and evidence.library == "pinned memory":
        advice.insert(0, _PIN_LESS)
    if kind is FailureKind.DEVICE_OOM:
        is_crowded = not evidence.own_limit and _is_held_by_others(evidence)
        if evidence.own_limit or is_crowded:
            advice.remove(_OTHERS)
        if evidence.own_limit:
            advice.insert(0, _RAISE_LIMIT)
        if evidence.fragmented:
            advice.insert(0, _DEFRAGMENT)
        if is_crowded:
            advice.insert(0, _OTHERS)
    return tuple(advice)


def _is_held_by_others(evidence: Evidence) -> bool:
    """Return whether other processes hold more memory than was requested, and more than a CUDA
    context takes."""
    total = evidence.total_bytes
    free = evidence.free_bytes
    allocated = evidence.allocated_bytes
    if total is None or free is None or allocated is None:
        return False
    unused = evidence.reserved_unallocated_bytes or 0
    ours = allocated + unused
    return total - free - ours > max(evidence.requested_bytes or 0, total // 4)


def describe_cuda_versions(attempt: Attempt, config: RobustConfig) -> str:
    """Return the CUDA versions of the driver and of torch if they explain the failure, otherwise
    an empty text."""
    if not attempt.cuda_cannot_work:
        return ""
    torch_version = None
    # A script may use another torch than this process.
    if config.traits.shares_packages:
        torch_version = torch_cuda_version()
    return read_inventory(processes=False).cuda_versions(torch_version)


def with_advice(attempt: Attempt, config: RobustConfig, cuda_versions: str = "") -> Attempt:
    """Return the attempt with advice on its failure that its trainer can follow.

    Args:
        attempt: an attempt that has ended.
        config: the job's config.
        cuda_versions: the text of `describe_cuda_versions`.
    """
    failure = attempt.failure
    if failure is None:
        return attempt
    advice = failure.advice
    if not advice:
        advice = advice_for(failure.kind, failure.evidence)
    if failure.kind is FailureKind.SETUP:
        advice = (cuda_versions, *advice)
        if not attempt.cuda_cannot_work:
            advice = (_THE_DEVICE_GIVEN,)
    replacements = _replacements(attempt, config, failure.evidence)
    adapted = [replacements.get(sentence, sentence) for sentence in advice]
    kept = tuple(sentence for sentence in adapted if sentence)
    return replace(attempt, failure=replace(failure, advice=kept))


def _replacements(attempt: Attempt, config: RobustConfig, evidence: Evidence) -> dict[str, str]:
    """Return a text for each sentence that does not fit the trainer, empty to leave it out."""
    replacements: dict[str, str] = {}
    traits = config.traits
    has_workers = traits.has_our_workers and attempt.spec.noted("num_workers", 0) > 0
    if not has_workers or evidence.noted("no_workers", False):
        replacements |= dict.fromkeys(_NEEDS_WORKERS, "")
    if config.theirs is not None:
        replacements |= _IN_A_PROJECT
    if traits.is_program:
        replacements |= _FOR_A_SCRIPT if attempt.spec.has_batch else _WITHOUT_A_BATCH
    if not config.is_built_in:
        # Only built-in trainers have the ``model`` keys that the advice names.
        replacements |= _FOR_ANY_MODEL
    elif not attempt.has_begun:
        # Built-in trainers report their first step, so activations took no memory yet.
        replacements |= dict.fromkeys((*_SMALLER_BATCH, *_OF_THE_MODEL[:2]), "")
    return replacements
