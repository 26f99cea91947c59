"""What ranks on several nodes do at the same step, agreed upon through their store.

A rank may look at a flag at any time, so a raised flag becomes due in a round: each node holds its
ranks' looks at it and writes down how many there were; when all have, each lets its ranks go on,
with the flag due after the furthest look of all. No collective, and nothing where nobody asks.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from robust_train.execution.votes import FLAGS, Votes

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]


class NodeVotes:
    """One node's part; node 0 begins the rounds. To be polled often, by one thread."""

    def __init__(self, votes: Votes, store: Store, node: int, nodes: int) -> None:
        self._votes, self._store, self._node = votes, store, node
        self._nodes = range(nodes)
        self._rounds = 0
        self._held: str | None = None  # the flag of the round in progress
        self._seen = dict.fromkeys(FLAGS, 0)  # how often others have raised it, of those dealt with
        self._has_begun = False

    def poll(self, ranks: int) -> None:
        """Take part in what is going on; ``ranks``: how many there are on this node."""
        store, votes = self._store, self._votes
        if not self._has_begun and votes.begun == ranks:
            self._has_begun = True
            store.set(f"begun/{self._node}", "")
        for flag in FLAGS:
            if votes.take_raised(flag):
                store.add(f"raised/{flag}", 1)
        if self._node == 0 and self._held is None:
            self._begin_round()
        if self._held is None and store.check([f"round/{self._rounds + 1}"]):
            self._rounds += 1
            self._held = store.get(f"round/{self._rounds}").decode()
            looks = votes.hold(self._held)
            store.set(self._key(self._node), json.dumps(looks))
        elif self._held is not None and all(map(self._has_answered, self._nodes)):
            keys = [key for key in map(self._key, self._nodes) if store.check([key])]
            looks_of = [json.loads(store.get(key)) for key in keys]
            votes.release(self._held, [(fewest, most) for fewest, most in looks_of])
            self._held = None

    def missing(self) -> list[int]:
        """Return the nodes whose ranks have not all begun."""
        return [node for node in self._nodes if not self._store.check([f"begun/{node}"])]

    def end(self) -> None:
        """Record that all ranks of this node have ended well."""
        self._store.set(f"ended/{self._node}", "")

    @property
    def is_over(self) -> bool:
        """Whether nobody needs the store any more."""
        return self._node > 0 or self._store.check([f"ended/{node}" for node in self._nodes])

    def _begin_round(self) -> None:
        for flag in FLAGS:
            raised = self._store.add(f"raised/{flag}", 0)
            if raised > self._seen[flag]:
                self._seen[flag] = raised
                self._store.set(f"round/{self._rounds + 1}", flag)
                return

    def _has_answered(self, node: int) -> bool:
        """Return whether a node has written its looks down, or never will."""
        return any(self._store.check([key]) for key in (f"ended/{node}", self._key(node)))

    def _key(self, node: int) -> str:
        return f"looks/{self._rounds}/{node}"
