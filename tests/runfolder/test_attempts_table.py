"""The table of attempts at a job's end. Pure."""

from __future__ import annotations

from pathlib import Path

from robust_train.runfolder.summary import AttemptRecord, Summary, attempts_table
from robust_train.values import Attempt, AttemptSpec, Failure, FailureKind, GiveUp, Outcome

STOPPED = GiveUp("interrupted", action="stopped")


def row_of(record: AttemptRecord) -> list[str]:
    """The cells of the only attempt, which is the job's third."""
    table = attempts_table(Summary("failed", Path("/run"), attempts=(record,), first_attempt=3))
    return [cell for cell in table.splitlines()[1].split("  ") if cell]


def record(outcome: Outcome, decision: GiveUp | None = None, **spec: object) -> AttemptRecord:
    sizes = {"gpus": (), "batch_size": 64, "gradient_accumulation_steps": 2, **spec}
    return AttemptRecord(Attempt(AttemptSpec(**sizes), outcome), decision)


def interrupted(message: str) -> Outcome:
    return Outcome(Failure(FailureKind.INTERRUPTED, message), seconds=1.0, end_step=5)


def test_it_names_the_micro_batch_in_the_end_and_the_ranks():
    outcome = Outcome(None, seconds=1.0, start_step=2, end_step=9, micro_batch=4)
    cells = [cell.strip() for cell in row_of(record(outcome, ranks=2))]
    assert cells == ["3", "cpu × 2 processes", "64 → 4", "2", "256", "2-9", "1.0 s", "completed"]


def test_a_script_that_is_told_no_batch_and_reports_no_steps_has_neither():
    told_nothing = record(Outcome(None, seconds=1.0), has_batch=False, batch_size=1)
    cells = [cell.strip() for cell in row_of(told_nothing)]
    assert cells == ["3", "cpu", "-", "-", "-", "-", "1.0 s", "completed"]
    assert told_nothing.as_json(1)["batch_size"] is None


def test_it_tells_a_job_that_its_user_stopped_from_one_that_was_killed():
    message = "killed by SIGKILL (by somebody, not by us)"
    assert row_of(record(interrupted(message)))[-1].strip() == message
    assert row_of(record(interrupted("asked to stop"), STOPPED))[-2:] == ["stopped", "stopped"]
