"""Which node a launcher is on, and which of several nodes' ends is the reason for the others."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hydra import compose, initialize_config_module
from omegaconf import DictConfig

from robust_train.config.schema import complete
from robust_train.errors import ConfigError
from robust_train.nodes.messages import Begin, Ended, decode, encode, root_of
from robust_train.nodes.place import node_in, place_of
from robust_train.values import AttemptSpec, Clue, Evidence, Failure, FailureKind


def job(**keys: object) -> DictConfig:
    return complete({"num_nodes": 2, **keys})


@pytest.mark.parametrize(
    "environ",
    [
        {"ROBUST_TRAIN_NODE_RANK": "1"},
        {"ROBUST_TRAIN_NODE_RANK": "1", "ROBUST_TRAIN_NUM_NODES": "2", "SLURM_NODEID": "0"},
        {"PET_NODE_RANK": "1", "PET_NNODES": "2", "RANK": "0", "WORLD_SIZE": "9"},
        {"SLURM_NODEID": "1", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2"},
        {"JOB_COMPLETION_INDEX": "1"},
    ],
)
def test_a_node_is_known_by_what_its_scheduler_sets(environ: dict[str, str]):
    place = place_of(job(), environ)
    assert place is not None
    assert (place.node, place.nodes) == (1, 2)


@pytest.mark.parametrize(
    ("keys", "environ", "words"),
    [
        ({}, {}, "ROBUST_TRAIN_NODE_RANK"),
        ({}, {"ROBUST_TRAIN_NODE_RANK": "2"}, "nodes 0 to 1"),
        ({}, {"ROBUST_TRAIN_NODE_RANK": "one"}, "ROBUST_TRAIN_NODE_RANK=one"),
        ({}, {"PET_NODE_RANK": "0", "PET_NNODES": "4"}, "PET_NNODES=4"),
        ({}, {"PET_NODE_RANK": "0", "PET_NNODES": "1:4"}, "PET_NNODES=1:4"),
        (
            {},
            {"SLURM_NODEID": "0", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "16"},
            "--ntasks-per-node=1",
        ),
        ({}, {"SLURM_NODEID": "0", "SLURM_STEP_NUM_NODES": "1"}, "hydra.launcher.nodes=2"),
        ({"num_nodes": 1}, {"ROBUST_TRAIN_NUM_NODES": "2"}, "give num_nodes=2"),
        ({"isolation": "none"}, {"ROBUST_TRAIN_NODE_RANK": "0"}, "isolation=none"),
        pytest.param(
            {"trainer": {"argv": ["x"]}},
            {"ROBUST_TRAIN_NODE_RANK": "0"},
            "a script starts its own",
            marks=pytest.mark.proves("scripts", "several machines", "refused", "every script"),
        ),
        ({"min_num_gpus": 1}, {"ROBUST_TRAIN_NODE_RANK": "0"}, "min_num_gpus"),
        ({"detach": True}, {"ROBUST_TRAIN_NODE_RANK": "0"}, "detach"),
        (
            {"auto_device": False, "device": "cuda:1"},
            {"ROBUST_TRAIN_NODE_RANK": "0"},
            "device=cuda:1",
        ),
    ],
)
def test_what_cannot_be_is_refused(keys: dict[str, object], environ: dict[str, str], words: str):
    with pytest.raises(ConfigError, match=words):
        place_of(job(**keys), environ)


def test_a_job_of_one_node_imports_neither_leader_nor_follower():
    lines = (
        "import robust_train.launcher, sys; print([one for one in sys.modules if '.nodes.' in one])"
    )
    found = subprocess.run(
        [sys.executable, "-c", lines], capture_output=True, text=True, check=True
    )
    assert "robust_train.nodes.place" in found.stdout
    assert "robust_train.nodes.leader" not in found.stdout


def test_a_sweep_on_slurm_asks_for_as_many_nodes_and_gpus_as_the_job():
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="the extra [slurm]")
    with initialize_config_module("robust_train.configs", version_base="1.3"):
        words = ["hydra/launcher=robust_slurm", "num_nodes=2", "num_gpus=8"]
        launcher = compose("robust", words, return_hydra_config=True).hydra.launcher
    assert (launcher.nodes, launcher.tasks_per_node, launcher.gpus_per_node) == (2, 1, 8)


def test_a_job_of_one_node_asks_for_no_number():
    assert place_of(job(num_nodes=1), {"SLURM_NODEID": "3", "SLURM_STEP_NUM_NODES": "8"}) is None
    assert node_in({"SLURM_NODEID": "3"}, 1) == 0
    assert node_in({"SLURM_NODEID": "3"}, 8) == 3


def end(node: int, kind: FailureKind | None, rank: int | None = 0, **more: object) -> Ended:
    evidence = Evidence(clue=more.pop("clue", None), library=more.pop("library", None))
    failure = None if kind is None else Failure(kind, "…", evidence, rank=rank)
    return Ended(1, failure, node=node, **more)


OOM, COMM, STOP = FailureKind.DEVICE_OOM, FailureKind.COMM, FailureKind.INTERRUPTED


@pytest.mark.parametrize(
    ("ends", "node"),
    [
        pytest.param([end(0, None), end(1, None, 2)], None, id="all completed"),
        pytest.param([end(0, COMM), end(1, OOM, 2)], 1, id="a lost connection follows"),
        pytest.param([end(0, OOM, 2), end(1, OOM, 2)], 1, id="node 0 has heard of it"),
        pytest.param(
            [end(0, STOP, None, clue=Clue.KILLED, was_ended=True), end(1, FailureKind.BUG, 3)],
            1,
            id="node 0 was ended for it",
        ),
        pytest.param(
            [end(0, FailureKind.BUG), end(1, STOP, 2, clue=Clue.KILLED)],
            1,
            id="who was killed reports nothing, so that comes first",
        ),
        pytest.param(
            [end(0, COMM), end(1, STOP, 2, clue=Clue.KILLED, was_ended=True)],
            1,
            id="a rank of node 1 was killed before the end of node 0 was heard of",
        ),
        pytest.param([end(0, STOP), end(1, STOP, 2)], 0, id="both were asked to stop"),
        pytest.param([end(0, None), end(1, FailureKind.BUG, 2)], 1, id="after node 0's end"),
    ],
)
def test_the_reason_is_what_other_nodes_follow_from(ends: list[Ended], node: int | None):
    root = root_of(tuple(ends), ranks=2)
    assert (None if root is None else root.node) == node


def test_messages_travel_as_they_are():
    spec = AttemptSpec((), 16, 2, ranks=4, gradient_checkpointing=True)
    for message in (Begin(3, spec, "job", 1234, "checkpoints/5"), end(1, OOM, 2, output="\n")):
        assert decode(encode(message)) == message
