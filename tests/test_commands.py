"""What every command of ``robust-train`` does with odd arguments and streams."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from another_user import ANOTHER_USER, needs_root
from robust_train.cli.main import main
from robust_train.execution import screen

COMMAND = [sys.executable, "-m", "robust_train.cli.main"]


@pytest.mark.parametrize(
    ("stdout", "code", "error"),
    [
        (">&-", 0, b""),
        ("> /dev/full", 1, b"robust-train: cannot write the output: No space left on device\n"),
        ("> /dev/null", 0, b""),
    ],
)
def test_output_that_cannot_be_shown_gets_no_traceback(stdout: str, code: int, error: bytes):
    # the help has characters that ASCII lacks
    environ = {**os.environ, "PYTHONIOENCODING": "ascii"}
    line = f'exec "$@" {stdout}'
    command = ["sh", "-c", line, "sh", *COMMAND, "--help"]
    done = subprocess.run(command, env=environ, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (code, error)


ODD_PATHS = ("a" * 300, "~nobody-of-that-name/x")


@pytest.mark.parametrize("path", ODD_PATHS)
@pytest.mark.parametrize(
    "command", ["run status", "run stop", "logs", "wait", "attach", "report", "queue --dir"]
)
def test_a_path_that_cannot_be_is_refused_in_one_line(
    command: str, path: str, tmp_path: Path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ROBUST_TRAIN_STATE_DIR", str(tmp_path / "runs"))
    code, shown = main([*command.split(), path]), capsys.readouterr()
    assert code == (0 if command.startswith("queue") else 2 if command == "report" else 1)
    assert len((shown.out + shown.err).splitlines()) == 1


def test_a_project_in_a_folder_that_cannot_be_is_refused_in_one_line(capsys):
    assert main(["init", "a" * 300]) == 2
    assert "File name too long" in capsys.readouterr().err


@needs_root
@pytest.mark.parametrize("command", ["run status", "run stop", "logs", "report", "queue --dir"])
def test_another_users_private_folder_is_refused_in_one_line(
    command: str, tmp_path: Path, monkeypatch, capsys
):
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    monkeypatch.setenv("ROBUST_TRAIN_STATE_DIR", str(tmp_path / "runs"))
    arguments = [*command.split(), str(private / "x" if "dir" in command else private)]
    main(arguments)  # imports what the other user may not read here
    capsys.readouterr()
    os.seteuid(ANOTHER_USER)
    try:
        main(arguments)
    finally:
        os.seteuid(0)
    shown = capsys.readouterr()
    assert len((shown.out + shown.err).splitlines()) == 1


def test_a_stream_that_the_shell_has_closed_takes_output_and_is_no_terminal(monkeypatch):
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    screen.open_closed_streams()
    print("goes nowhere", file=sys.stderr)
    assert not sys.stdout.isatty()
