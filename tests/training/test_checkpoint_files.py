import threading
from collections import OrderedDict

import pytest
import torch
from training_world import WatchedRun, config, train

from robust_train.attempt import checkpoints
from robust_train.attempt.checkpoint_errors import run_on_all_ranks
from robust_train.attempt.host_copies import HostCopies
from robust_train.attempt.read_checkpoint import read_newest
from robust_train.attempt.run import Run, live_of
from robust_train.folder import identity
from robust_train.folder.checkpoint_writing import CheckpointError, write_atomically
from robust_train.folder.checkpoints import newest_checkpoint, of_job
from robust_train.folder.identity import begin_job


def folder_of(run_dir, keep=5):
    """Checkpoints of a run without a launcher."""
    return live_of(Run(run_dir=run_dir)).saves.folder(keep)


def test_training_continues_without_a_writable_checkpoint_folder(tmp_path, caplog):
    """The end says that nothing could be saved."""
    (tmp_path / "checkpoints").write_text("in the way")
    run = WatchedRun(tmp_path)
    with pytest.raises(CheckpointError, match=r"cannot write .*checkpoints/final\.pt"):
        train(config("model.width=8", "training.epochs=2"), run)
    assert run.last_step == 46
    assert caplog.text.count("training continues, none is saved yet") == 2


def test_a_failed_save_leaves_the_old_file(tmp_path):
    path = tmp_path / "file.pt"
    write_atomically({"value": torch.arange(3)}, path)
    before = path.read_bytes()
    with pytest.raises(Exception, match="pickle"):
        write_atomically({"value": torch.arange(1000), "odd": (i for i in ())}, path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("elsewhere", [None, OSError("no space left")], ids=str)
def test_a_frameworks_files_appear_only_when_complete(tmp_path, monkeypatch, elsewhere):
    """They are copied at once."""
    safetensors = pytest.importorskip("safetensors.torch", reason="no extra is installed")
    weights, may_write = torch.zeros(9), threading.Event()
    run, other = (Run(run_dir=tmp_path, rank=rank, world_size=2) for rank in (0, 1))
    unfinished, whole = (run.checkpoint_dir / name for name in (".step-1.tmp", "step-1"))
    monkeypatch.setattr(checkpoints, "of_all_ranks", lambda value: [value, elsewhere])

    def save(run, write):
        files = {"write": write, "publish": lambda: unfinished.rename(whole)}
        live_of(run).saves.try_to_write(
            lambda: live_of(run).saves.folder(1).save_files(unfinished, 1, **files)
        )

    class Waits:
        def __deepcopy__(self, memo):
            return self

        def __reduce__(self):
            assert may_write.wait(60)
            return OrderedDict, ()

    def write():
        torch.save([weights, Waits()], unfinished / "a.pt")
        safetensors.save_file({"w": weights}, unfinished / "b.safetensors")

    unfinished.mkdir(parents=True)
    save(other, lambda: torch.save([weights], unfinished / "of-rank-1.pt"))
    assert (unfinished / "of-rank-1.pt").exists(), "the first rank meets it and waits for no more"
    save(run, write)
    weights += 1
    assert not whole.exists()
    may_write.set()
    live_of(run).saves.finish()
    if elsewhere is None:
        assert torch.load(whole / "a.pt")[0].sum() == 0
        assert safetensors.load_file(whole / "b.safetensors")["w"].sum() == 0
        assert [manifest.path for manifest in of_job(run.checkpoint_dir, "")] == [whole]
    else:
        assert list(run.checkpoint_dir.iterdir()) == []
        assert str(live_of(run).saving.owed) == f"cannot write {unfinished}: no space left"


def test_background_writes_have_the_state_of_their_step(tmp_path):
    run = Run(run_dir=tmp_path)
    folder = live_of(run).saves.folder(1)
    weights = torch.zeros(1000)
    folder.save_from_copy({"weights": weights, "nested": [(weights,)]}, 1)
    weights += 1
    assert of_job(folder.path, "") == [], "a checkpoint gets its manifest between two steps"
    folder.report_written(wait=True)
    newest = newest_checkpoint(folder.path, "")
    content = torch.load(newest.path, weights_only=True)
    assert content["weights"].sum() == content["nested"][0][0].sum() == 0
    folder.save_from_copy({"weights": weights}, 2)
    folder.save({"weights": weights}, 3)
    assert [manifest.step for manifest in of_job(folder.path, "")] == [3]


def test_tied_weights_are_written_once_and_stay_tied(tmp_path):
    def tied(content):
        return {tensor.untyped_storage().data_ptr() for tensor in content.values()}

    weights = torch.rand(100, 100)
    content = {"embedding": weights, "head": weights, "rows": weights[10:].T}
    (copied,) = tied(HostCopies().copy(content))
    folder = folder_of(tmp_path)
    folder.save_from_copy(content, 1)
    weights += 1
    folder.report_written(wait=True)
    newest = newest_checkpoint(folder.path, "").path
    loaded = torch.load(newest, weights_only=True)
    assert copied not in tied(content)
    assert len(tied(loaded)) == 1
    assert all(torch.equal(loaded[name] + 1, content[name]) for name in content)
    at_once = write_atomically(content, tmp_path / "at_once.pt")
    assert newest.stat().st_size == at_once.stat().st_size


def test_a_restarted_folder_is_safe_from_its_predecessor(tmp_path):
    """A job whose folder was begun anew leaves the checkpoints of the other alone."""
    begin_job(tmp_path, resume=True)
    run = Run(run_dir=tmp_path)
    (tmp_path / "job.json").unlink()
    begin_job(tmp_path, resume=True)
    unfinished = tmp_path / "checkpoints" / ".step-00000001.pt.7.tmp"
    unfinished.parent.mkdir()
    unfinished.touch()
    run.save({"weights": torch.zeros(3)}, 1)
    live_of(run).saves.finish()
    assert "another job has removed and restarted this run folder" in str(live_of(run).saving.owed)
    run.checkpoint_saved(unfinished, 1)
    assert list(unfinished.parent.iterdir()) == [unfinished]


def test_a_failed_write_names_its_file(tmp_path):
    (tmp_path / "checkpoints").write_text("in the way")
    folder = folder_of(tmp_path)
    folder.save_from_copy({"weights": torch.zeros(3)}, 2)
    with pytest.raises(CheckpointError, match=r"cannot write .*step-00000002\.pt"):
        folder.report_written(wait=True)
    folder.report_written(wait=True)


class RunsCode:
    def __reduce__(self):
        return print, ("code of a foreign file was run",)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ([1, 2], "it holds a list and is not a checkpoint"),
        ({"weights": torch.zeros(3)}, "it has no 'step' and is not a checkpoint of this trainer"),
        ({"step": 30, "odd": RunsCode()}, "Weights only load failed"),
    ],
)
def test_foreign_files_are_skipped_without_running_their_code(
    tmp_path, caplog, capfd, content, why
):
    folder = folder_of(tmp_path)
    folder.save({"step": 20}, 20)
    foreign = folder.path / "step-00000030.pt"
    torch.save(content, foreign)
    checkpoint = read_newest(foreign, required=["step"])
    assert checkpoint[1] == {"step": 20}
    assert why in caplog.text
    assert "code of a foreign file" not in capfd.readouterr().out


def test_no_flipped_byte_is_believed(tmp_path):
    """Whatever byte is hit, the content is the old one or the file is refused."""
    folder = folder_of(tmp_path)
    content = {"step": 30, "weights": torch.arange(40), "rng": [1, [2, 3], None]}
    path = folder.save(content, 30)
    data = path.read_bytes()
    refused = 0
    for index in range(0, len(data), 7):
        path.write_bytes(data[:index] + bytes([data[index] ^ 0xFF]) + data[index + 1 :])
        newest = newest_checkpoint(folder.path, "")
        checkpoint = newest and read_newest(newest.path, required=content.keys())
        refused += checkpoint is None
        if checkpoint is not None:
            weights = checkpoint[1].pop("weights")
            assert torch.equal(weights, content["weights"]), f"byte {index}"
            assert checkpoint[1] == {"step": 30, "rng": [1, [2, 3], None]}, f"byte {index}"
    assert refused > 100


def test_too_little_memory_does_not_condemn_a_checkpoint(tmp_path, monkeypatch):
    path = folder_of(tmp_path).save({"step": 30}, 30)

    def no_memory(*args, **options):
        raise MemoryError

    monkeypatch.setattr(torch, "load", no_memory)
    with pytest.raises(MemoryError):
        read_newest(path)


def test_a_temporarily_unreadable_checkpoint_is_waited_for(tmp_path, monkeypatch):
    """It is not skipped."""
    monkeypatch.setattr(identity, "PAUSES_SECONDS", (0.01,))
    folder = folder_of(tmp_path)
    folder.save({"step": 20}, 20)
    path = folder.save({"step": 30}, 30)
    away = path.rename(tmp_path / "away")
    path.symlink_to(path)

    def warning(text, *values):
        assert "trying again" in text
        path.unlink()
        away.rename(path)

    monkeypatch.setattr(identity.log, "warning", warning)
    assert read_newest(path) == (path, {"step": 30})


def test_no_later_checkpoint_replaces_the_requested_one(tmp_path):
    folder = folder_of(tmp_path)
    paths = [folder.save({"step": step}, step) for step in (10, 20)]
    paths[0].write_bytes(b"")
    assert read_newest(paths[0]) is None


def test_incomplete_checkpoint_folders_are_removed_at_startup(tmp_path):
    """Folders without a manifest, and those that are half written."""
    folder = folder_of(tmp_path)
    path = folder.save({"step": 30}, 30)
    for name in ("step-00000040", "step-00000050"):
        (folder.path / name).mkdir()
        (folder.path / name / "values.pt").write_bytes(b"")
    (folder.path / "step-00000050.manifest.json").write_text("torn")
    (tmp_path / "away").mkdir()
    cannot_be_removed = folder.path / ".step-00000060.tmp"
    cannot_be_removed.symlink_to(tmp_path / "away")
    folder.remove_leftovers(None)
    left = {path.name for path in folder.path.iterdir() if path.is_dir()}
    assert left - {cannot_be_removed.name} == {"step-00000050"}, "it can be repaired by hand"
    assert path.exists()


def test_a_bug_is_raised_as_it_is():
    class Odd(Exception):
        """Cannot be sent."""

    def fail():
        raise Odd

    with pytest.raises(Odd):
        run_on_all_ranks(fail, lambda value: [value] * 2)
