"""Commands that hang are given up."""

from __future__ import annotations

import sys

import pytest

from robust_train.gpu.bounded import NoAnswer, ask, printed_by, run_command


def test_a_command_s_output_and_exit_code_come_back() -> None:
    done = run_command([sys.executable, "-c", "print(1); raise SystemExit(3)"], 60)
    assert (done.returncode, done.stdout) == (3, b"1\n")


def test_a_command_that_takes_too_long_is_killed() -> None:
    with pytest.raises(NoAnswer, match=r"sleep has not ended after 0\.2 s"):
        run_command(["sleep", "100"], 0.2)


def test_one_that_cannot_be_killed_is_left_behind() -> None:
    """What holds its output open stands for a child that waits in the driver."""
    with pytest.raises(NoAnswer):
        run_command(["sh", "-c", "sleep 3 & exec sleep 100"], 0.2)


def test_a_program_that_may_be_missing_is_asked_for_its_output_alone() -> None:
    assert printed_by(["sh", "-c", "sleep 3 & exec sleep 100"], 0.2) is None
    assert printed_by(["sh", "-c", "echo one; exit 3"], 60) is None
    assert printed_by(["sh", "-c", "echo $WHICH"], 60, {"WHICH": "two"}) == b"two\n"
    assert printed_by(["no-such-program"], 60) is None


def test_an_answer_that_comes_when_the_time_was_spent_stopped_counts() -> None:
    """As after Ctrl-Z and fg in the middle of a call: no time is left, and nothing hangs."""
    assert ask(lambda: sum(n % 2 for n in range(500_000)), 0.0) == 250_000
