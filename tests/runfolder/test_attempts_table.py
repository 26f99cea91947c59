"""The table of attempts at a job's end. Pure."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from robust_train.runfolder.summary import AttemptRecord, Summary, attempts_table
from robust_train.values import Attempt, AttemptSpec, Failure, FailureKind, GiveUp, Outcome, Retry

STOPPED = GiveUp("interrupted", action="stopped")


def row_of(record: AttemptRecord) -> list[str]:
    """The cells of the only attempt, which is the job's third."""
    table = attempts_table(Summary("failed", Path("/run"), attempts=(record,), first_attempt=3))
    first, *rest = table.splitlines()[1:]
    row = " ".join([first, *(line.strip() for line in rest)])  # the last cell may be wrapped
    return [cell for cell in row.split("  ") if cell]


def record(outcome: Outcome, decision: GiveUp | None = None, **spec: object) -> AttemptRecord:
    sizes = {"gpus": (), "batch_size": 64, "gradient_accumulation_steps": 2, **spec}
    return AttemptRecord(Attempt(AttemptSpec(**sizes), outcome), decision)


def interrupted(message: str) -> Outcome:
    return Outcome(Failure(FailureKind.INTERRUPTED, message), seconds=1.0, end_step=5)


def test_it_names_the_micro_batch_in_the_end_and_the_ranks():
    outcome = Outcome(None, seconds=1.0, start_step=2, end_step=9, micro_batch=4)
    cells = [cell.strip() for cell in row_of(record(outcome, ranks=2))]
    assert cells == ["3", "cpu × 2 processes", "64 → 4", "256", "2-9", "1.0 s", "completed"]


def test_a_script_that_is_told_no_batch_and_reports_no_steps_has_neither():
    told_nothing = record(Outcome(None, seconds=1.0), has_batch=False, batch_size=1)
    cells = [cell.strip() for cell in row_of(told_nothing)]
    assert cells == ["3", "cpu", "-", "-", "-", "1.0 s", "completed"]
    assert told_nothing.as_json(1)["batch_size"] is None


def test_it_tells_a_job_that_its_user_stopped_from_one_that_was_killed():
    message = "killed by SIGKILL (by somebody, not by us)"
    assert row_of(record(interrupted(message)))[-1].strip() == message
    assert row_of(record(interrupted("asked to stop"), STOPPED))[-2:] == ["1.0 s", "stopped"]


def test_a_process_that_ended_without_a_report_is_not_called_a_bug():
    def ending(message: str) -> str:
        return row_of(record(Outcome(Failure(FailureKind.BUG, message), seconds=1.0)))[-1]

    assert ending("ended with exit code 3: no such file") == "exit code 3"
    assert ending("ended by SIGSEGV: forward() in net.py:7") == "SIGSEGV"
    assert ending("KeyError: 'lr'") == "bug"


def test_it_fits_80_columns():
    killed = interrupted("killed by SIGKILL (by somebody, not by us)")
    again = Retry(AttemptSpec((), 64, 2), "retry", "the same again")
    one = record(replace(killed, start_step=1000, end_step=12_000), again, ranks=2)
    table = attempts_table(Summary("failed", Path("/run"), attempts=(one, one))).splitlines()
    assert max(map(len, table)) <= 80
    below = table[0].index("outcome")
    ending = "killed by SIGKILL (by somebody, not by us) → retry"
    assert " ".join(line[below:] for line in table[1:]) == f"{ending} {ending}"
