"""What every command of ``robust-train`` does with right and wrong arguments, and odd streams."""

import json
import os
import subprocess
import sys

import pytest

import robust_train
from another_user import ANOTHER_USER, needs_root
from plans import folder_in
from robust_train.cli.command import load
from robust_train.cli.commands import COMMANDS, OTHER_NAMES
from robust_train.cli.main import find_command, main, parser_of
from robust_train.folder.state import Summary
from robust_train.host.signals import SignalWatch

COMMAND = [sys.executable, "-m", "robust_train.cli.main"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working directory of a user without runs, on a machine with an empty queue."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("ROBUST_TRAIN_QUEUE_DIR", str(tmp_path / "queue"))
    return folder


# --- the table ------------------------------------------------------------------------------------


def test_every_command_has_a_short_help_line(capsys):
    """It has a function, too; the line fits into 80 columns."""
    assert main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    for name, command in COMMANDS.items():
        assert any(line.startswith(f"  {name} ") and command.help in line for line in lines)
        assert callable(load(command.function))
        assert max(map(len, parser_of(command).format_help().splitlines())) <= 80
    assert main([]) == 2
    capsys.readouterr()
    assert main(["memory", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "memory kill" in shown
    assert "halve-batch" not in shown


def test_help_and_the_package_import_no_framework():
    code = (
        "import sys, robust_train; from robust_train.cli.main import main; main(['--help']); "
        "main(['run', '--help']); print({'torch', 'hydra', 'omegaconf', 'psutil'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("\nset()\n")


def test_other_names_lead_to_real_commands():
    for name, meant in OTHER_NAMES.items():
        assert name not in COMMANDS
        command, rest = find_command(meant.split())
        option_names = {word for option in command.options for word in option.names}
        assert option_names.issuperset(rest), meant


# --- mistakes -------------------------------------------------------------------------------------

MISTAKES = [
    ("stauts", 2, ["stauts: no such command", "did you mean status?"]),
    ("xyz", 2, ["xyz: no such command", "there are train, run, resume, init, ps, status, "]),
    ("tail", 2, ["tail: no such command; did you mean logs -f?"]),
    ("result", 2, ["result: no such command; did you mean status?"]),
    ("cite here", 2, ["cite: no such command; did you mean report --cite?"]),
    ("gpus extra", 2, ["gpus: unrecognized arguments: extra"]),
    ("ps --al", 2, ["ps: unrecognized arguments: --al"]),
    # the program of `run`
    ("run", 2, ["no program to run", "--batch-size"]),
    ("run --batch-size 8 --", 2, ["no program to run"]),
    ("run 128 -- python3", 2, ["128", "PATH"]),
    ("run --batch-size 0 -- ls", 2, ["--batch-size", "0", "1 or more"]),
    ("run --batch-size many -- ls", 2, ["--batch-size=many: must be an integer or auto"]),
    ("run --batch-size 4 training.batch_size=8 -- ls", 2, ["training.batch_size=… say the same"]),
    ("run --device  -- ls", 2, ["--device=: must be auto, cpu"]),
    ("run --num-gpus 2 -- ls", 2, ["--num-gpus; write num_gpus=…"]),
    ("run CUDA_VISIBLE_DEVICES=0 ls", 2, ["write env CUDA_VISIBLE_DEVICES=0 PROGRAM"]),
    ("run oops=0 ls", 2, ["oops=0: no such key; robust-train train --cfg job lists all"]),
    ("run max_retries=-1 -- ls", 2, ["max_retries=-1"]),
    ("run --nosuch -- ls", 2, ["--nosuch"]),
    ("run --batch-szie 8 -- ls", 2, ["--batch-szie; did you mean --batch-size?"]),
    ("run -- ls {batch_size}", 2, ["batch size", "--batch-size N"]),
    ("run --min-batch-size 4 -- ls", 2, ["batch size", "--batch-size N"]),
    ("run --batch-size 8 --min-batch-size 9 -- ls", 2, ["--min-batch-size=9", "--batch-size=8"]),
    ("run --resume-argv 'x -- ls", 2, ["--resume-argv", "quotation"]),
    ("run max_retrys=3 -- ls", 2, ["did you mean max_retries?"]),
    ("run training.batch_size=x -- ls", 2, ["training.batch_size=x", "an integer"]),
    ("run device=gpu7 -- ls", 2, ["device=gpu7", "cuda:<number>"]),
    ("run -- ./no_such_file", 2, ["PROGRAM: ./no_such_file: no such file in "]),
    ("run --resume-argv {last} -- ls", 2, ["--resume-argv: {last} is not a placeholder"]),
    ("run --batch-size 8 -- ls {batchsize}", 2, ["did you mean {batch_size}?"]),
    # runs
    ("status", 1, ["status: no run of yours is alive"]),
    ("status 3-cccccc", 1, ["3-cccccc: no run of yours has that id"]),
    ("stop --now 3-cccccc", 1, ["3-cccccc: no run of yours"]),
    ("halve-batch", 1, ["no run of yours is alive"]),
    ("logs nothing", 1, ["nothing: no run of yours"]),
    ("logs --attempt x", 2, ["--attempt"]),
    ("attach", 1, ["no run of yours is alive"]),
    ("wait nothing", 1, ["nothing: no run of yours"]),
    # the machine
    ("memory", 2, ["an action is needed: info, clear, reset, fraction, enable, snapshot, kill"]),
    ("memory shrink", 2, ["shrink: no such action: info, clear"]),
    ("memory fraction", 2, ["the following arguments are required: FRACTION"]),
    ("memory fraction 80", 2, ["80: accepted is a number over 0, up to 1"]),
    ("memory fraction 0.8", 1, ["memory.fraction=0.8"]),
    ("memory clear", 1, ["a process cannot empty another's cache"]),
    ("memory reset", 1, ["peaks are counted inside a process"]),
    ("memory snapshot", 1, ["memory.snapshot_on_oom=true"]),
    ("memory clear --run 1-abcdef", 1, ["1-abcdef: no run of yours"]),
    ("memory info --run 1-abcdef", 1, ["1-abcdef: no run of yours"]),
    ("rm --days x", 2, ["--days"]),
    ("rm --days nan", 2, ["nan: accepted is a number of 0 or more"]),
    ("memory kill --pid x", 2, ["--pid"]),
    ("cleanup --force", 2, ["cleanup: no such command; did you mean memory clear?"]),
    ("sweep max-jobs . 2", 2, ["sweep: max-jobs: no such action: limit, best"]),
    ("doctor --include GPU-5", 1, ["--include GPU-5: you have not excluded this GPU"]),
    ("queue --usage", 2, ["unrecognized arguments: --usage"]),
    # the rest
    ("report absent", 2, ["absent: no such folder"]),
    ("report .", 2, ["neither a run folder"]),
    ("init /dev/null/mine", 2, ["/dev/null", "Not a directory"]),
    ("notify", 2, ["an action is needed: test"]),
    ("notify test", 2, ["nothing to send to", "notify.urls=…"]),
    ("notify test notify.url=x", 2, ["did you mean notify.urls?"]),
    *((f"{name} {'a' * 300}", 1, []) for name in ("status", "stop", "resume", "logs")),
    *((f"{name} ~nobody-of-that-name/x", 1, []) for name in ("stop", "attach", "wait")),
    (f"report {'a' * 300}", 2, []),
    (f"init {'a' * 300}", 2, ["File name too long"]),
]


@pytest.mark.parametrize(("line", "code", "words"), MISTAKES, ids=lambda value: str(value)[:50])
def test_a_mistake_is_one_line_and_leaves_nothing(line, code, words, here, capsys):
    ended, shown = main(line.split(" ")), capsys.readouterr()
    assert ended == code, shown
    assert shown.out == ""
    assert len(shown.err.splitlines()) == 1, shown.err
    assert [word for word in words if word not in shown.err] == []
    assert list(here.iterdir()) == []


@needs_root
@pytest.mark.parametrize("command", ["status", "stop", "logs", "report", "queue --dir"])
def test_another_users_private_folder_is_refused(command, tmp_path, capsys):
    """The refusal is one line."""
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
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


# --- for programs ---------------------------------------------------------------------------------

WITHOUT_A_RUN = {"error"}
MACHINE = {"problem", "skipped", "gpus", "host"}
KEYS = {
    "status RUN": {"run", "id", "pid", "run_dir", "alive", "state", "host", "exit_code"},
    "checkpoint": WITHOUT_A_RUN,
    "halve-batch": WITHOUT_A_RUN,
    "stop": WITHOUT_A_RUN,
    "sweep best RUN": {"error"},  # not a sweep folder
    "rm": {"dry_run", "runs", "kept"},
    "sweep limit RUN 2": {"error"},
    "ps": {"runs"},
    "need RUN": {"error"},  # it ran on the CPU
    "queue": {"directory", "jobs", "excluded"},
    "gpus": {"driver_version", "problem", "warning", "gpus", "skipped"},
    "memory info": {*MACHINE, "live_run"},
    "memory clear": WITHOUT_A_RUN,
    "memory reset": WITHOUT_A_RUN,
    "memory fraction 0.5": WITHOUT_A_RUN,
    "memory enable": {"variable", "value", "lines"},
    "memory snapshot": WITHOUT_A_RUN,
    "memory kill --pid 1": {"error"},  # without a driver, or because it is no CUDA process
    "doctor": {"driver_version", "packages", "gpus", "skipped", "queue", "probes"},
    "report RUN": {"schema", "name", "status", "attempts", "spans", "memory", "curves"},
}


def test_every_json_output_is_checked():
    with_json = {
        name
        for name, command in COMMANDS.items()
        if any("--json" in option.names for option in command.options)
    }
    assert with_json == {find_command(line.split())[0].name for line in KEYS}


@pytest.mark.parametrize("line", KEYS)
def test_json_has_the_documented_keys(line, here, capsys):
    run_dir = here / "run"
    run_dir.mkdir()
    with SignalWatch() as signals, folder_in(run_dir, signals) as folder:
        Summary("completed", run_dir, result=0.5).write()
        folder.record_end("completed", None)
    code = main([*line.replace("RUN", str(run_dir)).split(" "), "--json"])
    content = json.loads(capsys.readouterr().out)
    assert KEYS[line] <= content.keys()
    assert (code == 0) is ("error" not in content) or line == "doctor"
    if line == "ps":
        (run,) = content["runs"]
        assert run["result"] == 0.5
        assert {"id", "name", "state", "run_dir", "alive"} <= run.keys()


# --- streams --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stdout", "code", "error"),
    [
        (">&-", 0, b""),
        ("> /dev/full", 1, b"robust-train: cannot write the output: No space left on device\n"),
        ("> /dev/null", 0, b""),
    ],
)
def test_output_that_cannot_be_shown_gets_no_traceback(stdout, code, error):
    # the help has characters that ASCII lacks
    environ = {**os.environ, "PYTHONIOENCODING": "ascii"}
    command = ["sh", "-c", f'exec "$@" {stdout}', "sh", *COMMAND, "--help"]
    done = subprocess.run(command, env=environ, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (code, error)


@pytest.mark.parametrize("words", ["--help", "run --help", "doctor", "gpus", "completion"])
def test_readers_that_leave_early_see_no_traceback(words):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stdout:
        done = subprocess.run([*COMMAND, *words.split()], stdout=stdout, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (141, b"")


def test_the_version_is_printed(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"robust-train {robust_train.__version__}\n"
