"""Which checkpoints count and which are removed; no process is started but for one that is refused
a file."""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
import time
import zipfile
from pathlib import Path

import pytest

from another_user import as_another_user, needs_root
from robust_train.attempt.run import Run
from robust_train.folder import identity
from robust_train.folder.checkpoints import Manifest, newest_checkpoint, read_manifests, rotate
from robust_train.folder.identity import (
    begin_job,
    complete_job,
    read_identity,
    resume_from,
    wait_until_readable,
)
from robust_train.model.errors import ConfigError


def save(folder: Path, step: int, *, job: str = "ours", attempt: int = 1, text: str = "x") -> Path:
    path = folder / f"step-{step:08d}.txt"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    record(folder, path, step, job=job, attempt=attempt)
    return path


def record(folder: Path, path: Path, step: int | None, job: str = "ours", attempt: int = 1) -> None:
    run = Run(run_dir=folder.parent, attempt=attempt)
    run.saving.folder, run.saving.job = folder, job
    run.checkpoint_saved(path, step)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


def newest(folder: Path) -> Path | None:
    found = newest_checkpoint(folder, "ours")
    return None if found is None else found.path


def test_a_manifest_says_whose_checkpoint_it_is_and_how_large(folder: Path):
    path = save(folder, 7, attempt=3, text="seven")
    (manifest,) = read_manifests(folder)
    assert (manifest.job, manifest.attempt, manifest.step) == ("ours", 3, 7)
    assert (manifest.path, manifest.bytes) == (path, 5)
    assert json.loads((folder / f"{path.name}.manifest.json").read_text())["path"] == path.name


@pytest.mark.parametrize("change", [{"step": "8"}, {"attempt": None}, {"time": []}])
def test_a_manifest_with_a_value_of_a_wrong_type_is_passed_over(folder: Path, change: dict):
    path = save(folder, 7)
    manifest = folder / f"{save(folder, 8).name}.manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | change))
    assert newest(folder) == path


def test_the_clock_that_is_set_back_makes_no_older_checkpoint_the_newest(folder, monkeypatch):
    for number, now in enumerate((5000.0, 4000.0, 4001.0)):
        monkeypatch.setattr(time, "time", lambda now=now: now)
        path = folder / f"{'bac'[number]}.txt"
        folder.mkdir(exist_ok=True)
        path.write_text("x")
        record(folder, path, None)
        assert newest(folder) == path


def test_another_jobs_later_checkpoint_does_not_count(folder: Path):
    path = save(folder, 7)
    save(folder, 900, job="theirs")
    assert newest(folder) == path


def test_what_a_later_attempt_saved_is_newer_whatever_step_it_counts(folder: Path):
    save(folder, 100, attempt=1)
    path = save(folder, 5, attempt=2)
    assert newest(folder) == path


@pytest.mark.parametrize("damage", ["gone", "torn", "manifest gone and torn"])
def test_without_a_whole_newest_checkpoint_the_one_before_counts(folder: Path, damage: str):
    path = save(folder, 7)
    last = save(folder, 8)
    with zipfile.ZipFile(last, "w") as whole:
        whole.writestr("weights", "many" * 100)
    record(folder, last, 8)
    assert newest(folder) == last
    if damage == "gone":
        last.unlink()
    else:
        last.write_bytes(last.read_bytes()[:-50])
    if "manifest" in damage:
        (folder / f"{last.name}.manifest.json").unlink()
    assert newest(folder) == path


@pytest.mark.parametrize("suffix", ["txt", "safetensors"])
def test_one_whose_end_was_written_over_in_place_counts_where_there_is_no_other(folder, suffix):
    last = folder / f"step-00000008.{suffix}"
    folder.mkdir()
    header = json.dumps({"w": {"dtype": "U8", "shape": [9], "data_offsets": [0, 9]}}).encode()
    last.write_bytes(len(header).to_bytes(8, "little") + header + b"x" * 9)
    record(folder, last, 8)
    last.write_bytes(last.read_bytes()[:-4] + bytes(4))
    assert newest(folder) == last
    path = save(folder, 7)
    assert newest(folder) == path


@pytest.mark.parametrize("name", ["8.zip", "8.bin", "8/values.zip"])
def test_a_byte_that_was_flipped_in_the_middle_is_seen_before_a_job_resumes(folder, name, caplog):
    path, file = save(folder, 7), folder / name
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(bytes(500_000))
    if file.suffix == ".zip":
        with zipfile.ZipFile(file, "w") as whole:
            whole.writestr("weights", bytes(500_000))
    last, run = folder / name.partition("/")[0], Run(run_dir=folder.parent)
    run.saving.job, run.saving.clock.interval = "ours", 60.0  # so that it is read back
    run.checkpoint_saved(last, 8)
    assert newest(folder) == last
    with file.open("r+b") as opened:
        opened.seek(250_000)
        opened.write(b"!")
    assert newest(folder) == path
    how = "is damaged" if file.suffix == ".zip" else "has changed"
    assert f"{last} {how}" in caplog.text


@pytest.mark.parametrize("content", [None, '{"job": "ours"'])
def test_a_checkpoint_whose_manifest_could_not_be_written_counts_once_it_was_read(folder, content):
    save(folder, 7)
    for name, byte in (
        ("step-00000008.txt", b"8"),
        ("step-00000009.txt", b"?"),
        ("best-9.txt", b"9"),
    ):
        with zipfile.ZipFile(folder / name, "w") as whole:
            whole.writestr("weights", byte * 400)
    damaged = folder / "step-00000009.txt"  # its checksum is wrong
    damaged.write_bytes(damaged.read_bytes().replace(b"?" * 400, b"!" * 400))
    (folder / "step-00000010.txt").write_text("of no form that shows whether it is whole")
    if content is not None:
        (folder / "step-00000008.txt.manifest.json").write_text(content)
    assert newest(folder) == folder / "step-00000008.txt"
    (folder / "step-00000007.txt.manifest.json").unlink()
    (folder / "step-00000008.txt").rename(folder / "step-00000008.pt")
    assert newest(folder) == folder / "step-00000008.pt", "the first one of a job"


def test_a_file_that_is_written_over_counts_while_its_form_says_that_it_is_whole(folder: Path):
    path = save(folder, 7)
    with zipfile.ZipFile(path, "w") as whole:
        whole.writestr("weights", "other")
    assert newest(folder) == path


def test_a_changed_file_of_unknown_form_is_better_than_to_begin_anew(folder: Path, caplog):
    path = save(folder, 7)
    path.write_text("longer than before")
    assert newest(folder) == path
    assert "has changed since it was reported" in caplog.text


def test_a_folder_is_whole_with_all_of_its_files(folder: Path):
    saved = folder / "checkpoint-5"
    saved.mkdir(parents=True)
    for name in ("weights", "optimizer"):
        (saved / name).write_text(name)
    record(folder, saved, 5)
    assert newest(folder) == saved
    (saved / "weights").write_text("")
    assert newest(folder) == saved, "its form does not tell"
    before = save(folder, 4)
    assert newest(folder) == before


def test_checkpoints_elsewhere_have_manifests_of_their_own(folder: Path, tmp_path: Path):
    for number in (1, 2):
        path = tmp_path / f"epoch{number}" / "model.bin"
        path.parent.mkdir()
        path.write_text("weights")
        record(folder, path, number)
    assert len(read_manifests(folder)) == 2
    assert newest(folder) == path


def test_rotation_keeps_the_newest_of_this_job_and_all_of_others(folder: Path):
    theirs = save(folder, 900, job="theirs")
    nobodys = folder / "step-00000800.txt"
    nobodys.write_text("x")
    own = [save(folder, step) for step in (10, 20, 30)]
    rotate(folder, "ours", "step-*.txt", 2)
    assert not own[0].exists()
    assert not (folder / f"{own[0].name}.manifest.json").exists()
    assert all(path.exists() for path in (theirs, nobodys, *own[1:]))


def test_rotation_never_removes_what_was_written_last(folder: Path):
    for step in (10, 20):
        save(folder, step)
    last = save(folder, 5)  # an attempt that went further back
    rotate(folder, "ours", "step-*.txt", 1)
    assert last.exists()
    assert (folder / "step-00000020.txt").exists()


def test_a_torn_checkpoint_does_not_push_out_a_whole_one(folder: Path):
    whole = save(folder, 10)
    for step in (20, 30):
        save(folder, step).write_text("")
    rotate(folder, "ours", "step-*.txt", 1)
    assert newest(folder) == whole


def test_manifests_of_checkpoints_that_are_gone_do_not_gather(folder: Path):
    for step in range(5):
        save(folder, step).unlink()
    assert len(read_manifests(folder)) == 1


def test_a_job_keeps_its_identity_until_it_has_completed(tmp_path: Path):
    first = begin_job(tmp_path, resume=True)
    path = save(tmp_path / "checkpoints", 5, job=first.job, attempt=4)
    again = begin_job(tmp_path, resume=True)
    assert (again.job, again.checkpoint, again.attempts) == (first.job, path, 4)
    complete_job(tmp_path)
    fresh = begin_job(tmp_path, resume=True)
    assert fresh.job != first.job
    assert fresh.checkpoint is None
    assert (tmp_path / "checkpoints" / "earlier-1" / path.name).exists()


def test_a_moved_run_folder_is_resumed_and_a_new_job_on_request_sets_all_aside(tmp_path: Path):
    (tmp_path / "here").mkdir()
    first = begin_job(tmp_path / "here", resume=True)
    name = save(tmp_path / "here" / "checkpoints", 5, job=first.job).name
    moved = (tmp_path / "here").rename(tmp_path / "there")
    assert begin_job(moved, resume=True).checkpoint == moved / "checkpoints" / name
    fresh = begin_job(moved, resume=False)
    assert (fresh.checkpoint, fresh.job == first.job) == (None, False)
    assert (moved / "checkpoints" / "earlier-1" / name).exists()


def test_a_launch_that_dies_while_it_sets_aside_leaves_that_to_the_next(tmp_path: Path):
    begin_job(tmp_path, resume=True)
    identity = read_identity(tmp_path)
    assert identity is not None
    content = {**json.loads((tmp_path / "job.json").read_text()), "cleared": False}
    (tmp_path / "job.json").write_text(json.dumps(content))
    theirs = save(tmp_path / "checkpoints", 9, job="theirs")
    assert begin_job(tmp_path, resume=True).job == identity.id
    assert not theirs.exists()


def test_a_reported_checkpoint_without_a_manifest_counts(tmp_path: Path):
    job = begin_job(tmp_path, resume=True).job
    save(tmp_path / "checkpoints", 5, job=job)
    reported = tmp_path / "elsewhere"
    reported.write_text("x")
    assert resume_from(tmp_path, job, reported) == reported


def test_what_cannot_be_read_is_an_error_after_a_while_and_no_reason_to_begin_anew(tmp_path: Path):
    path = save(tmp_path / "checkpoints", 5)
    manifest = tmp_path / "checkpoints" / f"{path.name}.manifest.json"
    manifest.unlink()
    manifest.mkdir()
    paused: list[float] = []
    with pytest.raises(ConfigError) as refusal:
        wait_until_readable(lambda: newest(path.parent), sleep=paused.append)
    assert f"{manifest}: cannot be read now (Is a directory)" in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert paused == sorted(paused)
    assert 50 <= sum(paused) <= 70


@pytest.mark.parametrize("bad", range(3))
def test_a_disk_that_is_away_for_a_moment_delays_the_beginning_whenever_that_is(
    tmp_path, monkeypatch, bad
):
    reads = itertools.count()

    def read(folder: Path) -> list[Manifest]:
        if next(reads) == bad:
            raise OSError(errno.EIO, "Input/output error", str(folder))
        return read_manifests(folder)

    monkeypatch.setattr(identity, "read_manifests", read)
    monkeypatch.setattr(identity, "PAUSES_SECONDS", (0.0,))
    assert begin_job(tmp_path, resume=True).checkpoint is None


@needs_root
@pytest.mark.parametrize("closed", ["checkpoint", "manifest", "folder", "job.json"])
def test_a_file_of_another_user_is_no_missing_file(closed: str):
    # pytest's own folders are closed to others
    folder = Path(os.path.realpath(f"/tmp/robust-train-test-{os.getpid()}-{closed[:3]}"))
    try:
        begun = begin_job_in(folder)
        path = save(folder / "checkpoints", 5, job=begun)
        shut = {
            "checkpoint": path,
            "manifest": path.parent / f"{path.name}.manifest.json",
            "folder": path.parent,
            "job.json": folder / "job.json",
        }[closed]
        shut.chmod(0)
        with as_another_user(lambda: _is_refused(folder)):
            pass
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def begin_job_in(folder: Path) -> str:
    folder.mkdir()
    folder.chmod(0o777)
    return begin_job(folder, resume=True).job


def _is_refused(folder: Path) -> None:
    with pytest.raises(PermissionError):
        newest_checkpoint(folder / "checkpoints", read_identity(folder).id)
