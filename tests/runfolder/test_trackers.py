"""What attempts are given so that experiment trackers go on in one run."""

import json
import sys
import types

import pytest

from robust_train.folder import trackers
from robust_train.folder.trackers import TrackerNote, tracker_environment

WANDB = {"WANDB_RUN_ID": "abc", "WANDB_RESUME": "allow"}


def given(folder, environ=None, **options):
    return tracker_environment(environ or {}, folder, "abc", **{"is_script": True, **options})


@pytest.fixture
def mlflow(monkeypatch):
    """A library whose active run the test chooses."""
    module = types.ModuleType("mlflow")
    module.active_run = lambda: None

    def begin(run, **tags):
        data = types.SimpleNamespace(tags=tags)
        found = types.SimpleNamespace(info=types.SimpleNamespace(run_id=run), data=data)
        module.active_run = lambda: found

    monkeypatch.setitem(sys.modules, "mlflow", module)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return begin


def test_wandb_gets_the_jobs_id_where_it_may_be_installed_and_the_user_has_set_none(
    tmp_path, monkeypatch
):
    for name in ("WANDB_RUN_ID", "WANDB_RESUME", "WANDB_SWEEP_ID"):
        assert given(tmp_path, {name: ""}) == {}, "also an empty one"
    for is_there, expected in ((None, {}), (object(), WANDB)):
        monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name, it=is_there: it)
        assert given(tmp_path, is_script=False) == expected
        assert given(tmp_path) == WANDB


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
    later = tracker_environment({}, tmp_path, "later job", is_script=True)
    assert later == {**WANDB, "WANDB_RUN_ID": "later job"}


def test_what_is_wrong_costs_the_note_and_nothing_else(tmp_path, mlflow):
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
        assert given(tmp_path) == WANDB
