"""The table of attempts at a job's end. Pure."""

from dataclasses import replace

import pytest

from robust_train.model.attempt import Attempt
from robust_train.model.exit import Exit
from robust_train.model.failure import Failure, FailureKind
from robust_train.model.spec import AttemptSpec, GiveUp
from robust_train.report.narration import attempts_table, log_end


def row_of(attempt):
    """The cells of the only attempt, which is the job's third."""
    first, *rest = attempts_table([attempt]).splitlines()[1:]
    row = " ".join([first, *(line.strip() for line in rest)])  # the last cell may be wrapped
    return [cell.strip() for cell in row.split("  ") if cell]


def record(failure=None, **fields):
    sizes = {"gpus": (), "batch_size": 64, "gradient_accumulation_steps": 2}
    of_spec = {name: fields.pop(name) for name in ("ranks", "has_batch") if name in fields}
    return Attempt(
        3, AttemptSpec(**sizes, **of_spec), **{"seconds": 1.0, "failure": failure, **fields}
    )


def interrupted(message, **fields):
    return record(Failure(FailureKind.INTERRUPTED, message), end_step=5, **fields)


def bug(message):
    return record(Failure(FailureKind.BUG, message))


KILLED = "killed by SIGKILL (sender unknown)"


@pytest.mark.parametrize(
    ("attempt", "cells"),
    [
        (
            record(start_step=2, end_step=9, micro_batch=4, ranks=2),
            ["3", "cpu × 2 processes", "64 → 4", "256", "2-9", "1.0 s", "completed"],
        ),
        # a script that is told no batch and reports no steps has neither
        (record(has_batch=False), ["3", "cpu", "-", "1.0 s", "completed"]),
        (interrupted(KILLED), [KILLED]),
        (interrupted("asked to stop", action="stopped"), ["1.0 s", "stopped"]),
        # a process that ended without a report is not called a bug
        (bug("ended with exit code 3: no such file"), ["exit code 3"]),
        (bug("ended by SIGSEGV: forward() in net.py:7"), ["SIGSEGV"]),
        (bug("KeyError: 'lr'"), ["trainer failed"]),
    ],
)
def test_a_row_ends_with_these_cells(attempt, cells):
    assert row_of(attempt)[-len(cells) :] == cells


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"end_step": None}, "without a last checkpoint"),
        ({"end_step": 49, "saved_step": 47}, "steps 48 to 49 are lost, it resumes from step 47"),
        ({"end_step": 1}, "step 1 is lost, it starts over"),
        ({"end_step": 47, "saved_step": 47}, "the checkpoint of step 47 has all"),
    ],
)
def test_a_second_signal_is_said_to_cost_steps(fields, said, caplog):
    killed = replace(interrupted("killed", exit=Exit(was_hurried=True)), **fields)
    with caplog.at_level("INFO", "robust_train"):
        log_end(killed, GiveUp("interrupted", action="stopped"))
        log_end(replace(killed, exit=Exit()), GiveUp("interrupted", action="stopped"))
    first, second = (record.message for record in caplog.records)
    assert first.startswith("attempt 3: stopped at once by a second signal")
    assert first.endswith(said)
    assert second == "attempt 3: stopped"


def test_the_summary_of_a_batchless_job_has_none():
    assert record(has_batch=False).as_json()["batch_size"] is None


def test_it_fits_80_columns():
    killed = interrupted(KILLED, action="retry", ranks=2)
    attempt = replace(killed, start_step=1000, end_step=12_000)
    table = attempts_table([attempt, attempt]).splitlines()
    assert max(map(len, table)) <= 80
    below = table[0].index("outcome")
    ending = f"{KILLED} → the same again"
    assert " ".join(line[below:] for line in table[1:]) == f"{ending} {ending}"
