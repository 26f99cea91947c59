"""How often checkpoints are saved; pure, except for the clocks of ranks in threads."""

import itertools
import math
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from robust_train.attempt.cadence import OWED_SECONDS, SaveClock, seconds_between_saves
from robust_train.attempt.run import Run, live_of
from robust_train.config.checks import checked
from robust_train.config.composition import complete
from robust_train.config.training_plans import SavePlan
from robust_train.folder.identity import begin_job
from robust_train.host.votes import Votes
from robust_train.model.events import ValueReported

costs = st.floats(0, 1e4)


@given(costs, costs, st.integers(1, 10_000), st.floats(0, 1e8))
def test_the_interval_follows_the_square_root_rule(cost, other, n, seconds):
    """It stays within its bounds."""
    longest = seconds_between_saves(cost, 0, seconds)
    # at first it is more often than each ten seconds: it may fail after as long as it has run
    assert max(min(math.sqrt(2 * cost * seconds), 10), 1) <= longest <= 300
    interval = seconds_between_saves(cost, n, seconds)
    assert interval == min(max(math.sqrt(2 * cost * seconds / n), 1), longest)
    assert seconds_between_saves(cost, n + 1, seconds) <= interval
    least, most = sorted((cost, other))
    for failures in (0, n):
        shorter = seconds_between_saves(least, failures, seconds)
        assert shorter <= seconds_between_saves(most, failures, seconds)
    if seconds >= 1e6:
        share = cost / seconds_between_saves(cost, 0, seconds)
        assert share <= 0.01 * (1 + 1e-9) or longest == 300


class Clock:
    seconds = 0.0

    def __call__(self):
        return self.seconds


@pytest.fixture
def time():
    return Clock()


@given(st.floats(0, 3), st.floats(1, 7))
def test_a_slow_first_save_does_not_delay_another(cost, times_as_long):
    clock = SaveClock(SavePlan(), now=(time := Clock()))
    clock.begin(1)
    time.seconds += cost * times_as_long
    assert clock.saved(1) <= 7 / 6 * cost + 1e-9


def saves_of(clock, time, *, cost, seconds, writes=lambda step: True):
    """When it saves, with a step every second."""
    saved = []
    for step in itertools.count(1):
        time.seconds += 1
        if time.seconds > seconds:
            break
        if clock.is_due(step):
            saved.append(time.seconds)
            clock.begin(step)
            time.seconds += cost
            clock.saved(step) if writes(step) else clock.failed()
    return saved


@pytest.mark.parametrize(
    ("keys", "earlier_cost", "cost", "seconds", "saves"),
    [
        # measured at the first two saves
        ({}, 0, 0.5, 112, [1, 10.5, 61, 111.5]),
        # known from the attempt before
        ({}, 0.5, 0.5, 60, [50]),
        # a number of minutes means that number
        ({"checkpoint_every_minutes": 2}, 0, 50, 500, [120, 290, 460]),
        ({"checkpoint_every_minutes": 9, "checkpoint_every_steps": 10}, 0, 0, 30, [10, 20, 30]),
    ],
)
def test_when_checkpoints_are_saved(time, keys, earlier_cost, cost, seconds, saves):
    plan = SavePlan.of(checked(complete({"training": keys})))
    clock = SaveClock(plan, cost=earlier_cost, now=time)
    assert saves_of(clock, time, cost=cost, seconds=seconds) == saves


def test_first_saves_give_way_to_earlier_measurements(time):
    """If the job knows better: the first save of an attempt also allocates the memory of the
    copy.
    """
    clock = SaveClock(SavePlan(), cost=0.5, now=time)
    for seconds, cost in (4.0, 0.5), (2.0, 2.0):
        clock.begin(1)
        time.seconds += seconds
        assert clock.saved(1) == cost
    assert clock.spent == 6.0


def test_a_late_write_counts_for_its_own_step(time):
    clock = SaveClock(SavePlan(1e9, 2), now=time)
    clock.begin(2)
    clock.copied()
    clock.begin(4)
    time.seconds += 1  # it waits for the one before
    clock.saved(2)
    clock.copied()
    assert not clock.is_due(5), "the checkpoint of step 4 is the last"
    assert clock.spent == 1.0


def test_one_save_retries_a_failed_checkpoint(time):
    """Although steps follow before its copy is written."""
    clock = SaveClock(SavePlan(1e9), now=time)
    clock.begin(1)
    clock.failed()
    assert not clock.is_due(2)
    time.seconds += OWED_SECONDS
    assert clock.is_due(3)
    clock.begin(3)
    clock.copied()
    assert not clock.is_due(4)


def test_the_writing_of_a_copy_costs_nothing(time):
    clock = SaveClock(SavePlan(), cost=1.0, now=time)
    time.seconds = 10
    clock.begin(1)
    time.seconds = 10.5
    clock.copied()
    time.seconds = 17
    assert clock.saved(1) == 0.5


@pytest.mark.parametrize("first", [1, 41])
@pytest.mark.parametrize("counts", [True, False], ids=["steps", "calls of a trainer without steps"])
def test_a_number_of_steps_counts_from_the_start(first, counts):
    """It counts from where the attempt began."""
    saves = SaveClock(SavePlan(1e9, 3), now=Clock())

    def due(*steps):
        return [n for n in steps if saves.is_due(first + n if counts else None)]

    assert due(0, 1, 2, 3, 4, 5) == [2, 3, 4, 5]
    saves.saved(first + 5 if counts else None)
    assert due(6, 7, 8, 9) == [8, 9]


def test_a_failed_checkpoint_is_due_each_minute(time):
    """It is due until it is written."""
    saves = SaveClock(SavePlan(1e9, 3), now=time)
    due = saves_of(saves, time, cost=0, seconds=199, writes=lambda step: step >= 100)
    assert due[:5] == [3, 63, 123, 126, 129]


def test_all_ranks_save_at_the_same_step(tmp_path):
    """It does not matter which rank is ahead."""
    votes = Votes(2)
    due = {0: [], 1: []}

    def loop(rank):
        run = Run(run_dir=tmp_path, rank=rank, world_size=2, flags=votes)
        live_of(run).saving.follow(SavePlan(1e9, 2 if rank else 7))  # rank 0's clock counts
        for step in range(1, 101):
            run.progress(step)
            if run.should_save():
                due[rank].append(step)
                path = tmp_path / "checkpoint"
                path.touch()
                run.checkpoint_saved(path, step)
            # a step ends for all of them at the same time
            barrier.wait()

    barrier = threading.Barrier(2)
    with ThreadPoolExecutor(2) as ranks:
        list(ranks.map(loop, (1, 0)))
    assert due[0] == due[1]
    assert 12 <= len(due[0]) <= 14


def test_an_objective_is_a_number_and_no_answer(tmp_path):
    sent = []
    run = Run(run_dir=tmp_path, report=sent.append)
    live_of(run).reports.monitor("better", "max")
    run.record("validation", {"better": True, "step": 1})
    run.record("validation", {"better": 0.5, "step": 2})
    assert [message.value for message in sent if isinstance(message, ValueReported)] == [0.5]


def test_an_unreadable_manifest_does_not_end_training(tmp_path):
    """It cannot be read for the moment."""
    begin_job(tmp_path, resume=True)
    (tmp_path / "checkpoints" / "1.pt.manifest.json").mkdir(parents=True)
    run = Run(run_dir=tmp_path)
    live_of(run).saving.follow(SavePlan(0.0))
    assert run.should_save()
