"""What several ranks of one attempt agree on, and which of their ends is the reason."""

import signal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from robust_train.attempt.run import Run
from robust_train.host.votes import CHECKPOINT, STOP, Votes
from robust_train.launcher.rank_ends import RankEnd, find_root_cause
from robust_train.model.events import Failed, Finished
from robust_train.model.failure import Failure, FailureKind


def failed(rank, kind, at, **more):
    ending = Failed(Failure(FailureKind(kind), ""), **more)
    return RankEnd(rank, 100 + rank, ending, at, 1)


def died(rank, at, signum=signal.SIGKILL, **more):
    return RankEnd(rank, 100 + rank, None, at, -signum, **more)


FINISHED = RankEnd(0, 100, Finished(), 9.0)


REASONS = {
    "none failed": ([FINISHED], None),
    "the first of its kind": ([failed(0, "bug", 2), failed(1, "bug", 1)], 1),
    "a lost peer is told first": ([failed(0, "comm", 1), failed(1, "device_oom", 2)], 1),
    "the kernel's kill, which says nothing": (
        [failed(0, "comm", 1), died(1, 2), failed(2, "bug", 1)],
        1,
    ),
    "not whom we killed": ([died(0, 2, was_killed=True), failed(1, "host_oom", 1)], 1),
    "not who has heard of it": (
        [failed(0, "device_oom", 1, caused_by_rank=1), failed(1, "device_oom", 2)],
        1,
    ),
    "a crash counts by its time": ([died(0, 1, signal.SIGABRT), failed(1, "bug", 0)], 1),
    "only lost connections": ([failed(0, "comm", 2), failed(1, "comm", 1)], 1),
}


@pytest.mark.parametrize(("ends", "rank"), REASONS.values(), ids=REASONS)
def test_the_reason_is_what_the_others_follow_from(ends, rank):
    root = find_root_cause(ends)
    assert (None if root is None else root.rank) == rank


@given(st.lists(st.one_of(st.integers(0, 2), st.sampled_from(["stop", "checkpoint"])), max_size=80))
def test_all_ranks_see_a_flag_at_one_look(happenings):
    """Ranks look in any order, and flags are raised at any moment."""

    def look(run):
        return run.should_stop(), run.should_save()

    votes = Votes(3)
    runs = [Run(run_dir=Path(), rank=rank, world_size=3, flags=votes) for rank in range(3)]
    seen = [[], [], []]
    raised = False
    for happening in happenings:
        if isinstance(happening, str):
            raised = raised or happening == STOP
            votes.raise_flag(STOP if happening == STOP else CHECKPOINT)
        else:
            run = runs[happening]
            seen[happening].append(look(run))
    shortest = min(map(len, seen))
    assert seen[0][:shortest] == seen[1][:shortest] == seen[2][:shortest]
    for rank, (run, looks) in enumerate(zip(runs, seen, strict=True)):
        stops = [stop for stop, _ in looks]
        assert stops == sorted(stops), f"it stays due on rank {rank}"
        most = max(map(len, seen))
        stops += [look(run)[0] for _ in range(most + 1 - len(looks))]
        assert stops[-1] is raised, f"rank {rank}"
