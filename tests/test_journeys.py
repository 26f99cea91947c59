"""Journeys of the policy as a table: each failure, and what is decided after it.

A step is ``failure → decision``; the next attempt uses what was decided. A failure is a kind with
modifiers: a clue (``fault:hardware``), or a figure (``oom:step=3``, memory in GiB). A decision has
an action and any of the words in :func:`in_words`, and after ``|`` words of its reason or warning.
"""

import re

import pytest
from omegaconf import OmegaConf

from attempts import built, decided, failed, gpu, policy
from robust_train.model.failure import Clue, Evidence, FailureKind
from robust_train.model.spec import GiveUp, RetryRule
from robust_train.policy.decide import first_attempt
from robust_train.readable import GIB

KINDS = {
    "oom": FailureKind.DEVICE_OOM,
    "host": FailureKind.HOST_OOM,
    "worker": FailureKind.WORKER_DEATH,
    "fault": FailureKind.DEVICE_FAULT,
    "unavailable": FailureKind.DEVICE_UNAVAILABLE,
    "setup": FailureKind.SETUP,
    "disk": FailureKind.DISK_FULL,
    "comm": FailureKind.COMM,
    "diverged": FailureKind.DIVERGED,
    "stopped": FailureKind.INTERRUPTED,
    "bug": FailureKind.BUG,
}
CLUES = {value for name, value in vars(Clue).items() if name.isupper()}
STEPS = {"step": "end_step", "start": "start_step", "at": "micro_batch", "exit": "exit_code"}
FIGURES = {"requested": "requested_bytes", "free": "free_bytes", "used": "allocated_bytes"}
NO_CPU = {"allow_cpu_fallback": False}
ONE_SIZE = {"min_batch_size": 64}
LEAK = {**ONE_SIZE, **NO_CPU, "num_workers": 0}
TWO = {"num_gpus": 2, "batch_size": 8, "min_batch_size": 4}


def rules(*given):
    return {"rules": given, "min_batch_size": 16}


SETS = {
    "NO_CPU": NO_CPU,
    "ONE_SIZE": ONE_SIZE,
    "LEAK": LEAK,
    "TWO": TWO,
    "FOUR": {"num_gpus": 4, "batch_size": 24, "min_batch_size": 4},
    "ACCUMULATED": {"gradient_accumulation_steps": 2},
    "CHANGED": {"batch_size": 8, "min_batch_size": 4, "preserve_effective_batch_size": False},
    "TWICE": rules(RetryRule("retry", message="bug mess", times=2)),
    "THREE_RULES": rules(
        RetryRule("retry", message="bug", times=2),
        RetryRule("smaller_batch", message="bug", times=1),
        RetryRule("retry", exit_code=7, times=1),
    ),
    "SMALLER": rules(RetryRule("smaller_batch", exit_code=9), RetryRule("retry", message="bug")),
    "BLAMED": rules(RetryRule("exclude_gpu", message="bug", times=1)),
}
"""Settings that rows name."""

TABLE = """
# memory of the GPU
halves, then a larger GPU, then the CPU | num_workers=0
    0:10 1:20 // oom → halve_batch 32×2 cuda:0; oom → halve_batch 16×4; oom → halve_batch 8×8;
    oom → switch_gpu 16×4 cuda:1; oom → halve_batch 8×8 cuda:1; oom → cpu_fallback 64×1 cpu
a batch that no smaller size divides | batch_size=7 min_batch_size=2
    0:1 // oom → halve_batch 3×3 | effective batch size 7
an effective batch that need not be preserved | CHANGED
    0:1 // oom → halve_batch 4×1 | preserve_effective_batch_size is false
one GPU alike is a second opinion | max_retries=1
    0:10 1:9.5 2:9.5 3:5 // oom → halve_batch; oom → switch_gpu 32×2 cuda:1; oom → cpu_fallback
a second opinion that gets further is no proof | ONE_SIZE
    0:10 1:10 2:10 // oom → switch_gpu cuda:1; oom:step=900 → switch_gpu cuda:2
not below the required memory | ONE_SIZE min_gpu_memory_mb=30720
    0:10 1:20 // oom → cpu_fallback
the user's own GPU is not left | ONE_SIZE auto_device=false
    0:10 1:20 // oom → cpu_fallback
no CPU | max_retries=1 NO_CPU
    0:10 // oom → halve_batch; oom → give up | cuda:0 at micro-batch 64, 32 (allow_cpu_fallback
    is
nothing fits before the first step | reports_start=true NO_CPU
    0:20 // oom → give up | model, optimizer and data do not fit
fragmentation, once | expandable_segments=false
    0:20 // oom:fragmented → expandable_segments 64×1 | 3072 MiB reserved but unused;
    oom:fragmented → halve_batch
the user's setting of segments stays | expandable_segments=false may_use_expandable_segments=false
    0:20 // oom:fragmented → halve_batch
others took it: where there is room
    (0:20) 1:30 0:14 // oom:taken=6 → switch_gpu 64×1 cuda:1 | others took 6144 MiB
others took it: wait
    (0:20) 1:14 0:14 // oom:taken=6 → wait 64×1 cuda:0 room=15GiB else=halve_batch
others took it: no waiting | wait_for_gpu=false
    (0:20) 0:14 // oom:taken=6 → halve_batch
others take it again and again
    0:20 // oom:taken=6 → wait; oom:taken=6 → wait; oom:taken=6 → wait; oom:taken=6 →
    halve_batch
others take it again after progress | max_retries=1
    0:20 // oom:taken=5 → wait; oom:taken=5:saved=8 → wait; oom:taken=5 → halve_batch
a GPU that others filled is no proof that the batch fits on none
    (0:20) 1:20 2:20 // oom:step=100:taken=6 → switch_gpu cuda:1; oom:step=100 → halve_batch
others took it: what the attempt used is enough
    (0:20) 0:14 // oom:taken=6:requested=3:free=2 → wait room=15GiB
how much was asked for is not known: a little is no reason
    0:20 // oom:taken=6:no_figure → halve_batch
… but a tenth of the GPU is
    (0:20) 0:10 // oom:taken=10:no_figure → wait room=10GiB
too big anyhow
    0:20 // oom:taken=6:requested=9:free=1 → halve_batch
our own limit
    (0:20) 1:30 // oom:taken=6:own_limit → halve_batch | limit (memory.fraction)
where the trainer had come down to
    0:20 // oom:at=16 → halve_batch 8×8
at the bottom in the step
    0:20 1:40 // oom:at=8 → switch_gpu cuda:1
a model that does not fit
    0:20 1:40 // oom:model → switch_gpu 64×1
no first step | reports_start=true
    0:20 1:40 // oom → switch_gpu 64×1
no first step, as an earlier attempt shows
    0:20 1:40 // comm:began:step=40 → retry; oom → switch_gpu 64×1
a first step | reports_start=true
    0:20 // oom:began → halve_batch
max_retries again after progress | max_retries=1
    (0:20) // oom:step=4 → halve_batch 32×2; oom:step=9:saved=8 → halve_batch 16×4
a batch that may change nothing
    0:20 // oom:requested=900:used=0:place=3 → halve_batch 32×2;
    oom:requested=900:used=0:place=3 → halve_batch 16×4
all sizes on the device with the most memory before the CPU | batch_size=128 min_batch_size=4
    0:20 1:40 // oom → halve_batch 64×2; oom → halve_batch 32×4; oom → halve_batch 16×8; oom →
    switch_gpu 32×4 cuda:1; oom → halve_batch 16×8; oom → halve_batch 8×16 cuda:1; oom →
    halve_batch 4×32 cuda:1; oom → cpu_fallback 128×1 cpu
max_retries bounds everything on a device | max_retries=1 NO_CPU
    0:20 // oom → halve_batch 32×2; oom → give up | micro-batch 16, 8 was not tried (max_ret
all sizes before the end | batch_size=32 min_batch_size=1
    cpu // host:no_workers → halve_batch 16×2; host:no_workers → halve_batch 8×4;
    host:no_workers → halve_batch 4×8; host:no_workers → halve_batch 2×16; host:no_workers →
    halve_batch 1×32; host:no_workers → give up
# gradient checkpointing
gradient checkpointing before another device | can_checkpoint=true max_retries=0
    0:20 1:40 // oom:step=3 → gradient_checkpointing 8×8 cuda:0 checkpointing | third more time;
    oom:step=3 → switch_gpu cuda:1
no gradient checkpointing on the CPU | can_checkpoint=true max_retries=1
    (0:20) // oom:step=3 → halve_batch; oom:step=3 → gradient_checkpointing 8×8; oom:step=3 →
    cpu_fallback 64×1 plain
it saves host memory on the CPU alone | can_checkpoint=true LEAK
    cpu // host:step=3 → gradient_checkpointing
it saves no host memory beside a GPU | can_checkpoint=true LEAK
    0:20 // host:step=3 → give up
# memory of the host, workers
an import
    cpu // host:import → give up | while a module was imported
an import later
    cpu // host:import:step=7 → give up
fewer workers with less ahead, then half
    0:20 1:70 // host → fewer_workers workers=2 64×1; host → fewer_workers workers=1; host →
    halve_batch 32×2 cuda:0 workers=1
the built-in trainer can do without workers | num_workers=1 reports_start=true
    0:20 // host:began → fewer_workers workers=0; host:began → halve_batch 32×2
workers that hold little
    cpu // host:hold=0:workers=4 → halve_batch workers=4
there are no workers
    cpu // host:hold=1:workers=0 → halve_batch workers=4 32×2
workers whose number is not ours
    cpu // host:hold=1:workers=4 → fewer_workers workers=2; host:hold=1:workers=4 → halve_batch
    workers=2 32×2
no workers are read
    cpu // host:no_workers → halve_batch workers=4 32×2
a worker that dies
    cpu // worker → fewer_workers workers=2; worker → fewer_workers workers=1; worker →
    fewer_workers workers=0; worker → give up
a worker that dies, of a trainer that needs one
    cpu // worker → fewer_workers workers=2; worker → fewer_workers workers=1; worker →
    fewer_workers workers=0; bug:needs_workers → fewer_workers workers=1; worker → give up
a worker that someone killed, of a fixed number | num_workers=0 max_retries=1
    cpu // worker:killed → retry 64×1; worker:killed → halve_batch 32×2
a worker that the kernel killed, of a fixed number | num_workers=0
    cpu // worker:kernel → halve_batch 32×2; worker:shared_memory → halve_batch 16×4
# faults
a fault of the context, then of the GPU, then of the program
    0:70 1:10 // fault:step=40 → retry cuda:0 64×1; fault:step=40 → switch_gpu cuda:1;
    fault:step=40 → give up | on two devices (cuda:0 and cuda:1) is not the device's
a fault of the program before the first step
    (0:9) 1:9 2:70 // fault → switch_gpu cuda:1; fault → give up | before the first step on two
    devices (cuda:0 and cuda:1)
a fault at the start in another week is no proof against the program
    (0:20) 1:20 // fault → switch_gpu cuda:1; comm:step=900:saved=890 → retry; fault → retry
    cuda:1
faults at other steps stay on the GPU while the job gets further
    0:70 1:60 // fault:start=00:step=03 → retry cuda:0; fault:start=10:step=13 → retry cuda:0;
    fault:start=20:step=23 → retry cuda:0; fault:start=30:step=33 → retry cuda:0;
    fault:start=40:step=43 → retry cuda:0; fault:start=50:step=53 → retry cuda:0
faults at other steps without progress leave the GPU
    0:70 1:60 // fault:step=0 → retry cuda:0; fault:step=1 → retry cuda:0; fault:step=2 → retry
    cuda:0; fault:step=3 → switch_gpu cuda:1
hardware is not returned to, whatever came after
    0:20 1:20 // fault:hardware:step=3 → switch_gpu cuda:1; fault:hardware:step=500:saved=400 →
    cpu_fallback
a GPU that is unusable
    (0:70) 0:70! 1:10 // fault:step=40 → switch_gpu cuda:1
the CPU after waiting for others' GPUs
    (0:70) [1:3] // fault:hardware:step=4 → wait exclude=GPU-0 else=cpu_fallback
hardware is not waited for
    (0:70) [0:3] // fault:hardware:step=4 → cpu_fallback
a context is waited for
    (0:70) [0:3] // fault:step=4 → wait
a driver without segments
    0:70 // fault:driver → no_expandable_segments 64×1; oom:fragmented → halve_batch
a driver error in a step
    0:70 // fault:driver:step=7 → retry
segments that the user chose | may_use_expandable_segments=false
    0:70 // fault:driver → retry
an unavailable GPU
    0:70 1:60 2:50 // unavailable → switch_gpu cuda:1; unavailable → switch_gpu cuda:2;
    unavailable → cpu_fallback
a busy GPU that is free
    0:70 // unavailable:busy → retry pause=10; unavailable:busy → retry pause=20;
    unavailable:busy → retry pause=40; unavailable:busy → cpu_fallback
what segments cause goes without them, at any step
    0:70 // fault:segments:step=7 → no_expandable_segments cuda:0; fault:segments:step=9 → retry
an internal error twice at a step: half the batch once
    0:70 1:60 // fault:cudnn:step=7 → retry 64×1; fault:cudnn:step=7 → halve_batch 32×2 cuda:0;
    fault:cudnn:step=7 → switch_gpu 32×2 cuda:1
no CUDA could work
    0:70 1:60 // setup → give up | CUDA cannot work here: a setup message
a busy GPU that another job has
    (0:20) // unavailable:busy → wait
# peers, disks, stops, crashes
a server that was asked too often
    0:20 // comm:rate_limit → retry pause=300; comm:rate_limit → retry pause=600
a server that was asked too often never shortens a longer pause | retry_pause_seconds=7200.0
    0:20 // comm:rate_limit → retry pause=7200
a crash, once without progress
    0:20 // bug:crashed → retry | once more, from the beginning; bug:crashed → give up
a crash after progress
    0:20 // bug:crashed:step=3 → retry; bug:crashed:step=9:saved=8 → retry; bug → give up
a disk that is full or fails
    0:20 // disk → retry pause=10; disk → retry pause=20; disk → retry; disk → give up
peers
    0:20 // comm:step=3 → retry pause=10; comm:step=3 → retry pause=20; comm:step=3 → retry
    pause=40; comm:step=3 → give up
no retries | max_retries=0
    0:20 // comm → give up | , 1 attempt without progress
pauses double up to an hour, or the first one | max_retries=99 retry_pause_seconds=5000.0
    0:20 // comm → retry pause=5000; comm → retry pause=5000
killed, as long as it gets further | max_retries=1
    0:20 1:40 // stopped:killed:start=10 → retry cuda:0; stopped:killed:start=20 → retry cuda:0;
    stopped:killed:start=20 → give up | 2 times without progress
the same checkpoint again is no progress | NO_CPU
    0:9 // comm:saved=3:file=last.pt → retry | from the last checkpoint, last.pt;
    comm:saved=3:file=last.pt → retry; comm → retry; comm → give up
diverged: back once, then a lower learning rate; progress renews both | max_retries=2
    0:20 // diverged:has_checkpoint:reads_lr → before_it_diverged lr=1;
    diverged:has_checkpoint:reads_lr → lower_learning_rate lr=0.5;
    diverged:has_checkpoint:reads_lr → lower_learning_rate lr=0.25 | from it with 0.25 times;
    diverged:has_checkpoint:reads_lr:saved=7 → before_it_diverged lr=0.25;
    diverged:has_checkpoint:reads_lr → lower_learning_rate lr=0.125;
    diverged:has_checkpoint:reads_lr → lower_learning_rate; diverged:has_checkpoint:reads_lr →
    give up
diverged where nothing reads the rate
    0:20 // diverged:has_checkpoint → before_it_diverged; diverged:has_checkpoint → give up
diverged before any checkpoint | max_retries=1
    0:20 // diverged:reads_lr → lower_learning_rate lr=0.5 | from the beginning;
    diverged:reads_lr → give up
# several GPUs
a group halves for all, and the CPU has the whole effective batch | TWO ACCUMULATED max_retries=1
    (0:10) (1:9) 3:20 // oom:rank=0 → halve_batch 4×4×2 cuda:0,cuda:1 | cuda:0 (rank 0);
    oom:rank=0 → cpu_fallback 8×4×1
every GPU of a group that has no more than the failed one is exchanged | TWO max_retries=1
    (0:10) (1:9) 3:20 2:18 // oom:rank=0 → halve_batch 4×2×2; oom:rank=0 → switch_gpu
    cuda:3,cuda:2
only the GPU that is short is exchanged | TWO max_retries=0
    (0:10) (2:18) 3:20 // oom:rank=0 → switch_gpu cuda:3,cuda:2
a faulty GPU of a group is exchanged | TWO
    (0:20) (1:20) 2:20 // fault:rank=1 → switch_gpu cuda:0,cuda:2 | same batch on cuda:2
the CPU in place of several GPUs | num_gpus=3 batch_size=16 min_batch_size=1
    cpu // host:no_workers → halve_batch 8×6×1
several processes on the CPU, as requested | TWO device=cpu auto_device=false
    cpu // host:no_workers → halve_batch 4×2×2
fewer GPUs, where the user allows it | FOUR min_num_gpus=2
    0:40 1:40 2:40 3:40 // fault:hardware:rank=3 → fewer_gpus counts=3,2 exclude=GPU-3
    else=cpu_fallback
never fewer GPUs | FOUR
    0:40 1:40 2:40 3:40 // fault:hardware:rank=3 → cpu_fallback
fewer GPUs have no more memory | FOUR min_num_gpus=2 max_retries=0
    0:40 1:40 2:40 3:20 // oom:rank=3:step=3 → cpu_fallback
waiting for another GPU comes before fewer | FOUR min_num_gpus=3
    0:40 1:40 2:40 3:40 [4:40] // fault:hardware:rank=3 → wait counts=4 else=fewer_gpus
# a batch that must not be split
another device for a batch that must not be split | can_checkpoint=true
    0:10 1:20 // oom:kept:step=3 → switch_gpu 64×1 cuda:1; oom:kept:step=3 → cpu_fallback 64×1;
    oom:kept:step=3 → give up | the batch was not split: Gan does not accumulate
fewer workers for a batch that must not be split | can_checkpoint=true num_workers=2
    cpu // host:kept:step=3 → fewer_workers workers=1; host:kept:step=3 → give up
a batch that must not be split gets further | num_workers=0
    cpu // host:kept:saved=3:saves=2 → retry 64×1
# the user's own rules
nobody can name it: before a checkpoint
    0:20 // bug:unknown:step=9 → give up | a bug message
… after a checkpoint once, and again after the next one
    0:20 // bug:unknown:saved=3:file=3.pt → retry 64×1 cuda:0 | once more, from the last
    checkpoint, 3.pt; bug:unknown:saved=6:file=6.pt → retry | 6.pt; comm → retry;
    bug:unknown → give up | twice at the same place
… from what an earlier launch has saved
    cpu // bug:unknown:resumed=3.pt → retry; bug:unknown:resumed=3.pt → give up
… never | max_retries=0
    0:20 // bug:unknown:saved=3:file=3.pt → give up
… and the user's rule comes first | TWICE
    0:20 // bug:unknown:saved=3:file=3.pt → retry | retry.rules[0] (1 of 2)
what is certainly the program's ends at once
    0:20 // bug:saved=3:file=3.pt → give up
the last attempt met what another one has left behind
    0:20 // comm:saved=3 → retry; bug → give up | a bug message (attempt 1 before it: a comm mess
… also if it was tried once more
    0:20 // comm:saved=3:file=3.pt → retry; bug:unknown:file=3.pt → retry;
    bug:unknown:file=3.pt → give up | (attempt 1 before it: a comm mess
a bug that the user knows | TWICE
    0:20 // bug:step=5 → retry pause=10 64×1 | retry.rules[0] (1 of 2);
    bug:step=5 → retry pause=20 | (2 of 2); bug:step=5:saved=4 → retry; bug → retry; bug → give up
the next rule that fits has tries of its own | THREE_RULES
    0:20 // bug:exit=7 → retry | rules[0] (1 of 2); bug:exit=7 → retry | rules[0] (2 of 2);
    bug:exit=7 → halve_batch 32×2 | rules[1] (1 of 1); bug:exit=7 → retry | rules[2] (1 of 1);
    bug:exit=7 → give up
a smaller batch down to the smallest and then the next rule | SMALLER
    0:20 // bug:exit=9 → halve_batch 32×2; bug:exit=9 → halve_batch 16×4; bug:exit=9 → retry | [1]
a GPU that the user blames is left like one whose hardware failed | BLAMED
    0:20 1:20 // bug:step=3 → switch_gpu cuda:1 | retry.rules[0] (1 of 1): exclude_gpu;
    bug:step=3 → give up
no GPU to blame | BLAMED
    cpu // bug → give up
"""


def rows_of(table):
    """Yield rows: a name, its settings after ``|``, and in the lines below GPUs ``//`` journey."""
    for row in re.split(r"\n(?! )", re.sub(r"(?m)^#.*\n", "", table).strip()):
        heading, *lines = row.splitlines()
        name, _, words = heading.partition(" | ")
        given = {}
        for word in words.split():
            own = OmegaConf.to_container(OmegaConf.from_dotlist([word]))
            given |= SETS.get(word, own)
        yield name, " ".join(map(str.strip, lines)), given


WEEKS = "".join(
    f"KIND:start={week}00:step={week + 1}00:saved={week + 1}00 → retry 64×1;" for week in range(8)
)
LEAKS = f"0:20 // {WEEKS}KIND:start=800:step=800 → give up"
JOURNEYS = [
    *rows_of(TABLE),
    *(
        (f"a leak that gets further: {kind}", LEAKS.replace("KIND", kind), LEAK)
        for kind in ("oom", "host", "worker")
    ),
    *(
        (
            f"after progress a GPU that was left is tried again: {kind}",
            f"0:20 1:20 // {kind}:step=3 → switch_gpu cuda:1; {kind}:step=5{saved}",
            {**ONE_SIZE, "max_retries": 0},
        )
        for kind in ("fault", "unavailable", "oom")
        for saved in (" → cpu_fallback", ":saved=4 → switch_gpu cuda:0")
    ),
    *(
        (
            f"a checkpoint beyond the last failure renews all tries: {kind}, {further}",
            f"0:9 // {kind}:step=5:saved=3:file=last.pt → retry; {kind}:step=9 → retry;"
            f"{kind}:step=9 → retry; {kind}:step=9:{further} → retry; {kind}:step=9 → retry;"
            f"{kind}:step=9 → retry; {kind}:step=9 → give up",
            NO_CPU,
        )
        for kind in ("stopped:killed", "comm", "unavailable:busy")
        for further in ("saved=7", "saves=2:file=last.pt", "saves=1:file=epoch-2.pt", "start=7")
    ),
    *(
        (
            f"a batch that must not be split is not shared by fewer ranks: {then}",
            f"(0:10) (1:20) // fault:hardware:rank=0{kept} → {then}",
            {**TWO, "min_num_gpus": 1, "min_batch_size": 8},
        )
        for kept, then in (("", "fewer_gpus"), (":kept", "give up"))
    ),
    (
        "a rule's pauses end at an hour",
        "0:20 // " + "bug → retry;" * 30 + "bug → retry pause=3600",
        rules(RetryRule("retry", message="bug", times=99)),
    ),
    *(
        (f"a rule fits by all that it names: {fits}", f"0:20 // {journey}", rules(rule))
        for rule, fits, other in (
            (RetryRule("stop", exit_code=7), "exit=7", "exit=0"),
            (RetryRule("stop", message="^gone$"), "printed=gone", "printed=gone by"),
            (RetryRule("stop", message="line 4"), "place=4", "place=5"),
            (RetryRule("stop", exception="OSError"), "raised=OSError", "raised=Error"),
            (RetryRule("stop", exception="a.Lost"), "raised=a.Lost", "raised=OSError"),
            (RetryRule("stop", exit_code=7, message="oom"), "exit=7", "exit=0"),
        )
        for journey in [
            f"oom:step=3:{other} → halve_batch; oom:step=3:{fits} → give up | retry.rules[0]: stop"
        ]
    ),
]


@pytest.mark.parametrize(
    ("row", "given"), [row[1:] for row in JOURNEYS], ids=[row[0] for row in JOURNEYS]
)
def test_each_failure_has_its_remedy(row, given):
    offers, _, journey = row.partition(" // ")
    settings = policy(**{"num_workers": 4, "min_batch_size": 8, **given})
    gpus, others, left = machine(offers)
    own = left or tuple(sorted(gpus, key=lambda one: one.index))[: settings.config.num_gpus]
    spec = first_attempt(settings, own)
    history = ()
    for step in filter(None, journey.split(";")):
        failure, _, expected = step.strip().partition(" → ")
        expected, _, reason = expected.partition(" | ")
        history += (attempt_of(spec, failure),)
        decision = decided(settings, history, gpus, others)
        assert set(expected.split()) <= in_words(decision), (step, decision)
        warning = "" if isinstance(decision, GiveUp) else decision.warning
        assert reason in f"{decision.reason} {warning}", step
        if not isinstance(decision, GiveUp):
            spec = decision.spec


def machine(offers):
    """The GPUs that could be taken, those that others have, and those that the job has left."""
    found = {"": [], "[": [], "(": []}
    for word in offers.replace("cpu", "").split():
        index, free = word.strip("[]()!").split(":")
        unusable = "a memory row failed" if word.endswith("!") else None
        one = gpu(int(index), float(free), unusable)
        found[word[0] if word[0] in "[(" else ""].append(one)
    return tuple(map(tuple, found.values()))


def attempt_of(spec, text):
    """An attempt that failed as a row has it."""
    kind, *modifiers = text.split(":")
    evidence = {}
    record = {}
    for modifier in modifiers:
        name, _, value = modifier.partition("=")
        if name in CLUES:
            evidence["clue"] = name
        elif name == "fragmented":
            evidence |= {"requested_bytes": GIB, "free_bytes": 0}
            evidence["reserved_unallocated_bytes"] = 3 * GIB
        elif name == "workers":
            evidence["workers"] = int(value)
        elif name == "hold":
            evidence["workers_hold_most"] = value == "1"
        elif name in ("cudnn", "kernel"):
            evidence["library"] = name
        elif name in ("own_limit", "no_workers", "has_checkpoint", "reads_lr"):
            evidence[name] = True
        elif name in FIGURES:
            evidence[FIGURES[name]] = int(value) * GIB
        elif name == "no_figure":
            del evidence["requested_bytes"]
        elif name == "taken":
            evidence["requested_bytes"] = GIB
            record["gpu_free_before_bytes"] = 20 * GIB
            record["gpu_free_after_bytes"] = (20 - int(value)) * GIB
        elif name == "began":
            record["began_training"] = True
        elif name == "kept":
            record["keeps_batch"] = "Gan does not accumulate"
        elif name == "place":
            record["traceback"] = f'  File "train.py", line {value}\nError: {len(modifiers)} MiB'
        elif name == "printed":
            record["output"] = f"step 1\rstep 2\r{value}\r\n"
        elif name == "raised":
            record["exceptions"] = (value, "builtins.Exception")
        elif name == "needs_workers":
            record["message"] = "ValueError: persistent_workers option needs num_workers > 0"
        elif name == "file":
            record["checkpoint"] = value
        elif name == "resumed":
            record["resumed_from"] = value
        elif name == "saved":
            record["saved_step"] = int(value)
            record.setdefault("saves", 1)
        else:
            record[STEPS.get(name, name)] = int(value)
    return failed(spec, KINDS[kind], built(Evidence, **evidence), **record)


def in_words(decision):
    """All that a row may say of a decision."""
    if isinstance(decision, GiveUp):
        return {"give", "up"}
    spec, room = decision.spec, decision.room
    batch = f"{spec.batch_size}×{spec.gradient_accumulation_steps}"
    words = {
        decision.action,
        batch,
        f"{batch}×{spec.ranks}",
        spec.device,
        f"workers={spec.noted('num_workers', 0)}",
        f"pause={decision.pause_seconds:g}",
        f"lr={spec.noted('lr_factor', 1.0):g}",
        "checkpointing" if spec.noted("gradient_checkpointing", False) else "plain",
    }
    if decision.otherwise is not None:
        words.add(f"else={decision.otherwise.action}")
    if room is not None:
        counts, excluded = ",".join(map(str, room.counts)), ",".join(room.exclude)
        words |= {f"room={room.free_bytes // GIB}GiB", f"counts={counts}", f"exclude={excluded}"}
    return words
