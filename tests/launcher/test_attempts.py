"""What a trainer is given, and how its end, in any form, becomes an outcome."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from terminal_screen import lines_shown
from world import ROOT, World, is_running, wait_until


def test_a_function_of_cfg_is_enough_and_its_result_is_the_jobs_result(world: World):
    ended = world.train("what_it_was_given", "training.batch_size=12", "training.lr=0.5", code=0)
    result = ended.summary["result"]
    assert result["device"] == "cpu"
    assert result["batch_size"] == 12
    assert result["gradient_accumulation_steps"] == 1
    assert result["lr"] == 0.5
    assert result["cwd"] == str(world.folder)
    assert result["visible"] == ""
    assert result["cuda_started"] is False
    assert ended.summary["status"] == "completed"
    assert (ended.summary["schema"], ended.attempts[0]["attempt"]) == (2, 1)


def test_a_bug_ends_the_job_at_once_with_the_trainers_own_traceback(world: World):
    ended = world.train("has_a_bug", code=1)
    assert len(ended.attempts) == 1
    assert ended.attempts[0]["outcome"] == "bug"
    assert ended.summary["status"] == "failed"
    assert "KeyError: 'a key that is not there'" in ended.stderr
    assert "in _deep_down" in ended.stderr
    frames = [line for line in ended.stderr.splitlines() if line.strip().startswith("File ")]
    assert all("trainers.py" in frame for frame in frames), "frames of the launcher are shown"


def test_what_a_trainer_prints_is_shown_and_kept(world: World):
    ended = world.train("prints")
    assert "a line on stdout" in ended.stdout
    assert "straight to the descriptor" in ended.stdout
    assert "a line on stderr" in ended.stderr
    log = (world.run_dir / "attempt-1.log").read_text().splitlines()
    assert {"a line on stdout", "a line on stderr", "straight to the descriptor"} <= set(log)
    assert "step 2" in log, "a rewritten line is kept as it was in the end"
    assert ended.summary["result"] == [False, False]


def test_a_trainer_has_a_terminal_where_the_launcher_has_one(world: World):
    written = world.run_in_terminal("trainer._target_=trainers.prints", columns=80)
    shown = lines_shown(written, 80)
    summary = json.loads((world.run_dir / "summary.json").read_text())
    assert summary["result"] == [True, True]
    assert {"a line on stdout", "a line on stderr", "step 2"} <= set(shown)
    assert "?25l" not in written, "the cursor stays"
    assert not [line for line in shown if line.startswith(("running", "starting"))]
    *_, ending, folder = (line[9:] for line in shown if re.match(r"\d\d:\d\d:\d\d \w", line))
    assert ending.startswith("completed after ")
    assert folder.startswith("run folder: ")


def test_logging_and_hydra_config_work_inside_an_attempt(world: World):
    ended = world.train("knows_hydra")
    assert ended.summary["result"] == str(world.run_dir)
    assert "said through logging" in ended.stdout
    assert "said through logging" in (world.run_dir / "train_robust.log").read_text()


def test_ctrl_c_stops_child_and_launcher_after_a_last_checkpoint(world: World):
    ready = world.folder / "ready"
    world.environ["READY_FILE"] = str(ready)
    process = world.start("trainer._target_=trainers.catches_everything_and_stops_politely")
    child = int(wait_until(lambda: ready.exists() and ready.read_text(), "the trainer runs"))
    process.send_signal(signal.SIGINT)
    ended = world.end(process, code=130)
    assert not is_running(child)
    assert ended.summary["status"] == "interrupted"
    assert [a["outcome"] for a in ended.attempts] == ["interrupted"]
    assert Path(ended.summary["checkpoint"]).exists()
    answer = "stopping: saving a checkpoint, at most 20 s; press Ctrl-C again to kill"
    assert answer in ended.stdout
    assert "to go on: robust-train resume 0-" in ended.stdout.splitlines()[-1]


def test_a_trainer_that_never_looks_is_interrupted_and_can_clean_up(world: World):
    ready = world.folder / "ready"
    world.environ["READY_FILE"] = str(ready)
    process = world.start("trainer._target_=trainers.never_looks_whether_to_stop")
    wait_until(lambda: ready.exists() and ready.read_text(), "the trainer runs")
    process.send_signal(signal.SIGTERM)
    ended = world.end(process, code=143)
    assert "send SIGTERM again to kill" in ended.stdout
    assert Path(f"{ready}.cleaned").exists()


def test_a_trainer_that_does_not_stop_is_killed_with_all_it_started(world: World):
    ready = world.folder / "ready"
    world.environ["READY_FILE"] = str(ready)
    process = world.start(
        "trainer._target_=trainers.does_not_stop_at_all", "stop_grace_seconds=0.2"
    )
    text = wait_until(lambda: ready.exists() and ready.read_text(), "the trainer runs")
    process.send_signal(signal.SIGTERM)
    world.end(process, code=143)
    for pid in text.split():
        wait_until(lambda pid=pid: not is_running(int(pid)), f"process {pid} ends")


def test_the_launcher_itself_never_imports_torch(world: World):
    code = (
        "import sys\n"
        "from robust_train.cli.train import open_robust\n"
        "try:\n"
        "    open_robust()\n"
        "except SystemExit as stop:\n"
        "    print('code', stop.code, 'torch' in sys.modules)\n"
    )
    process = subprocess.run(
        [
            sys.executable,
            "-c",
            code,
            "trainer._target_=trainers.what_it_was_given",
            f"hydra.run.dir={world.run_dir}",
        ],
        cwd=ROOT,
        env=world.environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "code 0 False" in process.stdout, process.stdout + process.stderr


def test_import_of_the_package_alone_does_not_import_torch():
    code = "import sys, robust_train; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_job_goes_on_when_its_journal_cannot_be_written(world: World):
    world.run_dir.mkdir()
    (world.run_dir / "journal.jsonl").symlink_to("/dev/full")
    ended = world.train("uses_run", code=0)
    assert ended.output.count("No space left on device") == 1
    assert ended.summary["status"] == "completed"


@pytest.mark.usefixtures("alone")
def test_inline_attempts_run_in_the_launchers_process(world: World):
    ended = world.train("what_it_was_given", "isolation=none", code=0)
    assert ended.summary["result"]["parent"] == os.getpid()


def test_inline_attempts_recover_like_isolated_ones(world: World):
    ended = world.train("resumes", "isolation=none")
    assert ended.summary["result"] == 5
    assert [a["outcome"] for a in ended.attempts] == ["host_oom", "completed"]
