"""``robust-train run``: what may be typed, what it makes of it, and its exit codes."""

import json
import shlex
import sys

import pytest
import yaml

from robust_train.config.trainers import name_of_program

EVERYTHING = [
    "it's",
    "${x}",
    "$HOME",
    "a\\",
    '\\"',
    "a,b [c]",
    "",
    '{"json": 1}',
    "null",
    "x=1",
    "--",
]


def test_command_line_words_arrive_unchanged(scripts):
    """Options, keys and arguments reach the program as they were typed."""
    options = ("--batch-size=8", "--min-batch-size=2", "--name=my job")
    keys = ("device=cpu", "training.num_workers=3")
    code = "import json, os, sys; print(json.dumps([os.environ[sys.argv[1]], *sys.argv[2:]]))"
    words = ("ROBUST_TRAIN_MIN_BATCH_SIZE", "{num_workers}", "{min_batch_size}", *EVERYTHING)
    ended = scripts.run(*options, *keys, "--", "python3", "-c", code, *words).with_code(0)
    assert json.dumps(["2", "3", "2", *EVERYTHING]) in ended.stdout.splitlines()
    kept = yaml.safe_load((scripts.run_dir / ".hydra" / "config.yaml").read_text())
    expected = {"device": "cpu", "job_name": "my job", "min_batch_size": 2}
    assert {key: kept[key] for key in expected} == expected


def test_closed_streams_are_nobodys_trouble(scripts):
    """Else a lock or a pipe of ours would be standard input or output."""
    words = ["-m", "robust_train.cli.main", "run", "--run-dir", str(scripts.run_dir), "--"]
    words += ["sh", "-c", "cat && echo printed"]
    command = shlex.join([sys.executable, *words])
    scripts.world.program("sh", "-c", f"{command} <&- >&- 2>&-")
    assert (scripts.run_dir / "attempt-1.log").read_text() == "printed\n"


def test_each_attempt_rereads_standard_input(scripts):
    """A file on standard input is read from where it began."""
    (scripts.folder / "in").write_text("skipped\nhello\n")
    words = ("sh", "-c", "cat; [ {batch_size} = 4 ] || { echo MemoryError: no; exit 1; }")
    with (scripts.folder / "in").open("rb", buffering=0) as file:
        file.seek(len("skipped\n"))
        ended = scripts.run("--batch-size", "8", "--", *words, stdin=file)
        assert file.tell() == len("skipped\n"), "another job may read the same file"
    assert ended.returncode == 0, ended.output
    assert ended.stdout.splitlines().count("hello") == 2
    assert "skipped" not in ended.stdout


def test_a_script_with_its_own_batch_keeps_it(scripts):
    """The batch is left to the script, which is not started again with less."""
    ended = scripts.run("--", "sh", "-c", "echo MemoryError: no more; exit 1").with_code(1)
    assert [a["outcome"] for a in ended.attempts] == ["host_oom"]


def test_the_run_folder_is_named_after_the_script(scripts):
    scripts.world.robust_train("run", "--name", "a/b c", "--", "true", code=0)
    (folder,) = scripts.folder.glob("outputs/*/*")
    assert folder.name.split("_", 1)[1].startswith("a_b_c_")
    assert (folder / "summary.json").is_file()


@pytest.mark.parametrize(
    ("program", "name"),
    [
        (["python", "-u", "src/train_clip.py", "--lr", "1"], "train_clip"),
        (["./fit.sh"], "fit"),
        (["python", "-m", "pkg.train", "x"], "pkg.train"),
        (["torchrun", "--nproc", "2", "a.py"], "a"),
        (["/usr/bin/julia"], "julia"),
        (["/"], "script"),
    ],
)
def test_a_job_is_called_after_its_script(program, name):
    assert name_of_program(program) == name
