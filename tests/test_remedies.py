"""The right remedy for each kind of failure, where the evidence speaks for it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attempts import changed, failed, gpu, policy
from attempts import decided as decide
from robust_train.model.attempt import Attempt
from robust_train.model.failure import Clue, Evidence, Failure, FailureKind
from robust_train.model.gpu import GpuInfo
from robust_train.model.spec import AttemptSpec, GiveUp, Retry
from robust_train.policy.context import FailureContext, excluded_after
from robust_train.policy.decide import first_attempt, on_gpus
from robust_train.policy.sizes import PolicySettings
from robust_train.readable import GIB

SETTINGS = policy(batch_size=64, num_workers=4, min_batch_size=8, max_retries=3)
FRAGMENTED = Evidence(
    requested_bytes=GIB, reserved_unallocated_bytes=3 * GIB, free_bytes=0, fragmented=True
)


def after(*history: Attempt, gpus: tuple[GpuInfo, ...] = (), settings=SETTINGS) -> Retry:
    decision = decide(settings, history, gpus)
    assert isinstance(decision, Retry), decision
    return decision


def moved(settings: PolicySettings, spec: AttemptSpec, gpus: tuple[GpuInfo, ...]) -> AttemptSpec:
    return on_gpus(settings, (), Retry(spec, "wait", ""), gpus).spec


def taken(gib: float) -> dict[str, int]:
    """Others took so much between the attempt's start and its end."""
    return {"gpu_free_before_bytes": 20 * GIB, "gpu_free_after_bytes": int((20 - gib) * GIB)}


# --- device_oom ---


def test_a_gpu_that_others_filled_is_no_proof_that_the_batch_fits_on_none():
    """The same step runs out on the next one: smaller there, before the CPU."""
    spec = first_attempt(SETTINGS, (gpu(0, 20),))
    first = failed(spec, FailureKind.DEVICE_OOM, end_step=100, **taken(6))
    gpus = (gpu(1, 20), gpu(2, 20))
    switch = after(first, gpus=gpus)
    assert switch.action == "switch_gpu"
    second = failed(switch.spec, FailureKind.DEVICE_OOM, end_step=100)
    assert after(first, second, gpus=gpus).action == "halve_batch"


@pytest.mark.parametrize("known_by", ["stack", "trainer", "history"])
def test_before_the_first_step_the_batch_is_not_halved(known_by: str):
    settings = changed(SETTINGS, reports_start=known_by == "trainer")
    spec = first_attempt(settings, (gpu(0, 20),))
    evidence = Evidence(clue=Clue.MODEL if known_by == "stack" else None)
    history = (failed(spec, FailureKind.DEVICE_OOM, evidence),)
    if known_by == "history":
        earlier = failed(spec, FailureKind.COMM, began_training=True, end_step=40)
        history = (earlier, *history)
    retry = after(*history, gpus=(gpu(1, 40),), settings=settings)
    assert (retry.action, retry.spec.batch_size) == ("switch_gpu", 64)
    alone = changed(settings, allow_cpu_fallback=False)
    decision = decide(alone, history, ())
    assert isinstance(decision, GiveUp)
    assert "model, optimizer and data do not fit" in decision.reason


# --- host_oom and worker_death ---


def as_asked(*history: Attempt) -> Retry:
    decision = decide(SETTINGS, history)
    assert isinstance(decision, Retry)
    return decision


def test_a_batch_that_is_halved_on_request_keeps_the_effective_batch_and_costs_no_retry():
    first = first_attempt(SETTINGS, (gpu(0, 20),))
    stopped = failed(first, FailureKind.INTERRUPTED, stopped_for="halve_batch")
    asked = as_asked(stopped)
    assert asked.action == "halve_batch_on_request"
    assert (asked.spec.batch_size, asked.spec.effective_batch_size) == (32, 64)
    assert asked.spec.gpu == first.gpu
    settings = changed(SETTINGS, max_retries=1)
    smaller = after(stopped, failed(asked.spec, FailureKind.DEVICE_OOM), settings=settings)
    assert (smaller.action, smaller.spec.batch_size) == ("halve_batch", 16)


def test_a_batch_is_not_halved_below_the_minimum_on_request():
    least = replace(first_attempt(SETTINGS, ()), batch_size=8, gradient_accumulation_steps=8)
    asked = as_asked(failed(least, FailureKind.INTERRUPTED, stopped_for="halve_batch"))
    assert asked.spec == least


# --- devices ---


HARDWARE = Evidence(clue=Clue.HARDWARE)
BUSY = Evidence(clue=Clue.BUSY)
DRIVER = Evidence(clue=Clue.DRIVER)


def fault(spec: AttemptSpec, step: int | None, evidence: Evidence | None = None, **outcome: object):
    return failed(spec, FailureKind.DEVICE_FAULT, evidence, end_step=step, **outcome)


def test_faults_at_other_steps_stay_on_the_gpu_while_the_job_gets_further():
    gpus = (gpu(0, 70), gpu(1, 60))
    spec = first_attempt(SETTINGS, gpus[:1])
    moving = [fault(spec, 10 * n + 3, start_step=10 * n) for n in range(9)]
    assert after(*moving, gpus=gpus).spec == spec
    standing = [fault(spec, n) for n in range(9)]
    assert [after(*standing[:n], gpus=gpus).spec.device for n in (3, 4)] == ["cuda:0", "cuda:1"]


@pytest.mark.parametrize("gone", [False, True])
def test_a_gpu_whose_hardware_failed_is_left_at_once(gone: bool):
    spec = first_attempt(SETTINGS, (gpu(0, 70),))
    ill = replace(gpu(0, 70), unusable="a memory row failed") if gone else gpu(0, 70)
    evidence = Evidence() if gone else HARDWARE
    retry = after(fault(spec, 40, evidence), gpus=(ill, gpu(1, 10)))
    assert (retry.action, retry.spec.device) == ("switch_gpu", "cuda:1")
    # two GPUs whose hardware failed are two GPUs whose hardware failed
    both = after(fault(spec, 40, HARDWARE), fault(retry.spec, 40, HARDWARE), gpus=(gpu(2, 9),))
    assert both.spec.device == "cuda:2"


def test_the_cpu_comes_after_every_gpu_and_after_waiting_for_those_that_others_have():
    failure = fault(first_attempt(SETTINGS, (gpu(0, 70),)), 4, HARDWARE)
    assert after(failure, gpus=()).action == "cpu_fallback"
    decision = decide(SETTINGS, (failure,), (), held=(gpu(1, 3),))
    assert isinstance(decision, Retry)
    assert decision.action == "wait"
    assert decision.room is not None
    assert (decision.room.gpu_uuids, decision.room.exclude) == ((), ("GPU-0",))
    assert isinstance(decision.otherwise, Retry)
    assert decision.otherwise.action == "cpu_fallback"
    # the job's own GPU is worth a wait as well, unless its hardware failed
    assert decide(SETTINGS, (failure,), (), held=(gpu(0, 3),)).action == "cpu_fallback"
    address = fault(failure.spec, 4)
    assert decide(SETTINGS, (address,), (), held=(gpu(0, 3),)).action == "wait"


def test_what_the_host_avoids_after_a_fault_follows_from_the_same_evidence():
    one, two = gpu(0, 1), gpu(1, 1)
    ecc = Failure(FailureKind.DEVICE_FAULT, "uncorrectable ECC error", HARDWARE)
    assert excluded_after(ecc, (one,), (1,)) == {"GPU-0": "uncorrectable ECC error"}
    assert excluded_after(ecc, (one, two), (1, 1)) == {}, "which of the two is not known"
    address = replace(ecc, evidence=Evidence())
    assert excluded_after(address, (one,), (1,)) == {}
    assert set(excluded_after(address, (one, two), (1, None))) == {"GPU-1"}
    assert excluded_after(replace(ecc, kind=FailureKind.DEVICE_OOM), (one,), (None,)) == {}


@pytest.mark.parametrize("step", [40, None])
def test_the_same_fault_at_the_same_step_on_two_devices_is_not_the_devices(step: int | None):
    one = failed(first_attempt(SETTINGS, (gpu(0, 9),)), FailureKind.DEVICE_FAULT, end_step=step)
    other = failed(first_attempt(SETTINGS, (gpu(1, 9),)), FailureKind.DEVICE_FAULT, end_step=step)
    decision = decide(SETTINGS, (one, other), (gpu(2, 70),))
    assert isinstance(decision, GiveUp)
    assert "on two devices (cuda:0 and cuda:1) is not the device's" in decision.reason


# --- comm ---


# --- all of it ---

sizes = st.integers(0, 80 * GIB)
clues = [value for name, value in vars(Clue).items() if name.isupper()]
evidence_strategy = st.builds(
    Evidence,
    requested_bytes=st.none() | sizes,
    reserved_unallocated_bytes=st.none() | sizes,
    free_bytes=st.none() | sizes,
    fragmented=st.booleans(),
    own_limit=st.booleans(),
    clue=st.none() | st.sampled_from(clues),
)
kinds = st.sampled_from(sorted(FailureKind))


@given(st.data())
def test_any_series_of_failures_ends_keeps_the_effective_batch_and_takes_the_cpu_last(data):
    batch = data.draw(st.integers(1, 256))
    settings = policy(
        batch_size=batch,
        gradient_accumulation_steps=data.draw(st.integers(1, 4)),
        num_workers=data.draw(st.integers(0, 8)),
        min_batch_size=data.draw(st.integers(1, batch)),
        max_retries=data.draw(st.integers(0, 4)),
        auto_device=data.draw(st.booleans()),
        allow_cpu_fallback=data.draw(st.booleans()),
        expandable_segments=data.draw(st.booleans()),
        wait_for_gpu=data.draw(st.booleans()),
        reports_start=data.draw(st.booleans()),
    )
    free = data.draw(st.lists(st.floats(1, 80), max_size=4))
    gpus = tuple(gpu(index, gib) for index, gib in enumerate(free))
    held = tuple(gpu(index + 10, 9) for index in range(data.draw(st.integers(0, 2))))
    spec = first_attempt(settings, gpus[:1])
    history: tuple[Attempt, ...] = ()
    visited = [spec.device_key]
    while True:
        kind, evidence = data.draw(kinds), data.draw(evidence_strategy)
        outcome = {
            "start_step": data.draw(st.integers(0, 2)),
            "end_step": data.draw(st.none() | st.integers(0, 3)),
            "saved_step": data.draw(st.none() | st.integers(0, 3)),
            "gpu_free_before_bytes": data.draw(st.none() | sizes),
            "gpu_free_after_bytes": data.draw(st.none() | sizes),
            "micro_batch": data.draw(st.none() | st.integers(settings.min_batch_size, batch)),
        }
        history += (failed(spec, kind, evidence, **outcome),)
        decision = decide(settings, history, gpus, held)
        if isinstance(decision, Retry) and decision.otherwise and data.draw(st.booleans()):
            decision = decision.otherwise
        if isinstance(decision, GiveUp):
            return
        assert kind is not FailureKind.BUG
        assert kind is not FailureKind.INTERRUPTED or evidence.clue == Clue.KILLED
        is_ill = kind is FailureKind.DEVICE_FAULT and evidence.clue == Clue.HARDWARE
        if decision.room is not None and not decision.room.gpu_uuids:
            others = [g for g in (*held, *gpus) if g.uuid not in decision.room.exclude]
            assert not (is_ill and spec.gpus[0] in others)
            found = data.draw(st.sampled_from(others))
            spec = replace(decision.spec, gpus=(found,))
            visited.append(spec.device_key)
        elif is_ill and decision.action != "no_expandable_segments":
            assert decision.spec.device_key != spec.device_key
            spec = decision.spec
        else:
            spec = decision.spec
        assert settings.min_batch_size <= spec.batch_size <= settings.asked.batch_size
        effective = settings.asked.effective_batch_size
        if effective % spec.batch_size == 0:
            assert spec.effective_batch_size == effective
        if FailureContext(settings, history, gpus).since_progress[0] is history[-1]:
            visited = visited[-1:]  # the tries are renewed, of devices too
        if spec.device_key != visited[-1]:
            assert spec.device_key not in visited
            visited.append(spec.device_key)
        assert "cpu" not in visited[:-1], "the CPU is the last device"
        assert history.count(history[-1]) < 100
        assert len(history) < 400, "does not end"


def of_rank(spec: AttemptSpec, rank: int, kind: FailureKind = FailureKind.DEVICE_OOM) -> Attempt:
    return failed(spec, kind, message="out of memory", rank=rank)


def test_a_group_halves_for_all_and_exchanges_every_gpu_that_has_no_more_than_the_failed_one():
    settings = policy(batch_size=8, gradient_accumulation_steps=2, num_gpus=2, max_retries=1)
    small, smaller, big, bigger = gpu(0, 10), gpu(1, 9), gpu(2, 18), gpu(3, 20)
    first = first_attempt(settings, (small, smaller))
    assert (first.ranks, first.effective_batch_size) == (2, 32)
    assert first.device == "cuda:0,cuda:1"
    second = decide(settings, (of_rank(first, 0),), ())
    assert isinstance(second, Retry)
    assert (second.action, second.spec.batch_size, second.spec.gpus) == (
        "halve_batch",
        4,
        (small, smaller),
    )
    assert second.spec.effective_batch_size == 32
    assert "cuda:0 (rank 0)" in second.reason
    history = (of_rank(first, 0), of_rank(second.spec, 0))
    # the other one has even less: one better GPU alone would not help
    few = decide(settings, history, (bigger,))
    assert isinstance(few, Retry)
    assert (few.action, few.spec.ranks, few.spec.effective_batch_size) == ("cpu_fallback", 1, 32)
    assert (few.spec.batch_size, few.spec.gradient_accumulation_steps) == (8, 4)
    both = decide(settings, history, (bigger, big))
    assert isinstance(both, Retry)
    assert (both.action, both.spec.gpus) == ("switch_gpu", (bigger, big))
    assert both.spec.effective_batch_size == 32
    # where only the failed one is short, only that one goes
    last = replace(second.spec, gpus=(small, big))
    one = decide(settings, (of_rank(first, 0), of_rank(last, 0)), (bigger,))
    assert isinstance(one, Retry)
    assert (one.action, one.spec.gpus) == ("switch_gpu", (bigger, big))


def test_a_faulty_gpu_of_a_group_is_exchanged_and_the_others_stay():
    settings = policy(batch_size=8, num_gpus=2)
    spec = first_attempt(settings, (gpu(0, 20), gpu(1, 20)))
    decision = decide(settings, (of_rank(spec, 1, FailureKind.DEVICE_FAULT),), (gpu(2, 20),))
    assert isinstance(decision, Retry)
    assert [g.index for g in decision.spec.gpus] == [0, 2]
    assert "same batch on cuda:2" in decision.reason


def test_the_cpu_in_place_of_several_gpus_halves_by_the_whole_effective_batch():
    settings = policy(batch_size=16, num_gpus=3, min_batch_size=1)
    spec = first_attempt(settings, ())
    assert (spec.ranks, spec.gradient_accumulation_steps, spec.effective_batch_size) == (1, 3, 48)
    decision = decide(settings, (failed(spec, FailureKind.HOST_OOM),), ())
    assert isinstance(decision, Retry)
    assert (decision.spec.batch_size, decision.spec.gradient_accumulation_steps) == (8, 6)
    # unless the CPU is what the user has asked for
    asked = first_attempt(changed(settings, device="cpu", auto_device=False), ())
    assert (asked.ranks, asked.gradient_accumulation_steps) == (3, 1)


def test_a_batch_that_must_not_be_split_gets_another_device_or_fewer_workers_or_no_attempt():
    settings = changed(SETTINGS, num_workers=1, can_checkpoint=True)
    kept = {"keeps_batch": "Gan does not accumulate", "end_step": 3}
    small, large = gpu(0, 10), gpu(1, 20)
    spec = first_attempt(settings, (small,))
    history: tuple[Attempt, ...] = ()
    actions = []
    while isinstance(
        decision := decide(
            settings, (*history, failed(spec, FailureKind.DEVICE_OOM, **kept)), (small, large)
        ),
        Retry,
    ):
        history += (failed(spec, FailureKind.DEVICE_OOM, **kept),)
        actions.append(decision.action)
        spec = decision.spec
        assert (spec.batch_size, spec.gradient_accumulation_steps, spec.ranks) == (64, 1, 1)
    assert actions == ["switch_gpu", "cpu_fallback"]
    assert "the batch was not split: Gan does not accumulate" in decision.reason
    # on the host fewer workers help, and then only what gets further
    spec = first_attempt(settings, ())
    host = after(failed(spec, FailureKind.HOST_OOM, **kept), settings=settings)
    assert host.action == "fewer_workers"
    none = replace(spec, num_workers=0)
    assert isinstance(decide(settings, (failed(none, FailureKind.HOST_OOM, **kept),), ()), GiveUp)
    further = failed(none, FailureKind.HOST_OOM, saved_step=3, saves=2, **kept)
    assert after(further, settings=settings).spec == none


@pytest.mark.parametrize("kind", [FailureKind.DEVICE_OOM, FailureKind.DEVICE_FAULT])
def test_a_batch_that_must_not_be_split_is_not_shared_by_fewer_ranks(kind: FailureKind):
    settings = policy(batch_size=8, num_gpus=2, min_num_gpus=1, min_batch_size=8)
    spec = first_attempt(settings, (gpu(0, 10), gpu(1, 20)))
    gone = Evidence(clue=Clue.HARDWARE)

    def failed_on_rank_0(**outcome: object) -> Attempt:
        return failed(spec, kind, gone, message="failed", rank=0, **outcome)

    allowed = decide(settings, (failed_on_rank_0(),), ())
    assert isinstance(allowed, Retry)
    assert allowed.action == "fewer_gpus"
    decision = decide(settings, (failed_on_rank_0(keeps_batch="no accumulation"),), ())
    assert isinstance(decision, GiveUp)


# --- killed by somebody ---


def killed(spec: AttemptSpec, **outcome: object) -> Attempt:
    return failed(spec, FailureKind.INTERRUPTED, Evidence(clue=Clue.KILLED), **outcome)


@pytest.mark.parametrize(
    "further",
    [
        {"saved_step": 7, "saves": 1},
        {"saves": 2, "checkpoint": "last.pt"},
        {"saves": 1, "checkpoint": "epoch-2.pt"},
        {"start_step": 7},
    ],
    ids=["a later checkpoint", "two without a step", "one under a new name", "a later start"],
)
@pytest.mark.parametrize(
    ("kind", "evidence", "gpus"),
    [
        (FailureKind.INTERRUPTED, Evidence(clue=Clue.KILLED), ()),
        (FailureKind.COMM, None, ()),
        (FailureKind.DEVICE_UNAVAILABLE, Evidence(clue=Clue.BUSY), (gpu(0, 20),)),
    ],
)
def test_a_checkpoint_beyond_the_last_failure_renews_all_tries(kind, evidence, gpus, further):
    settings = changed(SETTINGS, allow_cpu_fallback=False)
    spec = first_attempt(settings, (gpu(0, 20),))
    once = failed(spec, kind, evidence, end_step=9)
    saved = failed(spec, kind, evidence, end_step=5, saved_step=3, saves=1, checkpoint="last.pt")
    gets_further = failed(spec, kind, evidence, end_step=9, **further)
    # the same checkpoint again is no progress, and neither are steps that no checkpoint has
    assert isinstance(decide(settings, (saved, saved, once, once), gpus), GiveUp)
    for tries in range(3):
        history = (saved, once, once, gets_further) + (once,) * tries
        assert after(*history, gpus=gpus, settings=settings).spec == spec
    assert isinstance(decide(settings, (*history, once), gpus), GiveUp)


def test_after_progress_memory_may_run_out_max_retries_times_again():
    settings = changed(SETTINGS, max_retries=1)
    first = first_attempt(settings, (gpu(0, 20),))
    half = replace(first, batch_size=32, gradient_accumulation_steps=2)
    ran_out = failed(first, FailureKind.DEVICE_OOM, end_step=4)
    again = failed(half, FailureKind.DEVICE_OOM, end_step=9)
    assert after(ran_out, again, settings=settings).action == "cpu_fallback"
    further = replace(again, saved_step=8, saves=1)
    assert after(ran_out, further, settings=settings).spec.batch_size == 16
    # and others may take the same memory again
    taken_once = failed(half, FailureKind.DEVICE_OOM, **taken(5))
    assert after(taken_once, taken_once, settings=settings).action != "wait"
    taken_later = replace(taken_once, saved_step=8, saves=1)
    assert after(taken_once, taken_later, settings=settings).action == "wait"


@pytest.mark.parametrize(
    ("kind", "evidence"),
    [
        (FailureKind.DEVICE_FAULT, None),
        (FailureKind.DEVICE_UNAVAILABLE, None),
        (FailureKind.DEVICE_OOM, None),
    ],
)
def test_after_progress_a_gpu_that_was_left_is_tried_again(kind, evidence):
    settings = changed(SETTINGS, max_retries=0, min_batch_size=64)
    one, two = gpu(0, 20), gpu(1, 20)
    first, second = first_attempt(settings, (one,)), first_attempt(settings, (two,))
    left = failed(first, kind, evidence, end_step=3)
    again = failed(second, kind, evidence, end_step=5)
    assert after(left, again, gpus=(one, two), settings=settings).action == "cpu_fallback"
    further = replace(again, saved_step=4, saves=1)
    retry = after(left, further, gpus=(one, replace(two, free_bytes=0)), settings=settings)
    assert (retry.action, retry.spec.device) == ("switch_gpu", "cuda:0")


def test_a_gpu_whose_hardware_failed_is_not_returned_to_whatever_came_after():
    first, second = first_attempt(SETTINGS, (gpu(0, 20),)), first_attempt(SETTINGS, (gpu(1, 20),))
    ill = Evidence(clue=Clue.HARDWARE)
    left = failed(first, FailureKind.DEVICE_FAULT, ill, end_step=3)
    also = failed(second, FailureKind.DEVICE_FAULT, ill, end_step=500, saved_step=400, saves=1)
    assert after(left, also, gpus=(gpu(0, 20), gpu(1, 20))).action == "cpu_fallback"


def test_a_fault_at_the_start_in_another_week_on_another_gpu_is_no_proof_against_the_program():
    first, second = first_attempt(SETTINGS, (gpu(0, 20),)), first_attempt(SETTINGS, (gpu(1, 20),))
    at_start = failed(first, FailureKind.DEVICE_FAULT)
    trained = failed(second, FailureKind.COMM, end_step=900, saved_step=890, saves=1)
    later = failed(second, FailureKind.DEVICE_FAULT)
    both = (gpu(0, 20), gpu(1, 20))
    assert after(at_start, trained, later, gpus=both).spec == second
    assert isinstance(decide(SETTINGS, (at_start, later), both), GiveUp)


@pytest.mark.parametrize(
    "kind", [FailureKind.DEVICE_OOM, FailureKind.HOST_OOM, FailureKind.WORKER_DEATH]
)
def test_what_a_leak_ends_at_the_smallest_size_is_started_again_as_long_as_it_gets_further(kind):
    settings = changed(SETTINGS, min_batch_size=64, num_workers=0, allow_cpu_fallback=False)
    spec = first_attempt(settings, (gpu(0, 20),))
    history: tuple[Attempt, ...] = ()
    for week in range(1, 9):
        at = {"start_step": 100 * week - 100, "saved_step": 100 * week, "saves": 1}
        history += (failed(spec, kind, end_step=100 * week, **at),)
        retry = after(*history, settings=settings)
        assert (retry.action, retry.spec) == ("retry", spec)
    same = failed(spec, kind, start_step=800, end_step=800)
    assert isinstance(decide(settings, (*history, same), ()), GiveUp)


@pytest.mark.parametrize("name", ["last.pt", "version_{}/last.pt"])
def test_a_script_that_begins_anew_each_time_is_not_repeated_for_ever(name: str):
    """It saves as much as one that goes on, and a script need not report steps."""
    settings = changed(SETTINGS, min_batch_size=64, num_workers=0, allow_cpu_fallback=False)
    spec = first_attempt(settings, (gpu(0, 20),))
    history: tuple[Attempt, ...] = ()
    for number in range(50):
        saved = {"saves": 3, "checkpoint": name.format(number)}
        history += (failed(spec, FailureKind.DEVICE_OOM, **saved),)
        if isinstance(decide(settings, history, ()), GiveUp):
            break
    assert 20 <= len(history) < 30
    # a step that is reported, and saved, counts anew
    further = failed(spec, FailureKind.DEVICE_OOM, end_step=9, saved_step=8, saves=1)
    assert after(*history, further, settings=settings).spec == spec


# --- gradient checkpointing ---


def test_the_smallest_batch_is_tried_with_gradient_checkpointing_before_another_device():
    settings = changed(SETTINGS, can_checkpoint=True)
    first = first_attempt(settings, (gpu(0, 20),))
    gpus = (gpu(1, 40), gpu(0, 20))
    history = (failed(replace(first, batch_size=8), FailureKind.DEVICE_OOM, end_step=3),)
    retry = after(*history, gpus=gpus, settings=settings)
    assert retry.action == "gradient_checkpointing"
    assert (retry.spec.device, retry.spec.batch_size) == ("cuda:0", 8)
    assert (retry.spec.gradient_checkpointing, retry.spec.effective_batch_size) == (True, 64)
    assert "third more time" in retry.reason
    history += (failed(retry.spec, FailureKind.DEVICE_OOM, end_step=3),)
    assert after(*history, gpus=gpus, settings=settings).action == "switch_gpu"
    on_cpu = after(*history, settings=settings)
    assert (on_cpu.action, on_cpu.spec.gradient_checkpointing) == ("cpu_fallback", False)
    # where max_retries ends the halving, the smallest size that may be used
    few = changed(settings, max_retries=1)
    half = replace(first, batch_size=32, gradient_accumulation_steps=2)
    history = tuple(failed(spec, FailureKind.DEVICE_OOM, end_step=3) for spec in (first, half))
    assert after(*history, settings=few).spec.batch_size == 8


def test_gradient_checkpointing_saves_host_memory_of_jobs_on_the_cpu_alone():
    settings = changed(SETTINGS, can_checkpoint=True, num_workers=0, min_batch_size=64)
    for gpus, action in (((), "gradient_checkpointing"), ((gpu(0, 20),), None)):
        failure = failed(first_attempt(settings, gpus), FailureKind.HOST_OOM, end_step=3)
        decision = decide(settings, (failure,), gpus)
        assert action == (decision.action if isinstance(decision, Retry) else None)


def test_attempts_that_stopped_because_the_user_asked_use_up_no_try_of_a_killed_one():
    spec = first_attempt(SETTINGS, (gpu(0, 20),))
    asked = failed(spec, FailureKind.INTERRUPTED, stopped_for="halve_batch")
    assert after(*[asked] * 9, killed(spec), gpus=(gpu(0, 20),)).spec == spec


# --- fewer GPUs ---


def of_four(**keys) -> PolicySettings:
    return policy(24, **{"num_gpus": 4, **keys})


FOUR = tuple(gpu(index, 40) for index in range(4))


def lost(settings: PolicySettings, group=FOUR) -> Attempt:
    attempt = failed(
        first_attempt(settings, group), FailureKind.DEVICE_FAULT, Evidence(clue=Clue.HARDWARE)
    )
    failure = replace(attempt.failure, rank=len(group) - 1)
    return replace(attempt, failure=failure)


def test_without_another_gpu_a_group_goes_on_with_fewer_where_its_user_allows_it():
    allowed = of_four(min_num_gpus=2)
    retry = after(lost(allowed), gpus=FOUR, settings=allowed)
    assert (retry.action, retry.room.counts, retry.room.exclude) == (
        "fewer_gpus",
        (3, 2),
        ("GPU-3",),
    )
    assert retry.otherwise.action == "cpu_fallback"
    assert after(lost(of_four()), gpus=FOUR, settings=of_four()).action == "cpu_fallback"


def test_a_group_goes_on_without_the_gpu_that_has_too_little_memory_for_any_size():
    settings, group = of_four(min_num_gpus=2), (*FOUR[:3], gpu(3, 20))

    def ran_out(rank: int, group=group) -> Attempt:
        spec = replace(first_attempt(settings, group), batch_size=settings.min_batch_size)
        attempt = failed(spec, FailureKind.DEVICE_OOM, end_step=3)
        failure = replace(attempt.failure, rank=rank)
        return replace(attempt, failure=failure)

    retry = after(ran_out(3), gpus=group, settings=settings)
    assert (retry.action, retry.room.counts, retry.room.exclude) == (
        "fewer_gpus",
        (3, 2),
        ("GPU-3",),
    )
    assert retry.room.free_bytes > group[3].free_bytes
    assert retry.otherwise.action == "cpu_fallback"
    assert after(ran_out(0, FOUR), gpus=FOUR, settings=settings).action == "cpu_fallback"
    three = changed(settings, min_num_gpus=4)
    assert after(ran_out(3), gpus=group, settings=three).action == "cpu_fallback"


def test_it_waits_first_where_others_have_gpus_that_would_do():
    settings = of_four(min_num_gpus=3)
    retry = decide(settings, (lost(settings),), FOUR, (gpu(4, 40),))
    assert (retry.action, retry.room.counts) == ("wait", (4,))
    assert retry.otherwise.action == "fewer_gpus"


def test_a_group_that_has_lost_one_before_waits_for_as_many_as_it_has():
    settings = of_four(min_num_gpus=2)
    spec = moved(settings, first_attempt(settings, FOUR), FOUR[:3])
    again = replace(lost(settings, FOUR[:3]), spec=spec)
    assert decide(settings, (again,), FOUR[:3], (gpu(4, 40),)).room.counts == (3,)
    assert after(again, gpus=FOUR[:3], settings=settings).room.counts == (2,)


@given(
    batch_size=st.integers(1, 64),
    accumulation=st.integers(1, 4),
    ranks=st.integers(1, 8),
    min_ranks=st.integers(1, 8),
    min_batch_size=st.integers(1, 8),
)
def test_fewer_gpus_keep_the_effective_batch_and_no_larger_micro_batch(
    batch_size, accumulation, ranks, min_ranks, min_batch_size
):
    settings = policy(
        batch_size,
        accumulation,
        num_gpus=ranks,
        min_num_gpus=min(min_ranks, ranks),
        min_batch_size=min(min_batch_size, batch_size),
    )
    spec = first_attempt(settings, tuple(gpu(index, 40) for index in range(ranks)))
    counts = settings.fewer_ranks(ranks)
    assert list(counts) == sorted(counts, reverse=True)
    for count in counts:
        assert settings.config.min_num_gpus <= count < ranks
        fewer = moved(settings, spec, spec.gpus[:count])
        assert (fewer.ranks, len(fewer.gpus)) == (count, count)
        assert fewer.effective_batch_size == settings.asked.effective_batch_size
        assert settings.min_batch_size <= fewer.batch_size <= batch_size


def test_a_batch_that_changes_nothing_is_halved_once():
    big = Evidence(requested_bytes=900 * GIB, allocated_bytes=0)
    place = {"traceback": 'Traceback …:\n  File "train.py", line 3\nError: 5 MiB are free\n'}
    spec = first_attempt(SETTINGS, (gpu(0, 20),))
    silent = failed(spec, FailureKind.DEVICE_OOM, replace(big, free_bytes=5), **place)
    retry = after(silent, gpus=(gpu(0, 20),))
    assert retry.action == "halve_batch"
    assert "no step was reported, so the batch may not matter: micro-batch 64 → 32" in retry.reason
    smaller = replace(spec, batch_size=32, gradient_accumulation_steps=2)
    place = {"traceback": place["traceback"].replace("5 MiB", "6 MiB")}
    again = failed(smaller, FailureKind.DEVICE_OOM, big, **place)
    assert after(silent, again, gpus=(gpu(0, 20), gpu(1, 40))).action == "switch_gpu"
    assert after(silent, again).spec.gpus == (), "no third size on this GPU"
    # halved further where place or figures differ or are unknown, or there was a step
    for evidence, reported in (
        (replace(big, requested_bytes=GIB), place),
        (replace(big, allocated_bytes=GIB), place),
        (replace(big, reserved_unallocated_bytes=1), place),
        (Evidence(), place),
        (big, {"traceback": place["traceback"].replace("line 3", "line 4")}),
        (big, {}),
        (big, {**place, "end_step": 3}),
    ):
        other = failed(smaller, FailureKind.DEVICE_OOM, evidence, **reported)
        assert after(silent, other).action == "halve_batch"
    auto = changed(SETTINGS, finds_batch_size=True)
    assert after(silent, again, settings=auto).action == "halve_batch"
    script = failed(spec, FailureKind.DEVICE_OOM, big)
    assert after(script, replace(script, spec=smaller)).action == "halve_batch"
    assert "may not matter" not in after(failed(spec, FailureKind.DEVICE_OOM, end_step=3)).reason
