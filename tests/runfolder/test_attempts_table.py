"""The table of attempts at a job's end. Pure."""

from __future__ import annotations

from dataclasses import replace

from robust_train.model.attempt import Attempt
from robust_train.model.failure import Failure, FailureKind
from robust_train.model.spec import AttemptSpec
from robust_train.report.narration import attempts_table


def row_of(attempt: Attempt) -> list[str]:
    """The cells of the only attempt, which is the job's third."""
    first, *rest = attempts_table([attempt]).splitlines()[1:]
    row = " ".join([first, *(line.strip() for line in rest)])  # the last cell may be wrapped
    return [cell for cell in row.split("  ") if cell]


def record(failure: Failure | None = None, **fields: object) -> Attempt:
    sizes = {"gpus": (), "batch_size": 64, "gradient_accumulation_steps": 2}
    own = {name: fields.pop(name) for name in ("ranks", "has_batch") if name in fields}
    spec = AttemptSpec(**{**sizes, **own})
    return Attempt(3, spec, **{"seconds": 1.0, "failure": failure, **fields})


def interrupted(message: str, **fields: object) -> Attempt:
    return record(Failure(FailureKind.INTERRUPTED, message), end_step=5, **fields)


def test_it_names_the_micro_batch_in_the_end_and_the_ranks():
    attempt = record(start_step=2, end_step=9, micro_batch=4, ranks=2)
    cells = [cell.strip() for cell in row_of(attempt)]
    assert cells == ["3", "cpu × 2 processes", "64 → 4", "256", "2-9", "1.0 s", "completed"]


def test_a_script_that_is_told_no_batch_and_reports_no_steps_has_neither():
    told_nothing = record(has_batch=False)
    cells = [cell.strip() for cell in row_of(told_nothing)]
    assert cells == ["3", "cpu", "-", "1.0 s", "completed"]
    assert told_nothing.as_json()["batch_size"] is None


def test_it_tells_a_job_that_its_user_stopped_from_one_that_was_killed():
    message = "killed by SIGKILL (sender unknown)"
    assert row_of(interrupted(message))[-1].strip() == message
    assert row_of(interrupted("asked to stop", action="stopped"))[-2:] == ["1.0 s", "stopped"]


def test_a_process_that_ended_without_a_report_is_not_called_a_bug():
    def ending(message: str) -> str:
        return row_of(record(Failure(FailureKind.BUG, message)))[-1]

    assert ending("ended with exit code 3: no such file") == "exit code 3"
    assert ending("ended by SIGSEGV: forward() in net.py:7") == "SIGSEGV"
    assert ending("KeyError: 'lr'") == "trainer failed"


def test_it_fits_80_columns():
    killed = interrupted("killed by SIGKILL (sender unknown)", action="retry", ranks=2)
    one = replace(killed, start_step=1000, end_step=12_000)
    table = attempts_table([one, one]).splitlines()
    assert max(map(len, table)) <= 80
    below = table[0].index("outcome")
    ending = "killed by SIGKILL (sender unknown) → the same again"
    assert " ".join(line[below:] for line in table[1:]) == f"{ending} {ending}"
