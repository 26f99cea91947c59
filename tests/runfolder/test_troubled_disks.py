"""Run folders on disks that are full or away. Real disks, made small (needs root)."""

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from command_world import CommandWorld
from disks import fill, small_disk
from robust_train.attempt import ending, last_save
from robust_train.attempt.run import Run, live_of
from robust_train.features.disk.launcher import Disk
from robust_train.folder.checkpoint_writing import CheckpointError, write_atomically
from robust_train.folder.checkpoints import Manifest, read_manifests, record_checkpoint
from robust_train.folder.full_disk import why_full
from robust_train.folder.identity import begin_job, wait_until_readable
from robust_train.model.errors import ConfigError, RunFolderUnavailableError, TrainingStopped
from robust_train.model.events import CheckpointFailed, CheckpointSaved
from robust_train.model.failure import Failure, FailureKind

STATE_BYTES = 2_000_000


@pytest.fixture
def disk(tmp_path):
    with small_disk(tmp_path / "disk", "size=64k"):
        yield tmp_path / "disk"


def test_a_full_disk_keeps_no_job_from_resuming(disk):
    job = begin_job(disk, resume=True).job
    path = disk / "checkpoints" / "step-5.bin"
    path.parent.mkdir()
    path.write_text("5")
    record_checkpoint(path.parent, Manifest(job, 1, 5, path))
    fill(disk)
    begun = begin_job(disk, resume=True, max_launches=3)
    assert (begun.job, begun.checkpoint) == (job, path)


@pytest.mark.parametrize("is_script", [True, False])
def test_a_full_disk_exits_with_a_repeatable_code(world, disk, is_script):
    """Supervisors start a command with this code again."""
    fill(disk)
    world.run_dir = disk / "run"
    ended = CommandWorld(world).run("--", "true") if is_script else world.run("device=cpu")
    assert ended.returncode == 75, ended.output
    assert "Traceback" not in ended.output
    last = ended.stderr.splitlines()[-1]
    assert "No space left on device" in last
    assert "; the same command may succeed later" in last


def test_an_owed_manifest_replaces_an_older_checkpoint(tmp_path):
    """A full disk owes it; it takes the room of the older one."""
    with small_disk(tmp_path / "disk", "nr_inodes=10"):
        run_dir = tmp_path / "disk"
        begin_job(run_dir, resume=True)
        folder = live_of(Run(run_dir=run_dir)).saves.folder(2)
        for step in (1, 2):
            folder.save({"step": step}, step)
        while os.statvfs(run_dir).f_ffree > 1:
            (run_dir / f"filler-{os.statvfs(run_dir).f_ffree}").touch()
        folder.save({"step": 3}, 3)
        listed = [manifest.step for manifest in read_manifests(folder.path)]
        assert sorted(listed) == [2, 3]
        assert begin_job(run_dir, resume=True).checkpoint == folder.path / "step-00000003.pt"


def test_whether_a_disk_has_room_again(disk, tmp_path, monkeypatch):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    message = f"OSError: [Errno 28] No space left on device: '{disk}/cache'"
    filler = fill(disk)
    assert why_full(run_dir, message) == f"no space is left in {disk}"
    assert why_full(run_dir, "OSError: [Errno 28] No space left on /nowhere/x") is None
    assert "(No space left on device)" in str(why_full(disk, ""))
    filler.unlink()
    # whoever else writes there would have no space meanwhile
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: pytest.fail("all that is left is taken"))
    assert "(No space left on device)" in str(why_full(disk, "")), "64 KiB are not enough"
    assert list(disk.iterdir()) == []


@pytest.mark.parametrize(
    ("number", "kind"), [(errno.ESTALE, RunFolderUnavailableError), (errno.EACCES, ConfigError)]
)
def test_what_stays_unreadable_becomes_an_error(number, kind):
    """This takes a while."""

    def read():
        raise OSError(number, os.strerror(number), "/runs/a")

    paused = []
    with pytest.raises(ConfigError) as refused:
        wait_until_readable(read, sleep=paused.append)
    assert type(refused.value) is kind, (
        "a fault that may pass is not a mistake in the configuration"
    )
    (line,) = str(refused.value).splitlines()
    assert f"/runs/a: cannot be read now ({os.strerror(number)})" in line
    assert paused == sorted(paused)
    assert 50 <= sum(paused) <= 70


@pytest.fixture
def full(tmp_path, monkeypatch):
    """An attempt on a disk with room for most of a checkpoint, until it waits for more."""
    monkeypatch.setattr(last_save, "PAUSES", (0.01,))
    with small_disk(tmp_path / "disk", "size=4m"):
        begin_job(tmp_path / "disk", resume=True)
        filler = fill(tmp_path / "disk")
        os.truncate(filler, filler.stat().st_size - STATE_BYTES * 3 // 4)
        heard = []

        def hear(event):
            heard.append(event)
            if isinstance(event, CheckpointFailed) and "no checkpoint fits" in event.reason:
                filler.unlink()

        yield Run(run_dir=tmp_path / "disk", report=hear), heard


def test_the_last_checkpoint_waits_for_space(full):
    run, heard = full
    weights = torch.arange(STATE_BYTES // 4, dtype=torch.float32)
    run.save({"weights": weights}, 7)
    run.finish_saving()
    assert not live_of(run).saves.has_checkpoint
    last_save.save_owed_checkpoint(live_of(run))
    (saved,) = [event for event in heard if isinstance(event, CheckpointSaved)]
    assert saved.step == 7
    assert torch.equal(torch.load(saved.path)["weights"], weights)
    assert live_of(run).saving.owed is None


def test_trained_weights_wait_for_space(full):
    run, heard = full
    run.checkpoint_failed("No space left on device")
    path = run.checkpoint_dir / "final.pt"
    content = {"weights": torch.zeros(STATE_BYTES // 4)}
    assert last_save.save_result(live_of(run), lambda: write_atomically(content, path)) == path
    assert path.stat().st_size > STATE_BYTES
    last_save.save_owed_checkpoint(live_of(run))
    assert not any(isinstance(event, CheckpointSaved) for event in heard), "the weights are enough"


def test_a_stop_ends_the_wait_for_space(full):
    run, _ = full
    run.save({"weights": torch.zeros(STATE_BYTES // 4)}, 7)
    run.finish_saving()
    live_of(run).stops.request_stop()
    with pytest.raises(TrainingStopped):
        last_save.save_owed_checkpoint(live_of(run))


def test_training_without_any_checkpoint_is_not_repeated(tmp_path, caplog):
    """A checkpoint that only its framework could write is a reason to repeat the last steps, never
    to begin again."""
    run = Run(run_dir=tmp_path)
    run.checkpoint_failed("No space left on device")
    last_save.save_owed_checkpoint(live_of(run))
    assert "it is not trained again" in caplog.text
    run.checkpoint_saved(tmp_path, 3)
    run.checkpoint_failed("No space left on device")
    with pytest.raises(CheckpointError):
        last_save.save_owed_checkpoint(live_of(run))


@pytest.mark.parametrize(
    ("checkpoint", "what_follows"),
    [
        (None, "training starts from the beginning, because no checkpoint is known"),
        (Path("step-5"), "training continues"),
    ],
)
def test_a_wait_for_space_says_what_follows(tmp_path, caplog, checkpoint, what_follows):
    """A script whose own save failed loses all its steps if it has no checkpoint."""
    with small_disk(tmp_path / "disk"):
        filler = fill(tmp_path / "disk")
        message = f"OSError: [Errno 28] No space left on device: '{tmp_path}/disk/mine.pt'"
        last = SimpleNamespace(failure=Failure(FailureKind.DISK_FULL, message))
        job = SimpleNamespace(
            state=SimpleNamespace(attempt=last),
            plan=SimpleNamespace(run_dir=tmp_path / "disk"),
            checkpoint=checkpoint,
            sleep=lambda seconds: filler.unlink(),
        )
        Disk(job).before(None)
    told = f"no space is left in {tmp_path}/disk: waiting for space, then {what_follows}"
    assert caplog.messages == [told]


def test_a_failed_save_does_not_cost_the_next(full):
    run, heard = full
    run.save({"weights": torch.zeros(STATE_BYTES // 4)}, 7)
    live_of(run).saving.writer.submit((run.run_dir / "filler").unlink).result()
    run.save({"weights": torch.zeros(STATE_BYTES // 4)}, 8)
    run.finish_saving()
    assert [event.step for event in heard if isinstance(event, CheckpointSaved)] == [8]


def test_a_disk_needs_room_for_what_failed(tmp_path):
    disk = tmp_path / "disk"
    with small_disk(disk, "size=1500k"):
        check_a_failed_write(disk)


def check_a_failed_write(disk):
    assert why_full(disk, "") is None
    with pytest.raises(CheckpointError) as failed:
        write_atomically({"weights": torch.zeros(500_000)}, disk / "large.pt")
    assert failed.value.bytes > 2_000_000
    event = ending.describe_end(failed.value, lambda failure: failure)
    assert event.failure.evidence.requested_bytes == failed.value.bytes
    assert "(No space left on device)" in why_full(disk, "", failed.value.bytes)
