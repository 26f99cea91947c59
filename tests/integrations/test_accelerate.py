"""A loop with accelerate as an attempt."""

import json
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import warm
from disks import fill, small_disk
from forked_ranks import of_ranks
from framework_config import framework_config
from robust_train.attempt.run import live_of
from robust_train.config.checks import unchecked
from robust_train.config.training_plans import MicroBatchPlan
from robust_train.host.votes import Votes
from robust_train.model.errors import UserError
from watched_run import RunOnAFullDisk, WatchedRun

accelerate = pytest.importorskip("accelerate", reason="the extra [accelerate] is not installed")
ON_EACH_NODE = accelerate.utils.ProjectConfiguration(save_on_each_node=True)


@pytest.mark.proves("accelerate", "FSDP2", "in the step")
@pytest.mark.proves("accelerate", "FSDP2", "new attempt")
@pytest.mark.slow
def test_sharded_ranks_end_with_one_processs_weights(tmp_path):
    """accelerate shards the model. Steps are repeated, and an attempt that ran out at every size is
    followed by another with half the batch.
    """
    folder = Path(__file__).parent
    program = (folder / "ranks_sharded_by_accelerate.py").read_text()
    ended = warm.preloaded(program, str(tmp_path), cwd=folder)
    assert ended.returncode == 0, ended.stderr
    seen = json.loads(ended.stdout.splitlines()[-1])
    (single,) = seen["one"]
    for how in ("forward", "backward", "next"):
        for rank in seen[how]:
            assert rank["kind"] == "FSDPSequential"
            assert rank["error"] is None
            assert rank["weights"] == pytest.approx(single["weights"], abs=1e-5), how
            # also of an epoch's last step, in which rank 1 has no samples
            (start,) = rank["started"]
            assert rank["losses"] == pytest.approx(single["losses"][start:], abs=1e-5), how
    for how in ("forward", "backward"):
        assert [rank["changed"] for rank in seen[how]] == [[], [[2, 4, 2]]]
    heard, ran_out = seen["exhausted"]
    assert heard["error"].startswith("rank 1: ")
    assert "can't allocate memory" in ran_out["error"]
    assert seen["next"][0]["started"] > [0]
    assert "continue with num_gpus=2 or more" in seen["alone"][0]["error"]


def _mean_square(output):
    return output.square().mean()


def _train(folder, cfg, run=None, loss=_mean_square, **options):
    from robust_train.integrations.accelerate import RobustLoop, effective_batch_size

    torch.manual_seed(0)
    run = run or WatchedRun(folder)
    live_of(run).parts.split_by(MicroBatchPlan.of(unchecked(cfg)))
    accelerator = accelerate.Accelerator(cpu=True, **options)
    data = TensorDataset(torch.arange(22.0)[:, None] / 22)
    model = torch.nn.Linear(1, 1)
    model, optimizer, loader = accelerator.prepare(
        model,
        torch.optim.AdamW(model.parameters(), lr=0.1),
        DataLoader(data, effective_batch_size(cfg), shuffle=True),
    )
    loop = RobustLoop(accelerator, model, loader, cfg=cfg, run=run)
    for _ in loop.epochs(3):
        for batch in loop.batches():
            loop.backward(lambda part: loss(model(part[0])), batch)
            optimizer.step()
            optimizer.zero_grad()
    return accelerator.unwrap_model(model).weight.detach(), run


def test_the_last_step_waits_for_room(tmp_path):
    """What is saved is what training has ended with, although an earlier save had failed."""
    with small_disk(tmp_path / "disk", "size=1m"):
        run = RunOnAFullDisk(tmp_path / "disk", fill(tmp_path / "disk"))
        weight, _ = _train(run.run_dir, framework_config(8), run)
        assert list(run.saved_at) == [9]
        assert live_of(run).saving.owed is None
        saved = run.last_checkpoint / "model.safetensors"
        content = pytest.importorskip("safetensors.torch").load_file(saved)
        assert torch.equal(content["weight"], weight)


@pytest.mark.slow
def test_two_ranks_wait_for_room_together(tmp_path):
    """Rank 0 alone knows that the disk took nothing, and both save what training ended with."""
    votes = Votes(2)
    cfg = framework_config(4, checkpoint_every_steps=1)
    cfg.num_gpus = 2

    def train(rank):
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        run = RunOnAFullDisk(folder, filler, rank=rank, world_size=2, flags=votes)
        weight, _ = _train(folder, cfg, run)
        owed = str(live_of(run).saving.owed)
        return [weight.tolist(), owed, list(run.saved_at)]

    folder = tmp_path / "disk"
    with small_disk(folder, "size=1m"):
        filler = fill(folder)
        first, second = of_ranks(2, train)
        assert first[:2] == second[:2]
        assert first[1:] == ["None", [9]]
        (saved,) = folder.glob("checkpoints/*/model.safetensors")
        content = pytest.importorskip("safetensors.torch").load_file(saved)
        assert content["weight"].tolist() == first[0]


def test_a_second_loop_is_refused_in_one_line(tmp_path):
    _, run = _train(tmp_path, framework_config(8))
    with pytest.raises(UserError, match="a second fit or loop in one job"):
        _train(tmp_path, framework_config(8), run)


@pytest.mark.parametrize(("loss", "lines"), [(_mean_square, 0), (torch.std, 1)])
def test_a_split_that_changes_losses_warns_once(tmp_path, caplog, loss, lines):
    _train(tmp_path, framework_config(4, 2, checkpoint_every_steps=None), loss=loss)
    assert caplog.text.count("splitting changes this loss: a part of 4 has loss") == lines


def test_a_prepared_schedule_continues_step_by_step(tmp_path):
    """Whatever the number of ranks: accelerate makes one schedule for each rank, whose batches are
    its steps otherwise.
    """

    def rates(rank):
        from robust_train.integrations.accelerate import RobustLoop

        cfg = framework_config(4, checkpoint_every_steps=None)
        cfg.num_gpus = 2
        run = WatchedRun(tmp_path, rank=rank, world_size=2, flags=votes)
        live_of(run).parts.split_by(MicroBatchPlan.of(unchecked(cfg)))
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = accelerate.Accelerator(cpu=True)
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        loader = DataLoader(TensorDataset(torch.arange(16.0)[:, None]), 8)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        prepared = accelerator.prepare(model, optimizer, loader, schedule)
        model, optimizer, loader, schedule = prepared
        loop = RobustLoop(accelerator, model, loader, cfg=cfg, run=run)
        learning_rates = []
        for _ in loop.epochs(1):
            for batch in loop.batches():
                loop.backward(lambda part: model(part[0]).mean(), batch)
                optimizer.step()
                schedule.step()
                learning_rates += schedule.get_last_lr()
        return learning_rates

    votes = Votes(2)
    assert of_ranks(2, rates) == [[0.5, 0.25]] * 2


def test_autocast_reaches_the_parts_of_a_step(tmp_path, request):
    exact, _ = _train(tmp_path / "float32", framework_config(2, 4))
    # accelerate keeps its settings for as long as the process lives
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    request.addfinalizer(
        lambda: accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    )
    coarse, _ = _train(tmp_path / "bfloat16", framework_config(2, 4), mixed_precision="bf16")
    assert not torch.equal(exact, coarse)
    torch.testing.assert_close(exact, coarse, rtol=0.1, atol=0.1)


def test_a_killed_attempts_partial_checkpoint_is_harmless(tmp_path, caplog):
    caplog.set_level("INFO")
    leftover = tmp_path / "checkpoints" / ".step-00000002.tmp"
    leftover.mkdir(parents=True)
    (leftover / "model.safetensors").write_bytes(b"half")
    _, run = _train(tmp_path, framework_config(8))
    assert not leftover.exists()
    assert len(run.saved_at) == 9
    assert 0 < live_of(run).speed.speed().data_share < 1
    assert not [record for record in caplog.records if record.name.startswith("accelerate")]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"gradient_accumulation_steps": 2}, r"set training.gradient_accumulation_steps"),
        ({"project_config": ON_EACH_NODE}, r"save_on_each_node=True: .* which they share"),
    ],
)
def test_accelerates_own_accumulation_and_files_are_refused(tmp_path, monkeypatch, options, said):
    """This includes checkpoints with files of each node."""
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    with pytest.raises(UserError, match=said):
        _train(tmp_path, framework_config(8), **options)
