"""Journeys of the policy as a table: each failure, and what is decided after it.

A step is ``failure → decision``; the next attempt uses what was decided. A failure is a kind with
modifiers: a clue (``fault:hardware``), or a figure (``oom:step=3``, memory in GiB). A decision has
an action and any of: sizes, device, ``workers=``, ``pause=``, ``room=`` and ``else=`` (what to wait
for, and what to do if that is in vain), and after ``|`` words of its reason.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from attempts import decided, failed, gpu, policy
from robust_train.model.attempt import Attempt
from robust_train.model.failure import Clue, Evidence, FailureKind
from robust_train.model.gpu import GpuInfo
from robust_train.model.spec import Decision, GiveUp
from robust_train.policy.decide import first_attempt
from robust_train.readable import GIB

KINDS = {
    "oom": FailureKind.DEVICE_OOM,
    "host": FailureKind.HOST_OOM,
    "worker": FailureKind.WORKER_DEATH,
    "fault": FailureKind.DEVICE_FAULT,
    "unavailable": FailureKind.DEVICE_UNAVAILABLE,
    "comm": FailureKind.COMM,
    "stopped": FailureKind.INTERRUPTED,
    "bug": FailureKind.BUG,
}
CLUES = {value for name, value in vars(Clue).items() if name.isupper()}
STEPS = {"step": "end_step", "start": "start_step", "saved": "saved_step", "at": "micro_batch"}
NO_CPU = {"allow_cpu_fallback": False}
ONE_SIZE = {"min_batch_size": 64}

# name, settings, GPUs as index:free GiB (those of others in brackets), journey
JOURNEYS = (
    (
        "halves, then a larger GPU, then the CPU",
        {"num_workers": 0},
        "0:10 1:20",
        "oom → halve_batch 32×2 cuda:0; oom → halve_batch 16×4; oom → halve_batch 8×8;"
        "oom → switch_gpu 16×4 cuda:1; oom → halve_batch 8×8 cuda:1; oom → cpu_fallback 64×1 cpu",
    ),
    (
        "max_retries smaller batches",
        {"min_batch_size": 1, "max_retries": 2},
        "0:10",
        "oom → halve_batch 32×2; oom → halve_batch 16×4; oom → cpu_fallback 64×1",
    ),
    (
        "one GPU alike is a second opinion",
        {"max_retries": 1},
        "0:10 1:9.5 2:9.5 3:5",
        "oom → halve_batch; oom → switch_gpu 32×2 cuda:1; oom → cpu_fallback",
    ),
    ("no smaller GPU", ONE_SIZE, "0:10 3:5", "oom → cpu_fallback"),
    ("not below the required memory", {**ONE_SIZE, "need": 30}, "0:10 1:20", "oom → cpu_fallback"),
    (
        "the user's own GPU is not left",
        {**ONE_SIZE, "auto_device": False},
        "0:10 1:20",
        "oom → cpu_fallback",
    ),
    (
        "no CPU",
        {"max_retries": 1, **NO_CPU},
        "0:10",
        "oom → halve_batch; oom → give up | cuda:0 at micro-batch 64, 32 (allow_cpu_fallback is",
    ),
    (
        "nothing fits before the first step",
        {"reports_start": True, **NO_CPU},
        "0:20",
        "oom → give up | model, optimizer and data do not fit",
    ),
    ("a trainer without checkpointing", ONE_SIZE, "0:20", "oom:step=3 → cpu_fallback"),
    (
        "segments that the user chose",
        {"may_use_expandable_segments": False},
        "0:70",
        "fault:driver → retry",
    ),
    (
        "fragmentation, once",
        {"expandable_segments": False},
        "0:20",
        "oom:fragmented → expandable_segments 64×1 | 3072 MiB reserved but unused;"
        "oom:fragmented → halve_batch",
    ),
    (
        "the user's setting of segments stays",
        {"expandable_segments": False, "may_use_expandable_segments": False},
        "0:20",
        "oom:fragmented → halve_batch",
    ),
    (
        "others took it: where there is room",
        {},
        "1:30 0:14",
        "oom:taken=6 → switch_gpu 64×1 cuda:1 | others took 6144 MiB",
    ),
    (
        "others took it: wait",
        {},
        "1:15 0:14",
        "oom:taken=6 → wait 64×1 cuda:0 room=20GiB else=halve_batch",
    ),
    ("others took it: no waiting", {"wait_for_gpu": False}, "0:14", "oom:taken=6 → halve_batch"),
    (
        "others take it again and again",
        {},
        "0:20",
        "oom:taken=6 → wait; oom:taken=6 → wait; oom:taken=6 → wait; oom:taken=6 → halve_batch",
    ),
    ("too big anyhow", {}, "0:14", "oom:taken=6:requested=9:free=1 → halve_batch"),
    (
        "our own limit",
        {},
        "1:30 0:14",
        "oom:taken=6:own_limit → halve_batch | limit (memory.fraction)",
    ),
    ("where the trainer had come down to", {}, "0:20", "oom:at=16 → halve_batch 8×8"),
    ("at the bottom in the step", {}, "0:20 1:40", "oom:at=8 → switch_gpu cuda:1"),
    ("a model that does not fit", {}, "0:20 1:40", "oom:model → switch_gpu 64×1"),
    ("no first step", {"reports_start": True}, "0:20 1:40", "oom → switch_gpu 64×1"),
    ("a first step", {"reports_start": True}, "0:20", "oom:began → halve_batch"),
    ("an import", {}, "", "host:import → give up | while a module was imported"),
    ("an import later", {}, "", "host:import:step=7 → give up"),
    (
        "fewer workers with less ahead, then half",
        {},
        "0:20 1:70",
        "host → fewer_workers workers=2 64×1; host → fewer_workers workers=1;"
        "host → fewer_workers workers=0; host → halve_batch 32×2 cuda:0",
    ),
    ("no workers are read", {}, "", "host:no_workers → halve_batch workers=4 32×2"),
    (
        "a worker that dies",
        {},
        "",
        "worker → fewer_workers workers=2; worker → fewer_workers workers=1;"
        "worker → fewer_workers workers=0; worker → give up",
    ),
    (
        "a fault of the context, then of the GPU, then of the program",
        {},
        "0:70 1:10",
        "fault:step=40 → retry cuda:0 64×1; fault:step=40 → switch_gpu cuda:1;"
        "fault:step=40 → give up | on two devices (cuda:0 and cuda:1) is not the device's",
    ),
    (
        "hardware",
        {},
        "0:70 1:10 2:9",
        "fault:hardware:step=40 → switch_gpu cuda:1; fault:hardware:step=40 → switch_gpu cuda:2",
    ),
    (
        "the CPU after waiting for others' GPUs",
        {},
        "[1:3]",
        "fault:hardware:step=4 → wait else=cpu_fallback",
    ),
    ("hardware is not waited for", {}, "[0:3]", "fault:hardware:step=4 → cpu_fallback"),
    ("a context is waited for", {}, "[0:3]", "fault:step=4 → wait"),
    (
        "a driver without segments",
        {},
        "0:70",
        "fault:driver → no_expandable_segments 64×1; oom:fragmented → halve_batch",
    ),
    ("a driver error in a step", {}, "0:70", "fault:driver:step=7 → retry"),
    (
        "an unavailable GPU",
        {},
        "0:70 1:60 2:50",
        "unavailable → switch_gpu cuda:1; unavailable → switch_gpu cuda:2;"
        "unavailable → cpu_fallback",
    ),
    (
        "a busy GPU that is free",
        {},
        "0:70",
        "unavailable:busy → retry pause=10; unavailable:busy → retry pause=20;"
        "unavailable:busy → retry pause=40; unavailable:busy → cpu_fallback",
    ),
    ("a busy GPU that another job has", {}, "", "unavailable:busy → wait"),
    (
        "peers",
        {},
        "0:20",
        "comm:step=3 → retry pause=10; comm:step=3 → retry pause=20; comm:step=3 → retry pause=40;"
        "comm:step=3 → give up",
    ),
    (
        "killed, as long as it gets further",
        {"max_retries": 1},
        "0:20 1:40",
        "stopped:killed:start=10 → retry cuda:0; stopped:killed:start=20 → retry cuda:0;"
        "stopped:killed:start=20 → give up | 2 times without progress",
    ),
    ("asked to stop", {}, "0:20", "stopped → give up"),
    ("a bug", {}, "0:20", "oom → halve_batch; bug → give up"),
    (
        "gradient checkpointing before another device",
        {"can_checkpoint": True, "max_retries": 0},
        "0:20 1:40",
        "oom:step=3 → gradient_checkpointing 8×8 cuda:0; oom:step=3 → switch_gpu cuda:1",
    ),
    (
        "a leak that gets further",
        {**ONE_SIZE, **NO_CPU, "num_workers": 0},
        "0:20",
        "oom:step=9:saved=8 → retry 64×1; oom:start=8:step=19:saved=18 → retry;"
        "oom:start=18:step=19 → give up",
    ),
)


@pytest.mark.parametrize(
    ("given", "offers", "journey"),
    [row[1:] for row in JOURNEYS],
    ids=[row[0] for row in JOURNEYS],
)
def test_each_failure_has_its_remedy(given: dict[str, Any], offers: str, journey: str):
    keys = {"num_workers": 4, "min_batch_size": 8, "max_retries": 3, **given}
    need = int(keys.pop("need", 0)) * 1024
    settings = policy(batch_size=64, min_gpu_memory_mb=need, **keys)
    gpus, held = machine(offers)
    starts_on_cpu = not gpus and not held and journey.startswith(("host", "worker"))
    first = sorted(gpus, key=lambda one: one.index)[:1] or [gpu(0, 20)]
    spec = first_attempt(
        settings, () if starts_on_cpu else (replace(first[0], free_bytes=had(gpus)),)
    )
    history: tuple[Attempt, ...] = ()
    for step in journey.split(";"):
        failure, _, expected = step.strip().partition(" → ")
        expected, _, reason = expected.partition(" | ")
        history += (attempt_of(spec, failure),)
        decision = decided(settings, history, gpus, held)
        assert set(expected.split()) <= in_words(decision), (step, decision)
        assert reason in decision.reason, step
        if not isinstance(decision, GiveUp):
            spec = decision.spec


def machine(offers: str) -> tuple[tuple[GpuInfo, ...], tuple[GpuInfo, ...]]:
    """The GPUs that could be taken, and those that others have."""
    found: dict[bool, list[GpuInfo]] = {False: [], True: []}
    for word in offers.split():
        index, free = word.strip("[]").split(":")
        found[word.startswith("[")].append(gpu(int(index), float(free)))
    return tuple(found[False]), tuple(found[True])


def had(gpus: tuple[GpuInfo, ...]) -> int:
    """What was free on the first GPU when the job began on it; others have taken some since."""
    own = [one.free_bytes for one in gpus if one.index == 0]
    return 20 * GIB if own in ([], [14 * GIB]) else own[0]


def attempt_of(spec: Any, text: str) -> Attempt:
    """An attempt that failed as a row has it."""
    kind, *modifiers = text.split(":")
    evidence: dict[str, Any] = {}
    record: dict[str, Any] = {}
    for modifier in modifiers:
        name, _, value = modifier.partition("=")
        if name in CLUES:
            evidence["clue"] = name
        elif name == "fragmented":
            evidence |= {"fragmented": True, "requested_bytes": GIB, "free_bytes": 0}
            evidence["reserved_unallocated_bytes"] = 3 * GIB
        elif name in ("own_limit", "no_workers"):
            evidence[name] = True
        elif name in ("requested", "free"):
            evidence[f"{name}_bytes"] = int(value) * GIB
        elif name == "taken":
            record["gpu_free_before_bytes"] = 20 * GIB
            record["gpu_free_after_bytes"] = (20 - int(value)) * GIB
        elif name == "began":
            record["began_training"] = True
        else:
            record[STEPS[name]] = int(value)
            record["saves"] = record.get("saves", 0) + (name == "saved")
    return failed(spec, KINDS[kind], Evidence(**evidence), **record)


def in_words(decision: Decision) -> set[str]:
    """All that a row may say of a decision."""
    if isinstance(decision, GiveUp):
        return {"give", "up"}
    spec = decision.spec
    words = {
        decision.action,
        f"{spec.batch_size}×{spec.gradient_accumulation_steps}",
        spec.device,
        f"workers={spec.num_workers}",
        f"pause={decision.pause_seconds:g}",
    }
    if decision.otherwise is not None:
        words.add(f"else={decision.otherwise.action}")
    if decision.room is not None:
        words.add(f"room={decision.room.free_bytes // GIB}GiB")
    return words
