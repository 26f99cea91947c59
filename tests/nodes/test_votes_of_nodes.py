"""Flags that ranks on several nodes see at the same look, with a store in a dictionary."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from robust_train.execution import votes as module
from robust_train.execution.node_votes import NodeVotes
from robust_train.execution.votes import Votes
from robust_train.run import CHECKPOINT, STOP


class _Store:
    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def get(self, key: str) -> bytes:
        return self.values[key].encode()

    def add(self, key: str, amount: int) -> int:
        self.values[key] = str(int(self.values.get(key, 0)) + amount)
        return int(self.values[key])

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)


class _Held(Exception):
    """A rank would wait now."""


def _would_wait(seconds: float) -> None:
    raise _Held


RANKS = st.tuples(st.just("look"), st.integers(0, 3), st.sampled_from([STOP, CHECKPOINT]))
NODES = st.tuples(st.just("poll"), st.integers(0, 1), st.just(""))
RAISES = st.tuples(st.just("raise"), st.integers(0, 1), st.sampled_from([STOP, CHECKPOINT]))


@given(st.lists(st.one_of(RANKS, RANKS, NODES, NODES, RAISES), max_size=120))
def test_a_flag_is_seen_at_the_same_look_on_all_nodes(happenings: list[tuple[str, int, str]]):
    """Ranks look in any order, nodes poll at any moment, and flags are raised anywhere."""
    store = _Store()
    votes = [Votes(2, first=2 * node, is_part=True) for node in range(2)]
    nodes = [NodeVotes(votes[node], store, node, 2) for node in range(2)]
    seen = {flag: [[], [], [], []] for flag in (STOP, CHECKPOINT)}

    def look(rank: int, flag: str) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module.time, "sleep", _would_wait)
            with contextlib.suppress(_Held):
                seen[flag][rank].append(votes[rank // 2].look(flag, rank))

    raised = set()
    for what, who, flag in happenings:
        if what == "look":
            look(who, flag)
        elif what == "poll":
            nodes[who].poll(2)
        else:
            votes[who].raise_flag(flag)
            raised.add(flag)
    for _ in range(12):  # whatever was going on comes to its end
        nodes[0].poll(2)
        nodes[1].poll(2)
    for flag, looks in seen.items():
        most = max(map(len, looks)) + 1
        for rank in range(4):
            while len(looks[rank]) < most:
                look(rank, flag)
        assert looks[0] == looks[1] == looks[2] == looks[3]
        assert bool(looks[0][-1]) is (flag in raised)


def test_a_node_whose_ranks_have_not_begun_is_missing():
    store = _Store()
    votes = [Votes(2, first=2 * node, is_part=True) for node in range(2)]
    nodes = [NodeVotes(votes[node], store, node, 2) for node in range(2)]
    for rank in (0, 1, 2):
        votes[rank // 2].begin(rank)
    for node in nodes:
        node.poll(2)
    assert nodes[0].missing() == [1]
    votes[1].begin(3)
    nodes[1].poll(2)
    assert nodes[0].missing() == []


def test_nobody_waits_for_a_node_whose_ranks_have_ended():
    store = _Store()
    votes = [Votes(1, first=node, is_part=True) for node in range(2)]
    nodes = [NodeVotes(votes[node], store, node, 2) for node in range(2)]
    nodes[1].end()
    votes[0].raise_flag(CHECKPOINT)
    for _ in range(3):
        nodes[0].poll(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.time, "sleep", _would_wait)
        assert votes[0].look(CHECKPOINT, 0) == 1
