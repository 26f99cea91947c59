"""Advice on a failure, in the order in which to try it. The launcher adds it to an attempt's
record. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace

from robust_train.compat import torch_cuda_version
from robust_train.config.schema import RobustConfig
from robust_train.gpu.inventory import read_inventory
from robust_train.model.attempt import Attempt
from robust_train.model.failure import Clue, Evidence, FailureKind

_SMALLER_BATCH = (
    "use a smaller training.batch_size: activations take memory for each sample",
    "use more training.gradient_accumulation_steps with it: the effective batch stays the same",
)
_DEFRAGMENT = (
    "set memory.expandable_segments=true: the allocator holds enough memory, in pieces too small"
)
_RAISE_LIMIT = (
    "set a larger memory.fraction: the GPU had room, but this job's own limit was reached"
)
_LEAVE_ROOM = (
    "set a smaller memory.fraction: CUDA's libraries and NCCL need memory beside torch's cache"
)
_OTHERS = "see with nvidia-smi who else holds memory of this GPU, or use another"
_PIN_LESS = "pin less: it is bounded by the host's memory and by ulimit -l"
_OF_THE_MODEL = (
    "set training.mixed_precision=true: activations take about half the memory",
    "set training.gradient_checkpointing=true: less memory for about a third more time",
    "try a smaller model.lora_r where the model is trained with LoRA",
)
_FEWER_WORKERS = "use fewer training.num_workers: each is a process with memory of its own"
_NO_WORKERS = "use fewer training.num_workers, 0 to load in the training process"
_LESS_AHEAD = "use a smaller training.prefetch_factor: fewer batches wait in memory"
_MORE_MEMORY = (
    "give the job more memory (the container's or the scheduler's limit counts, not the machine's)"
)
_MORE_SHARED_MEMORY = (
    "give the container more shared memory (docker run --shm-size=8g, or --ipc=host)"
)
_ON_THE_CPU = "or train on the CPU: device=cpu"
_THE_DEVICE_GIVEN = (
    "let the trainer use the device that it is given (cfg.device): it has no GPU here"
)
_LOWER_RATE = (
    "lower the learning rate, or let it be lowered: read cfg.training.lr, or put "
    "{learning_rate} into the command"
)
_NEEDS_WORKERS = (_FEWER_WORKERS, _NO_WORKERS, _LESS_AHEAD)
_FOR_A_SCRIPT = {
    _SMALLER_BATCH[0]: ("use a smaller --batch-size: activations take memory for each sample"),
    _SMALLER_BATCH[1]: (
        "accumulate gradients over more of them: the effective batch stays the same"
    ),
}
_WITHOUT_A_BATCH = {
    _SMALLER_BATCH[0]: (
        "give --batch-size N and write {batch_size} where the command has its batch size: then it "
        "is halved when memory runs out"
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
"""Replacements if the trainer is a script, or a user's trainer. An empty text removes the advice.
"""

_ADVICE: dict[FailureKind, tuple[str, ...]] = {
    FailureKind.DEVICE_OOM: (*_SMALLER_BATCH, *_OF_THE_MODEL, _OTHERS),
    FailureKind.HOST_OOM: (_FEWER_WORKERS, _LESS_AHEAD, *_SMALLER_BATCH, _MORE_MEMORY),
    FailureKind.WORKER_DEATH: (_NO_WORKERS, _LESS_AHEAD, _MORE_SHARED_MEMORY),
    FailureKind.DEVICE_FAULT: (
        "run once with CUDA_LAUNCH_BLOCKING=1: the traceback then names the kernel at fault",
        "if it happens on this GPU alone, check the GPU (nvidia-smi -q, dmesg for Xid)",
    ),
    FailureKind.DEVICE_UNAVAILABLE: (
        "check the driver and that the GPU is there: nvidia-smi",
        "check CUDA_VISIBLE_DEVICES: a wrong entry hides itself and all after it",
        "check that this torch was built for this GPU and driver: "
        "python -m torch.utils.collect_env",
        "see whether another process holds the GPU in exclusive mode",
    ),
    FailureKind.SETUP: (
        "install a torch that was built for the driver's CUDA or an older one "
        "(https://pytorch.org/get-started/locally), or a newer driver",
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
        "look for samples that are not finite, and for numbers too large for float16",
    ),
    FailureKind.COMM: (
        "try again: a peer went away or answered too late",
        "look at the first rank that failed; the others only report that it is gone",
        "run with NCCL_DEBUG=INFO if it happens again",
    ),
}

_BY_CLUE: dict[FailureKind, dict[str, tuple[str, ...]]] = {
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
            "set memory.expandable_segments=false: tensors of such segments are not shared between "
            "processes here",
        ),
    },
    FailureKind.DEVICE_UNAVAILABLE: {
        Clue.BUSY: (
            "see whether another process holds the GPU in exclusive mode: nvidia-smi",
            "where MPS is used: check that nvidia-cuda-mps-control runs as this user",
        )
    },
    FailureKind.SETUP: {
        Clue.GPU_MODEL: (
            "install a build with code for this model of GPU: a newer build for a newer GPU, "
            "an older build for an older GPU",
            _ON_THE_CPU,
        ),
        Clue.NO_CUDA_BUILD: (
            "install a build with the driver's CUDA or an older one "
            "(https://pytorch.org/get-started/locally)",
            _ON_THE_CPU,
        ),
    },
    FailureKind.COMM: {
        Clue.SHARED_MEMORY: (
            _MORE_SHARED_MEMORY,
            "or run with NCCL_SHM_DISABLE=1, which is slower; remove stale /dev/shm/nccl-* files",
        ),
        Clue.RATE_LIMIT: (
            "ask the server less often: "
            "download the files before the job, log less often, or log in",
        ),
        Clue.PORT: (
            "another process has the port: give each job one of its own with MASTER_PORT, or let a "
            "free one be chosen: torchrun --standalone, accelerate launch --main_process_port 0",
            "if no job has it, see who does: ss -ltnp",
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
    """Return short sentences, most promising first, none after bugs and interruptions."""
    by_clue = _BY_CLUE.get(kind, {})
    advice = list(by_clue.get(evidence.clue or "", _ADVICE.get(kind, ())))
    if kind is FailureKind.HOST_OOM and evidence.library == "pinned memory":
        advice.insert(0, _PIN_LESS)
    if kind is FailureKind.DEVICE_OOM:
        is_others = not evidence.own_limit and _is_others(evidence)
        if evidence.own_limit or is_others:
            advice.remove(_OTHERS)
        if evidence.own_limit:
            advice.insert(0, _RAISE_LIMIT)
        if evidence.fragmented:
            advice.insert(0, _DEFRAGMENT)
        if is_others:
            advice.insert(0, _OTHERS)
    return tuple(advice)


def cuda_versions(attempt: Attempt, config: RobustConfig) -> str:
    """Return the driver's CUDA and torch's if they are the reason of a failure, otherwise nothing.

    A script's torch may differ from the torch of this process.
    """
    if not attempt.cuda_cannot_work:
        return ""
    torchs = torch_cuda_version() if config.traits.shares_packages else None
    return read_inventory(processes=False).cuda_versions(torchs)


def with_advice(attempt: Attempt, config: RobustConfig, cuda_versions: str = "") -> Attempt:
    """Return the attempt with advice on its failure that its trainer can follow.

    Args:
        attempt: an attempt that has ended.
        config: the job's config. Only built-in trainers have the keys of a model, and always report
            their first step.
        cuda_versions: the driver's CUDA and torch's, if they matter.
    """
    failure = attempt.failure
    if failure is None:
        return attempt
    # The text to show instead of an advice, empty to leave the advice out.
    instead: dict[str, str] = {}
    traits = config.traits
    has_workers = traits.has_our_workers and attempt.spec.noted("num_workers", 0) > 0
    if not has_workers or failure.evidence.noted("no_workers", False):
        instead |= dict.fromkeys(_NEEDS_WORKERS, "")
    if config.theirs is not None:
        instead |= _IN_A_PROJECT
    if traits.is_program:
        instead |= _FOR_A_SCRIPT if attempt.spec.has_batch else _WITHOUT_A_BATCH
    if not config.is_built_in:
        instead |= _FOR_ANY_MODEL
    elif not attempt.has_begun:
        instead |= dict.fromkeys((*_SMALLER_BATCH, *_OF_THE_MODEL[:2]), "")
    advice: Iterable[str] = failure.advice
    if not failure.advice:
        advice = advice_for(failure.kind, failure.evidence)
    if failure.kind is FailureKind.SETUP:
        advice = itertools.chain([cuda_versions], advice)
        if not attempt.cuda_cannot_work:
            advice = [_THE_DEVICE_GIVEN]
    fitting = filter(None, (instead.get(sentence, sentence) for sentence in advice))
    return replace(attempt, failure=replace(failure, advice=tuple(fitting)))


def _is_others(evidence: Evidence) -> bool:
    """Return whether other processes hold more than was requested, and more than a context
    takes."""
    total = evidence.total_bytes
    free = evidence.free_bytes
    allocated = evidence.allocated_bytes
    if total is None or free is None or allocated is None:
        return False
    unused = evidence.reserved_unallocated_bytes or 0
    ours = allocated + unused
    return total - free - ours > max(evidence.requested_bytes or 0, total // 4)
