"""What a job ran with and goes on with: its command, ``environment.json``, and no secrets."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from robust_train import launch
from robust_train.folder import provenance
from robust_train.folder.provenance import (
    public_command,
    public_variables,
    this_command,
)


def test_secrets_are_left_out():
    command = ["python", "t.py", "lr=1", "wandb.api_key=abc", "--token", "abc", "--x", "-v"]
    shown = ["python", "t.py", "lr=1", "wandb.api_key=…", "--token", "…", "--x", "-v"]
    assert public_command(command) == shown
    assert public_command(["+notify.urls=[a://b]", "s3://me:pw@host/x"]) == [
        "+notify.urls=…",
        "s3://…@host/x",
    ]
    assert public_command(["+wandb={api_key:0a1b2c3d4e}"]) == ["+wandb={api_key:…}"]
    harmless = ["+model={max_tokens:1000000000}"]
    assert public_command(harmless) == harmless
    given = {
        "SLURM_JWT": "a",
        "HF_TOKEN": "a",
        "HF_HOME": "/h",
        "CUDA_VISIBLE_DEVICES": "0",
        "HOME": "/root",
    }
    given |= {"ROBUST_TRAIN_NOTIFY_URLS": "a://b", "TORCH_PROXY": "http://u:p@h"}
    shown = {"CUDA_VISIBLE_DEVICES": "0", "HF_HOME": "/h", "TORCH_PROXY": "http://…@h"}
    assert public_variables(given) == shown


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "train.py").write_text("lr = 1\n")
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    for arguments in (["init", "-q"], ["add", "."], [*identity, "commit", "-qm", "first"]):
        subprocess.run(["git", "-C", str(folder), *arguments], check=True)
    monkeypatch.chdir(folder)
    return folder


def _launch(run_dir: Path) -> None:
    cfg = {"device": "cpu", "isolation": "none"}
    launch(lambda cfg: None, cfg, run_dir=run_dir)


def test_a_job_records_commit_changes_and_versions(tmp_path: Path, repository: Path):
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


def test_a_git_that_hangs_costs_its_answer_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repository: Path
):
    git = tmp_path / "bin" / "git"
    git.parent.mkdir()
    git.write_text("#!/bin/sh\nexec sleep 600\n")
    git.chmod(0o755)
    monkeypatch.setenv("PATH", f"{git.parent}:/usr/bin:/bin")
    monkeypatch.setattr(provenance, "GIT_SECONDS", 0.1)
    _launch(tmp_path / "run")
    found = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert (found["git_commit"], found["git_dirty"]) == (None, None)


@pytest.mark.parametrize(
    "folder", ["/a/2026-01-31_x.y", "/a b/c", "/a[1]/{x},=y%20 $z", "/ü/(1)", "/it's", '/"a"']
)
def test_the_command_goes_on_in_that_folder_whatever_it_is_called(
    folder: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "orig_argv", ["python", "train.py", "lr=1", "hydra.run.dir=/other"])
    *words, last = shlex.split(this_command("hydra.run.dir", Path(folder)))
    assert words == ["python", "train.py", "lr=1"]
    override = OverridesParser.create().parse_override(last)
    value = override.value()
    assert (override.key_or_group, getattr(value, "text", value)) == ("hydra.run.dir", folder)
