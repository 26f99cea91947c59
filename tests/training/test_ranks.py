"""Several processes share an optimizer step: real gloo groups of four and of two."""

import json
import re
from pathlib import Path

import pytest
from torch import nn
from training_world import difference, trained_weights

import warm
from robust_train.config.training_plans import MicroBatchPlan
from robust_train.model.failure import Failure, FailureKind
from robust_train.step import ranks
from robust_train.step.micro_batch_size import MicroBatchSize
from robust_train.step.ranks import OtherGroups, RankReport, RanOut, agree
from robust_train.step.replicas import ReplicaFinder, Replicated

PROGRAM = Path(__file__).with_name("group_of_ranks.py").read_text()
PARTS = re.findall(r"(?m)^    (\w+),$", PROGRAM.partition("\nPARTS")[2])


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    """What four processes have seen."""
    folder = tmp_path_factory.mktemp("group")
    ended = warm.preloaded(PROGRAM, str(folder), cwd=Path(__file__).parent)
    assert ended.returncode == 0, ended.stderr
    seen = json.loads(ended.stdout)
    assert all(seen["ranks"]), ended.stderr
    return seen


@pytest.mark.proves("functions (`run.backward`)", "several GPUs", "refused", "SyncBatchNorm")
@pytest.mark.proves("functions (`run.backward`)", "several GPUs", "refused", "static_graph")
@pytest.mark.proves("functions (`run.backward`)", "several GPUs", "refused", "communication hooks")
@pytest.mark.proves("functions (`run.backward`)", "several GPUs", "refused", "sparse gradients")
@pytest.mark.parametrize("part", PARTS)
def test_of_four_ranks(group, part):
    for rank in group["ranks"]:
        assert not rank[part], rank[part]


def test_of_a_rank_that_is_alone(group):
    (seen,) = group["alone"]
    assert not any(seen.values()), seen


@pytest.mark.proves("built-in trainer", "several GPUs", "in the step")
@pytest.mark.proves("built-in trainer", "several GPUs", "new attempt")
def test_results_do_not_depend_on_the_ranks(group):
    """Two ranks of the built-in trainer stop after a step in which one ran out of memory, and four
    ranks resume. The result is that of one rank without interruption.
    """
    single, first, rest = group["one"][0], group["first"], group["rest"]
    assert [rank["changed"] for rank in first] == [[], [6]]
    assert [bool(rank["saved"]) for rank in first] == [True, False], "by the first alone"
    assert [bool(rank["saved"]) for rank in rest] == [True, False, False, False]
    expected = trained_weights(single["result"])
    assert difference(trained_weights(rest[0]["result"]), expected) < 1e-4
    accuracies = [rank["result"]["test_accuracy"] for rank in rest]
    assert accuracies == [single["result"]["test_accuracy"]] * 4, "of the whole test set, on each"
    for epoch, alone in zip(rest[0]["epochs"], single["epochs"], strict=True):
        assert epoch["metrics"]["train_loss"] == pytest.approx(
            alone["metrics"]["train_loss"], abs=1e-4
        )
        assert epoch["metrics"]["val_loss"] == pytest.approx(alone["metrics"]["val_loss"], abs=1e-4)


def test_ranks_that_would_resume_different_checkpoints_say_so(group):
    """As on nodes whose disks differ: each would train another step's samples."""
    for line in group["other disk"]:
        assert "different checkpoints" in line
        assert "all nodes must share one folder" in line
        assert "remove it" not in line


def test_a_replaced_wrapper_is_looked_up_again(monkeypatch):
    """Its successor's gradients would be summed over no ranks, without a word."""
    monkeypatch.setattr("robust_train.step.replicas.broadcast", lambda *given: None)
    net, finder = nn.Linear(2, 1), ReplicaFinder()
    assert finder.find([net], None) == [], "it is wrapped later"
    wrapper = Replicated(net)
    assert finder.find([net], [wrapper]) == [wrapper]
    del wrapper
    wrapper = Replicated(net)
    assert finder.find([net], [wrapper]) == [wrapper]


def test_a_rank_that_is_exhausted_decides_for_all():
    failure = Failure(FailureKind.HOST_OOM, "out of memory")
    ran_out = [RanOut(failure, 8, is_exhausted=rank == 1, rank=rank) for rank in range(3)]
    agreed = agree([RankReport(shortage, None, 1.0) for shortage in (None, *ran_out)])
    assert agreed.ran_out is ran_out[1]


def test_agreed_sizes_do_not_depend_on_ranks():
    """The sizes are the same wherever memory ran out."""
    plan = MicroBatchPlan(16)
    here, there = MicroBatchSize(plan), MicroBatchSize(plan)
    here.record_failure(16)
    here.agree(8, failed=16, is_known=True)
    there.agree(8, failed=16)
    assert here.state() == there.state()
    there.shrink()
    here.agree(there.current)
    assert here.state() == there.state()


class Group:
    """A process group that counts what it has begun."""

    def __init__(self):
        self.begun = 3

    def _get_sequence_number_for_group(self):
        return self.begun


@pytest.mark.parametrize(
    ("messages", "seen"),
    [
        ((1, 1, 0), [False, True, False]),
        ((1, 0, 1), [False, False, False]),
        ((0, 1, 1), [False, False, False]),
    ],
)
def test_first_parts_show_messages_over_other_groups(messages, seen):
    """A thread that sends now and then is not taken for the function."""
    used, other, silent = Group(), Group(), Group()
    groups = OtherGroups()
    answers = []
    for more in messages:
        groups.begin_part([used, other, silent])
        used.begun += 1
        other.begun += more
        answers.append(groups.end_part([used, other, silent], {used}))
    assert answers == seen


def test_a_group_made_in_a_part_counts():
    groups = OtherGroups()
    for _ in range(2):
        groups.begin_part([])
        is_seen = groups.end_part([Group()], set())
    assert is_seen


@pytest.mark.parametrize(("backend", "sent"), [("nccl", ["cuda"]), ("gloo", [])])
def test_nccl_takes_its_memory_before_the_first_part(monkeypatch, backend, sent):
    sizes = []
    monkeypatch.setattr(ranks.dist, "get_backend", lambda: backend)
    monkeypatch.setattr(ranks.dist, "all_reduce", sizes.append)
    monkeypatch.setattr(ranks.torch, "zeros", lambda size, *, device: device)
    ranks.start_nccl()
    assert sizes == sent
