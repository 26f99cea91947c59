from types import SimpleNamespace

import pytest
import torch
from training_world import (
    WatchedRun,
    config,
    difference,
    run_to_end,
    train,
    trained_weights,
    write_image_folder,
)

from robust_train.attempt.run import live_of
from robust_train.model.errors import ConfigError, TrainingStopped
from robust_train.vision.models import SmallCnn

ONE_EPOCH = "training.epochs=1"


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """Makes configs of a job of two epochs of 23 steps of eight images."""
    root = tmp_path_factory.mktemp("images")
    for part, per_class in (("train", 102), ("test", 20)):
        write_image_folder(root, per_class=per_class, parts=[part], size=(16, 16))
    settings = (
        *("dataset=image_folder", f"dataset.root={root}", "training.num_workers=0"),
        *("model.width=8", "model.image_size=16", "training.batch_size=8", "training.epochs=2"),
        # no checkpoint but those that a test asks for, however slow this machine is
        "training.checkpoint_every_minutes=60",
    )
    return lambda *overrides: config(*settings, *overrides)


def stopped(cfg, folder, **when):
    """Return the run after a stop was requested and a checkpoint saved."""
    run = WatchedRun(folder, **when)
    with pytest.raises(TrainingStopped):
        train(cfg, run)
    return run


def resumed(cfg, run):
    """Return a run that resumes from its last checkpoint to the end, and the result."""
    again = WatchedRun(run.run_dir, resume=run.last_checkpoint)
    return again, train(cfg, again)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, job):
    """A run without interruption."""
    run = WatchedRun(tmp_path_factory.mktemp("whole"))
    result = train(job(), run)
    return SimpleNamespace(run=run, result=result, weights=trained_weights(result))


def test_a_stopped_validation_is_resumed(tmp_path, job, whole):
    run = stopped(job(), tmp_path, stop_at_checkpoint=23)
    assert run.of("epoch") == []
    again, result = resumed(job(), run)
    assert difference(whole.weights, trained_weights(result)) == 0
    assert again.of("epoch") == whole.run.of("epoch")


def test_a_changed_effective_batch_visits_every_sample(tmp_path, job):
    """The former effective batch cannot be kept."""
    run = stopped(job(ONE_EPOCH), tmp_path, stop_at_step=11)
    _, result = resumed(job(ONE_EPOCH, "training.batch_size=3"), run)
    assert result["steps"] == 11 + -(-(184 - 11 * 8) // 3)


def test_a_finished_run_is_only_tested_again(job, whole):
    again, result = resumed(job(), whole.run)
    assert again.of("epoch") == whole.run.of("epoch")[-1:]
    assert result == whole.result


@pytest.mark.parametrize(
    ("stopped_at", "goes_on_at", "said"),
    [(30, 23, "trying the checkpoint before it"), (5, 0, "starts from the beginning")],
)
def test_a_damaged_checkpoint_gives_way_to_its_predecessor(
    tmp_path, job, whole, caplog, stopped_at, goes_on_at, said
):
    run = stopped(job(), tmp_path, stop_at_step=stopped_at)
    newest = run.last_checkpoint
    newest.write_bytes(newest.read_bytes()[:-500])
    again, result = resumed(job(), run)
    assert again.of("training_started")[0]["step"] == goes_on_at
    assert f"{newest} cannot be used" in caplog.text
    assert said in caplog.text
    assert difference(whole.weights, trained_weights(result)) == 0


def test_another_runs_checkpoint_is_refused(tmp_path, job):
    """Epochs and learning rate may change."""
    run = stopped(job(), tmp_path, stop_at_step=2)
    for override, named in (
        ("model.width=16", "model.width was 8, now 16"),
        ("seed=9", "seed was 42, now 9"),
        ("dataset.augment=none", "dataset.augment was crop_flip, now none"),
    ):
        with pytest.raises(ConfigError, match=named) as refusal:
            resumed(job(override), run)
        assert "\n" not in str(refusal.value), override
    assert resumed(job(ONE_EPOCH, "training.lr=1e-4"), run)[1]["steps"] == 23


def test_only_the_newest_checkpoints_are_kept(tmp_path, job):
    cfg = job(ONE_EPOCH, "training.checkpoint_every_minutes=0", "training.keep_checkpoints=3")
    run = WatchedRun(tmp_path)
    train(cfg, run)
    names = sorted(p.name for p in run.checkpoint_dir.glob("*.pt"))
    # the first one stays until a later one is proven by a hundred steps with a finite loss
    assert names == ["best.pt", "final.pt", *(f"step-{step:08d}.pt" for step in (1, 21, 22, 23))]
    manifests = sorted(p.name for p in run.checkpoint_dir.glob("*.manifest.json"))
    assert manifests == [f"step-{step:08d}.pt.manifest.json" for step in (1, 21, 22, 23)]


def test_workers_do_not_change_what_is_learned(tmp_path, job, whole):
    helped = run_to_end(job("training.num_workers=2"), tmp_path)
    assert difference(whole.weights, helped) == 0


@pytest.fixture
def memory_for(monkeypatch):
    """Give the model memory for ``samples`` samples at once, in training or in validation."""
    whole_forward = SmallCnn.forward
    sizes: list[tuple[bool, int]] = []

    def limit(*, training=10**9, validation=10**9):
        def forward(self, images_BCHW):
            most = training if self.training else validation
            logits_BK = whole_forward(self, images_BCHW)
            if len(images_BCHW) > most:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            sizes.append((self.training, len(images_BCHW)))
            return logits_BK

        monkeypatch.setattr(SmallCnn, "forward", forward)
        sizes.clear()
        return sizes

    return limit


def test_a_resumed_run_keeps_the_fitting_size(tmp_path, job, memory_for):
    """It is the micro-batch that fitted before."""
    memory_for(training=5)
    limited = run_to_end(job(ONE_EPOCH), tmp_path / "whole")
    run = stopped(job(ONE_EPOCH), tmp_path / "run", stop_at_step=11)
    assert live_of(run).parts.last_micro_batch == 4
    sizes = memory_for()
    _, result = resumed(job(ONE_EPOCH), run)
    in_training = [size for is_training, size in sizes if is_training]
    # The split is checked once: a part, its halves, and a quarter beside the rest.
    assert in_training[:5] == [4, 2, 2, 1, 3]
    assert set(in_training[5:]) == {4}
    assert difference(limited, trained_weights(result)) == 0


def test_an_unsplittable_step_saves_the_step_before(tmp_path, job, memory_for):
    """No smaller part is allowed."""
    run = stopped(job(ONE_EPOCH), tmp_path, stop_at_step=11)
    memory_for(training=5)
    failed = WatchedRun(tmp_path, resume=run.last_checkpoint)
    with pytest.raises(torch.OutOfMemoryError):
        train(job(ONE_EPOCH, "+min_batch_size=8"), failed)
    assert [event["tried"] for event in failed.of("micro_batch_exhausted")] == [[8]]
    assert [event["step"] for event in failed.of("checkpoint")] == [11], "nothing is repeated"


def test_memory_errors_in_validation_change_nothing(tmp_path, job, whole, memory_for):
    """Neither score nor training differs."""
    sizes = memory_for(validation=5)
    run = WatchedRun(tmp_path)
    result = train(job(), run)
    assert result["test_accuracy"] == whole.result["test_accuracy"]
    assert result["test_loss"] == pytest.approx(whole.result["test_loss"], rel=1e-5)
    assert max(size for is_training, size in sizes if not is_training) == 4
    assert max(size for is_training, size in sizes if is_training) == 8
    assert live_of(run).parts.last_micro_batch is None
    assert difference(whole.weights, trained_weights(result)) == 0
