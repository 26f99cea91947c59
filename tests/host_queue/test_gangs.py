"""Jobs of several GPUs: the pure decision, by example and by property."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from robust_train.gpu.select import choose_group
from robust_train.queue.order import GpuReservation, WaitingJob
from robust_train.queue.reasons import why_waiting
from robust_train.queue.scheduler import Plan, open_to, plan
from robust_train.values import MIB, GpuInfo

UUIDS = tuple(f"GPU-{letter}" for letter in "abcdefgh")
A, B, C, D = UUIDS[:4]
ALL = frozenset(UUIDS)


def gpu(uuid: str, free: int = 40000, total: int = 40000, **changes: object) -> GpuInfo:
    index = UUIDS.index(uuid)
    info = GpuInfo(uuid, "A100", index, uuid, total * MIB, free * MIB, (total - free) * MIB)
    return replace(info, **changes)


def job(ticket: int, count: int, need: int = 4000, per_device: int = 1) -> WaitingJob:
    return WaitingJob(f"job{ticket}", ticket, need * MIB, ALL, per_device, count=count)


def held(uuid: str, claim: int = 4000, by: str = "old", **changes: object) -> GpuReservation:
    return replace(GpuReservation(by, uuid, claim * MIB, claim * MIB), **changes)


def uuids(decided: Plan) -> dict[str, tuple[str, ...]]:
    return {id_: tuple(gpu.uuid for gpu in group) for id_, group in decided.groups.items()}


def test_a_job_gets_all_its_gpus_at_once_or_none_and_then_they_are_kept_for_it() -> None:
    gpus = [gpu(A, free=30000), gpu(B), gpu(C)]
    assert uuids(plan([job(1, 2)], [], gpus)) == {"job1": (B, C)}
    decided = plan([job(1, 3), job(2, 1)], [held(C)], gpus)
    assert (decided.groups, decided.first) == ({}, "job1")
    assert set(decided.kept) == {A, B, C}


def test_two_jobs_that_want_every_gpu_go_one_after_the_other() -> None:
    gpus = [gpu(uuid) for uuid in (A, B, C, D)]
    line = [job(1, 4), job(2, 4)]
    assert set(uuids(plan(line, [], gpus))) == {"job1"}
    first = [held(uuid, by="job1", ticket=1) for uuid in (A, B, C, D)]
    assert not plan(line[1:], first, gpus).groups
    assert not plan(line[1:], first[:1], gpus).groups, "nor where it has released all but one"
    assert len(plan(line[1:], [], gpus).groups["job2"]) == 4


def test_small_jobs_take_only_gpus_that_are_not_kept_for_a_large_one() -> None:
    gpus = [gpu(uuid) for uuid in (A, B, C, D)]
    holdings = [held(A, since=1.0), held(B, since=2.0)]
    line = [job(1, 3), job(2, 1), job(3, 1)]
    decided = plan(line, holdings, gpus)
    # two are free, and of the busy ones A was taken first
    assert decided.kept == (C, D, A)
    assert not decided.groups
    assert uuids(plan(line, holdings[:1], gpus)) == {"job1": (B, C, D)}


def test_a_job_that_could_only_have_some_of_the_gpus_is_in_nobodys_way() -> None:
    """No GPU is kept for it while no end of a job could give it enough: others go on."""
    gpus = [gpu(A), gpu(B), gpu(C, unusable="it has to be reset")]
    line = [replace(job(n, count), only=frozenset({A, B, C})) for n, count in enumerate((3, 1, 1))]
    assert set(uuids(plan(line, [], gpus))) == {"job1", "job2"}
    well = [gpu(uuid) for uuid in (A, B, C)]
    assert set(uuids(plan(line, [held(C)], well))) == set()
    owned = gpu(C, compute_mode="exclusive_process", unusable="pid 7 owns it")
    assert set(uuids(plan(line, [], [gpu(A), gpu(B), owned]))) == set()


def test_gpus_are_kept_for_a_job_that_may_use_others_which_only_its_container_sees() -> None:
    small = replace(job(2, 1), only=frozenset({A, B}))
    seen = [gpu(A), gpu(B)]
    assert not plan([replace(job(1, 3), only=frozenset({A, B, C})), small], [], seen).groups
    assert plan([replace(job(1, 3), only=frozenset({A, B})), small], [], seen).groups


def test_gpus_of_one_model_are_taken_where_there_are_enough() -> None:
    v100 = {"name": "V100", "total": 16000, "free": 16000}
    gpus = [gpu(A, free=39000), gpu(B, **v100), gpu(C, **v100), gpu(D, free=12000)]
    assert uuids(plan([job(1, 2, 4000)], [], gpus)) == {"job1": (B, C)}
    # not even two of the same have that much
    assert uuids(plan([job(1, 2, 14000)], [], [*gpus[:2], gpu(C)])) == {"job1": (C, A)}
    assert uuids(plan([job(1, 2, 14000)], [], gpus[:2])) == {"job1": (A, B)}


def test_a_job_that_passes_takes_gpus_that_the_head_could_not_use() -> None:
    small = {"name": "V100", "total": 16000, "free": 16000}
    gpus = [gpu(A, free=39000), gpu(B, **small), gpu(C, **small), gpu(D, free=38000)]
    assert uuids(plan([job(2, 2)], [], gpus)) == {"job2": (A, D)}
    assert uuids(plan([job(1, 1, 39500), job(2, 2)], [], gpus)) == {"job2": (B, C)}


def test_the_longer_a_job_of_several_gpus_waits_the_more_are_kept_for_it() -> None:
    gpus = [gpu(uuid, free=3000) for uuid in UUIDS]
    kept = [len(plan([job(1, 2)], [], gpus, now).kept) for now in (299, 301, 601, 10**6)]
    assert kept == [2, 4, 8, 8]


def test_a_waiter_is_told_how_many_it_needs_and_how_many_it_could_have() -> None:
    gpus = [gpu(A), gpu(B, free=2000)]
    line = [job(1, 2, 6000)]
    short = why_waiting(line[0], [], gpus, plan(line, [], gpus))
    assert short == "1 of 2 GPUs available; GPU 1: 2000 of 6000 MiB free"
    behind = why_waiting(job(2, 2), [], gpus, plan([*line, job(2, 2)], [], gpus))
    assert behind == (
        "0 of 2 GPUs available; GPU 0: kept for job job1, which is ahead in the queue; "
        "GPU 1: 2000 of 4000 MiB free"
    )


def test_a_running_job_may_move_to_any_of_the_gpus_that_nobody_before_it_waits_for() -> None:
    gpus = [gpu(uuid) for uuid in (A, B, C, D)]
    others = [held(D, by="x")]
    assert [g.uuid for g in open_to(job(5, 2), [job(9, 4)], others, gpus)] == [A, B, C]
    assert open_to(job(5, 2), [job(1, 4)], others, gpus) == ()


# --- properties ---

counts = st.sampled_from((1, 1, 2, 3, 4))
needs = st.integers(1, 48).map(lambda n: n * 1000)
lines = st.lists(st.tuples(counts, needs, st.integers(1, 3)), min_size=1, max_size=10)
machines = st.lists(
    st.tuples(st.sampled_from((8000, 24000, 48000)), st.floats(0, 1)), min_size=1, max_size=6
)


@given(lines, machines)
def test_nobody_gets_a_part_and_no_gpu_is_over_committed(
    wanted: list[tuple[int, int, int]], machine: list[tuple[int, float]]
) -> None:
    gpus = [gpu(u, int(t * f), t) for u, (t, f) in zip(UUIDS, machine, strict=False)]
    line = [job(n, *sizes) for n, sizes in enumerate(wanted)]
    decided = plan(line, [], gpus)
    for waiter in line:
        group = uuids(decided).get(waiter.id, ())
        assert len(group) == len(set(group))
        assert len(group) in (0, waiter.count)
    for info in gpus:
        here = [w for w in line if info.uuid in uuids(decided).get(w.id, ())]
        assert sum(w.need_bytes for w in here) <= info.free_bytes
        assert all(len(here) <= w.jobs_per_device for w in here)
    head = next((w for w in line if w.id not in decided.groups), None)
    assert decided.first == (head.id if head else None), "the first who gets nothing"
    for waiter in line:
        if head is not None and waiter.ticket > head.ticket:
            assert not set(uuids(decided).get(waiter.id, ())) & set(decided.kept)


@given(machines, st.integers(1, 4))
def test_a_group_is_of_one_model_where_there_are_enough_and_else_the_best(
    machine: list[tuple[int, float]], count: int
) -> None:
    gpus = [gpu(u, total=t) for u, (t, _) in zip(UUIDS, machine, strict=False)]
    group = choose_group(gpus, count)
    models = [info.total_bytes for info in gpus]
    if len(gpus) < count:
        assert group == ()
    elif max(models.count(model) for model in models) >= count:
        assert len(group) == count
        assert len({info.total_bytes for info in group}) == 1
    else:
        assert group == tuple(gpus[:count])


LONGEST = 8


def test_the_first_in_the_queue_waits_no_longer_than_the_longest_job_runs() -> None:
    longest = max(longest_wait_of_a_head(seed) for seed in range(30))
    assert longest <= LONGEST


def longest_wait_of_a_head(seed: int) -> int:
    """Four GPUs, and jobs of one, two and four of them: each has its turn in the end.

    Returns:
        How many steps somebody was the head of the line at most.
    """
    rng = random.Random(seed)
    line = [job(1, 4), job(2, 4)]
    running: list[tuple[int, list[GpuReservation]]] = []
    became: dict[str, int] = {}
    longest = last_head = now = 0
    ticket = len(line)
    while line:
        now += 1
        for _ in range(rng.randrange(3) if now < 80 else 0):
            ticket += 1
            sizes = rng.choice((1, 1, 1, 1, 2, 4)), rng.choice((4000, 12000, 38000))
            line.append(job(ticket, *sizes, rng.randint(1, 3)))
        running = [(until, mine) for until, mine in running if until > now]
        holdings = [holding for _, mine in running for holding in mine]
        claimed = {u: sum(h.reserved_bytes for h in holdings if h.gpu == u) // MIB for u in UUIDS}
        decided = plan(line, holdings, [gpu(u, 40000 - claimed[u]) for u in (A, B, C, D)])
        for waiter in [w for w in line if w.id in decided.groups]:
            line.remove(waiter)
            longest = max(longest, now - became.get(waiter.id, now))
            size, company, place = waiter.need_bytes, waiter.jobs_per_device, waiter.ticket
            mine = [
                GpuReservation(waiter.id, g.uuid, size, size, company, now, ticket=place)
                for g in decided.groups[waiter.id]
            ]
            assert len(mine) == waiter.count
            running.append((now + rng.randint(1, LONGEST), mine))
        if decided.first is not None:
            became.setdefault(decided.first, now)
            head = next(w.ticket for w in line if w.id == decided.first)
            assert head >= last_head, "nobody is head after one who came later"
            last_head = head
    return longest
