"""An edit between two attempts, or two launches, is named in one line."""

import os
import subprocess
import sys

import pytest

from attempts import attempt_request
from robust_train.attempt.code import Code

MAIN = """
import os, sys
from pathlib import Path
from robust_train import launch
from parts import model

def train(cfg, run):
    from parts import late
    run.progress(1)
    print("ran", run.attempt, model.VERSION, late.VERSION, Path(model.__file__).parent.name)
    if run.attempt == 1:
        for name in ("model", "late"):
            Path("parts", name + ".py").write_text("VERSION = 2")
        os.kill(os.getpid(), 9)

if __name__ == "__main__":
    launch(train, {"device": "cpu", "retry_pause_seconds": 0.1}, run_dir="run")
"""


@pytest.fixture
def project(tmp_path):
    (tmp_path / "parts").mkdir()
    for name in ("model", "late"):
        (tmp_path / "parts" / f"{name}.py").write_text("VERSION = 1\n")
    (tmp_path / "main.py").write_text(MAIN)
    return tmp_path


SCRIPT = """
import os, robust_train
from pathlib import Path
run = robust_train.current_run()
run.progress(1)
if run.attempt == 1:
    for name, text in (("script.py", "\\n"), ("rates.yaml", "lr: 2")):
        with open(name, "a") as file:
            file.write(text)
    os.kill(os.getpid(), 9)
if run.attempt == 2:
    run.result(1)
"""


def run(project, *words):
    command = [sys.executable, *words]
    ended = subprocess.run(
        command, cwd=project, env=os.environ, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


def test_an_attempt_of_other_code_names_the_files(project):
    said = run(project, "main.py")
    assert "ran 2 2 2 parts" in said
    assert "attempt 2 runs other code; changed since attempt 1: parts/model.py" in said
    assert "changed since attempt 1: parts/late.py" in said


def test_changed_files_of_a_scripts_command_are_named(project):
    (project / "script.py").write_text(SCRIPT)
    (project / "rates.yaml").write_text("lr: 1\n")
    ours = (
        "-m",
        "robust_train.cli.main",
        "run",
        "retry_pause_seconds=0.1",
        "--run-dir",
        "run",
        "--",
    )
    said = run(project, *ours, sys.executable, "script.py", "--config=rates.yaml")
    assert said.count("runs other code; changed since attempt 1: rates.yaml, script.py") == 1


def test_a_resuming_launch_names_changed_source_files(tmp_path, caplog):
    """It leaves changes of the config to the launcher."""
    files = [tmp_path / "train.py", tmp_path / "rates.yaml"]
    program = [str(path) for path in files]
    for text, resumed in (("1", None), ("2", None), ("3", tmp_path / "last.pt")):
        for path in files:
            path.write_text(text)
        caplog.clear()
        request = attempt_request(tmp_path, resume_checkpoint=resumed)
        Code(request, rank=0).record(program)
        if resumed is None:
            assert not caplog.messages, "a job that starts afresh is made of today's files"
    (line,) = caplog.messages
    assert line.startswith("this launch runs today's code; changed since attempt 1: ")
    assert line.endswith("train.py")
