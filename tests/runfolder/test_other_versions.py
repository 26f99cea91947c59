"""Run folders of another version: refused in a line, and nothing in them is lost."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from robust_train.folder.checkpoints import read_manifests
from robust_train.folder.identity import begin_job, refuse_other_version
from robust_train.folder.state import read_state, read_summary
from robust_train.model.errors import ConfigError

RECORDED = Path(__file__).resolve().parents[1] / "recorded" / "run_folder_0_2"
"""An unfinished job of version 0.2: its trainer failed after the checkpoint of step 2."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(RECORDED, tmp_path / "run"))


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_an_unfinished_job_of_0_2_is_refused_in_a_line_and_nothing_is_changed(folder: Path):
    before = contents(folder)
    with pytest.raises(ConfigError) as refused:
        refuse_other_version(folder, resume=True)
    message = str(refused.value)
    assert "\n" not in message
    assert "another version of robust-train (state.json has schema 1, this version 2)" in message
    assert "resume=false" in message
    assert contents(folder) == before
    assert read_state(folder) is None
    assert read_summary(folder).status == "failed"


def test_with_resume_false_it_begins_again_and_keeps_the_checkpoints_aside(folder: Path):
    (manifest,) = read_manifests(folder / "checkpoints")
    saved = manifest.path.read_bytes()
    refuse_other_version(folder, resume=False)
    beginning = begin_job(folder, resume=False)
    assert (beginning.checkpoint, beginning.attempts) == (None, 1)
    assert beginning.job != manifest.job
    assert (folder / "checkpoints" / "earlier-1" / manifest.path.name).read_bytes() == saved


def test_a_folder_without_a_state_is_any_version_s(tmp_path: Path):
    refuse_other_version(tmp_path, resume=True)
