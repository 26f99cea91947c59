"""What attempts are given so that experiment trackers continue in one run."""

import contextvars
import json
import re
import subprocess
import sys
import types

import pytest

from robust_train.attempt.script.script_run import ScriptRun
from robust_train.config.placeholders import PREFIX
from robust_train.folder import trackers
from robust_train.folder.identity import begin_job
from robust_train.folder.trackers import TrackerNote, tracker_environment

WANDB = {"WANDB_RUN_ID": "abc", "WANDB_RESUME": "allow"}


def given(folder, environ=None, **options):
    return tracker_environment(
        environ or {}, folder, "abc", **{"shares_packages": False, **options}
    )


@pytest.fixture
def mlflow(monkeypatch):
    """A library whose active run the test chooses."""
    module = types.ModuleType("mlflow")
    module.active_run = lambda: None

    def begin(run, **tags):
        data = types.SimpleNamespace(tags=tags)
        active = types.SimpleNamespace(info=types.SimpleNamespace(run_id=run), data=data)
        module.active_run = lambda: active

    monkeypatch.setitem(sys.modules, "mlflow", module)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return begin


def test_wandb_gets_the_jobs_id(tmp_path, monkeypatch):
    """It gets none if the user has set an id, or if wandb cannot be installed here."""
    for name in ("WANDB_RUN_ID", "WANDB_RESUME", "WANDB_SWEEP_ID"):
        assert given(tmp_path, {name: ""}) == {}, "also an empty one"
    for is_there, expected in ((None, {}), (object(), WANDB)):
        monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name, it=is_there: it)
        assert given(tmp_path, shares_packages=True) == expected
        assert given(tmp_path) == WANDB, f"{is_there=}"


def test_mlflow_gets_the_run_that_was_active_last(tmp_path, mlflow, monkeypatch):
    note = TrackerNote(tmp_path, "abc")
    note.poll()
    assert given(tmp_path) == WANDB, "no run was active"
    for run in ("first", "second"):
        mlflow(run)
        monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///x")  # as set_tracking_uri() does
        note.poll()
        assert given(tmp_path) == {**WANDB, "MLFLOW_RUN_ID": run}
    mlflow("third", **{"mlflow.parentRunId": "whole"})
    note.poll()
    assert given(tmp_path)["MLFLOW_RUN_ID"] == "whole", "a run within a run ends with it"
    assert given(tmp_path, {"MLFLOW_RUN_ID": ""}) == WANDB
    assert given(tmp_path, {"MLFLOW_TRACKING_URI": "another"}) == WANDB, "it is not known there"
    later = tracker_environment({}, tmp_path, "later job", shares_packages=False)
    assert later == {**WANDB, "WANDB_RUN_ID": "later job"}


class Trackio(types.ModuleType):
    """A library in which a run is active, beside MLflow's."""

    def __init__(self, name):
        super().__init__("trackio.context_vars")
        self.current_run = contextvars.ContextVar("current_run")
        self.current_run.set(types.SimpleNamespace(project="digits", name=name))


def test_trackio_gets_the_name_of_its_run(tmp_path, mlflow, monkeypatch):
    """Runs of others may exist in the same project."""
    mlflow("first")
    TrackerNote(tmp_path, "abc").poll()
    sys.modules["mlflow"].active_run = lambda: None
    monkeypatch.setitem(sys.modules, "trackio.context_vars", Trackio("brave-sunset-0"))
    TrackerNote(tmp_path, "abc").poll()
    both = {"MLFLOW_RUN_ID": "first", "TRACKIO_RUN_NAME": "brave-sunset-0"}
    assert given(tmp_path) == {**WANDB, **both}
    assert given(tmp_path, {"TRACKIO_RUN_NAME": ""}) == {**WANDB, "MLFLOW_RUN_ID": "first"}
    later = tracker_environment({}, tmp_path, "later job", shares_packages=False)
    assert later == {**WANDB, "WANDB_RUN_ID": "later job"}


def test_the_run_of_the_real_trackio_is_noted(tmp_path, monkeypatch):
    pytest.importorskip("trackio", reason="not installed")
    code = """
import os, sys, trackio
from pathlib import Path
from robust_train.folder.trackers import TrackerNote, tracker_environment
folder = Path(sys.argv[1])
noted = tracker_environment({}, folder, "abc", shares_packages=True)
name = noted.get("TRACKIO_RUN_NAME")
run = trackio.init(project="digits", name=name, resume="allow", embed=False)
TrackerNote(folder, "abc").poll()
print("name:", run.name)
trackio.finish()
"""
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    names = []
    for _ in range(2):
        command = [sys.executable, "-c", code, str(tmp_path)]
        ended = subprocess.run(command, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stderr
        names += re.findall("name: (.+)", ended.stdout)
    assert names[0] == names[1]


def test_a_scripts_own_mlflow_run_is_noted(tmp_path, mlflow):
    """Only the script's own process sees which run is active."""
    job = begin_job(tmp_path, resume=True).job
    run = ScriptRun({f"{PREFIX}RUN_DIR": str(tmp_path)})
    mlflow("first")
    run.progress(1)
    later = tracker_environment({}, tmp_path, job, shares_packages=False)
    assert later["MLFLOW_RUN_ID"] == "first"


def test_a_broken_tracker_costs_only_its_note(tmp_path, mlflow):
    mlflow("first")
    TrackerNote(tmp_path, "").poll()
    TrackerNote(tmp_path, None).poll()
    assert list(tmp_path.iterdir()) == [], "without a launcher nobody reads it"
    TrackerNote(tmp_path / "gone", "abc").poll()
    sys.modules["mlflow"].active_run = lambda: 1 / 0
    TrackerNote(tmp_path, "abc").poll()
    del sys.modules["mlflow"].active_run  # it is being imported
    TrackerNote(tmp_path, "abc").poll()
    for content in ("{", "[1]", json.dumps({"job": "abc", "mlflow_run_id": 3})):
        (tmp_path / "trackers.json").write_text(content)
        assert given(tmp_path) == WANDB, content
