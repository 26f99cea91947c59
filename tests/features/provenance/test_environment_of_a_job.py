"""What a job ran with, as ``environment.json`` has it."""

import json
import subprocess

import pytest

from robust_train import launch
from robust_train.features.provenance import environment


@pytest.fixture
def repository(tmp_path, monkeypatch):
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "train.py").write_text("lr = 1\n")
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    for arguments in (["init", "-q"], ["add", "."], [*identity, "commit", "-qm", "first"]):
        subprocess.run(["git", "-C", str(folder), *arguments], check=True)
    monkeypatch.chdir(folder)
    return folder


def _launch(run_dir):
    cfg = {"device": "cpu", "isolation": "none"}
    launch(lambda cfg: None, cfg, run_dir=run_dir)


def test_a_job_records_commit_changes_and_versions(tmp_path, repository):
    _launch(tmp_path / "clean")
    clean = json.loads((tmp_path / "clean" / "environment.json").read_text())
    assert (clean["git_dirty"], len(clean["git_commit"])) == (False, 40)
    assert clean["packages"]["torch"] == clean["torch"]
    assert clean["git_changed"] == []
    (repository / "train.py").write_text("api_key = 's3cr3t'\n")
    _launch(tmp_path / "dirty")
    assert "s3cr3t" not in (written := (tmp_path / "dirty" / "environment.json").read_text())
    assert json.loads(written)["git_changed"] == ["train.py"]
    short = json.loads((tmp_path / "dirty" / "summary.json").read_text())["environment"]
    assert (short["git_dirty"], short["gpus"]) == (True, [])
    assert short["git_commit"] == clean["git_commit"]


def test_a_git_that_hangs_costs_its_answer_only(tmp_path, monkeypatch, repository):
    git = tmp_path / "bin" / "git"
    git.parent.mkdir()
    git.write_text("#!/bin/sh\nexec sleep 600\n")
    git.chmod(0o755)
    monkeypatch.setenv("PATH", f"{git.parent}:/usr/bin:/bin")
    monkeypatch.setattr(environment, "GIT_SECONDS", 0.1)
    _launch(tmp_path / "run")
    written = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert (written["git_commit"], written["git_dirty"]) == (None, None)
