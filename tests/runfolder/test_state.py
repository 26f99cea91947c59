"""state.json: what it says after which event, and what becomes of broken ones."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from live_folder import open_folder

from robust_train.events import (
    AttemptProcess,
    BatchSizeFound,
    CheckpointSaved,
    MemoryReported,
    MicroBatchChanged,
    Progress,
    TrainingStarted,
)
from robust_train.runfolder.journal import AttemptStarted, JobStarted
from robust_train.runfolder.state import (
    REQUESTED,
    RunState,
    StateFile,
    after_event,
    read_state,
    with_attempt,
)
from robust_train.values import Attempt, AttemptSpec, FailureKind, Outcome, Retry

STATE = RunState("0-a", "job", "/run", 1, "host", "user", 1.0, 2.0)


def test_events_of_an_attempt_are_folded():
    state = with_attempt(STATE, 2, AttemptStarted("cuda:0", 64, 2, 2, gpu_uuids=("A", "B")))
    assert (state.state, state.attempt, state.effective_batch_size) == ("running", 2, 256)
    for event in (
        JobStarted("/run", "trainer", "c0ffee"),
        AttemptProcess(77),
        TrainingStarted(10),
        Progress(11, 100, {"loss": 0.5}),
        Progress(12, None, {"lr": 0.1, "attempt": 9.0}),
        MemoryReported("start", allocated=5),
        MemoryReported("start", allocated=6, rank=1),
        MicroBatchChanged(12, True, 64, 32, "memory"),
        MicroBatchChanged(12, False, 64, 8, "memory"),
        BatchSizeFound(32, 4, 256),
        CheckpointSaved("/c", 12),
    ):
        state = after_event(state, event)
    assert (state.attempt, state.attempt_pid, state.step, state.total_steps) == (2, 77, 12, 100)
    assert (state.loss, state.memory, state.micro_batch) == (0.5, {"allocated": 5}, 32)
    assert (state.batch_size, state.checkpoint, state.checkpoint_step) == (32, "/c", 12)
    assert state.job == "c0ffee"
    again = with_attempt(state, 3, AttemptStarted("cpu", 32, 4))
    assert (again.step, again.loss, again.attempt_pid, again.gpu_uuids) == (None, None, None, ())
    assert again.checkpoint == "/c"


@pytest.mark.parametrize("loss", ["tensor(0.5)", True, 10**400, [0.5], None])
def test_a_loss_that_is_no_number_does_not_cost_the_state(loss: object, tmp_path: Path):
    file = StateFile(tmp_path, STATE)
    file.update(lambda state: after_event(state, Progress(3, None, {"loss": loss})))
    read = read_state(tmp_path)
    assert read is not None
    assert (read.step, read.loss) == (3, None)


def test_a_requested_micro_batch_is_kept_for_the_next_launch_of_the_job(tmp_path: Path):
    for event, requested in (
        (MicroBatchChanged(3, True, 64, 32, "memory", FailureKind.DEVICE_OOM), None),
        (MicroBatchChanged(4, True, 32, 16, "memory is nearly out"), None),
        (MicroBatchChanged(5, True, 16, 8, REQUESTED), 8),
        (MicroBatchChanged(6, True, 8, 4, "memory", FailureKind.DEVICE_OOM), 8),
    ):
        with open_folder(tmp_path) as folder:
            folder.on_event(JobStarted("/run", "trainer", "c0ffee"))
            folder.on_event(event)
        assert read_state(tmp_path).requested_micro_batch == requested, event
    with open_folder(tmp_path) as folder:
        folder.on_event(JobStarted("/run", "trainer", "another"))
        assert folder.state.requested_micro_batch is None
        began = AttemptSpec((), 64, 1)
        stopped = Attempt(began, Outcome(None, stopped_for="halve_batch"))
        folder.decided(stopped, Retry(replace(began, batch_size=32), "halve", "why"), None)
    assert read_state(tmp_path).requested_micro_batch == 32


def test_what_is_written_is_read(tmp_path: Path):
    kept = StateFile(tmp_path, STATE)
    kept.update(lambda state: with_attempt(state, 1, AttemptStarted("cpu", 8, 1)))
    kept.update(lambda state: after_event(state, CheckpointSaved("/c", 1)))
    found = read_state(tmp_path)
    assert found is not None
    assert (found.attempt, found.checkpoint, found.since > STATE.since) == (1, "/c", True)
    assert json.loads((tmp_path / "state.json").read_text())["schema"] == 1


def test_progress_is_written_once_a_second_at_most(tmp_path: Path):
    kept = StateFile(tmp_path, STATE)
    kept.write_if_due()
    written = os.stat(tmp_path / "state.json").st_ino
    for step in range(50):
        kept.update(lambda state, step=step: after_event(state, Progress(step, None, {})))
    assert os.stat(tmp_path / "state.json").st_ino == written


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"schema": 1}',
        json.dumps({**asdict(STATE), "pid": "1"}).encode(),
        json.dumps({**asdict(STATE), "schema": 99}).encode(),
        json.dumps({**asdict(STATE), "waiting": 3}).encode(),
        json.dumps({**asdict(STATE), "step": True}).encode(),
        json.dumps({**asdict(STATE), "started": float("nan")}).encode(),
        json.dumps(asdict(STATE)).replace("1.0", "1e999").encode(),
    ],
    ids=lambda content: repr(content[:20]),
)
def test_torn_foreign_and_wrongly_typed_files_are_no_state(tmp_path: Path, content: bytes):
    (tmp_path / "state.json").write_bytes(content)
    assert read_state(tmp_path) is None


def test_control_characters_do_not_reach_a_terminal():
    found = RunState.parse(
        json.dumps({**asdict(STATE), "name": "a\x1b[2Jb", "waiting": {"reason": "\n"}})
    )
    assert found is not None
    assert (found.name, found.waiting) == ("a?[2Jb", {"reason": "?"})


@given(st.binary(max_size=200) | st.text(max_size=200).map(lambda t: json.dumps(t).encode()))
def test_no_bytes_crash_the_reader(data: bytes):
    assert RunState.parse(data) is None


def test_a_disk_that_takes_nothing_costs_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    kept = StateFile(tmp_path / "gone", STATE)
    for number in range(5):
        kept.update(lambda s, n=number: with_attempt(s, n, AttemptStarted("cpu", 8, 1)))
    (record,) = caplog.records
    assert "No such file or directory; the job goes on" in record.getMessage()
    (tmp_path / "gone").mkdir()
    kept.update(lambda state: after_event(state, CheckpointSaved("/c", 1)))
    assert read_state(tmp_path / "gone") is not None, "it is written once there is room"
