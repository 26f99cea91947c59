"""Who gets which GPUs: the pure decision, by example, by property and over time."""

import itertools
from dataclasses import replace
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from robust_train.gpu.processes import GpuUser
from robust_train.gpu.select import choose_group
from robust_train.model.gpu import GpuInfo, GpuProcess
from robust_train.queue import plan as plans
from robust_train.queue.plan import (
    LONGEST,
    Plan,
    describe,
    find_job_to_yield_to,
    find_open_gpus,
    gpu_states,
    has_room,
    queue_order,
    who_goes_first,
    why_waiting,
)
from robust_train.queue.queue_dir import NO_LIMIT
from robust_train.queue.registry import UNSEEN_SECONDS, QueuedJob
from robust_train.readable import MIB

UUIDS = tuple(f"GPU-{letter}" for letter in "abcdefgh")
A, B, C, D = UUIDS[:4]
ADA, BOB, EVE = 1000, 1001, 1002
NOW = 100.0


@pytest.fixture(autouse=True)
def _names():
    names = {ADA: "ada", BOB: "bob", EVE: "eve"}
    with mock.patch.object(plans, "user_name", lambda uid: names.get(uid, "x")):
        yield


def gpu(uuid, free=None, total=40000, **changes):
    free = total if free is None else free
    index = UUIDS.index(uuid)
    info = GpuInfo(uuid, "A100", index, uuid, total * MIB, free * MIB, (total - free) * MIB)
    return replace(info, **changes)


def job(ticket, need=4000, user=ADA, **changes):
    waiting = QueuedJob(
        id=f"job{ticket}",
        ticket=ticket,
        owner=user,
        reserved_bytes=need * MIB,
        only=UUIDS,
        queued_at=NOW,
        polled_at=1e9,
    )
    return replace(waiting, **changes)


def held(*uuids, claim=4000, taken=None, **changes):
    taken_bytes = None if taken is None else taken * MIB
    running = QueuedJob(
        id=f"on-{uuids[0]}",
        owner=ADA,
        reserved_bytes=claim * MIB,
        gpus=uuids,
        count=len(uuids),
        taken_bytes=(taken_bytes,) * len(uuids),
    )
    return replace(running, **changes)


def granted(jobs, gpus, now=NOW):
    return {
        name: "".join(device.uuid[-1] for device in group)
        for name, group in Plan(jobs, gpus, now).groups.items()
    }


# --- one GPU ---


def test_equal_tickets_are_served_by_arrival():
    early, late = (replace(job(9), id=name, queued_at=at) for name, at in (("b", 1.0), ("a", 2.0)))
    assert list(granted([late, early], [gpu(A)])) == ["b"]
    assert find_open_gpus(late, [early], [gpu(A)], NOW) == ()
    assert len(find_open_gpus(early, [late], [gpu(A)], NOW)) == 1


TWO, FOUR = {"jobs_per_device": 2}, {"jobs_per_device": 4}
EXCLUSIVE = {"compute_mode": "exclusive_process"}


@pytest.mark.parametrize(
    ("running", "asks", "device", "gets"),
    [
        (held(A), job(1), gpu(A), False),
        (held(A, **TWO), job(1), gpu(A), False),
        (held(A), job(1, **TWO), gpu(A), False),
        (held(A, **TWO), job(1, **TWO), gpu(A), True),
        # what a job has reserved and not taken yet is not free
        (held(A, claim=30000, **FOUR), job(1, 15000, **FOUR), gpu(A), False),
        # what it has taken NVML's figure contains already
        (held(A, claim=20000, taken=20000, **FOUR), job(1, 20000, **FOUR), gpu(A, 20000), True),
        # it reported 30000 before it returned them to the driver, and may take them again
        (held(A, claim=30000, taken=30000, **FOUR), job(1, 15000, **FOUR), gpu(A), False),
        # exclusive mode: one process, which may not have started yet; MPS is one process for all
        (held(A, **FOUR), job(1, **FOUR), gpu(A, **EXCLUSIVE), False),
        (held(A, **FOUR), job(1, **FOUR), gpu(A, mps=True, **EXCLUSIVE), True),
        (held(B), job(1), gpu(A, unusable="it has to be reset"), False),
    ],
)
def test_a_gpu_is_given_only_with_room(running, asks, device, gets):
    assert bool(granted([running, asks], [device])) == gets
    announced = asks.on((A,))
    assert has_room(announced, [running], [device]) == gets, "the second look says the same"


def test_the_soonest_suitable_gpu_is_reserved():
    """It is reserved for the first job of the queue."""
    # the first needs a whole GPU; A lacks less than B, whose memory a stranger holds
    gpus = [gpu(A, 15000), gpu(B, 20000)]
    running = held(A, claim=25000, taken=25000, jobs_per_device=4)
    needs = (30000, 12000, 6000)
    waiting = [job(n, need, jobs_per_device=4) for n, need in enumerate(needs, 1)]
    assert Plan([running, *waiting], gpus, NOW).kept == (A,)
    assert granted([running, *waiting], gpus) == {"job2": "b", "job3": "b"}


@pytest.mark.parametrize(("count", "kept"), [(1, [1, 2, 4, 8]), (2, [2, 4, 8, 8])])
def test_longer_waits_reserve_more_gpus(count, kept):
    """They are reserved for the first job of the queue."""
    gpus = [gpu(uuid, 3000) for uuid in UUIDS]
    waiting = [job(1, 30000, count=count)]
    seconds = (299, 301, 601, 901)
    assert [len(Plan(waiting, gpus, NOW + after).kept) for after in seconds] == kept
    # one that has trained meanwhile and comes back has not waited for so long
    back = [replace(waiting[0], queued_at=0.0, since=NOW)]
    assert [len(Plan(back, gpus, NOW + after).kept) for after in seconds] == kept


SMALL = {"name": "V100", "total": 16000}
MIXED = [gpu(A, 39000), gpu(B, **SMALL), gpu(C, **SMALL), gpu(D, 38000)]


@pytest.mark.parametrize(
    ("jobs", "gpus", "gets"),
    [
        # those that come together get a GPU each, the freest first, in the order of their tickets
        (
            [job(3), job(1), job(2), job(4)],
            [gpu(A, 10000), gpu(B, 30000), gpu(C, 20000)],
            {"job1": "b", "job2": "c", "job3": "a"},
        ),
        # packed ones go where they fit most tightly
        ([job(1, 6000, jobs_per_device=4)], [gpu(A), gpu(B, 9000)], {"job1": "b"}),
        # one that overtakes takes what the first could not use
        ([job(2, count=2)], MIXED, {"job2": "ad"}),
        ([job(1, 39500), job(2, count=2)], MIXED, {"job2": "bc"}),
        # one with a mask of its own does not wait for another that wants other GPUs
        ([job(1, only=(A,)), job(2, only=(B,))], [gpu(A, 0), gpu(B)], {"job2": "b"}),
        # all at once or none
        ([job(1, count=2)], [gpu(A, 30000), gpu(B), gpu(C)], {"job1": "bc"}),
    ],
)
def test_who_gets_what(jobs, gpus, gets):
    assert granted(jobs, gpus) == gets


def test_a_running_job_moves_if_none_waits_before():
    """A job that waits in front of it goes first."""
    gpus, me = [gpu(A), gpu(B)], job(5)
    assert [device.uuid for device in find_open_gpus(me, [job(9, 30000)], gpus, NOW)] == [A, B]
    assert len(find_open_gpus(me, [job(1, 30000)], gpus, NOW)) == 1
    assert not find_open_gpus(me, [job(1, 30000), held(B)], gpus, NOW)
    assert not find_open_gpus(me, [job(9, user=BOB), held(A, id="x")], [gpu(B)], NOW), (
        "bob holds less"
    )


def test_jobs_that_do_not_poll_are_passed():
    """They keep their tickets."""
    stopped = job(1, polled_at=NOW)
    waiting, gpus = [stopped, job(2)], [gpu(A)]
    assert granted(waiting, gpus, NOW + UNSEEN_SECONDS - 0.1) == {"job1": "a"}
    assert granted(waiting, gpus, NOW + UNSEEN_SECONDS + 0.1) == {"job2": "a"}
    assert Plan(waiting, gpus, NOW + 60).order == [stopped, waiting[1]]


# --- several GPUs ---


def test_gpus_are_collected_for_large_jobs():
    """For a job that cannot have all at once."""
    gpus = [gpu(A, 30000), gpu(B), gpu(C)]
    decided = Plan([held(C), job(1, count=3), job(2)], gpus, NOW)
    assert (decided.groups, decided.first, set(decided.kept)) == ({}, "job1", {A, B, C})


def test_small_jobs_take_only_unreserved_gpus():
    """Others are kept for a large job."""
    gpus = [gpu(uuid) for uuid in (A, B, C, D)]
    first, second = held(A, since=1.0), held(B, since=2.0)
    waiting = [job(1, count=3), job(2), job(3)]
    decided = Plan([first, second, *waiting], gpus, NOW)
    # two are free, and of the busy ones A was taken first
    assert (decided.kept, decided.groups) == ((C, D, A), {})
    assert granted([first, *waiting], gpus) == {"job1": "bcd"}


def test_unserviceable_jobs_reserve_no_gpu():
    """No end of a job could serve them."""
    waiting = [job(n, count=count, only=(A, B, C)) for n, count in enumerate((3, 1, 1), 1)]
    lost = [gpu(A), gpu(B), gpu(C, unusable="it has to be reset")]
    assert granted(waiting, lost).keys() == {"job2", "job3"}
    sick = gpu(C, unusable="it has to be reset", **EXCLUSIVE)
    assert granted(waiting, [*lost[:2], sick]).keys() == {"job2", "job3"}
    owned = gpu(C, unusable="pid 7 owns it", owned=True, **EXCLUSIVE)
    assert not granted(waiting, [*lost[:2], owned]), "its owner may end"
    # one that only another container sees may be healthy
    assert not granted(waiting, lost[:2])


# --- several users ---


def tickets(jobs):
    return [queued.ticket for queued in queue_order(jobs)]


def test_users_with_fewer_gpus_come_first():
    """They come before the rest of a sweep."""
    waiting = [*(job(n) for n in range(1, 6)), job(8, user=BOB), job(9, user=BOB)]
    assert tickets([held(A, B, C), *waiting]) == [8, 9, 1, 2, 3, 4, 5]
    # jobs ahead count: if neither holds any they alternate
    assert tickets(waiting) == [1, 8, 2, 9, 3, 4, 5]
    sharing = [held(A, id=name, jobs_per_device=2) for name in "xy"]
    assert tickets([*sharing, held(B, C, owner=BOB), job(1, user=BOB), job(2)]) == [2, 1]
    order = queue_order([held(A, B), job(1), job(2, user=BOB)])
    assert who_goes_first(order[1], order) == "job job2 of bob goes first: bob holds fewer GPUs"
    assert who_goes_first(order[0], order) == ""


def test_urgency_counts_among_a_users_own_jobs():
    """An urgent job does not go before the jobs of others."""
    sweep = [job(n, urgency=0) for n in (1, 2, 4)]
    assert tickets([*sweep, job(6)]) == [6, 1, 2, 4]
    assert tickets([*sweep, job(6), job(7, urgency=2)]) == [7, 6, 1, 2, 4]
    # its place is that of its user's first job: neither nearer nor farther for anyone else
    others = [job(3, user=BOB), job(5, user=BOB)]
    places = [BOB if n in (3, 5) else ADA for n in tickets([*sweep, *others])]
    urgent = [BOB if n in (3, 5) else ADA for n in tickets([*sweep, job(6, urgency=2), *others])]
    assert urgent[: len(places)] == places
    order = queue_order([*sweep, job(6)])
    assert who_goes_first(order[1], order) == "job job6 goes first: its queue_priority is higher"


@pytest.mark.parametrize(
    ("waiting", "leaves"),
    [
        (job(9, user=BOB), "a"),
        (job(9, user=ADA), ""),
        # who was first of all has the GPUs kept
        (job(9, user=BOB, count=2), "ab"),
        (job(9, user=BOB, only=UUIDS[1:2]), "b"),
        (job(9, user=BOB, polled_at=0.0), ""),
        (job(9, user=EVE), ""),
    ],
)
def test_an_expired_time_slice_frees_reserved_gpus(waiting, leaves):
    """They are reserved for a user with fewer GPUs."""
    jobs = [
        held(A, since=1.0),
        held(B, since=2.0),
        held(C, since=3.0, owner=EVE),
        held(D, since=4.0, owner=EVE),
        waiting,
    ]
    gpus = [gpu(uuid, free=0) for uuid in (A, B, C, D)]
    left = ""
    for running in jobs[:4]:
        others = [other for other in jobs if other is not running]
        if find_job_to_yield_to(running, others, gpus, NOW) is not None:
            left += running.gpus[0][-1]
    assert left == leaves


def test_no_user_exceeds_the_limit_of_gpus():
    """Who waits because of it is in no one's way."""
    jobs = [held(A), job(1), job(2, count=2), job(3, user=BOB)]
    gpus = [gpu(uuid) for uuid in (A, B, C, D)]
    decided = Plan(jobs, gpus, NOW, 2)
    assert decided.groups.keys() == {"job1", "job3"}
    assert (decided.capped.keys(), decided.first) == ({"job2"}, "")
    why = why_waiting(jobs[2], jobs[:1], gpus, decided, {})
    assert why == "ada holds 2 of at most 2 GPUs (max_gpus_per_user)"
    sharing = [held(A, jobs_per_device=2), held(B, jobs_per_device=2)]
    shares = Plan([*sharing, job(4, jobs_per_device=2)], gpus, NOW, 2).groups["job4"][0].uuid
    assert shares in (A, B), "it may share those that its user holds"
    assert has_room(job(4, jobs_per_device=2).on((A,)), sharing, gpus, 2)
    assert not has_room(job(4).on((C,)), sharing, gpus, 2)


# --- reasons ---


def test_each_gpu_lists_its_jobs_and_shares():
    """The line says who has how much of it."""
    running = held(A, claim=10000, taken=10000, id="7-ab", name="lora", draining=True)
    first, second = describe([running], [gpu(A, 22000), gpu(B, 35000)])
    assert first == (
        "GPU 0 (A100, GPU-a…): 22000 MiB of 40000 MiB free, 10000 MiB reserved by job 7-ab "
        "(lora, ada), which is leaving, 8000 MiB used by others"
    )
    assert second.endswith("35000 MiB of 40000 MiB free, 5000 MiB used by others")


TAKEN = "taken, one job per GPU (gpu_jobs_per_device=1"
FULL = gpu(C, 2000, processes=(GpuProcess(812, 30000 * MIB),))
BESIDE = "GPU 0: 2000 of 4000 MiB free next to job on-GPU-a"
ONE_OF_TWO = "1 of 2 GPUs available; GPU 1: 2000 of 6000 MiB free"
LOST = gpu(B, unusable="the driver reports that it has to be reset (nvidia-smi --gpu-reset)")


@pytest.mark.parametrize(
    ("me", "running", "gpus", "why"),
    [
        (job(2), [held(A)], [gpu(A)], f"GPU 0: {TAKEN})"),
        (job(2), [held(A), held(B)], [gpu(A), gpu(B)], f"GPUs 0, 1: {TAKEN})"),
        (job(2, jobs_per_device=2), [held(A)], [gpu(A)], f"GPU 0: {TAKEN} of the job there)"),
        (job(2), [], [FULL], "GPU 2: 2000 of 4000 MiB free, python (pid 812, ada) 30000 MiB"),
        (job(2, **TWO), [held(A, claim=38000, **TWO)], [gpu(A)], BESIDE),
        (job(2), [held(A)], [LOST, FULL, gpu(A)], f"GPU 0: {TAKEN}); GPU 2: 2000 of 4000 MiB"),
        (job(2), [], [LOST], "GPU 1: the driver reports that it has to be reset"),
        (job(2, 6000, count=2), [], [gpu(A), gpu(B, 2000)], ONE_OF_TWO),
        (job(2), [], [gpu(A)], "another job took its GPU at the same moment"),
        (job(2), [], [], "its driver shows none of its GPUs"),
        (job(2), [job(1, 30000)], [gpu(A, 20000)], "GPU 0: kept for job job1, which is ahead in"),
    ],
)
def test_the_nearest_obstacle_explains_the_wait(me, running, gpus, why):
    """The reason is one short line."""
    decided = Plan([*running, me], gpus, NOW)
    text = why_waiting(me, running, gpus, decided, {812: GpuUser("python", "ada")})
    assert text.startswith(why)
    assert len(text) <= LONGEST
    assert "\n" not in text


# --- properties ---

needs = st.sampled_from((1000, 4000, 9000, 16000, 24000, 40000, 48000))
wanted = st.lists(
    st.builds(
        dict,
        need=needs,
        count=st.sampled_from((1, 1, 2, 3, 4)),
        jobs_per_device=st.integers(1, 4),
        user=st.sampled_from((ADA, BOB, EVE)),
        only=st.sets(st.sampled_from(UUIDS[:5]), min_size=1).map(tuple),
    ),
    max_size=12,
)
machines = st.lists(
    st.tuples(st.sampled_from((8000, 24000, 48000)), st.floats(0, 1)), min_size=1, max_size=5
)
reservations = st.lists(
    st.tuples(st.sampled_from(UUIDS[:5]), needs, st.sampled_from((ADA, BOB)), st.integers(1, 3)),
    max_size=4,
)
limits = st.just(NO_LIMIT) | st.integers(1, 4)


def build(machine):
    pairs = zip(UUIDS, machine, strict=False)
    return [gpu(uuid, int(total * share), total) for uuid, (total, share) in pairs]


def running_jobs(drawn):
    return [
        held(uuid, claim=claim, taken=claim, owner=user, jobs_per_device=per, id=f"r{number}")
        for number, (uuid, claim, user, per) in enumerate(drawn)
    ]


@given(wanted, reservations, machines, limits)
def test_grants_fit_and_leave_no_gpu_idle(drawn, before, machine, limit):
    """They are whole, and no GPU stays idle that a job may have."""
    gpus, running = build(machine), running_jobs(before)
    waiting = [job(n, **about) for n, about in enumerate(drawn)]
    decided = Plan([*running, *waiting], gpus, NOW, limit)
    tickets_in_order = [queued.ticket for queued in decided.order]
    assert sorted(tickets_in_order) == [queued.ticket for queued in waiting]
    states, now_running = gpu_states(running, gpus), list(running)
    for queued in decided.order:
        group = [device.uuid for device in decided.groups.get(queued.id, ())]
        assert len(set(group)) in (0, queued.count), "all its GPUs or none"
        assert all(states[uuid].suits(queued) for uuid in group), "each has room when it comes"
        for uuid in group:
            states[uuid].take(queued)
        if group:
            assert has_room(queued.on(group), now_running, gpus, limit)
            now_running.append(queued.on(group))
    places = [queued.id for queued in decided.order]
    for queued in waiting:
        if queued.id in decided.groups or queued.id in decided.capped:
            continue
        free = [u for u, state in states.items() if u not in decided.kept and state.suits(queued)]
        assert len(free) < queued.count, "work conservation, except for GPUs kept for the first job"
        assert decided.first
        assert places.index(decided.first) <= places.index(queued.id)
    for queued in waiting:
        if decided.first and places.index(queued.id) > places.index(decided.first):
            assert not {g.uuid for g in decided.groups.get(queued.id, ())} & set(decided.kept)


@given(wanted, reservations, st.integers(0, 12))
def test_the_next_user_holds_the_fewest_gpus(drawn, before, rotation):
    """The order of each user's own jobs is kept."""
    running = running_jobs(before)
    waiting = [job(n, **about) for n, about in enumerate(drawn)]
    shuffled = [*waiting[rotation:], *waiting[:rotation]]
    order = queue_order([*running, *shuffled])
    assert order == queue_order([*running, *waiting]), "whatever the order of the listing"
    has = {user: len({j.gpus[0] for j in running if j.owner == user}) for user in (ADA, BOB, EVE)}
    for position, queued in enumerate(order):
        for other in order[position:]:
            assert other.owner != queued.owner or other.order >= queued.order
            assert has[other.owner] >= has[queued.owner]
        has[queued.owner] += queued.count


@given(wanted, machines)
def test_later_jobs_never_change_earlier_grants(drawn, machine):
    """This concerns jobs of the same user."""
    waiting = [job(n, **(about | {"user": ADA})) for n, about in enumerate(drawn)]
    gpus = build(machine)
    all_of_them = Plan(waiting, gpus, NOW).groups
    for n, queued in enumerate(waiting):
        assert Plan(waiting[: n + 1], gpus, NOW).groups.get(queued.id) == all_of_them.get(queued.id)


@given(machines, st.integers(1, 4))
def test_groups_prefer_gpus_of_one_model(machine, count):
    """If there are enough, and otherwise the best."""
    gpus = [gpu(uuid, total=total) for uuid, (total, _) in zip(UUIDS, machine, strict=False)]
    group = choose_group(gpus, count)
    models = [info.total_bytes for info in gpus]
    if len(gpus) < count:
        assert group == ()
    elif max(models.count(model) for model in models) >= count:
        assert (len(group), len({info.total_bytes for info in group})) == (count, 1)
    else:
        assert group == tuple(gpus[:count])


@settings(max_examples=40)
@given(st.randoms(use_true_random=False))
def test_no_job_waits_forever(random):
    """As long as running jobs end. Small later jobs of the same user keep coming, for as long as
    an old one waits.
    """
    waiting, running, tickets = [], [], itertools.count(1)

    def arrives(*needs, counts=(1,), most=4):
        need, count, per_device = map(random.choice, (needs, counts, range(1, most + 1)))
        newcomer = job(next(tickets), need, count=count, jobs_per_device=per_device)
        waiting.append(newcomer)
        return newcomer.id

    old = {arrives(4000, 24000, 38000, counts=(1, 2, 4), most=3) for _ in range(8)}
    for now in range(400):
        used = {uuid: sum(j.reserved_bytes for j in running if uuid in j.gpus) for uuid in UUIDS}
        gpus = [gpu(uuid, 40000 - used[uuid] // MIB) for uuid in UUIDS[:4]]
        assert all(device.free_bytes >= 0 for device in gpus), "over-committed"
        groups = Plan([*running, *waiting], gpus, NOW + now).groups
        for queued in [queued for queued in waiting if queued.id in groups]:
            waiting.remove(queued)
            on = queued.on([device.uuid for device in groups[queued.id]])
            running.append(replace(on, taken_bytes=(on.reserved_bytes,) * queued.count, since=now))
        old -= groups.keys()
        if not old:
            return
        while len(waiting) < len(old) + 3:
            arrives(1000, 4000)
        if running:
            running.remove(random.choice(running))
    pytest.fail(f"never served: {old}")
