import errno
import logging
import pickle
import shutil
import threading
import traceback
from collections import OrderedDict
from pathlib import Path

import pytest
import torch

import preloaded
from robust_train.attempt import checkpoints
from robust_train.attempt.checkpoints import CheckpointFolder, read_newest, together
from robust_train.attempt.run import Run
from robust_train.folder import identity
from robust_train.folder.checkpoints import (
    CheckpointError,
    newest_checkpoint,
    of_job,
    write_atomically,
)

LIMITED = """
import logging, resource, sys
sys.dont_write_bytecode = True  # of modules, which are too large as well
from pathlib import Path
from training_world import WatchedRun, config
from robust_train.folder.checkpoints import CheckpointError
from training_world import train

logging.basicConfig(level=logging.WARNING, format="%(message)s")
folder, limit = Path(sys.argv[1]), int(sys.argv[2])
cfg = config("model.width=8", "training.epochs=2")
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
run = WatchedRun(folder)
try:
    train(cfg, run)
except CheckpointError as error:
    print("FAILED", type(error).__name__, error)
print("STEPS", run.last_step, "CHECKPOINTS", len(run.of("checkpoint")))
"""


def folder_of(run_dir, keep=5):
    """Checkpoints of a run without a launcher."""
    return CheckpointFolder(Run(run_dir=run_dir), keep=keep)


def in_a_limited_process(folder, limit_bytes):
    ended = preloaded.run(LIMITED, str(folder), str(limit_bytes), cwd=Path(__file__).parent)
    assert ended.returncode == 0, ended.stderr
    return ended


def test_training_goes_on_when_a_checkpoint_is_too_large_and_says_so_at_the_end(tmp_path):
    ended = in_a_limited_process(tmp_path, limit_bytes=10_000)
    assert "STEPS 46 CHECKPOINTS 0" in ended.stdout
    assert "FAILED CheckpointError" in ended.stdout
    assert f"cannot write {tmp_path / 'checkpoints' / 'final.pt'}: File too large" in ended.stdout
    assert ended.stderr.count("training goes on, earlier ones are kept") == 2
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_a_failed_save_leaves_the_old_file_as_it_was(tmp_path):
    path = tmp_path / "file.pt"
    write_atomically({"value": torch.arange(3)}, path)
    before = path.read_bytes()
    with pytest.raises(Exception, match="pickle"):
        write_atomically({"value": torch.arange(1000), "odd": (i for i in ())}, path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("elsewhere", [None, OSError("no space left")], ids=str)
def test_files_of_a_framework_are_copied_at_once_and_seen_once_all_are_there(
    tmp_path, monkeypatch, elsewhere
):
    safetensors = pytest.importorskip("safetensors.torch", reason="no extra is installed")
    weights, may_write = torch.zeros(9), threading.Event()
    run, other = (Run(run_dir=tmp_path, rank=rank, world_size=2) for rank in (0, 1))
    unfinished, whole = (run.checkpoint_dir / name for name in (".step-1.tmp", "step-1"))
    monkeypatch.setattr(checkpoints, "of_all_ranks", lambda value: [value, elsewhere])

    class Waits:
        def __deepcopy__(self, memo):
            return self

        def __reduce__(self):
            assert may_write.wait(60)
            return OrderedDict, ()

    def write():
        torch.save([weights, Waits()], unfinished / "a.pt")
        safetensors.save_file({"w": weights}, unfinished / "b.safetensors")

    def publish():
        return unfinished.rename(whole)

    def write_other():
        unfinished.mkdir(parents=True)
        torch.save([weights], unfinished / "of-rank-1.pt")

    other.try_to_save(
        lambda: other.checkpoints(1).save_files(unfinished, 1, write=write_other, publish=publish)
    )
    assert (unfinished / "of-rank-1.pt").exists(), "the first rank meets it and waits for no more"
    run.try_to_save(
        lambda: run.checkpoints(1).save_files(unfinished, 1, write=write, publish=publish)
    )
    weights += 1
    assert not whole.exists()
    may_write.set()
    run.finish_saving()
    if elsewhere is None:
        assert torch.load(whole / "a.pt")[0].sum() == 0
        assert safetensors.load_file(whole / "b.safetensors")["w"].sum() == 0
        assert [one.path for one in of_job(run.checkpoint_dir, "")] == [whole]
    else:
        assert list(run.checkpoint_dir.iterdir()) == []
        assert run.saving.owed == f"cannot write {unfinished}: no space left"


def test_what_is_written_in_the_background_is_the_state_of_its_step(tmp_path):
    run = Run(run_dir=tmp_path)
    folder = CheckpointFolder(run, keep=1)
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


def test_a_write_in_the_background_that_fails_is_an_error_of_the_next_call(tmp_path):
    (tmp_path / "checkpoints").write_text("in the way")
    folder = folder_of(tmp_path)
    folder.save_from_copy({"weights": torch.zeros(3)}, 1)
    with pytest.raises(CheckpointError, match=r"cannot write .*step-00000001\.pt"):
        folder.report_written(wait=True)
    folder.report_written(wait=True)


def test_a_folder_that_cannot_be_made_is_an_error_that_names_the_file(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match=r"cannot write .*step-00000001\.pt"):
        folder_of(tmp_path / "file").save({}, 1)


@pytest.mark.parametrize("damage", ["truncated", "a flipped byte", "empty", "missing"])
def test_a_damaged_file_is_passed_over_for_the_newest_intact_one(tmp_path, damage):
    folder = folder_of(tmp_path)
    paths = [
        folder.save({"step": step, "weights": torch.randn(50_000)}, step) for step in (10, 20, 30)
    ]
    for path in paths[1:]:
        data = bytearray(path.read_bytes())
        if damage == "missing":
            path.unlink()
        elif damage == "a flipped byte":
            data[len(data) // 2] ^= 0xFF
            path.write_bytes(data)
        else:
            path.write_bytes(data[: len(data) // 2] if damage == "truncated" else b"")
    newest = newest_checkpoint(folder.path, "")
    assert newest.path == paths[0]
    paths[-1].unlink(missing_ok=True)  # what is given has been compared
    found = read_newest(paths[-1])
    assert (found[0], found[1]["step"]) == (paths[0], 10)


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
def test_a_foreign_file_is_passed_over_without_running_its_code(
    tmp_path, caplog, capfd, content, why
):
    folder = folder_of(tmp_path)
    folder.save({"step": 20}, 20)
    foreign = folder.path / "step-00000030.pt"
    torch.save(content, foreign)
    found = read_newest(foreign, required=["step"])
    assert found[1] == {"step": 20}
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
        found = newest and read_newest(newest.path, required=content.keys())
        refused += found is None
        if found is not None:
            weights = found[1].pop("weights")
            assert torch.equal(weights, content["weights"])
            assert found[1] == {"step": 30, "rng": [1, [2, 3], None]}
    assert refused > 100


def test_too_little_memory_to_read_a_checkpoint_does_not_condemn_it(tmp_path, monkeypatch):
    path = folder_of(tmp_path).save({"step": 30}, 30)

    def no_memory(*args, **options):
        raise MemoryError

    monkeypatch.setattr(torch, "load", no_memory)
    with pytest.raises(MemoryError):
        read_newest(path)


def test_a_checkpoint_that_cannot_be_read_now_is_waited_for_and_not_passed_over(tmp_path):
    folder = folder_of(tmp_path)
    folder.save({"step": 20}, 20)
    path = folder.save({"step": 30}, 30)
    away = path.rename(tmp_path / "away")
    path.symlink_to(path)

    class Mended(logging.Handler):
        def emit(self, record):
            if "trying again" in record.getMessage():
                path.unlink()
                away.rename(path)

    logger, mended = logging.getLogger("robust_train"), Mended()
    logger.addHandler(mended)
    try:
        assert read_newest(path) == (path, {"step": 30})
    finally:
        logger.removeHandler(mended)


def test_a_later_checkpoint_than_the_one_asked_for_is_never_used(tmp_path):
    folder = folder_of(tmp_path)
    paths = [folder.save({"step": step}, step) for step in (10, 20)]
    paths[0].write_bytes(b"")
    assert read_newest(paths[0]) is None


def test_a_size_that_cannot_be_read_now_is_waited_for(tmp_path, monkeypatch):
    path = folder_of(tmp_path).save({"step": 30}, 30)
    size_of, calls = checkpoints.size_of, []

    def stale_at_first(path):
        calls.append(path)
        if len(calls) == 1:
            raise OSError(errno.ESTALE, "Stale file handle", str(path))
        return size_of(path)

    monkeypatch.setattr(checkpoints, "size_of", stale_at_first)
    monkeypatch.setattr(identity, "PAUSES_SECONDS", (0.01,))
    assert read_newest(path) == (path, {"step": 30})


def test_a_node_reads_where_it_sees_the_run_folder(tmp_path):
    """The first rank's node has mounted the disk elsewhere."""
    path = folder_of(tmp_path / "here").save({"step": 30}, 30)
    first = tmp_path / "there" / "checkpoints" / path.name
    shutil.copytree(path.parent, first.parent)
    said = []
    assert read_newest(first, gather=lambda value: said.append(value) or [value])
    shutil.rmtree(tmp_path / "there")
    answers = iter(said)

    def with_the_first(value):
        return [next(answers), value]

    assert read_newest(path, gather=with_the_first) == (path, {"step": 30})


def test_leftovers_that_cannot_be_removed_stop_no_training(tmp_path):
    folder = folder_of(tmp_path)
    path = folder.save({"step": 30}, 30)
    (tmp_path / "away").mkdir()
    (folder.path / ".step-00000040.tmp").symlink_to(tmp_path / "away")
    folder.remove_leftovers()
    assert path.exists()


def test_a_folder_without_a_manifest_is_a_leftover(tmp_path):
    folder = folder_of(tmp_path)
    path = folder.save({"step": 30}, 30)
    for name in ("step-00000040", "step-00000050"):
        (folder.path / name).mkdir()
        (folder.path / name / "values.pt").write_bytes(b"")
    (folder.path / "step-00000050.manifest.json").write_text("torn")
    folder.remove_leftovers()
    left = {one.name for one in folder.path.iterdir() if one.is_dir()}
    assert left == {"step-00000050"}, "its manifest can be mended by hand"
    assert path.exists()


def sent(value):
    """What two ranks that do the same receive of each other."""
    return [pickle.loads(pickle.dumps(value)) for _ in range(2)]


def test_a_failure_that_ranks_share_keeps_its_stack(tmp_path):
    def read_the_missing():
        (tmp_path / "missing").open()

    with pytest.raises(FileNotFoundError) as raised:
        together(read_the_missing, sent)
    assert "in read_the_missing" in "".join(traceback.format_exception(raised.value))


def test_a_bug_is_raised_as_it_is(tmp_path):
    class Odd(Exception):
        """Cannot be sent."""

    def fail():
        raise Odd

    with pytest.raises(Odd):
        together(fail, sent)
