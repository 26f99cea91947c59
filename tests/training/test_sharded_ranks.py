"""A model sharded by FSDP2 whose memory runs out on one of two ranks: real gloo groups."""

import json
import re
from pathlib import Path

import pytest
import torch
from training_world import difference, trained_weights

import warm
from robust_train.model.errors import ConfigError
from robust_train.vision.sharding import shard

PROGRAM = Path(__file__).with_name("group_of_sharded_ranks.py").read_text()
PARTS = re.findall(r"(?m)^    (\w+),$", PROGRAM.partition("\nPARTS")[2])


def seen_by_ranks(folder, how):
    ended = warm.preloaded(PROGRAM, str(folder), how, cwd=Path(__file__).parent)
    assert ended.returncode == 0, ended.stderr
    seen = json.loads(ended.stdout)
    assert all(seen["ranks"]), ended.stderr
    return seen


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return seen_by_ranks(tmp_path_factory.mktemp("ranks"), "few")["ranks"]


@pytest.mark.proves("functions (`run.backward`)", "FSDP2", "in the step")
@pytest.mark.parametrize("part", PARTS)
def test_of_both_ranks(ranks, part):
    for rank in ranks:
        assert not rank[part], rank[part]


@pytest.mark.slow
def test_sharded_steps_repeat_and_resume_anywhere(tmp_path):
    """A step is repeated in every place, and any number of ranks resumes."""
    seen = seen_by_ranks(tmp_path, "thorough")
    assert [rank[PARTS[0]] for rank in seen["ranks"]] == ["", ""]
    attempts = seen["built in"]["attempts"]
    assert attempts[0][1]["changed"] == [6], "memory ran out on the second rank"
    saved = [Path(first["saved"][-1]).name for first, _ in attempts]
    assert saved == ["step-00000001", "step-00000002", "step-00000003.pt", "step-00000004"]
    alone, last = seen["built in"]["one"], attempts[-1][0]
    weights = [trained_weights(told["result"]) for told in (alone, last)]
    assert difference(*weights) < 1e-4


@pytest.mark.proves("functions (`run.backward`)", "FSDP2", "refused", "custom collectives")
@pytest.mark.proves("functions (`run.backward`)", "FSDP2", "refused", "models sharded in part")
@pytest.mark.proves("functions (`run.backward`)", "FSDP2", "refused", "hybrid sharding")
@pytest.mark.proves(
    "functions (`run.backward`)", "FSDP2", "refused", "DistributedDataParallel beside it"
)
@pytest.mark.proves("functions (`run.backward`)", "FSDP2", "refused", "tensor parallelism")
@pytest.mark.proves("functions (`run.backward`)", "several GPUs", "refused", "FSDP1")
@pytest.mark.proves("functions (`run.backward`)", "FSDP2", "refused", "passes that differ")
@pytest.mark.proves("functions (`run.backward`)", "FSDP2", "refused", "older versions of torch")
@pytest.mark.proves(
    "functions (`run.backward`)", "FSDP2", "refused", "a collective inside a micro-batch"
)
@pytest.mark.proves(
    "functions (`run.backward`)", "several GPUs", "refused", "a collective inside a micro-batch"
)
@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("own", "collectives of its own"),
        ("in part", "is not sharded, beside parameters that are"),
        ("hybrid", "hybrid sharding or tensor parallelism"),
        ("beside", "DistributedDataParallel beside a sharded model"),
        ("split", "1.wide (Linear) gathers its weights"),
        ("first kind", "(FullyShardedDataParallel) gathers its weights"),
        ("skips", "send different messages between its ranks"),
        ("older", "needs a torch that has FSDPModule.reset_iter_state; update torch"),
        ("averages", "a collective of your own"),
        ("averages in replicas", "a collective of your own"),
    ],
)
def test_unrepeatable_steps_are_refused_in_a_line(ranks, model, reason):
    for rank, seen in enumerate(ranks):
        line = seen["refused"][model]
        assert line.startswith("run.backward: "), f"rank {rank}"
        assert reason in line, f"rank {rank}"
        assert "or do without run.backward" in line, f"rank {rank}"


def test_an_older_torch_is_refused_in_a_line(monkeypatch):
    monkeypatch.delattr("torch.distributed.fsdp.FSDPModule.reset_iter_state")
    with pytest.raises(ConfigError, match=r"update torch, or set training\.sharding=ddp"):
        shard(torch.nn.Linear(2, 2))
