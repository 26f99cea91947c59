"""What a trainer is given, and how its end, in any form, becomes an outcome."""

import json
import re
import signal
from pathlib import Path

import pytest

from terminal_screen import showing_lines
from world import is_running, wait_for_text, wait_until


def test_a_functions_result_is_the_jobs_result(world):
    """The function takes ``cfg`` alone."""
    ended = world.train("what_it_was_given", "training.batch_size=12", "training.lr=0.5", code=0)
    expected = {"device": "cpu", "batch_size": 12, "gradient_accumulation_steps": 1, "lr": 0.5}
    expected |= {"cwd": str(world.folder), "visible": "", "cuda_started": False}
    assert ended.summary["result"].items() >= expected.items()
    assert ended.summary["status"] == "completed"
    assert (ended.summary["schema"], ended.attempts[0]["attempt"]) == (2, 1)


def test_what_a_trainer_prints_is_shown_and_kept(world):
    ended = world.train("prints")
    assert "a line on stdout" in ended.stdout
    assert "straight to the descriptor" in ended.stdout
    assert "a line on stderr" in ended.stderr
    log = (world.run_dir / "attempt-1.log").read_text().splitlines()
    assert {"a line on stdout", "a line on stderr", "straight to the descriptor"} <= set(log)
    assert "step 2" in log, "a rewritten line is kept as it was in the end"
    assert ended.summary["result"] == [False, False]


def test_a_trainer_shares_the_launchers_terminal(world):
    written = world.run_in_terminal("trainer._target_=trainers.prints", columns=80)
    shown = showing_lines(written, 80)
    summary = json.loads((world.run_dir / "summary.json").read_text())
    assert summary["result"] == [True, True]
    assert {"a line on stdout", "a line on stderr", "step 2"} <= set(shown)
    assert "?25l" not in written, "the cursor stays"
    assert not [line for line in shown if line.startswith(("running", "starting"))]
    *_, ending, folder = (line[9:] for line in shown if re.match(r"\d\d:\d\d:\d\d \w", line))
    assert ending.startswith("completed after ")
    assert folder.startswith("run folder: ")


def test_logging_and_hydra_config_work_inside_an_attempt(world):
    ended = world.train("knows_hydra")
    assert ended.summary["result"] == str(world.run_dir)
    assert "said through logging" in ended.stdout
    assert "said through logging" in (world.run_dir / "train_robust.log").read_text()


@pytest.mark.parametrize(
    ("trainer", "signum", "words"),
    [
        ("catches_everything_and_stops_politely", signal.SIGINT, "press Ctrl-C again to kill"),
        ("never_looks_whether_to_stop", signal.SIGTERM, "send SIGTERM again to kill"),
        ("does_not_stop_at_all", signal.SIGTERM, "the trainer is asked to end, at most 0.2 s"),
    ],
)
def test_a_signal_ends_everything_an_attempt_started(world, ready, trainer, signum, words):
    """After the trainer has done what it does at a stop."""
    grace = ["stop_grace_seconds=0.2"] if trainer == "does_not_stop_at_all" else []
    process = world.start(f"trainer._target_=trainers.{trainer}", *grace)
    pids = wait_for_text(ready, "the trainer runs").split()
    process.send_signal(signum)
    ended = world.end(process, code=128 + signum)
    assert words in ended.stdout
    for pid in pids:
        wait_until(lambda pid=pid: not is_running(int(pid)), f"process {pid} ends")
    if trainer == "never_looks_whether_to_stop":
        assert Path(f"{ready}.cleaned").exists()
    if signum == signal.SIGINT:
        assert ended.summary["status"] == "interrupted"
        assert [a["outcome"] for a in ended.attempts] == ["interrupted"]
        assert Path(ended.summary["checkpoint"]).exists()
        # by whether a checkpoint was saved before
        what = "(saving a checkpoint|the trainer is asked to end)"
        assert re.search(f"stopping: {what}, at most 20 s; ", ended.stdout)
        assert "to continue: robust-train resume " in ended.stdout.splitlines()[-1]


def test_inline_attempts_recover_like_isolated_ones(world):
    ended = world.train("resumes", "isolation=none")
    assert ended.summary["result"] == 5
    assert [a["outcome"] for a in ended.attempts] == ["host_oom", "completed"]
