"""What only sounds like memory, and what memory's lack does to worker processes: before memory."""

from __future__ import annotations

from robust_train.failures.patterns import Pattern, types_named, words
from robust_train.values import Clue

# fmt: off
BEFORE_MEMORY: tuple[Pattern, ...] = (
    # --- asked to stop ---
    types_named("interrupted", None,
        "KeyboardInterrupt CancelledError SignalException TaskCancelledError SIGTERMException"),
    # --- a program with an error in it, whatever its message ---
    types_named("bug", None, "OutOfResources"),  # Triton: a tile too big for the chip
    # --- NCCL's segments in /dev/shm: before bugs and workers, whose words it uses ---
    words("comm", "nccl",
        r"NCCL.{0,600}(?:/dev/shm/nccl-|shared memory segment)|/dev/shm/nccl-|\bnccl-shm-\w+",
        r"NCCL WARN Call to posix_fallocate failed", clue=Clue.SHARED_MEMORY),
    # --- sounds like memory and is a bug ---
    words("bug", "triton",
        # on-chip memory of one multiprocessor: the same at every batch size
        r"out of resources?: (?:shared memory|threads|registers|tensor memory|barriers)",
        r"out of memory in memory space (?:vmem|smem|sflag)"),
    words("bug", "cuda",
        # nearly always a label or an index out of range; the process is poisoned
        r"device-side assert",
        r"cudaErrorAssert|CUDA_ERROR_ASSERT|hipErrorAssert",
        r"Assertion `[^`']+['`] failed",
        # fork after CUDA was started, in the data loader mostly
        r"Cannot re-initialize CUDA in forked subprocess",
        r"DataLoader worker process \d+.*initialization error"),
    words("bug", "torch",
        # a size that was computed wrongly, not one that is too big
        r"called with negative number",
        r"calculation overflowed|multiplication overflow",
        r"invalid memory size -- maybe an overflow",
        r"negative dimension",
        r"more than 1 ?EB\b|\d ?E(?:i?B)?\b for an array with shape"),
    words("bug", None, r"in static TLS block"),  # glibc's loader, an order of imports
    words("bug", "nccl",
        # the two that NCCL's own documentation calls errors of the program
        r"ncclInvalidUsage|ncclInvalidArgument|Duplicate GPU detected",
        r"NCCL.{0,200}invalid (?:usage|argument)",
        r"Detected mismatch between collectives",
        r"op\.preamble\.length <= op\.nbytes"),  # gloo: tensors of different sizes
    words("bug", "grpc",
        # gRPC and web services: the status of a message too long or of a quota
        r"(?:Received|Sent) message larger than max",
        r"RESOURCE[_ ]?EXHAUSTED.*\b(?:quota|rate limit|requests per|tokens per|429)\b"),
    # --- data-loader and pool workers ---
    words("worker_death", "torch",
        r"DataLoader workers? \(pids?(?:\(s\))? [^)]*\) (?:is killed by|exited unexpectedly)",
        r"DataLoader (?:worker|process).{0,200} is killed by signal",  # Paddle
        # each batch from a worker is an open file here: fewer workers need fewer
        r"unable to open shared memory object",
        # on Windows; these numbers are a paging file too small
        r"Couldn't open shared (?:file mapping|event)(?!.*<(?:8|1450|1455)>)",
        r"Communication with the workers is no longer possible|received 0 items of ancdata",
        r"unable to (?:write to|resize) file <?/?torch_",
        r"insufficient shared memory",
        r"workers are out of shared memory",
        r"unable to (?:allocate|resize) shared memory.{0,80}(?:No space left|Success)",
        r"unable to allocate shared memory ?\(shm\)",
        r"/dev/shm.{0,200}No space left on device|No space left on device.{0,80}/dev/shm",
        r"(?:shm_open|shared memory|SharedMemory|shm).{0,60}No space left on device",
        r"No space left on device: '/?(?:psm|torch|pym|mp|sem)[-_]",
        r"DataLoader timed out after|Pin memory thread exited unexpectedly",
        r"Too many open files: '/?(?:dev/shm|tmp/pymp|torch_)"),
    words("worker_death", "multiprocessing",
        r"process in the process pool was terminated abruptly",
        r"child process terminated abruptly",
        r"worker process managed by the executor was unexpectedly terminated",
        r"(?:background|DataLoader) workers? (?:are|is) no longer alive",  # batchgenerators
        r"background workers? died",
        r"subprocesses has abruptly died",  # datasets
        r"background workers? .{0,20}6 feet under",
        r"DataLoader \d+ workers? exit unexpectedly",  # Paddle
        r"Worker process (?:died|crashed) unexpectedly|worker died unexpectedly"),
    words("bug", None, r"Disk quota exceeded|Too many open files"),
    words("bug", "multiprocessing", r"failed to un-?serialize"),  # loky: an object it cannot pickle
    types_named("worker_death", "multiprocessing",
        "BrokenProcessPool TerminatedWorkerError WorkerLostError KilledWorker "
        "WorkerCrashedError ActorDiedError RayActorError"),
)
# fmt: on
