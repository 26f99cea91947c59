"""What the screen shows at a job's end: the job's figures, and each error whole only once."""

from journals import Journal
from robust_train.folder.state import Summary
from robust_train.model.attempt import Attempt
from robust_train.model.events import Failed, JobEnded, JobStarted
from robust_train.model.failure import Failure, FailureKind
from robust_train.model.spec import AttemptSpec, GiveUp
from robust_train.report import narration
from robust_train.report.narration import print_failure

SPEC = AttemptSpec((), 32, 2)
MESSAGE = "ValueError: the labels go from 0 to 12, and the model has ten outputs"


def lines_of(caplog, summary):
    with caplog.at_level("INFO", "robust_train"):
        narration.show_end(print_failure, summary, "the command")
    return [line for record in caplog.records for line in record.getMessage().splitlines()]


def test_time_and_attempts_include_all_launches(tmp_path, caplog):
    journal = Journal(tmp_path)
    journal(0, JobStarted("/run", "train", "another"))
    journal(500, JobEnded("completed"))
    journal(9, JobStarted("/run", "train", "own"))
    journal.start(1, device="cpu", size=32)
    journal.steps(1, 1, 6)  # and is killed
    journal(100, JobStarted("/run", "train", "own"))
    journal.start(2, device="cpu", size=32)
    durations = {"wall_seconds": 24.0, "earlier_seconds": 6.0}
    last = Attempt(2, SPEC, seconds=24.0, start_step=4, end_step=9)
    summary = Summary("completed", tmp_path, result=0.9, attempts=(last,), **durations)
    lines = lines_of(caplog, summary)
    first, second = (line.split() for line in lines[2:4])
    assert first == ["1", "cpu", "32", "64", "0-6", "-", "no", "recorded", "end"]
    assert second == ["2", "cpu", "32", "64", "4-9", "24.0", "s", "completed"]
    assert lines[4].startswith("completed after 30 s (this launch: 24 s) on cpu")


def test_a_bug_is_shown_once_with_a_command(tmp_path, caplog, capsys):
    """Whole; the command is for after it is fixed."""
    trace = f'Traceback …:\n  File "train.py", line 3\n{MESSAGE}\n'
    failure = Failure(FailureKind.BUG, MESSAGE)
    ending = Failed(failure, exceptions=("builtins.ValueError",))
    attempt = Attempt(1, SPEC, seconds=1.0, failure=failure, traceback=trace, ending=ending)
    summary = Summary("failed", tmp_path, MESSAGE, wall_seconds=12.0, attempts=(attempt,))
    narration.log_end(attempt, GiveUp(MESSAGE))
    lines = lines_of(caplog, summary)
    assert lines[0] == "attempt 1 failed: ValueError"
    (line,) = [line for line in lines if MESSAGE in line]
    assert line == f"failed after 12 s on cpu with micro-batch 32; {MESSAGE}"
    assert capsys.readouterr().err.count(trace) == 1
    assert lines[-1] == "after fixing it: the command"
