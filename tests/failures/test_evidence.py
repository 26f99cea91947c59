"""The figures of a failure, in bytes, and the advice that follows from them."""

from dataclasses import replace

import pytest

from attempts import KEYS_OF_A_PROJECT, built, policy
from robust_train.config.schema import TrainerConfig
from robust_train.config.words import Words
from robust_train.failures import classify_failure
from robust_train.failures.advice import advice_for, with_advice
from robust_train.model.attempt import Attempt
from robust_train.model.failure import Clue, Evidence, FailureKind
from robust_train.model.spec import AttemptSpec

KIB, MIB, GIB = 1024, 1024**2, 1024**3


def evidence_of(message, kind=RuntimeError):
    return classify_failure(kind(message)).evidence


TORCH_2 = (
    "CUDA out of memory. Tried to allocate 1.17 GiB. GPU 0 has a total {} of 23.69 GiB of which "
    "1.03 GiB is free. Including non-PyTorch memory, this process has 22.64 GiB memory in use. Of "
    "the allocated memory 20.86 GiB is allocated by PyTorch, and 1.47 GiB is reserved by PyTorch "
    "but unallocated."
)
OWN_LIMIT = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB of "
    "which 70.20 GiB is free. Including non-PyTorch memory, this process has 8.90 GiB memory in "
    "use. 8.00 GiB allowed; Of the allocated memory 7.90 GiB is allocated by PyTorch, and 12.00 "
    "MiB is reserved by PyTorch but unallocated."
)


PREEMPTED = (
    "CUDA out of memory. Allocation was preemptively rejected because it would exceed "
    "per_process_memory_fraction limit. Requested size: 2147483648"
)
# others left less than was asked for, and the limit would have refused it all the same
LEFT_BY_OTHERS = OWN_LIMIT.replace("70.20 GiB is free", "1.20 GiB is free")
MESSAGES = {
    "our own limit": (OWN_LIMIT, (2 * GIB, 7.9 * GIB, 12 * MIB, 70.2 * GIB, 79.15 * GIB)),
    "torch 1.0": (
        "CUDA out of memory. Tried to allocate 12.50 MiB (GPU 0; 10.92 GiB total capacity; "
        "8.57 MiB already allocated; 9.28 GiB free; 4.68 MiB cached)",
        (12.5 * MIB, 8.57 * MIB, 4.68 * MIB, 9.28 * GIB, 10.92 * GIB),
    ),
    "torch 1.12, reserved less allocated is unused": (
        "CUDA out of memory. Tried to allocate 64.00 MiB (GPU 0; 4.00 GiB total capacity; "
        "3.25 GiB already allocated; 0 bytes free; 3.50 GiB reserved in total by PyTorch) If "
        "reserved memory is >> allocated memory try setting max_split_size_mb",
        (64 * MIB, 3.25 * GIB, 0.25 * GIB, 0, 4 * GIB),
    ),
    **{
        f"torch 2, {spelling}": (
            TORCH_2.format(spelling),
            (1.17 * GIB, 20.86 * GIB, 1.47 * GIB, 1.03 * GIB, 23.69 * GIB),
        )
        for spelling in ("capacity", "capacty")
    },
    "private pools and other processes": (
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 2 has a total capacity of 44.52 GiB "
        "of which 1.37 GiB is free. Process 11 has 14.94 GiB memory in use. Of the allocated "
        "memory 42.08 GiB is allocated by PyTorch, with 510.00 MiB allocated in private pools "
        "(e.g., CUDA Graphs), and 402.93 MiB is reserved by PyTorch but unallocated.",
        (2 * GIB, 42.08 * GIB, 402.93 * MIB, 1.37 * GIB, 44.52 * GIB),
    ),
    **{
        f"{unused} unused of 1 GiB": (
            "CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacity of 8.00 GiB"
            " of which 1.00 MiB is free. Of the allocated memory 6.00 GiB is allocated by PyTorch, "
            f"and {unused} is reserved by PyTorch but unallocated.",
            (GIB, 6 * GIB, size, MIB, 8 * GIB),
        )
        for unused, size in (("1.00 GiB", GIB), ("1023.00 MiB", 1023 * MIB), ("0 bytes", 0))
    },
    "MPS": (
        "MPS backend out of memory (MPS allocated: 5.50 GB, other allocations: 14.76 GB, max "
        "allowed: 20.40 GB). Tried to allocate 147.24 MB on private pool.",
        (147.24 * MIB, 5.5 * GIB, None, None, 20.4 * GIB),
    ),
}


@pytest.mark.parametrize(("message", "figures"), MESSAGES.values(), ids=MESSAGES)
def test_reads_the_figures_of_a_message(message, figures):
    """Requested, allocated, reserved but unused, free, total."""
    evidence = evidence_of(message)
    assert (
        evidence.requested_bytes,
        evidence.allocated_bytes,
        evidence.reserved_unallocated_bytes,
        evidence.free_bytes,
        evidence.total_bytes,
    ) == tuple(None if figure is None else int(figure) for figure in figures)
    requested, _, unused, *_ = figures
    assert evidence.fragmented is (unused is not None and unused >= requested)
    assert evidence.library == ("torch" if message.startswith("CUDA") else evidence.library)


@pytest.mark.parametrize(
    ("message", "requested"),
    [
        (
            "DefaultCPUAllocator: can't allocate memory: you tried to allocate 1178729664 bytes. "
            "Error code 12 (Cannot allocate memory)",
            1178729664,
        ),
        ("Unable to allocate 7.28 TiB for an array with shape (10, 10)", int(7.28 * 1024 * GIB)),
        ("Unable to allocate 745. GiB for an array with shape (10, 10)", 745 * GIB),
        (
            "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 7406166528 bytes.",
            7406166528,
        ),
        (
            "Out of memory allocating 8,000,000,000 bytes (allocated so far: 4,096 bytes).",
            8 * 10**9,
        ),
        ("Failed to allocate memory for requested buffer of size 285081600", 285081600),
        ("XPU out of memory. Tried to allocate 512.00 KiB.", 512 * KIB),
        (PREEMPTED, 2 * GIB),
    ],
)
def test_every_librarys_requested_size_is_read(message, requested):
    """Each library says it in its own words."""
    assert evidence_of(message).requested_bytes == requested


def test_a_message_without_figures_has_none():
    assert evidence_of("CUDA error: out of memory") == Evidence(library="torch")


@pytest.mark.parametrize(
    ("message", "is_ours"),
    [
        (OWN_LIMIT, True),
        (LEFT_BY_OTHERS, True),
        (LEFT_BY_OTHERS.replace("8.00 GiB allowed", "9.95 GiB allowed"), False),
        (PREEMPTED, True),
        ("CUDA error: out of memory", False),
    ],
)
def test_more_free_than_requested_is_our_own_limit(message, is_ours):
    assert evidence_of(message).own_limit is is_ours
    assert evidence_of(OWN_LIMIT).allowed_bytes == 8 * GIB


@pytest.mark.parametrize(
    ("message", "clue"),
    [
        ("CUDA error: uncorrectable ECC error encountered", Clue.HARDWARE),
        ("NVRM: Xid (PCI:0000:02:00): 79, GPU has fallen off the bus.", Clue.HARDWARE),
        ("NVRM: Xid (PCI:0000:b3:00): 31, pid=4211, name=python, MMU Fault", None),
        ("CUDA error: an illegal memory access was encountered", None),
        ("CUDA error: misaligned address", None),
        ("CUDA error: unspecified launch failure", None),
        ("CUDA error: hardware stack error", None),
        ("CUDA error: CUBLAS_STATUS_INTERNAL_ERROR when calling `cublasSgemm`", None),
        ("CUDA driver error: unknown error", Clue.DRIVER),
        ("CUDA error: operation not supported", Clue.DRIVER),
        ("CUDA error: operation not supported on global/shared address space", None),
        ("CUDA error: CUDA-capable device(s) is/are busy or unavailable", Clue.BUSY),
        ("CUDA error: invalid device ordinal", None),
        ("Error while creating shared memory segment /dev/shm/nccl-a (size 9)", Clue.SHARED_MEMORY),
        ("504 Server Error: Gateway Time-out for url: https://huggingface.co", Clue.DOWNLOAD),
        ("Connection reset by peer", None),
        (
            "The server socket has failed to bind to [::]:29500 (errno: 98 - "
            "Address already in use).",
            Clue.PORT,
        ),
        (
            "Tried to launch distributed communication on port 29500, but another process is "
            "utilizing it. Please specify a different port",
            Clue.PORT,
        ),
    ],
)
def test_messages_yield_all_other_figures_too(message, clue):
    """The table has what else each message tells."""
    assert evidence_of(message).clue == clue


CROWDED = (
    "CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacity of 80.00 GiB of "
    "which 36.25 MiB is free. Process 7 has 60.00 GiB memory in use. Of the allocated memory 18.00 "
    "GiB is allocated by PyTorch, and 100.00 MiB is reserved by PyTorch but unallocated."
)


@pytest.mark.parametrize(
    ("message", "order", "never"),
    [
        (
            "CUDA out of memory",
            [
                "training.batch_size",
                "training.gradient_accumulation_steps",
                "training.mixed_precision",
                "training.gradient_checkpointing",
                "model.lora_r",
            ],
            "pin less",
        ),
        (
            "std::bad_alloc",
            ["training.num_workers", "training.prefetch_factor", "training.batch_size"],
            "GPU",
        ),
        (MESSAGES["1.00 GiB unused of 1 GiB"][0], ["memory.expandable_segments"], "pin less"),
        (CROWDED, ["which other processes"], "pin less"),
        (OWN_LIMIT, ["memory.fraction"], "other processes"),
        (
            "failed to alloc 34359738368 bytes on host: CUDA_ERROR_OUT_OF_MEMORY",
            ["pin less"],
            "GPU",
        ),
        (
            "Error while creating shared memory segment /dev/shm/nccl-a (size 9)",
            ["--shm-size"],
            "GPU",
        ),
        ("CUDA error: uncorrectable ECC error encountered", [], "CUDA_LAUNCH_BLOCKING"),
        ("CUDA error: misaligned address", ["CUDA_LAUNCH_BLOCKING"], "other processes"),
        # a bug, and an interruption
        ("no such key", [], ""),
        ("received SIGTERM", [], ""),
    ],
)
def test_advice_starts_with_what_costs_least(message, order, never):
    """All of it fits the evidence."""
    failure = classify_failure(RuntimeError(message))
    advice = advice_for(failure.kind, failure.evidence)
    places = [next(n for n, sentence in enumerate(advice) if words in sentence) for words in order]
    assert places == sorted(places)
    assert places[:1] in ([], [0])
    assert not any(never in sentence for sentence in advice)
    assert len(set(advice)) == len(advice)


def fitting(error, *, num_workers=2, end_step=3, **trainer):
    spec = built(AttemptSpec, (), 8, 1, num_workers=num_workers)
    attempt = Attempt(1, spec, failure=classify_failure(error), end_step=end_step)
    config = replace(policy(reports_start=True).config, **trainer)
    return "; ".join(
        Words(config.theirs).reword_attempt(with_advice(attempt, config)).failure.advice
    )


OOM = RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
OWN = {"trainer": TrainerConfig("own.train")}
SCRIPT = {"trainer": TrainerConfig(argv=("python",))}
PROJECT = {**OWN, "theirs": KEYS_OF_A_PROJECT}
WITHOUT_KEYS = {**OWN, "theirs": {}}


@pytest.mark.parametrize(
    ("error", "trainer", "has", "lacks"),
    [
        (MemoryError(), {}, "num_workers", "pin less"),
        (MemoryError(), {"num_workers": 0}, "", "num_workers"),
        (MemoryError(), SCRIPT, "", "num_workers"),
        (OOM, {}, "training.mixed_precision", "--batch-size"),
        (OOM, OWN, "training.batch_size", "training.mixed_precision"),
        (OOM, SCRIPT, "--batch-size", "training."),
        (OOM, PROJECT, "smaller data.batch_size", "training."),
        (OOM, WITHOUT_KEYS, "smaller batch size", "training."),
        (MemoryError(), PROJECT, "fewer data.num_workers", "prefetch_factor"),
        (RuntimeError("No space left on device"), PROJECT, "keep fewer checkpoints", "robust."),
        # before the first step
        (MemoryError(), {"end_step": None, "num_workers": 0}, "", "batch"),
    ],
)
def test_advice_names_what_a_trainer_has(error, trainer, has, lacks):
    advice = fitting(error, **trainer)
    assert has in advice
    assert lacks not in advice


@pytest.mark.parametrize(("free", "is_ours"), [("0 bytes", False), ("6.00 GiB", True)])
def test_the_asynchronous_allocators_limit_may_be_physical(free, is_ours):
    """It names a limit that may be the GPU's."""
    text = (
        "Allocation on device 0 would exceed allowed memory. (out of memory)\n"
        "Currently allocated     : 15.16 GiB\nRequested               : 512.00 MiB\n"
        f"Device limit            : 15.99 GiB\nFree (according to CUDA): {free}\n"
        "PyTorch limit (set by user-supplied memory fraction)\n"
        "                        : 17179869184.00 GiB"
    )
    failure = classify_failure(RuntimeError(text))
    assert failure.kind is FailureKind.DEVICE_OOM
    assert failure.evidence.requested_bytes == 512 * MIB
    assert failure.evidence.own_limit is is_ours
