"""Launches of a run folder that bring no new checkpoint: counted, and in the end refused."""

import contextlib
import hashlib
import json
import os
import signal
from dataclasses import replace

import pytest
from live_folder import change_json, open_folder

from robust_train.folder.checkpoints import Manifest, record_checkpoint
from robust_train.folder.identity import begin_job, complete_job, count_launch, read_identity
from robust_train.folder.requests import REQUESTS, request_sweep_stop
from robust_train.folder.run_list import read_run
from robust_train.model.attempt import Attempt
from robust_train.model.errors import ConfigError, NoProgressError
from robust_train.model.events import JobStarted
from robust_train.model.failure import Clue, Evidence, Failure, FailureKind
from robust_train.model.spec import AttemptSpec


def launch(run_dir, *, saves=None, most=3):
    """A launch that begins an attempt; ``saves``: the step of the checkpoint that it saves."""
    job = begin_job(run_dir, resume=True, max_launches=most).job
    count_launch(run_dir, job, 1)
    if saves is not None:
        path = run_dir / "checkpoints" / "last.pt"
        path.parent.mkdir(exist_ok=True)
        path.write_text(str(saves))
        record_checkpoint(path.parent, Manifest(job, 1, saves, path))
    return job


def launches(run_dir):
    return json.loads((run_dir / "job.json").read_text())["launches"]


def test_the_launch_after_three_without_progress_is_refused(tmp_path):
    """Three in a row without a new checkpoint."""
    launch(tmp_path, saves=5)
    for saves in (None, 5, None):  # the same step again is no progress
        launch(tmp_path, saves=saves)
    content = {"schema": 2, "status": "failed", "reason": "ValueError: a bug", "attempts": []}
    (tmp_path / "summary.json").write_text(json.dumps(content))
    for _ in range(2):
        with pytest.raises(NoProgressError) as refused:
            launch(tmp_path)
        assert refused.value.exit_code == 76
    message = str(refused.value)
    assert f"launches in a row without a new checkpoint in {tmp_path}: 3 (the last: " in message
    assert "ValueError: a bug" in message
    assert "--checkpoint" not in message, "it has reported one"
    assert "max_launches=0" in message
    assert "\n" not in message
    launch(tmp_path, most=0)
    assert launches(tmp_path) == 1, "counted anew"


@pytest.mark.parametrize("name", ["train.py", "conf.yaml"])
def test_files_that_have_changed_begin_the_count_anew(tmp_path, caplog, name):
    for _ in range(3):
        launch(tmp_path)
    file = tmp_path / name
    file.write_text("as it was")
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    code = {"name": "train", "path": str(tmp_path / "train.py"), "digest": digest, "attempt": 1}
    (tmp_path / "code.jsonl").write_text(json.dumps(code) + "\n")
    environment = {"config_files": {str(tmp_path / "conf.yaml"): digest}}
    (tmp_path / "environment.json").write_text(json.dumps(environment))
    with pytest.raises(NoProgressError):
        launch(tmp_path)
    file.write_text("fixed")
    with caplog.at_level("INFO", "robust_train"):
        launch(tmp_path)
    assert f"files have changed: {os.path.relpath(file)}" in caplog.text
    assert launches(tmp_path) == 1


@pytest.mark.parametrize(
    ("kind", "clue", "counts"),
    [
        (FailureKind.BUG, None, 0),
        (FailureKind.BUG, Clue.UNKNOWN, 1),
        (FailureKind.DEVICE_FAULT, None, 1),
    ],
)
def test_a_bug_of_the_trainer_does_not_count(tmp_path, kind, clue, counts):
    failure = Failure(kind, "NameError: x", Evidence(clue=clue))
    with open_folder(tmp_path) as folder:
        attempt = Attempt(1, AttemptSpec((), 8, 1))
        folder.record_attempt_start(attempt)
        folder.record_decision(replace(attempt, failure=failure), None)
        folder.record_end("failed", "NameError: x")
    assert launches(tmp_path) == counts


def test_progress_restarts_the_count_of_launches(tmp_path):
    """Progress is a new checkpoint or a completed job."""
    first = launch(tmp_path)
    launch(tmp_path)
    launch(tmp_path, saves=5)
    for _ in range(3):
        assert launch(tmp_path) == first
    complete_job(tmp_path, "another job's")
    assert read_identity(tmp_path).completed is None
    complete_job(tmp_path, first)
    assert launch(tmp_path) != first
    assert launches(tmp_path) == 1


def test_a_refusal_without_checkpoints_explains_reporting(tmp_path):
    """The job has never reported a checkpoint."""
    (tmp_path / "job.json").write_text('{"id": "of an earlier version", "started": 1.0}')
    assert launch(tmp_path, most=1) == "of an earlier version", "it has had no launch"
    with pytest.raises(
        NoProgressError, match=r"no checkpoint was ever reported \(for a script, use --checkpoint\)"
    ):
        launch(tmp_path, most=1)


@pytest.mark.parametrize(
    ("how", "counts"),
    [
        (signal.SIGINT, 0),
        (signal.SIGHUP, 0),
        ("run stop", 0),
        ("another job of the sweep failed", 0),
        (ConfigError("refused by the trainer"), 0),
        (signal.SIGTERM, 1),  # preempted
        (signal.SIGUSR1, 1),
        ("failed", 1),
        (RuntimeError("in the launcher"), 1),
    ],
    ids=str,
)
def test_who_ended_a_launch_decides_whether_it_counts(tmp_path, how, counts):
    begin_job(tmp_path, resume=True)
    ends = (KeyboardInterrupt, ConfigError, RuntimeError)
    sweep = tmp_path / "sweep"
    sweep.mkdir()
    with contextlib.suppress(*ends), open_folder(tmp_path, sweep=sweep) as folder:
        for number in (1, 2):
            folder.record_attempt_start(Attempt(number, AttemptSpec((), 8, 1)))
        assert launches(tmp_path) == 1
        if isinstance(how, signal.Signals):
            os.kill(os.getpid(), how)
        elif isinstance(how, Exception):
            raise how
        elif how == "failed":
            folder.record_end("failed", "a reason")
        elif how == "another job of the sweep failed":
            request_sweep_stop(sweep)
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            request = tmp_path / REQUESTS / "1.json"
            request.write_text('{"verb": "stop", "options": {}}')
            while True:
                folder.tick()
    assert launches(tmp_path) == counts


def test_a_jobs_time_includes_all_its_launches(tmp_path):
    for job, earlier in (("a", 0), ("a", 100), ("a", 200), ("b", 0)):
        with open_folder(tmp_path) as folder:
            folder.record(JobStarted("/run", "train", job))
            assert folder.state.earlier_seconds == earlier
            folder.record_end("completed", None, 0)
        assert earlier <= read_run(tmp_path).about()["seconds"] < earlier + 60
        change_json(tmp_path / "state.json", started=1000.0, ended=1100.0)
