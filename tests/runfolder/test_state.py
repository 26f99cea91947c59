"""state.json: what it says after which event, and what becomes of broken ones."""

import json
import os
from dataclasses import asdict, replace

import pytest

from attempts import gpu
from robust_train import launch
from robust_train.folder.state import RunState, StateFile, Summary, read_state
from robust_train.model.attempt import Attempt
from robust_train.model.errors import NoDeviceError
from robust_train.model.events import (
    AttemptProcess,
    BatchSizeFound,
    CheckpointSaved,
    JobStarted,
    MemoryReported,
    MicroBatchChanged,
    Progress,
    TrainingStarted,
)
from robust_train.model.spec import AttemptSpec

SPEC = AttemptSpec((), 8, 1)
STATE = RunState("0-a", "job", "/run", 1, "host", "user", 1.0, 2.0)


def test_events_of_an_attempt_are_folded():
    group = (gpu(0, 20), gpu(1, 20))
    state = replace(STATE, attempt=Attempt(2, AttemptSpec(group, 64, 2, ranks=2)))
    assert state.attempt.spec.effective_batch_size == 256
    for event in (
        JobStarted("/run", "trainer", "c0ffee"),
        AttemptProcess(77),
        TrainingStarted(10),
        Progress(11, 100, {"loss": 0.5}),
        Progress(12, None, {"lr": 0.1, "attempt": 9.0}),
        MemoryReported("start", allocated=5),
        MemoryReported("start", allocated=6, rank=1),
        MicroBatchChanged(12, True, 64, "memory", after=32),
        MicroBatchChanged(12, False, 64, "memory", after=8),
        BatchSizeFound(32, 4, 256),
        CheckpointSaved("/c", 12),
    ):
        state = state.after(event)
    attempt = state.attempt
    assert (attempt.number, attempt.pid, attempt.step, attempt.total_steps) == (2, 77, 12, 100)
    assert (attempt.loss, attempt.memory, attempt.micro_batch) == (0.5, {"allocated": 5}, 32)
    assert (attempt.spec.batch_size, state.checkpoint, state.checkpoint_step) == (32, "/c", 12)
    assert state.job == "c0ffee"
    about = state.about()
    assert (about["attempt"], about["attempt_pid"], about["device"]) == (2, 77, "cuda:0,cuda:1")


@pytest.mark.parametrize("loss", ["tensor(0.5)", True, 10**400, [0.5], None])
def test_a_loss_of_nan_keeps_the_state(loss, tmp_path):
    file = StateFile(tmp_path, replace(STATE, attempt=Attempt(1, SPEC)))
    file.update(lambda state: state.after(Progress(3, None, {"loss": loss})))
    read = read_state(tmp_path)
    assert (read.attempt.step, read.attempt.loss) == (3, None)


def test_state_can_be_read_as_written(tmp_path):
    """Progress is written once a second at most."""
    kept = StateFile(tmp_path, STATE)
    kept.update(lambda state: replace(state, attempt=Attempt(1, SPEC)))
    kept.update(lambda state: state.after(CheckpointSaved("/c", 1)))
    read_back = read_state(tmp_path)
    assert read_back.attempt == replace(Attempt(1, SPEC), checkpoint="/c", saves=0)
    assert (read_back.checkpoint, read_back.since) == ("/c", STATE.since)
    assert json.loads((tmp_path / "state.json").read_text())["schema"] == 2
    kept.write_if_due()
    written = os.stat(tmp_path / "state.json").st_ino
    for step in range(50):
        kept.update(lambda state, step=step: state.after(Progress(step, None, {})))
    assert os.stat(tmp_path / "state.json").st_ino == written


def with_values(**values):
    return json.dumps({**asdict(STATE), **values}).encode()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"schema": 2}',
        with_values(pid="1"),
        with_values(schema=1),
        with_values(waiting=3),
        with_values(attempt={"attempt": True}),
        with_values(started=float("nan")),
        with_values().replace(b"1.0", b"1e999"),
    ],
    ids=lambda content: repr(content[:20]),
)
def test_torn_foreign_and_mistyped_files_are_ignored(tmp_path, content):
    (tmp_path / "state.json").write_bytes(content)
    assert read_state(tmp_path) is None


def test_a_pruned_job_raises_nothing():
    """Its sweep has pruned it."""
    Summary("pruned", reason="worse than the median").raise_unless_completed()
    Summary("pruned", attempts=(Attempt(1, SPEC),)).raise_unless_completed()
    with pytest.raises(NoDeviceError):
        Summary("no_device", reason="all are taken").raise_unless_completed()


def test_a_state_with_any_message_is_readable(tmp_path):
    """The length of the message does not matter."""

    def quotes_a_whole_file(cfg):
        raise ValueError("x" * 2_000_000)

    with pytest.raises(ValueError, match="xxx"):
        launch(quotes_a_whole_file, {"isolation": "none"}, run_dir=tmp_path)
    state = read_state(tmp_path)
    assert (state.state, state.attempt.outcome) == ("failed", "bug")
    assert "quotes_a_whole_file" in state.attempt.traceback


def test_control_characters_do_not_reach_a_terminal():
    state = RunState.read(with_values(name="a\x1b[2Jb", waiting={"reason": "\n"}))
    assert (state.name, state.waiting) == ("a?[2Jb", {"reason": "?"})


def test_a_disk_that_takes_nothing_costs_one_warning(tmp_path, caplog):
    kept = StateFile(tmp_path / "gone", STATE)
    for number in range(5):
        kept.update(lambda s, n=number: replace(s, attempt=Attempt(n, SPEC)))
    (record,) = caplog.records
    assert "No such file or directory; the job continues" in record.getMessage()
    (tmp_path / "gone").mkdir()
    kept.update(lambda state: state.after(CheckpointSaved("/c", 1)))
    assert read_state(tmp_path / "gone") is not None, "it is written once there is room"
