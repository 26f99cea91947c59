"""An edit between two attempts: what runs, and what is said."""

import os
import subprocess
import sys

import pytest

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
        if sys.argv[1:] == ["code=first"]:
            Path("parts/late.py").unlink()
        os.kill(os.getpid(), 9)

if __name__ == "__main__":
    key, _, value = sys.argv[1].partition("=")
    launch(train, {"device": "cpu", key: value}, run_dir="run")
"""


@pytest.fixture
def project(tmp_path):
    (tmp_path / "parts").mkdir()
    for name in ("model", "late"):
        (tmp_path / "parts" / f"{name}.py").write_text("VERSION = 1\n")
    (tmp_path / "main.py").write_text(MAIN)
    return tmp_path


def run(project, override):
    command = [sys.executable, "main.py", override]
    ended = subprocess.run(
        command, cwd=project, env=os.environ, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


def test_an_attempt_that_runs_other_code_names_the_files(project):
    said = run(project, "code=live")
    assert "ran 2 2 2 parts" in said
    assert "attempt 2 runs other code; changed since attempt 1: parts/model.py" in said
    assert "changed since attempt 1: parts/late.py" in said
    assert not list((project / "run/code-as-it-was").glob("*.py"))


def test_code_first_runs_the_code_of_the_first_attempt_where_data_stays(project):
    said = run(project, "code=first")
    assert "ran 2 1 1 parts" in said, "also of a file that was removed"
    assert "changed since" not in said
    copies = {path.name for path in (project / "run/code-as-it-was").glob("*.py")}
    assert copies == {"parts.model.py", "parts.late.py", "__mp_main__.py"}
