"""Two launchers on this machine, as those of two nodes: the real command, each with its address."""

from __future__ import annotations

import copy

from world import Ended, World

ON_THE_CPU = ("num_nodes=2", "num_gpus=1", "auto_device=false", "device=cpu")


def nodes_of(world: World) -> tuple[World, World]:
    """The same folder on two hosts."""
    found = []
    for node, host in enumerate(("127.0.0.1", "127.0.0.2")):
        one = copy.copy(world)
        one.environ = {**world.environ, "ROBUST_TRAIN_NODE_HOST": host}
        one.environ |= {"ROBUST_TRAIN_NODE_RANK": str(node)}
        found.append(one)
    return found[0], found[1]


def run_both(world: World, *words: str, only_node_1: tuple[str, ...] = ()) -> tuple[Ended, Ended]:
    """Run a job of one rank on each to its end."""
    leader, follower = nodes_of(world)
    processes = leader.start(*words, *ON_THE_CPU), follower.start(*words, *ON_THE_CPU, *only_node_1)
    ended = follower.end(processes[1])  # a leader would wait for one that was refused
    return leader.end(processes[0]), ended
