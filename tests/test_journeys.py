"""Journeys of the policy: after each failure, what is decided for the next attempt.

A row is a :func:`journey`: its name, the GPUs, its steps, and keys of the config. A step is
``after(oom(step=3)).expect("halve_batch", 32, 2)``: an attempt failed like this, and the next has
micro-batch 32 and accumulates 2 of them. The next attempt then uses what was decided. A row that
fails names the line of its step.

GPUs (number, GiB of free memory):
    free: the job could have it. unusable: it reports an error.
    left: the job had it for its last attempt. others: other jobs have it.

Failures: a function each, with signs (``fault("hardware")``) and figures, memory in GiB:
    Signs are the values of ``Clue``, and
    fragmented: 3 GiB are reserved and unused. cudnn, kernel: whose internal error it is.
    own_limit: the limit is ours. no_figure: it is not known how much was requested.
    no_workers, needs_workers: of the data loader. began: the first step was reached.
    has_checkpoint, reads_lr: of the trainer. kept: its batch must not be split.
    step, start, saved: where the attempt ended, started and last saved. saves: how often.
    file, resumed: the checkpoint saved last, and the one resumed from.
    at: the micro-batch to which it came down. taken: what other processes took.
    requested, free, used: of the allocator. place: the line of the program that failed.
    printed, raised, exit: the output, the exception and the exit code of a script.
    workers, workers_hold_most: of the data loader. rank: which one failed.

Expectations: the action, micro-batch, accumulation and ranks, and any of
    device: as in the log. workers, pause, learning_rate (a factor), checkpointing.
    room_gib, counts, exclude: what is waited for. otherwise: what is done if that is in vain.
    reason: words of the reason or of the warning.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from attempts import built, decided, failed, gpu, policy
from robust_train.model.failure import Clue, Evidence, FailureKind
from robust_train.model.gpu import GpuInfo
from robust_train.model.spec import GiveUp, RetryRule
from robust_train.policy.decide import first_attempt
from robust_train.readable import GIB

CLUES = {value for name, value in vars(Clue).items() if name.isupper()}
LIBRARIES = ("cudnn", "kernel")
OF_EVIDENCE = ("own_limit", "no_workers", "has_checkpoint", "reads_lr")
MEMORY = {"requested": "requested_bytes", "free": "free_bytes", "used": "allocated_bytes"}
FIELDS = {
    "step": "end_step",
    "start": "start_step",
    "at": "micro_batch",
    "exit": "exit_code",
    "file": "checkpoint",
    "resumed": "resumed_from",
    "saved": "saved_step",
    "saves": "saves",
    "rank": "rank",
}


@dataclass(frozen=True)
class Failed:
    """A failure as a row describes it."""

    kind: FailureKind
    signs: tuple[str, ...]
    figures: dict[str, Any]

    def __str__(self):
        words = ", ".join(filter(None, (*map(repr, self.signs), words_of(self.figures))))
        return f"{self.kind.value}({words})"


def words_of(figures):
    return ", ".join(f"{name}={value!r}" for name, value in figures.items())


def failures_of(kind):
    def failure(*signs, **figures):
        return Failed(kind, signs, figures)

    return failure


oom = failures_of(FailureKind.DEVICE_OOM)
host = failures_of(FailureKind.HOST_OOM)
worker = failures_of(FailureKind.WORKER_DEATH)
fault = failures_of(FailureKind.DEVICE_FAULT)
unavailable = failures_of(FailureKind.DEVICE_UNAVAILABLE)
setup = failures_of(FailureKind.SETUP)
disk = failures_of(FailureKind.DISK_FULL)
comm = failures_of(FailureKind.COMM)
diverged = failures_of(FailureKind.DIVERGED)
stopped = failures_of(FailureKind.INTERRUPTED)
bug = failures_of(FailureKind.BUG)


@dataclass(frozen=True)
class Offer:
    """A GPU, and whose it is: free, left, or of others."""

    gpu: GpuInfo
    whose: str


def free(index, free_gib):
    return Offer(gpu(index, free_gib), "free")


def unusable(index, free_gib):
    return Offer(gpu(index, free_gib, "a memory row failed"), "free")


def left(index, free_gib):
    return Offer(gpu(index, free_gib), "left")


def others(index, free_gib):
    return Offer(gpu(index, free_gib), "others")


@dataclass(frozen=True)
class Step:
    """A failure, what is expected after it, and the line that says so."""

    failure: Failed
    line: int
    expected: dict[str, Any] = field(default_factory=dict)
    reason: str = ""

    def expect(self, action, batch=None, accumulation=None, ranks=None, *, reason="", **expected):
        sizes = {"batch": batch, "accumulation": accumulation, "ranks": ranks}
        given = {name: size for name, size in sizes.items() if size is not None}
        return Step(self.failure, self.line, {"action": action, **given, **expected}, reason)

    def check(self, decision):
        """Assert that a decision is as expected, and name the line of this step otherwise."""
        facts = facts_of(decision)
        actual = {name: facts.get(name) for name in self.expected}
        outcome = f"{decision.action}, {decision.reason}"
        here = f"{Path(__file__).name}:{self.line}: after {self.failure}: {outcome}"
        assert actual == self.expected, here
        assert self.reason in facts["reason"], here


def after(failure):
    return Step(failure, sys._getframe(1).f_lineno)


def journey(name, gpus, *steps, **settings):
    return pytest.param(gpus, steps, settings, id=name)


def rules(*given):
    return {"rules": given, "min_batch_size": 16}


NO_CPU = {"allow_cpu_fallback": False}
ONE_SIZE = {"min_batch_size": 64}
LEAK = {**ONE_SIZE, **NO_CPU, "num_workers": 0}
TWO = {"num_gpus": 2, "batch_size": 8, "min_batch_size": 4}
FOUR = {"num_gpus": 4, "batch_size": 24, "min_batch_size": 4}
ACCUMULATED = {"gradient_accumulation_steps": 2}
CHANGED = {"batch_size": 8, "min_batch_size": 4, "preserve_effective_batch_size": False}
TWICE = rules(RetryRule("retry", message="bug mess", times=2))
THREE_RULES = rules(
    RetryRule("retry", message="bug", times=2),
    RetryRule("smaller_batch", message="bug", times=1),
    RetryRule("retry", exit_code=7, times=1),
)
SMALLER = rules(RetryRule("smaller_batch", exit_code=9), RetryRule("retry", message="bug"))
BLAMED = rules(RetryRule("exclude_gpu", message="bug", times=1))


def weeks_of_progress(failure):
    """Return the steps of a job that fails once a week, and after eight weeks gets no further."""
    weeks = [
        after(failure(start=start, step=start + 100, saved=start + 100)).expect("retry", 64, 1)
        for start in range(0, 800, 100)
    ]
    return [*weeks, after(failure(start=800, step=800)).expect("give_up")]


def tries_renewed(failure, *signs, **further):
    """Return the steps of a job that gets further once, and then has all its tries again."""
    same = after(failure(*signs, step=9))
    return [
        after(failure(*signs, step=5, saved=3, file="last.pt")).expect("retry"),
        same.expect("retry"),
        same.expect("retry"),
        after(failure(*signs, step=9, **further)).expect("retry"),
        same.expect("retry"),
        same.expect("retry"),
        same.expect("give_up"),
    ]


JOURNEYS = [
    # memory of the GPU
    journey(
        "halves, then a larger GPU, then the CPU",
        [free(0, 10), free(1, 20)],
        after(oom()).expect("halve_batch", 32, 2, device="cuda:0"),
        after(oom()).expect("halve_batch", 16, 4),
        after(oom()).expect("halve_batch", 8, 8),
        after(oom()).expect("switch_gpu", 16, 4, device="cuda:1"),
        after(oom()).expect("halve_batch", 8, 8, device="cuda:1"),
        after(oom()).expect("cpu_fallback", 64, 1, device="cpu"),
        num_workers=0,
    ),
    journey(
        "a batch that no smaller size divides",
        [free(0, 1)],
        after(oom()).expect("halve_batch", 3, 3, reason="effective batch size 7"),
        batch_size=7,
        min_batch_size=2,
    ),
    journey(
        "an effective batch that need not be preserved",
        [free(0, 1)],
        after(oom()).expect("halve_batch", 4, 1, reason="preserve_effective_batch_size is false"),
        **CHANGED,
    ),
    journey(
        "one GPU alike is a second opinion",
        [free(0, 10), free(1, 9.5), free(2, 9.5), free(3, 5)],
        after(oom()).expect("halve_batch"),
        after(oom()).expect("switch_gpu", 32, 2, device="cuda:1"),
        after(oom()).expect("cpu_fallback"),
        max_retries=1,
    ),
    journey(
        "a second opinion that gets further proves nothing",
        [free(0, 10), free(1, 10), free(2, 10)],
        after(oom()).expect("switch_gpu", device="cuda:1"),
        after(oom(step=900)).expect("switch_gpu", device="cuda:2"),
        **ONE_SIZE,
    ),
    journey(
        "not below the required memory",
        [free(0, 10), free(1, 20)],
        after(oom()).expect("cpu_fallback"),
        **ONE_SIZE,
        min_gpu_memory_mb=30720,
    ),
    journey(
        "the user's own GPU is not left",
        [free(0, 10), free(1, 20)],
        after(oom()).expect("cpu_fallback"),
        **ONE_SIZE,
        auto_device=False,
    ),
    journey(
        "no CPU",
        [free(0, 10)],
        after(oom()).expect("halve_batch"),
        after(oom()).expect(
            "give_up", reason="cuda:0 at micro-batch 64, 32 (allow_cpu_fallback is"
        ),
        **NO_CPU,
        max_retries=1,
    ),
    journey(
        "nothing fits before the first step",
        [free(0, 20)],
        after(oom()).expect("give_up", reason="model, optimizer and data do not fit"),
        **NO_CPU,
        reports_start=True,
    ),
    journey(
        "fragmentation, once",
        [free(0, 20)],
        after(oom("fragmented")).expect(
            "expandable_segments", 64, 1, reason="3072 MiB reserved but unused"
        ),
        after(oom("fragmented")).expect("halve_batch"),
        expandable_segments=False,
    ),
    journey(
        "the user's setting of segments stays",
        [free(0, 20)],
        after(oom("fragmented")).expect("halve_batch"),
        expandable_segments=False,
        may_use_expandable_segments=False,
    ),
    journey(
        "others took it: where there is room",
        [left(0, 20), free(1, 30), free(0, 14)],
        after(oom(taken=6)).expect(
            "switch_gpu", 64, 1, device="cuda:1", reason="other processes took 6144 MiB"
        ),
    ),
    journey(
        "others took it: wait",
        [left(0, 20), free(1, 14), free(0, 14)],
        after(oom(taken=6)).expect(
            "wait", 64, 1, device="cuda:0", room_gib=15, otherwise="halve_batch"
        ),
    ),
    journey(
        "others took it: no waiting",
        [left(0, 20), free(0, 14)],
        after(oom(taken=6)).expect("halve_batch"),
        wait_for_gpu=False,
    ),
    journey(
        "others take it again and again",
        [free(0, 20)],
        after(oom(taken=6)).expect("wait"),
        after(oom(taken=6)).expect("wait"),
        after(oom(taken=6)).expect("wait"),
        after(oom(taken=6)).expect("halve_batch"),
    ),
    journey(
        "others take it again after progress",
        [free(0, 20)],
        after(oom(taken=5)).expect("wait"),
        after(oom(taken=5, saved=8)).expect("wait"),
        after(oom(taken=5)).expect("halve_batch"),
        max_retries=1,
    ),
    journey(
        "a GPU that others filled proves nothing",
        [left(0, 20), free(1, 20), free(2, 20)],
        after(oom(step=100, taken=6)).expect("switch_gpu", device="cuda:1"),
        after(oom(step=100)).expect("halve_batch"),
    ),
    journey(
        "others took it: the attempt's use is enough",
        [left(0, 20), free(0, 14)],
        after(oom(taken=6, requested=3, free=2)).expect("wait", room_gib=15),
    ),
    journey(
        "unknown size: a little taken is no reason",
        [free(0, 20)],
        after(oom("no_figure", taken=6)).expect("halve_batch"),
    ),
    journey(
        "unknown size: a tenth of the GPU is",
        [left(0, 20), free(0, 10)],
        after(oom("no_figure", taken=10)).expect("wait", room_gib=10),
    ),
    journey(
        "too big anyhow",
        [free(0, 20)],
        after(oom(taken=6, requested=9, free=1)).expect("halve_batch"),
    ),
    journey(
        "our own limit",
        [left(0, 20), free(1, 30)],
        after(oom("own_limit", taken=6)).expect("halve_batch", reason="limit (memory.fraction)"),
    ),
    journey(
        "where the trainer had come down to",
        [free(0, 20)],
        after(oom(at=16)).expect("halve_batch", 8, 8),
    ),
    journey(
        "at the bottom in the step",
        [free(0, 20), free(1, 40)],
        after(oom(at=8)).expect("switch_gpu", device="cuda:1"),
    ),
    journey(
        "a model that does not fit",
        [free(0, 20), free(1, 40)],
        after(oom("model")).expect("switch_gpu", 64, 1),
    ),
    journey(
        "no first step",
        [free(0, 20), free(1, 40)],
        after(oom()).expect("switch_gpu", 64, 1),
        reports_start=True,
    ),
    journey(
        "no first step, as an earlier attempt shows",
        [free(0, 20), free(1, 40)],
        after(comm("began", step=40)).expect("retry"),
        after(oom()).expect("switch_gpu", 64, 1),
    ),
    journey(
        "a first step", [free(0, 20)], after(oom("began")).expect("halve_batch"), reports_start=True
    ),
    journey(
        "max_retries again after progress",
        [left(0, 20)],
        after(oom(step=4)).expect("halve_batch", 32, 2),
        after(oom(step=9, saved=8)).expect("halve_batch", 16, 4),
        max_retries=1,
    ),
    journey(
        "a batch whose size may change nothing",
        [free(0, 20)],
        after(oom(requested=900, used=0, place=3)).expect("halve_batch", 32, 2),
        after(oom(requested=900, used=0, place=3)).expect("halve_batch", 16, 4),
    ),
    journey(
        "all sizes on the largest GPU before the CPU",
        [free(0, 20), free(1, 40)],
        after(oom()).expect("halve_batch", 64, 2),
        after(oom()).expect("halve_batch", 32, 4),
        after(oom()).expect("halve_batch", 16, 8),
        after(oom()).expect("switch_gpu", 32, 4, device="cuda:1"),
        after(oom()).expect("halve_batch", 16, 8),
        after(oom()).expect("halve_batch", 8, 16, device="cuda:1"),
        after(oom()).expect("halve_batch", 4, 32, device="cuda:1"),
        after(oom()).expect("cpu_fallback", 128, 1, device="cpu"),
        batch_size=128,
        min_batch_size=4,
    ),
    journey(
        "max_retries bounds everything on a device",
        [free(0, 20)],
        after(oom()).expect("halve_batch", 32, 2),
        after(oom()).expect("give_up", reason="micro-batch 16, 8 was not tried (max_ret"),
        **NO_CPU,
        max_retries=1,
    ),
    journey(
        "all sizes before the end",
        [],
        after(host("no_workers")).expect("halve_batch", 16, 2),
        after(host("no_workers")).expect("halve_batch", 8, 4),
        after(host("no_workers")).expect("halve_batch", 4, 8),
        after(host("no_workers")).expect("halve_batch", 2, 16),
        after(host("no_workers")).expect("halve_batch", 1, 32),
        after(host("no_workers")).expect("give_up"),
        batch_size=32,
        min_batch_size=1,
    ),
    # gradient checkpointing
    journey(
        "gradient checkpointing before another device",
        [free(0, 20), free(1, 40)],
        after(oom(step=3)).expect(
            "gradient_checkpointing",
            8,
            8,
            device="cuda:0",
            checkpointing=True,
            reason="third more time",
        ),
        after(oom(step=3)).expect("switch_gpu", device="cuda:1"),
        can_checkpoint=True,
        max_retries=0,
    ),
    journey(
        "no gradient checkpointing on the CPU",
        [left(0, 20)],
        after(oom(step=3)).expect("halve_batch"),
        after(oom(step=3)).expect("gradient_checkpointing", 8, 8),
        after(oom(step=3)).expect("cpu_fallback", 64, 1, checkpointing=False),
        can_checkpoint=True,
        max_retries=1,
    ),
    journey(
        "it saves host memory on the CPU alone",
        [],
        after(host(step=3)).expect("gradient_checkpointing"),
        **LEAK,
        can_checkpoint=True,
    ),
    journey(
        "it saves no host memory beside a GPU",
        [free(0, 20)],
        after(host(step=3)).expect("give_up"),
        **LEAK,
        can_checkpoint=True,
    ),
    # memory of the host, workers
    journey(
        "an import",
        [],
        after(host("import")).expect("give_up", reason="while a module was imported"),
    ),
    journey("an import later", [], after(host("import", step=7)).expect("give_up")),
    journey(
        "fewer workers with less ahead, then half",
        [free(0, 20), free(1, 70)],
        after(host()).expect("fewer_workers", 64, 1, workers=2),
        after(host()).expect("fewer_workers", workers=1),
        after(host()).expect("halve_batch", 32, 2, device="cuda:0", workers=1),
    ),
    journey(
        "the built-in trainer can do without workers",
        [free(0, 20)],
        after(host("began")).expect("fewer_workers", workers=0),
        after(host("began")).expect("halve_batch", 32, 2),
        num_workers=1,
        reports_start=True,
    ),
    journey(
        "workers that hold little",
        [],
        after(host(workers_hold_most=False, workers=4)).expect("halve_batch", workers=4),
    ),
    journey(
        "there are no workers",
        [],
        after(host(workers_hold_most=True, workers=0)).expect("halve_batch", 32, 2, workers=4),
    ),
    journey(
        "workers whose number is not ours",
        [],
        after(host(workers_hold_most=True, workers=4)).expect("fewer_workers", workers=2),
        after(host(workers_hold_most=True, workers=4)).expect("halve_batch", 32, 2, workers=2),
    ),
    journey(
        "no workers are read", [], after(host("no_workers")).expect("halve_batch", 32, 2, workers=4)
    ),
    journey(
        "a worker that dies",
        [],
        after(worker()).expect("fewer_workers", workers=2),
        after(worker()).expect("fewer_workers", workers=1),
        after(worker()).expect("fewer_workers", workers=0),
        after(worker()).expect("give_up"),
    ),
    journey(
        "a worker dies and the trainer needs one",
        [],
        after(worker()).expect("fewer_workers", workers=2),
        after(worker()).expect("fewer_workers", workers=1),
        after(worker()).expect("fewer_workers", workers=0),
        after(bug("needs_workers")).expect("fewer_workers", workers=1),
        after(worker()).expect("give_up"),
    ),
    journey(
        "someone killed a worker of a fixed number",
        [],
        after(worker("killed")).expect("retry", 64, 1),
        after(worker("killed")).expect("halve_batch", 32, 2),
        num_workers=0,
        max_retries=1,
    ),
    journey(
        "the kernel killed a worker of a fixed number",
        [],
        after(worker("kernel")).expect("halve_batch", 32, 2),
        after(worker("shared_memory")).expect("halve_batch", 16, 4),
        num_workers=0,
    ),
    # faults
    journey(
        "a fault of context, then GPU, then program",
        [free(0, 70), free(1, 10)],
        after(fault(step=40)).expect("retry", 64, 1, device="cuda:0"),
        after(fault(step=40)).expect("switch_gpu", device="cuda:1"),
        after(fault(step=40)).expect(
            "give_up", reason="on two devices (cuda:0 and cuda:1), so no device is to blame"
        ),
    ),
    journey(
        "the program's fault before the first step",
        [left(0, 9), free(1, 9), free(2, 70)],
        after(fault()).expect("switch_gpu", device="cuda:1"),
        after(fault()).expect(
            "give_up", reason="before the first step on two devices (cuda:0 and cuda:1)"
        ),
    ),
    journey(
        "early faults in different weeks blame no program",
        [left(0, 20), free(1, 20)],
        after(fault()).expect("switch_gpu", device="cuda:1"),
        after(comm(step=900, saved=890)).expect("retry"),
        after(fault()).expect("retry", device="cuda:1"),
    ),
    journey(
        "changing faults stay on the GPU with progress",
        [free(0, 70), free(1, 60)],
        after(fault(start=0, step=3)).expect("retry", device="cuda:0"),
        after(fault(start=10, step=13)).expect("retry", device="cuda:0"),
        after(fault(start=20, step=23)).expect("retry", device="cuda:0"),
        after(fault(start=30, step=33)).expect("retry", device="cuda:0"),
        after(fault(start=40, step=43)).expect("retry", device="cuda:0"),
        after(fault(start=50, step=53)).expect("retry", device="cuda:0"),
    ),
    journey(
        "changing faults without progress leave the GPU",
        [free(0, 70), free(1, 60)],
        after(fault(step=0)).expect("retry", device="cuda:0"),
        after(fault(step=1)).expect("retry", device="cuda:0"),
        after(fault(step=2)).expect("retry", device="cuda:0"),
        after(fault(step=3)).expect("switch_gpu", device="cuda:1"),
    ),
    journey(
        "hardware is not returned to, whatever came after",
        [free(0, 20), free(1, 20)],
        after(fault("hardware", step=3)).expect("switch_gpu", device="cuda:1"),
        after(fault("hardware", step=500, saved=400)).expect("cpu_fallback"),
    ),
    journey(
        "a GPU that is unusable",
        [left(0, 70), unusable(0, 70), free(1, 10)],
        after(fault(step=40)).expect("switch_gpu", device="cuda:1"),
    ),
    journey(
        "the CPU after waiting for others' GPUs",
        [left(0, 70), others(1, 3)],
        after(fault("hardware", step=4)).expect(
            "wait", exclude=("GPU-0",), otherwise="cpu_fallback"
        ),
    ),
    journey(
        "hardware is not waited for",
        [left(0, 70), others(0, 3)],
        after(fault("hardware", step=4)).expect("cpu_fallback"),
    ),
    journey(
        "a context is waited for", [left(0, 70), others(0, 3)], after(fault(step=4)).expect("wait")
    ),
    journey(
        "a driver without segments",
        [free(0, 70)],
        after(fault("driver")).expect("no_expandable_segments", 64, 1),
        after(oom("fragmented")).expect("halve_batch"),
    ),
    journey(
        "a driver error in a step", [free(0, 70)], after(fault("driver", step=7)).expect("retry")
    ),
    journey(
        "segments that the user chose",
        [free(0, 70)],
        after(fault("driver")).expect("retry"),
        may_use_expandable_segments=False,
    ),
    journey(
        "an unavailable GPU",
        [free(0, 70), free(1, 60), free(2, 50)],
        after(unavailable()).expect("switch_gpu", device="cuda:1"),
        after(unavailable()).expect("switch_gpu", device="cuda:2"),
        after(unavailable()).expect("cpu_fallback"),
    ),
    journey(
        "a busy GPU that is free",
        [free(0, 70)],
        after(unavailable("busy")).expect("retry", pause=10),
        after(unavailable("busy")).expect("retry", pause=20),
        after(unavailable("busy")).expect("retry", pause=40),
        after(unavailable("busy")).expect("cpu_fallback"),
    ),
    journey(
        "without segments after they failed at any step",
        [free(0, 70)],
        after(fault("segments", step=7)).expect("no_expandable_segments", device="cuda:0"),
        after(fault("segments", step=9)).expect("retry"),
    ),
    journey(
        "an internal error twice halves the batch once",
        [free(0, 70), free(1, 60)],
        after(fault("cudnn", step=7)).expect("retry", 64, 1),
        after(fault("cudnn", step=7)).expect("halve_batch", 32, 2, device="cuda:0"),
        after(fault("cudnn", step=7)).expect("switch_gpu", 32, 2, device="cuda:1"),
    ),
    journey(
        "no CUDA could work",
        [free(0, 70), free(1, 60)],
        after(setup()).expect("give_up", reason="CUDA cannot work here: a setup message"),
    ),
    journey(
        "a busy GPU that another job has", [left(0, 20)], after(unavailable("busy")).expect("wait")
    ),
    # peers, disks, stops, crashes
    journey(
        "a server that was asked too often",
        [free(0, 20)],
        after(comm("rate_limit")).expect("retry", pause=300),
        after(comm("rate_limit")).expect("retry", pause=600),
    ),
    journey(
        "a rate limit never shortens a longer pause",
        [free(0, 20)],
        after(comm("rate_limit")).expect("retry", pause=7200),
        retry_pause_seconds=7200.0,
    ),
    journey(
        "a crash, once without progress",
        [free(0, 20)],
        after(bug("crashed")).expect("retry", reason="once more, from the beginning"),
        after(bug("crashed")).expect("give_up"),
    ),
    journey(
        "a crash after progress",
        [free(0, 20)],
        after(bug("crashed", step=3)).expect("retry"),
        after(bug("crashed", step=9, saved=8)).expect("retry"),
        after(bug()).expect("give_up"),
    ),
    journey(
        "a disk that is full or fails",
        [free(0, 20)],
        after(disk()).expect("retry", pause=10),
        after(disk()).expect("retry", pause=20),
        after(disk()).expect("retry"),
        after(disk()).expect("give_up"),
    ),
    journey(
        "peers",
        [free(0, 20)],
        after(comm(step=3)).expect("retry", pause=10),
        after(comm(step=3)).expect("retry", pause=20),
        after(comm(step=3)).expect("retry", pause=40),
        after(comm(step=3)).expect("give_up"),
    ),
    journey(
        "no retries",
        [free(0, 20)],
        after(comm()).expect("give_up", reason=", 1 attempt without progress"),
        max_retries=0,
    ),
    journey(
        "pauses double up to an hour, or the first",
        [free(0, 20)],
        after(comm()).expect("retry", pause=5000),
        after(comm()).expect("retry", pause=5000),
        max_retries=99,
        retry_pause_seconds=5000.0,
    ),
    journey(
        "killed, as long as it gets further",
        [free(0, 20), free(1, 40)],
        after(stopped("killed", start=10)).expect("retry", device="cuda:0"),
        after(stopped("killed", start=20)).expect("retry", device="cuda:0"),
        after(stopped("killed", start=20)).expect("give_up", reason="2 times without progress"),
        max_retries=1,
    ),
    journey(
        "the same checkpoint again is no progress",
        [free(0, 9)],
        after(comm(saved=3, file="last.pt")).expect(
            "retry", reason="from the last checkpoint, last.pt"
        ),
        after(comm(saved=3, file="last.pt")).expect("retry"),
        after(comm()).expect("retry"),
        after(comm()).expect("give_up"),
        **NO_CPU,
    ),
    journey(
        "diverged: back once, then a lower rate; renewed",
        [free(0, 20)],
        after(diverged("has_checkpoint", "reads_lr")).expect("before_it_diverged", learning_rate=1),
        after(diverged("has_checkpoint", "reads_lr")).expect(
            "lower_learning_rate", learning_rate=0.5
        ),
        after(diverged("has_checkpoint", "reads_lr")).expect(
            "lower_learning_rate", learning_rate=0.25, reason="from it with 0.25 times"
        ),
        after(diverged("has_checkpoint", "reads_lr", saved=7)).expect(
            "before_it_diverged", learning_rate=0.25
        ),
        after(diverged("has_checkpoint", "reads_lr")).expect(
            "lower_learning_rate", learning_rate=0.125
        ),
        after(diverged("has_checkpoint", "reads_lr")).expect("lower_learning_rate"),
        after(diverged("has_checkpoint", "reads_lr")).expect("give_up"),
        max_retries=2,
    ),
    journey(
        "diverged where nothing reads the rate",
        [free(0, 20)],
        after(diverged("has_checkpoint")).expect("before_it_diverged"),
        after(diverged("has_checkpoint")).expect("give_up"),
    ),
    journey(
        "diverged before any checkpoint",
        [free(0, 20)],
        after(diverged("reads_lr")).expect(
            "lower_learning_rate", learning_rate=0.5, reason="from the beginning"
        ),
        after(diverged("reads_lr")).expect("give_up"),
        max_retries=1,
    ),
    # several GPUs
    journey(
        "all ranks halve, and the CPU has everything",
        [left(0, 10), left(1, 9), free(3, 20)],
        after(oom(rank=0)).expect(
            "halve_batch", 4, 4, 2, device="cuda:0,cuda:1", reason="cuda:0 (rank 0)"
        ),
        after(oom(rank=0)).expect("cpu_fallback", 8, 4, 1),
        **TWO,
        **ACCUMULATED,
        max_retries=1,
    ),
    journey(
        "GPUs as small as the failed one go",
        [left(0, 10), left(1, 9), free(3, 20), free(2, 18)],
        after(oom(rank=0)).expect("halve_batch", 4, 2, 2),
        after(oom(rank=0)).expect("switch_gpu", device="cuda:3,cuda:2"),
        **TWO,
        max_retries=1,
    ),
    journey(
        "only the GPU that is short is exchanged",
        [left(0, 10), left(2, 18), free(3, 20)],
        after(oom(rank=0)).expect("switch_gpu", device="cuda:3,cuda:2"),
        **TWO,
        max_retries=0,
    ),
    journey(
        "a faulty GPU of a group is exchanged",
        [left(0, 20), left(1, 20), free(2, 20)],
        after(fault(rank=1)).expect(
            "switch_gpu", device="cuda:0,cuda:2", reason="same batch on cuda:2"
        ),
        **TWO,
    ),
    journey(
        "the CPU in place of several GPUs",
        [],
        after(host("no_workers")).expect("halve_batch", 8, 6, 1),
        num_gpus=3,
        batch_size=16,
        min_batch_size=1,
    ),
    journey(
        "several processes on the CPU, as requested",
        [],
        after(host("no_workers")).expect("halve_batch", 4, 2, 2),
        **TWO,
        device="cpu",
        auto_device=False,
    ),
    journey(
        "fewer GPUs, where the user allows it",
        [free(0, 40), free(1, 40), free(2, 40), free(3, 40)],
        after(fault("hardware", rank=3)).expect(
            "fewer_gpus", counts=(3, 2), exclude=("GPU-3",), otherwise="cpu_fallback"
        ),
        **FOUR,
        min_num_gpus=2,
    ),
    journey(
        "never fewer GPUs",
        [free(0, 40), free(1, 40), free(2, 40), free(3, 40)],
        after(fault("hardware", rank=3)).expect("cpu_fallback"),
        **FOUR,
    ),
    journey(
        "fewer GPUs have no more memory",
        [free(0, 40), free(1, 40), free(2, 40), free(3, 20)],
        after(oom(rank=3, step=3)).expect("cpu_fallback"),
        **FOUR,
        min_num_gpus=2,
        max_retries=0,
    ),
    journey(
        "waiting for another GPU comes before fewer",
        [free(0, 40), free(1, 40), free(2, 40), free(3, 40), others(4, 40)],
        after(fault("hardware", rank=3)).expect("wait", counts=(4,), otherwise="fewer_gpus"),
        **FOUR,
        min_num_gpus=3,
    ),
    # a batch that must not be split
    journey(
        "an unsplittable batch gets another device",
        [free(0, 10), free(1, 20)],
        after(oom("kept", step=3)).expect("switch_gpu", 64, 1, device="cuda:1"),
        after(oom("kept", step=3)).expect("cpu_fallback", 64, 1),
        after(oom("kept", step=3)).expect(
            "give_up", reason="the batch was not split: Gan does not accumulate"
        ),
        can_checkpoint=True,
    ),
    journey(
        "an unsplittable batch gets fewer workers",
        [],
        after(host("kept", step=3)).expect("fewer_workers", workers=1),
        after(host("kept", step=3)).expect("give_up"),
        can_checkpoint=True,
        num_workers=2,
    ),
    journey(
        "an unsplittable batch is retried after progress",
        [],
        after(host("kept", saved=3, saves=2)).expect("retry", 64, 1),
        num_workers=0,
    ),
    # the user's own rules
    journey(
        "nobody can name it: before a checkpoint",
        [free(0, 20)],
        after(bug("unknown", step=9)).expect("give_up", reason="a bug message"),
    ),
    journey(
        "nobody can name it: once for each checkpoint",
        [free(0, 20)],
        after(bug("unknown", saved=3, file="3.pt")).expect(
            "retry", 64, 1, device="cuda:0", reason="once more, from the last checkpoint, 3.pt"
        ),
        after(bug("unknown", saved=6, file="6.pt")).expect("retry", reason="6.pt"),
        after(comm()).expect("retry"),
        after(bug("unknown")).expect("give_up", reason="twice at the same place"),
    ),
    journey(
        "nobody can name it: an earlier launch's checkpoint",
        [],
        after(bug("unknown", resumed="3.pt")).expect("retry"),
        after(bug("unknown", resumed="3.pt")).expect("give_up"),
    ),
    journey(
        "nobody can name it: max_retries=0",
        [free(0, 20)],
        after(bug("unknown", saved=3, file="3.pt")).expect("give_up"),
        max_retries=0,
    ),
    journey(
        "nobody can name it: the user's rule first",
        [free(0, 20)],
        after(bug("unknown", saved=3, file="3.pt")).expect(
            "retry", reason="retry.rules[0] (1 of 2)"
        ),
        **TWICE,
    ),
    journey(
        "what is certainly the program's ends at once",
        [free(0, 20)],
        after(bug(saved=3, file="3.pt")).expect("give_up"),
    ),
    journey(
        "the last attempt met an earlier one's leftovers",
        [free(0, 20)],
        after(comm(saved=3)).expect("retry"),
        after(bug()).expect("give_up", reason="a bug message (attempt 1 before it: a comm mess"),
    ),
    journey(
        "an earlier attempt's leftovers, after another try",
        [free(0, 20)],
        after(comm(saved=3, file="3.pt")).expect("retry"),
        after(bug("unknown", file="3.pt")).expect("retry"),
        after(bug("unknown", file="3.pt")).expect(
            "give_up", reason="(attempt 1 before it: a comm mess"
        ),
    ),
    journey(
        "a bug that the user knows",
        [free(0, 20)],
        after(bug(step=5)).expect("retry", 64, 1, pause=10, reason="retry.rules[0] (1 of 2)"),
        after(bug(step=5)).expect("retry", pause=20, reason="(2 of 2)"),
        after(bug(step=5, saved=4)).expect("retry"),
        after(bug()).expect("retry"),
        after(bug()).expect("give_up"),
        **TWICE,
    ),
    journey(
        "each rule that fits has its own tries",
        [free(0, 20)],
        after(bug(exit=7)).expect("retry", reason="rules[0] (1 of 2)"),
        after(bug(exit=7)).expect("retry", reason="rules[0] (2 of 2)"),
        after(bug(exit=7)).expect("halve_batch", 32, 2, reason="rules[1] (1 of 1)"),
        after(bug(exit=7)).expect("retry", reason="rules[2] (1 of 1)"),
        after(bug(exit=7)).expect("give_up"),
        **THREE_RULES,
    ),
    journey(
        "the smallest batch, and then the next rule",
        [free(0, 20)],
        after(bug(exit=9)).expect("halve_batch", 32, 2),
        after(bug(exit=9)).expect("halve_batch", 16, 4),
        after(bug(exit=9)).expect("retry", reason="[1]"),
        **SMALLER,
    ),
    journey(
        "a GPU that the user blames is left",
        [free(0, 20), free(1, 20)],
        after(bug(step=3)).expect(
            "switch_gpu", device="cuda:1", reason="retry.rules[0] (1 of 1): exclude_gpu"
        ),
        after(bug(step=3)).expect("give_up"),
        **BLAMED,
    ),
    journey("no GPU to blame", [], after(bug()).expect("give_up"), **BLAMED),
    # rows for several kinds
    *(
        journey(
            f"a leak that gets further: {name}", [free(0, 20)], *weeks_of_progress(leak), **LEAK
        )
        for name, leak in {"oom": oom, "host": host, "worker": worker}.items()
    ),
    *(
        journey(
            f"no return without progress: {name}",
            [free(0, 20), free(1, 20)],
            after(failure(step=3)).expect("switch_gpu", device="cuda:1"),
            after(failure(step=5)).expect("cpu_fallback"),
            **ONE_SIZE,
            max_retries=0,
        )
        for name, failure in {"fault": fault, "unavailable": unavailable, "oom": oom}.items()
    ),
    *(
        journey(
            f"progress makes a GPU worth another try: {name}",
            [free(0, 20), free(1, 20)],
            after(failure(step=3)).expect("switch_gpu", device="cuda:1"),
            after(failure(step=5, saved=4)).expect("switch_gpu", device="cuda:0"),
            **ONE_SIZE,
            max_retries=0,
        )
        for name, failure in {"fault": fault, "unavailable": unavailable, "oom": oom}.items()
    ),
    *(
        journey(
            f"a later checkpoint renews all tries: {name}, {words_of(further)}",
            [free(0, 9)],
            *tries_renewed(*described, **further),
            **NO_CPU,
        )
        for name, described in {
            "killed": (stopped, "killed"),
            "comm": (comm,),
            "busy": (unavailable, "busy"),
        }.items()
        for further in (
            {"saved": 7},
            {"saves": 2, "file": "last.pt"},
            {"saves": 1, "file": "epoch-2.pt"},
            {"start": 7},
        )
    ),
    journey(
        "fewer ranks share a batch",
        [left(0, 10), left(1, 20)],
        after(fault("hardware", rank=0)).expect("fewer_gpus"),
        **{**TWO, "min_num_gpus": 1, "min_batch_size": 8},
    ),
    journey(
        "fewer ranks share no unsplittable batch",
        [left(0, 10), left(1, 20)],
        after(fault("hardware", "kept", rank=0)).expect("give_up"),
        **{**TWO, "min_num_gpus": 1, "min_batch_size": 8},
    ),
    journey(
        "a rule's pauses end at an hour",
        [free(0, 20)],
        *[after(bug()).expect("retry")] * 30,
        after(bug()).expect("retry", pause=3600),
        **rules(RetryRule("retry", message="bug", times=99)),
    ),
    *(
        journey(
            f"a rule fits by all it names: {words_of(fits)}",
            [free(0, 20)],
            after(oom(step=3, **other)).expect("halve_batch"),
            after(oom(step=3, **fits)).expect("give_up", reason="retry.rules[0]: stop"),
            **rules(rule),
        )
        for rule, fits, other in (
            (RetryRule("stop", exit_code=7), {"exit": 7}, {"exit": 0}),
            (RetryRule("stop", message="^gone$"), {"printed": "gone"}, {"printed": "gone by"}),
            (RetryRule("stop", message="line 4"), {"place": 4}, {"place": 5}),
            (RetryRule("stop", exception="OSError"), {"raised": "OSError"}, {"raised": "Error"}),
            (RetryRule("stop", exception="a.Lost"), {"raised": "a.Lost"}, {"raised": "OSError"}),
            (RetryRule("stop", exit_code=7, message="oom"), {"exit": 7}, {"exit": 0}),
        )
    ),
]


@pytest.mark.parametrize(("gpus", "steps", "given"), JOURNEYS)
def test_each_failure_has_its_remedy(gpus, steps, given):
    settings = policy(**{"num_workers": 4, "min_batch_size": 8, **given})
    free_gpus = of_whom(gpus, "free")
    by_index = sorted(free_gpus, key=lambda candidate: candidate.index)
    first = of_whom(gpus, "left") or tuple(by_index[: settings.config.num_gpus])
    spec = first_attempt(settings, first)
    history = ()
    for step in steps:
        history += (attempt_of(spec, step.failure),)
        decision = decided(settings, history, free_gpus, of_whom(gpus, "others"))
        step.check(decision)
        if not isinstance(decision, GiveUp):
            spec = decision.spec


def test_a_failing_row_names_its_line():
    step = after(oom(step=3)).expect("halve_batch", 32, 2)
    with pytest.raises(AssertionError, match=rf"{Path(__file__).name}:{step.line}: after .*step=3"):
        step.check(GiveUp("nothing helps"))


def of_whom(gpus, whose):
    return tuple(offer.gpu for offer in gpus if offer.whose == whose)


def attempt_of(spec, failure):
    """Return an attempt that failed as a row describes it."""
    evidence = {}
    record = {}
    for sign in failure.signs:
        if sign in CLUES:
            evidence["clue"] = sign
        elif sign in LIBRARIES:
            evidence["library"] = sign
        elif sign in OF_EVIDENCE:
            evidence[sign] = True
        elif sign == "fragmented":
            evidence |= {"requested_bytes": GIB, "free_bytes": 0}
            evidence["reserved_unallocated_bytes"] = 3 * GIB
        elif sign == "began":
            record["began_training"] = True
        elif sign == "kept":
            record["keeps_batch"] = "Gan does not accumulate"
        elif sign == "needs_workers":
            record["message"] = "ValueError: persistent_workers option needs num_workers > 0"
        else:
            assert sign == "no_figure", sign
    for name, value in failure.figures.items():
        if name in MEMORY:
            evidence[MEMORY[name]] = value * GIB
        elif name in ("workers", "workers_hold_most"):
            evidence[name] = value
        elif name == "taken":
            if "no_figure" not in failure.signs:
                evidence["requested_bytes"] = GIB
            record["gpu_free_before_bytes"] = 20 * GIB
            record["gpu_free_after_bytes"] = (20 - value) * GIB
        elif name == "place":
            size = len(failure.figures)
            record["traceback"] = f'  File "train.py", line {value}\nError: {size} MiB'
        elif name == "printed":
            record["output"] = f"step 1\rstep 2\r{value}\r\n"
        elif name == "raised":
            record["exceptions"] = (value, "builtins.Exception")
        else:
            record[FIELDS[name]] = value
    if "saved" in failure.figures:
        record.setdefault("saves", 1)
    return failed(spec, failure.kind, built(Evidence, **evidence), **record)


def facts_of(decision):
    """Return all that a row may expect of a decision."""
    if isinstance(decision, GiveUp):
        return {"action": "give_up", "reason": decision.reason}
    spec = decision.spec
    facts = {
        "action": decision.action,
        "batch": spec.batch_size,
        "accumulation": spec.gradient_accumulation_steps,
        "ranks": spec.ranks,
        "device": spec.device,
        "workers": spec.noted("num_workers", 0),
        "pause": decision.pause_seconds,
        "learning_rate": spec.noted("lr_factor", 1.0),
        "checkpointing": bool(spec.noted("gradient_checkpointing", False)),
        "reason": f"{decision.reason} {decision.warning}",
    }
    if decision.otherwise is not None:
        facts["otherwise"] = decision.otherwise.action
    if decision.room is not None:
        facts["room_gib"] = decision.room.free_bytes // GIB
        facts["counts"] = decision.room.counts
        facts["exclude"] = decision.room.exclude
    return facts
