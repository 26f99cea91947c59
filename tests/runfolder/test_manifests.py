"""Which checkpoints count and which are removed.

The tests run in this process, except for a fork of another user, who may not read a file.
"""

import json
import os
import shutil
import time
import zipfile
from pathlib import Path

import pytest

from another_user import as_another_user, needs_root
from robust_train.attempt.run import Run, live_of
from robust_train.folder.checkpoints import newest_checkpoint, read_manifests, rotate
from robust_train.folder.identity import (
    begin_job,
    complete_job,
    read_identity,
    resume_from,
    shown_id,
)


def save(folder, step, *, job="ours", attempt=1):
    path = folder / f"step-{step:08d}.txt"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text("x")
    return record(folder, path, step, job, attempt)


def record(folder, path, step, job="ours", attempt=1):
    run = Run(run_dir=folder.parent, attempt=attempt)
    live_of(run).saving.folder, live_of(run).saving.job = folder, job
    run.checkpoint_saved(path, step)
    return path


def manifest_of(path):
    return path.with_name(f"{path.name}.manifest.json")


def zipped(path, content=b"x" * 400):
    with zipfile.ZipFile(path, "w") as whole:
        whole.writestr("weights", content)
    return path


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "checkpoints"


def newest(folder):
    return newest_checkpoint(folder, "ours").path


def with_a_manifest_that_says(**values):
    def happens(folder):
        manifest = manifest_of(save(folder, 8))
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | values))

    return happens


def damaged(what):
    def happens(folder):
        last = record(folder, zipped(save(folder, 8)), 8)
        assert newest(folder) == last
        if "torn" in what:
            last.write_bytes(last.read_bytes()[:-50])
        if "manifest" in what:
            manifest_of(last).unlink()
        if what == "gone":
            last.unlink()

    return happens


@pytest.mark.parametrize(
    ("happens", "step"),
    [
        *((with_a_manifest_that_says(**wrong), 7) for wrong in ({"step": "8"}, {"time": []})),
        (with_a_manifest_that_says(attempt=None), 7),
        (lambda folder: save(folder, 900, job="theirs"), 7),
        (lambda folder: save(folder, 5, attempt=2), 5),
        *((damaged(what), 7) for what in ("gone", "torn", "torn, manifest gone")),
        # its form says that it is whole
        (lambda folder: zipped(folder / "step-00000007.txt", b"other"), 7),
        # it has changed, which is better than to begin anew
        (lambda folder: (folder / "step-00000007.txt").write_text("longer than before"), 7),
    ],
)
def test_the_jobs_newest_whole_checkpoint_counts(folder, happens, step):
    save(folder, 7)
    happens(folder)
    assert newest(folder) == folder / f"step-{step:08d}.txt"


def test_a_clock_set_back_misleads_no_one(folder, monkeypatch):
    """An older checkpoint does not become the newest."""
    folder.mkdir()
    for name, now in (("b", 5000.0), ("a", 4000.0), ("c", 4001.0)):
        monkeypatch.setattr(time, "time", lambda now=now: now)
        path = folder / name
        path.write_text("x")
        record(folder, path, None)
        assert newest(folder) == path, name


@pytest.mark.parametrize("suffix", ["txt", "safetensors"])
def test_a_damaged_end_counts_without_alternatives(folder, suffix):
    """The end was overwritten in place, and the job has no other checkpoint."""
    last = folder / f"step-00000008.{suffix}"
    folder.mkdir()
    header = json.dumps({"w": {"dtype": "U8", "shape": [9], "data_offsets": [0, 9]}}).encode()
    last.write_bytes(len(header).to_bytes(8, "little") + header + b"x" * 9)
    record(folder, last, 8)
    last.write_bytes(last.read_bytes()[:-4] + bytes(4))
    assert newest(folder) == last
    assert save(folder, 7) == newest(folder)


@pytest.mark.parametrize("name", ["8.zip", "8.bin", "8/values.zip"])
def test_a_flipped_byte_is_noticed_before_resuming(folder, name, caplog):
    """It is in the middle of the file."""
    path, file = save(folder, 7), folder / name
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(bytes(500_000))
    if file.suffix == ".zip":
        zipped(file, bytes(500_000))
    last, run = folder / name.partition("/")[0], Run(run_dir=folder.parent)
    live_of(run).saving.job, live_of(run).saving.clock.interval = (
        "ours",
        60.0,
    )  # so that it is read back
    run.checkpoint_saved(last, 8)
    assert newest(folder) == last
    with file.open("r+b") as opened:
        opened.seek(250_000)
        opened.write(b"!")
    assert newest(folder) == path
    how = "is damaged" if file.suffix == ".zip" else "has changed"
    assert f"{last} {how}" in caplog.text


@pytest.mark.parametrize("content", [None, '{"job": "ours"'])
def test_a_checkpoint_without_manifest_counts_once_read(folder, content):
    """Its manifest could not be written."""
    save(folder, 7)
    last = zipped(folder / "step-00000008.txt")
    wrong = zipped(folder / "step-00000009.txt", b"?" * 400)  # its checksum
    wrong.write_bytes(wrong.read_bytes().replace(b"?" * 400, b"!" * 400))
    zipped(folder / "best-9.txt")
    (folder / "step-00000010.txt").write_text("of no form that shows whether it is whole")
    if content is not None:
        manifest_of(last).write_text(content)
    assert newest(folder) == last
    manifest_of(folder / "step-00000007.txt").unlink()
    last = last.rename(folder / "step-00000008.pt")
    assert newest(folder) == last, "the first one of a job"


def test_counting_batches_requires_a_manifest(folder):
    """Without one no one knows which batches a checkpoint has seen."""
    path = save(folder, 7)
    content = json.loads(manifest_of(path).read_text())
    manifest_of(path).write_text(json.dumps(content | {"position": {"batches": 7, "in_pass": 7}}))
    zipped(folder / "step-00000008.txt")
    assert newest(folder) == path


def test_checkpoints_elsewhere_have_manifests_of_their_own(folder, tmp_path):
    for number in (1, 2):
        path = tmp_path / f"epoch{number}" / "model.bin"
        path.parent.mkdir()
        path.write_text("weights")
        record(folder, path, number)
    assert len(read_manifests(folder)) == 2
    assert newest(folder) == path


def test_rotation_keeps_the_newest_and_all_foreign(folder):
    """The newest whole checkpoints of this job, and all of others."""
    others = [save(folder, 900, job="theirs"), folder / "step-00000800.txt"]
    others[1].write_text("x")
    oldest, *newer = (save(folder, step) for step in (10, 20, 30))
    rotate(folder, "ours", 2)
    assert not oldest.exists()
    assert not manifest_of(oldest).exists()
    assert all(path.exists() for path in (*others, *newer))
    last = save(folder, 5)  # of an attempt that went further back
    rotate(folder, "ours", 1)
    assert last.exists(), "it was written last"
    assert newer[-1].exists()
    for step in (40, 50):
        save(folder, step).write_text("")
    rotate(folder, "ours", 1)
    assert newest(folder) == newer[-1], "a torn one does not push out a whole one"


def test_manifests_without_checkpoints_do_not_accumulate(folder):
    for step in range(5):
        save(folder, step).unlink()
    assert len(read_manifests(folder)) == 1


def test_a_job_keeps_its_identity_until_completed(tmp_path):
    """Moving its folder does not change that."""
    (tmp_path / "here").mkdir()
    first = begin_job(tmp_path / "here", resume=True)
    name = save(tmp_path / "here" / "checkpoints", 5, job=first.job, attempt=4).name
    there = (tmp_path / "here").rename(tmp_path / "there")
    again = begin_job(there, resume=True)
    assert (again.job, again.attempts) == (first.job, 4)
    assert again.checkpoint == there / "checkpoints" / name
    complete_job(there, first.job)
    second = begin_job(there, resume=True)
    path = save(there / "checkpoints", 6, job=second.job)
    third = begin_job(there, resume=False)
    assert len({first.job, second.job, third.job}) == 3
    assert second.checkpoint is third.checkpoint is None
    assert (there / "checkpoints" / "earlier-1" / name).exists()
    assert (there / "checkpoints" / "earlier-2" / path.name).exists()


def test_a_used_folder_says_a_job_is_new(tmp_path, caplog):
    """The same command again trains anew once its job has completed."""
    caplog.set_level("INFO", "robust_train")
    first = begin_job(tmp_path, resume=True).job
    begin_job(tmp_path, resume=True)
    assert "starting a new job" not in caplog.text
    complete_job(tmp_path, first)
    begin_job(tmp_path, resume=True)
    told = f"job {shown_id(first)} of this run folder has completed: starting a new job"
    assert told in caplog.text


def test_an_interrupted_move_is_completed_later(tmp_path):
    """A launch that dies while it sets a folder aside leaves that to the next."""
    job = begin_job(tmp_path, resume=True).job
    content = {**json.loads((tmp_path / "job.json").read_text()), "cleared": False}
    (tmp_path / "job.json").write_text(json.dumps(content))
    theirs = save(tmp_path / "checkpoints", 9, job="theirs")
    assert begin_job(tmp_path, resume=True).job == job
    assert not theirs.exists()


def test_a_reported_checkpoint_without_a_manifest_counts(tmp_path):
    job = begin_job(tmp_path, resume=True).job
    save(tmp_path / "checkpoints", 5, job=job)
    reported = tmp_path / "elsewhere"
    reported.write_text("x")
    assert resume_from(tmp_path, job, reported) == reported


@needs_root
@pytest.mark.parametrize("closed", ["checkpoint", "manifest", "folder", "job.json"])
def test_another_users_file_is_not_missing(closed):
    # pytest's own folders are closed to others
    folder = Path(os.path.realpath(f"/tmp/robust-train-test-{os.getpid()}-{closed[:3]}"))

    def is_refused():
        with pytest.raises(PermissionError):
            newest_checkpoint(folder / "checkpoints", read_identity(folder).id)

    try:
        folder.mkdir()
        folder.chmod(0o777)
        path = save(folder / "checkpoints", 5, job=begin_job(folder, resume=True).job)
        shut = {"checkpoint": path, "manifest": manifest_of(path), "folder": path.parent}
        shut.get(closed, folder / "job.json").chmod(0)
        with as_another_user(is_refused):
            pass
    finally:
        shutil.rmtree(folder, ignore_errors=True)
