"""Who gets which GPU: the pure decision, by example and by property."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from robust_train.gpu.processes import Holder
from robust_train.queue.order import GpuReservation, WaitingJob
from robust_train.queue.reasons import LONGEST, describe, why_waiting
from robust_train.queue.scheduler import Plan, Untaken, open_to, plan, to_pass_over, untaken
from robust_train.values import MIB, GpuInfo, GpuProcess

A, B, C = "GPU-a", "GPU-b", "GPU-c"
ALL = frozenset((A, B, C))


def gpu(uuid: str, total: int = 40000, free: int | None = None, **changes: object) -> GpuInfo:
    free = total if free is None else free
    index = "abcdefgh".index(uuid[-1])
    info = GpuInfo(uuid, "A100", index, uuid, total * MIB, free * MIB, (total - free) * MIB)
    return replace(info, **changes)


def job(ticket: int, need: int, only: frozenset[str] = ALL, per_device: int = 1) -> WaitingJob:
    return WaitingJob(f"job{ticket}", ticket, need * MIB, only, per_device)


def held(
    uuid: str | None, claim: int, taken: int | None = None, **changes: object
) -> GpuReservation:
    known = None if taken is None else taken * MIB
    return replace(GpuReservation(f"on-{uuid}", uuid, claim * MIB, known), **changes)


def uuids(decided: Plan) -> dict[str, str]:
    return {name: found[0].uuid for name, found in decided.groups.items()}


def test_jobs_that_come_together_get_a_gpu_each_in_the_order_of_their_tickets() -> None:
    gpus = [gpu(A, free=10000), gpu(B, free=30000), gpu(C, free=20000)]
    line = [job(3, 4000), job(1, 4000), job(2, 4000), job(4, 4000)]
    decided = plan(line, [], gpus)
    assert uuids(decided) == {"job1": B, "job2": C, "job3": A}
    assert decided.first == "job4"


def test_a_gpu_with_a_reservation_is_full_unless_both_jobs_allow_company() -> None:
    gpus = [gpu(A, free=40000)]
    alone, with_others = held(A, 4000), held(A, 4000, jobs_per_device=2)
    assert not plan([job(1, 4000)], [with_others], gpus).groups
    assert not plan([job(1, 4000, per_device=2)], [alone], gpus).groups
    assert uuids(plan([job(1, 4000, per_device=2)], [with_others], gpus)) == {"job1": A}


def test_what_a_reservation_has_not_taken_yet_is_not_free() -> None:
    packed = held(A, 30000, jobs_per_device=4)
    asks = job(1, 15000, per_device=4)
    assert not plan([asks], [packed], [gpu(A, free=40000)]).groups
    # it took 20000 of its claim, which NVML's figure knows of already
    took = held(A, 20000, 20000, jobs_per_device=4)
    granted = plan([asks], [took], [gpu(A, free=20000)]).groups["job1"][0]
    assert granted.free_bytes == 20000 * MIB


def test_claims_never_add_up_to_more_than_the_gpu_has_whatever_a_job_tells_it_took() -> None:
    # it told 30000 before it returned them to the driver, and may take them again
    boasts = held(A, 30000, 30000, jobs_per_device=4)
    assert not plan([job(1, 15000, per_device=4)], [boasts], [gpu(A, free=40000)]).groups


def test_an_exclusive_gpu_takes_one_job_even_before_that_one_has_started() -> None:
    exclusive = gpu(A, compute_mode="exclusive_process")
    first = held(A, 4000, jobs_per_device=8)
    assert not plan([job(1, 4000, per_device=8)], [first], [exclusive]).groups


def test_an_unusable_gpu_is_not_given() -> None:
    assert not plan([job(1, 4000)], [], [gpu(A, unusable="it is sick")]).groups


def test_a_record_that_cannot_be_read_may_hold_any_gpu() -> None:
    hidden = replace(held(None, 0), id="x")
    decided = plan([job(1, 4000)], [hidden], [gpu(A), gpu(B)])
    assert not decided.groups
    said = why_waiting(job(1, 4000), [hidden], [gpu(A)], decided)
    assert "the record of job x cannot be read" in said


def test_the_gpu_that_suits_the_head_first_is_kept_from_those_behind_it() -> None:
    # the head needs a whole GPU; A lacks less than B, whose memory a stranger holds
    gpus = [gpu(A, free=15000), gpu(B, free=20000)]
    holdings = [held(A, 25000, 25000, jobs_per_device=4)]
    line = [job(1, 30000, per_device=4), job(2, 12000, per_device=4), job(3, 6000, per_device=4)]
    decided = plan(line, holdings, gpus)
    assert decided.kept == (A,)
    assert uuids(decided) == {"job2": B, "job3": B}


def test_the_longer_the_head_waits_the_more_gpus_are_kept_for_it() -> None:
    gpus = [gpu(uuid, free=20000) for uuid in (A, B, C)]
    line = [job(1, 30000), job(2, 6000)]
    assert len(plan(line, [], gpus, now=299).kept) == 1
    assert len(plan(line, [], gpus, now=301).kept) == 2
    late = plan(line, [], gpus, now=901)
    assert set(late.kept) == ALL
    assert not late.groups


def test_a_job_that_passes_takes_a_gpu_that_the_head_could_not_use() -> None:
    gpus = [gpu(A, free=3000), gpu(B, free=20000), gpu(C, total=16000, free=8000)]
    decided = plan([job(1, 30000), job(2, 6000)], [], gpus)
    assert uuids(decided) == {"job2": C}


def test_a_job_with_a_mask_of_its_own_does_not_wait_for_a_head_that_wants_other_gpus() -> None:
    gpus = [gpu(A, free=0), gpu(B)]
    line = [job(1, 4000, frozenset({A})), job(2, 4000, frozenset({B}))]
    assert uuids(plan(line, [], gpus)) == {"job2": B}


def test_packed_jobs_go_where_they_fit_most_tightly() -> None:
    gpus = [gpu(A, free=40000), gpu(B, free=9000)]
    assert uuids(plan([job(1, 6000, per_device=4)], [], gpus)) == {"job1": B}


def test_a_running_job_may_move_where_nobody_before_it_waits() -> None:
    gpus = [gpu(A), gpu(B)]
    earlier, later = job(1, 30000), job(9, 30000)
    me = job(5, 4000)
    assert {g.uuid for g in open_to(me, [later], [], gpus)} == {A, B}
    assert {g.uuid for g in open_to(me, [earlier], [], gpus)} == {B}
    assert not open_to(me, [earlier], [held(B, 1000)], gpus)


def test_each_gpu_is_described_with_who_has_how_much_of_it() -> None:
    gpus = [gpu(A, total=40000, free=22000), gpu(B, free=35000)]
    holdings = [replace(held(A, 10000, 10000, jobs_per_device=2), id="7-ab", owner="lora, ada")]
    first, second = describe(holdings, gpus)
    assert first == (
        "GPU 0 (A100, GPU-a…): 22000 MiB of 40000 MiB free, "
        "10000 MiB reserved by job 7-ab (lora, ada), 8000 MiB used by others"
    )
    assert second.endswith("35000 MiB of 40000 MiB free, 5000 MiB used by others")


def test_the_reason_for_waiting_names_the_nearest_obstacle_first_in_one_short_line() -> None:
    me = job(2, 4000)
    full = gpu(C, free=2000, processes=(GpuProcess(812, 30000 * MIB),))
    sick = gpu(B, unusable="the driver reports that it has to be reset (nvidia-smi --gpu-reset)")
    mine = [held(A, 4000)]

    def why(job: WaitingJob, holdings: list[GpuReservation], *gpus: GpuInfo) -> str:
        decided = plan([job], holdings, gpus)
        said = why_waiting(job, holdings, gpus, decided, {812: Holder(812, "python", "ada")})
        assert len(said) <= LONGEST
        assert "\n" not in said
        return said

    taken = "taken, one job per GPU (gpu_jobs_per_device=1"
    assert why(me, mine, gpu(A)) == f"GPU 0: {taken})"
    assert why(me, [*mine, held(B, 1)], gpu(A), gpu(B)) == f"GPUs 0, 1: {taken})"
    assert why(job(2, 4, per_device=2), mine, gpu(A)) == f"GPU 0: {taken} of the job there)"
    assert why(me, [], full) == "GPU 2: 2000 of 4000 MiB free, python (pid 812, ada) 30000 MiB"
    packed = [held(A, 38000, jobs_per_device=2)]
    beside = f"GPU 0: 2000 of 4000 MiB free beside job {packed[0].id}"
    assert why(job(2, 4000, per_device=2), packed, gpu(A)) == beside
    assert why(me, mine, sick, full, gpu(A)).startswith(f"GPU 0: {taken}); GPU 2: 2000 of 4000")
    assert why(me, [], sick).startswith("GPU 1: the driver reports that it has to be reset")
    line = [job(1, 30000), me]
    kept = why_waiting(me, [], [gpu(A)], plan(line, [], [gpu(A)]))
    assert kept == "GPU 0: kept for job job1, which is ahead in the queue"


# --- properties ---

sizes = st.integers(1, 48).map(lambda n: n * 1000)
jobs = st.lists(
    st.tuples(sizes, st.integers(1, 4), st.sets(st.sampled_from(sorted(ALL)), min_size=1)),
    min_size=1,
    max_size=12,
)
machines = st.lists(
    st.tuples(st.sampled_from((8000, 24000, 48000)), st.floats(0, 1)), min_size=3, max_size=3
)


def build(machine: list[tuple[int, float]]) -> list[GpuInfo]:
    return [
        gpu(uuid, total, int(total * share))
        for uuid, (total, share) in zip((A, B, C), machine, strict=True)
    ]


@given(jobs, machines)
def test_grants_never_exceed_free_memory_nor_the_number_of_jobs_a_gpu_may_have(
    wanted: list[tuple[int, int, set[str]]], machine: list[tuple[int, float]]
) -> None:
    gpus = build(machine)
    line = [job(n, need, frozenset(only), per) for n, (need, per, only) in enumerate(wanted)]
    decided = plan(line, [], gpus)
    for info in gpus:
        here = [
            w for w in line if w.id in decided.groups and decided.groups[w.id][0].uuid == info.uuid
        ]
        assert sum(w.need_bytes for w in here) <= info.free_bytes
        assert len(here) <= min((w.jobs_per_device for w in here), default=0) or not here
        assert all(info.uuid in w.only for w in here)


@given(jobs, machines)
def test_whoever_passes_the_head_leaves_its_gpu_alone(
    wanted: list[tuple[int, int, set[str]]], machine: list[tuple[int, float]]
) -> None:
    line = [job(n, need, frozenset(only), per) for n, (need, per, only) in enumerate(wanted)]
    decided = plan(line, [], build(machine))
    if decided.first is None:
        return
    head = next(w for w in line if w.id == decided.first)
    passed = [w for w in line if w.ticket > head.ticket and w.id in decided.groups]
    assert all(decided.groups[w.id][0].uuid not in decided.kept for w in passed)
    assert all(w.ticket > head.ticket or w.id in decided.groups for w in line if w is not head)


@given(jobs, machines)
def test_what_is_behind_a_job_does_not_change_what_the_job_gets(
    wanted: list[tuple[int, int, set[str]]], machine: list[tuple[int, float]]
) -> None:
    line = [job(n, need, frozenset(only), per) for n, (need, per, only) in enumerate(wanted)]
    gpus = build(machine)
    everybody = plan(line, [], gpus).groups
    for n, waiter in enumerate(line):
        alone = plan(line[: n + 1], [], gpus).groups
        assert alone.get(waiter.id) == everybody.get(waiter.id)


@settings(max_examples=60, deadline=None)
@given(jobs, machines, st.integers(0, 10**6))
def test_nobody_waits_for_ever_as_long_as_running_jobs_end(
    wanted: list[tuple[int, int, set[str]]], machine: list[tuple[int, float]], seed: int
) -> None:
    """Newcomers keep coming, small ones that fit anywhere, for as long as an old one waits."""
    rng = random.Random(seed)
    gpus = [replace(info, free_bytes=info.total_bytes, used_bytes=0) for info in build(machine)]
    totals = {info.uuid: info.total_bytes for info in gpus}
    line = [job(n, need, frozenset(only), per) for n, (need, per, only) in enumerate(wanted)]
    line = [w for w in line if any(totals[uuid] >= w.need_bytes for uuid in w.only)]
    old, ticket = {w.id for w in line}, len(wanted)
    running: list[GpuReservation] = []
    started: list[str] = []
    for _ in range(400):
        if not old - set(started):
            break
        used = dict.fromkeys(totals, 0)
        for holding in running:
            used[holding.gpu] += holding.reserved_bytes
        now = [
            replace(info, free_bytes=info.total_bytes - used[info.uuid], used_bytes=used[info.uuid])
            for info in gpus
        ]
        assert all(info.free_bytes >= 0 for info in now)
        decided = plan(line, running, now)
        for waiter in [w for w in line if w.id in decided.groups]:
            line.remove(waiter)
            started.append(waiter.id)
            where = decided.groups[waiter.id][0].uuid
            size = waiter.need_bytes
            per_device, came = waiter.jobs_per_device, waiter.ticket
            running.append(
                GpuReservation(waiter.id, where, size, size, per_device, since=ticket, ticket=came)
            )
        while len(line) < len(old) + 2:
            ticket += 1
            line.append(job(ticket, rng.choice((1000, 4000)), per_device=4))
        if running:
            running.pop(rng.randrange(len(running)))
    assert not old - set(started)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 4))
def test_there_is_always_a_gpu_where_nobody_who_passed_the_head_is_in_its_way(
    seed: int, per_device: int
) -> None:
    """Jobs come and end at random; the head's own view of it is kept beside the scheduler's."""
    rng = random.Random(seed)
    line: list[WaitingJob] = []
    running: list[GpuReservation] = []
    first_in_line, since = "", 0
    for now in range(1, 60):
        line.append(job(now, rng.choice((4000, 4000, 8000, 12000, 38000)), per_device=per_device))
        used = {uuid: sum(h.reserved_bytes for h in running if h.gpu == uuid) for uuid in (A, B, C)}
        gpus = [gpu(uuid, 40000, 40000 - taken // MIB) for uuid, taken in used.items()]
        decided = plan(line, running, gpus)
        for waiter in [w for w in line if w.id in decided.groups]:
            line.remove(waiter)
            size, where = waiter.need_bytes, decided.groups[waiter.id][0].uuid
            came = waiter.ticket
            running.append(
                GpuReservation(waiter.id, where, size, size, per_device, since=now, ticket=came)
            )
        if line:
            head = line[0]
            if head.id != first_in_line:
                first_in_line, since = head.id, now
            in_the_way = {
                uuid: [h for h in running if h.gpu == uuid and h.since > since]
                for uuid in (A, B, C)
            }
            assert any(
                len(passed) < per_device
                and sum(h.reserved_bytes for h in passed) + head.need_bytes <= 40000 * MIB
                for passed in in_the_way.values()
            )
        for _ in range(rng.randrange(3)):
            if running:
                running.pop(rng.randrange(len(running)))


# --- who does not take its GPUs ---


def test_who_does_not_take_its_gpus_is_passed_over_after_some_seconds() -> None:
    noted: Untaken = {}
    for now in (100.0, 101.0, 102.0, 103.0, 104.0):
        noted = untaken(noted, ["a"], now)
        assert to_pass_over(noted, now) == frozenset()
    noted = untaken(noted, ["a"], 105.0)
    assert to_pass_over(noted, 105.0) == {"a"}
    assert untaken(noted, ["b"], 106.0) == {"b": (106.0, 106.0)}, "it has taken them"


def test_nobody_is_passed_over_for_a_time_in_which_nobody_polled() -> None:
    noted = untaken({}, ["a"], 100.0)
    noted = untaken(noted, ["a"], 700.0)
    assert to_pass_over(noted, 700.0) == frozenset()
    for now in range(701, 706):
        noted = untaken(noted, ["a"], float(now))
    assert to_pass_over(noted, 705.0) == {"a"}
    assert to_pass_over(noted, 900.0) == frozenset(), "whoever polls now was stopped itself"


def test_equal_tickets_go_by_the_time_at_which_they_came() -> None:
    gpus = [gpu(A)]
    last = 10**15 - 1
    early, late = (
        replace(job(last, 30000), id=id_, queued_at=at) for id_, at in (("b", 1.0), ("a", 2.0))
    )
    assert list(plan([late, early], [], gpus).groups) == ["b"]
    assert open_to(late, [early], [], gpus) == ()
    assert len(open_to(early, [late], [], gpus)) == 1


def test_gpus_in_exclusive_mode_under_mps_are_shared_as_the_jobs_allow() -> None:
    under_mps = replace(gpu(A), compute_mode="exclusive_process", mps=True)
    line = [job(n, 4000, per_device=2) for n in (1, 2, 3)]
    assert len(plan(line, [], [under_mps]).groups) == 2
    assert len(plan(line, [], [replace(under_mps, mps=False)]).groups) == 1
