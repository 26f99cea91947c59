"""The checker of the chaos, on logs made up by hand: what it must find, and what it must not."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
from witness import Verdict, judge

A, B, C = "GPU-a", "GPU-b", "GPU-c"


class Story:
    """A log in the making; each job enters the line in the order in which it is told of."""

    def __init__(self, per_device: int = 1, gpus: tuple[str, ...] = (A, B)) -> None:
        self.per_device = per_device
        self.gpus = gpus
        self.events: list[dict[str, object]] = []

    def tell(self, t: float, event: str, member: int, **more: object) -> Story:
        self.events.append({"t": t, "event": event, "member": member, **more})
        return self

    def enters(self, t: float, member: int, need: int, count: int = 1) -> Story:
        self.tell(t, "arrives", member, need=need, count=count, per_device=self.per_device)
        self.tell(t, "enters", -1, file=f"job.{member}")
        return self.tell(t, "owns", member, file=f"job.{member}")

    def runs(self, since: float, until: float | None, member: int, *gpus: str) -> Story:
        times = {"asked": since, "looked": since}
        self.tell(since + 0.2, "served", member, gpus=gpus, file=f"job.{member}", **times)
        for gpu in gpus:
            self.tell(since + 0.3, "takes", member, gpu=gpu, mib=1)
        if until is not None:
            for gpu in gpus:
                self.tell(until, "returns", member, gpu=gpu, mib=1)
            self.tell(until + 0.1, "leaves", -1, file=f"job.{member}")
        return self

    def verdict(self, left: dict[str, int] | None = None, locked: int = 0) -> Verdict:
        totals = dict.fromkeys(self.gpus, 40000)
        self.tell(999, "over", -1, left_on_device=left or {}, left_locked=locked, totals=totals)
        return judge(map(json.dumps, self.events))


def faults(verdict: Verdict) -> dict[str, int]:
    facts = ("served", "killed", "passes", "judged", "seen")
    return {name: n for name, n in asdict(verdict).items() if n and name not in facts}


def line_of_three(per_device: int = 1) -> Story:
    """1 has A and 2 has B; then 3 and 4 come, in this order."""
    story = Story(per_device)
    story.enters(1, 1, 30000).enters(2, 2, 30000).runs(1.1, 10, 1, A).runs(2.1, 20, 2, B)
    return story.enters(3, 3, 30000).enters(4, 4, 4000)


def test_jobs_that_go_one_after_the_other_are_fine() -> None:
    verdict = line_of_three().runs(11, 30, 3, A).runs(21, 30, 4, B).verdict()
    assert verdict == Verdict(served=4, seen=4)


def test_a_job_that_takes_another_ones_place_is_found() -> None:
    verdict = line_of_three().runs(11, 18, 4, A).runs(21, 30, 3, B).verdict()
    assert faults(verdict) == {"places_taken": 1}


def test_a_pass_where_there_was_room_for_both_is_lawful() -> None:
    story = Story().enters(1, 1, 30000).enters(2, 2, 30000)
    verdict = story.runs(3, 9, 2, A).runs(3.1, 9, 1, B).verdict()
    assert verdict == Verdict(served=2, seen=2, passes=1, judged=1)


def test_a_small_job_may_use_what_is_too_small_for_a_large_one() -> None:
    verdict = line_of_three(2).runs(5, 30, 4, A).runs(21, 40, 3, B).verdict()
    assert verdict == Verdict(served=4, seen=4, passes=1, judged=1)


def test_small_jobs_on_every_gpu_of_a_large_one_are_found() -> None:
    story = Story(3).enters(1, 1, 30000).enters(2, 2, 30000)
    story.runs(1.1, 10, 1, A).runs(2.1, 20, 2, B)
    story.enters(3, 3, 38000).enters(4, 4, 4000).enters(5, 5, 4000)
    story.runs(5, 50, 4, A).runs(6, 50, 5, B).runs(51, 60, 3, A)
    assert faults(story.verdict()) == {"heads_delayed": 1}


def test_a_job_that_is_given_a_part_of_its_gpus_or_one_twice_is_found() -> None:
    def given(*gpus: str) -> dict[str, int]:
        return faults(Story().enters(1, 1, 4000, 2).runs(2, 9, 1, *gpus).verdict())

    assert given(A, B) == {}
    assert given(A) == {"torn": 1}
    assert given(A, A) == {"torn": 1}
    story = Story().enters(1, 1, 4000).runs(2, 9, 1, A)
    assert faults(story.tell(3, "takes", 1, gpu=B, mib=1).verdict()) == {"torn": 1}


def three() -> Story:
    """1 has A, 6 has B, and 2 waits for two of three GPUs; then 3 and 4 come, in this order."""
    story = Story(gpus=(A, B, C)).enters(1, 1, 30000).runs(1.1, 20, 1, A)
    story.enters(1.2, 6, 30000).runs(1.3, 20, 6, B).enters(2, 2, 30000, 2)
    return story.enters(3, 3, 30000).enters(4, 4, 4000, 2)


def test_a_small_job_on_a_gpu_that_a_large_one_was_to_have_is_found() -> None:
    story = three().runs(5, 30, 3, C).runs(31, 40, 2, A, B).runs(41, 50, 4, A, B)
    assert faults(story.verdict()) == {}, "A and B are left, which come free by themselves"
    story = three().runs(5, 60, 3, C).runs(21, 60, 4, A, B).runs(61, 70, 2, A, B)
    assert "places_taken" in faults(story.verdict()), "two were free, and it was not its turn"
    story = Story(gpus=(A, B, C)).enters(1, 1, 30000).runs(1.1, 20, 1, A)
    story.enters(2, 2, 30000, 3).enters(3, 3, 30000).runs(5, 30, 3, B).runs(31, 40, 2, A, B, C)
    assert faults(story.verdict()) == {"heads_delayed": 1}, "it needs every one"


def test_who_could_not_start_beside_what_may_be_kept_for_the_first_in_line_is_passed() -> None:
    """2 waits for A, B and C, of which C is kept; D is too little for 3, but enough for 4."""
    story = Story(gpus=(A, B, C, "GPU-d")).enters(1, 1, 30000, 2).runs(1.1, 20, 1, A, B)
    story.enters(2, 2, 30000, 3).enters(3, 3, 30000, 2).enters(4, 4, 30000)
    story.runs(5, 30, 4, "GPU-d").runs(21, 40, 2, A, B, C).runs(41, 50, 3, A, B)
    verdict = story.verdict()
    assert (faults(verdict), verdict.passes) == ({}, 2)


def test_a_crowd_and_an_over_commit_are_found() -> None:
    verdict = line_of_three().runs(5, 30, 3, A).runs(21, 30, 4, B).verdict()
    assert faults(verdict) == {"crowded": 1, "over_commits": 1}
    told = line_of_three().runs(11, 30, 3, A).runs(21, 30, 4, B)
    verdict = told.tell(11.5, "refuses", 3, gpu=A, mib=4000).verdict()
    assert faults(verdict) == {"over_commits": 1}


def test_a_gpu_freed_under_a_living_trainer_is_found() -> None:
    story = line_of_three().tell(4.5, "killed", 1, what="launcher")
    verdict = story.runs(5, 30, 4, A).runs(21, 30, 3, B).verdict()
    assert faults(verdict) == {"crowded": 1}


def test_memory_of_the_dead_counts_for_nobody() -> None:
    story = Story(gpus=(A,)).enters(1, 1, 30000).runs(1.1, None, 1, A).enters(2, 2, 4000)
    story.tell(5, "killed", 1, what="trainer").tell(5.1, "leaves", -1, file="job.1")
    story.tell(9, "dies", 1, gpu=A, mib=30000)
    assert faults(story.runs(6, 12, 2, A).verdict()) == {}


@pytest.mark.parametrize(
    ("what", "found"),
    [
        ({"left": {A: 5}}, {"leaked_bytes": 5}),
        ({"locked": 2}, {"leaked_locks": 2}),
    ],
)
def test_what_is_left_at_the_end_is_found(what: dict[str, object], found: dict[str, int]) -> None:
    story = line_of_three().runs(11, 30, 3, A).runs(21, 30, 4, B)
    assert faults(story.verdict(**what)) == found  # type: ignore[arg-type]


def test_who_is_never_served_is_found_unless_somebody_killed_it() -> None:
    assert faults(line_of_three().runs(11, 30, 3, A).verdict()) == {"unserved": 1}
    story = line_of_three().runs(11, 30, 3, A).tell(8, "killed", 4, what="launcher")
    assert faults(story.verdict()) == {}


def test_members_that_fail_are_found() -> None:
    story = line_of_three().runs(11, 30, 3, A).runs(21, 30, 4, B)
    assert faults(story.tell(5, "error", 3, text="?").verdict()) == {"errors": 1}


def test_every_fault_counts() -> None:
    names = set(asdict(Verdict())) - {"served", "killed", "passes", "judged", "seen"}
    assert all(replace(Verdict(), **{name: 1}).faults == 1 for name in names)
