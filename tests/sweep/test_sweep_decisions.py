"""What a sweep decides, as pure functions."""

import csv
import logging
import math
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from unittest.mock import Mock

import pytest
from omegaconf import OmegaConf

from robust_train.children.notifier import Notifier
from robust_train.cli.main import main
from robust_train.config.schema import RobustConfig
from robust_train.files import parse_json, set_aside
from robust_train.folder.hydra_state import OF_HYDRA
from robust_train.folder.lock import RunLock
from robust_train.folder.state import Summary, lacked_by_json, read_summary, with_lacked_by_json
from robust_train.host.loggers import ShortLines
from robust_train.host.signals import SignalWatch, signal_to_forward
from robust_train.model.errors import ConfigError
from robust_train.sweep import session
from robust_train.sweep.checks import find_direction
from robust_train.sweep.job_process import start_job
from robust_train.sweep.record import (
    SweepJob,
    SweepTable,
    build_row,
    exit_code_of,
    link_outside,
    read_record,
    read_row,
    read_rows,
    read_table,
    start_record,
)
from robust_train.sweep.slots import choose_slots
from robust_train.sweep.table import (
    as_csv,
    best_first,
    explain_unranked,
    screen_table,
    seeds_table,
    tally,
    title,
)
from simulated_nvml import Gpu
from world import wait_until

RECORD = SweepJob(0, ("training.lr=1e-3", "model=cnn"), "first")
SAME = RECORD.overrides
DONE = replace(RECORD, status="completed", exit_code=0, result=0.5)
PRUNED = replace(DONE, status="pruned")


@pytest.mark.parametrize(
    ("earlier", "overrides", "sweep", "resume", "starts"),
    [
        (None, ["a=1"], "second", True, "resumed"),
        (None, ["a=1"], "second", False, "afresh"),
        (DONE, SAME, "second", True, "reused"),
        (PRUNED, SAME, "second", True, "reused"),
        (RECORD, SAME, "second", True, "resumed"),
        (DONE, SAME, "second", False, "afresh"),
        (DONE, ["training.lr=1e-2", "model=cnn"], "second", True, "afresh"),
        (RECORD, ["training.lr=1e-3"], "second", True, "afresh"),
        # the order does not matter, nor what only says how to resume
        (DONE, [SAME[1], "resume=true", SAME[0]], "second", True, "reused"),
        (DONE, [*SAME, "robust.sweep_fail_fast=true"], "second", True, "reused"),
        (RECORD, ["detach=true", *SAME, "gpu_wait_timeout_minutes=9"], "second", True, "resumed"),
        # put back into the queue by a scheduler: continues although a new launch would not
        (RECORD, SAME, "first", False, "resumed"),
    ],
)
def test_a_jobs_folder_decides_what_happens_next(earlier, overrides, sweep, resume, starts):
    expected = SweepJob(3, tuple(overrides), sweep)
    record, stays = start_record(expected, earlier, resume=resume)
    assert stays is (starts != "afresh")
    if starts == "reused":
        expected = replace(expected, status=earlier.status, exit_code=0, result=0.5, reused=True)
    assert record == expected


@pytest.mark.parametrize(
    ("n_jobs", "jobs", "gpus", "per_gpu", "per_job", "cpus", "at_once"),
    [
        (3, 10, 8, 1, 1, 64, 3),
        (20, 10, 8, 1, 1, 64, 10),
        (None, 10, 8, 1, 1, 64, 8),
        (None, 10, 2, 3, 1, 64, 6),
        (None, 10, 8, 2, 4, 64, 4),
        (None, 10, 2, 1, 4, 64, 1),
        (None, 100, 0, 1, 1, 16, 8),
        (None, 100, 0, 1, 1, 1, 1),
    ],
)
def test_room_decides_how_many_jobs_run(n_jobs, jobs, gpus, per_gpu, per_job, cpus, at_once):
    """This is the number of jobs at once."""
    config = RobustConfig(gpu_jobs_per_device=per_gpu, num_gpus=per_job)
    assert choose_slots(config, n_jobs, jobs, gpus=gpus, cpus=cpus) == at_once


COUNT = """
import psutil
from robust_train.config.schema import RobustConfig
from robust_train.gpu import inventory
from robust_train.sweep.slots import read_gpu_memory
inventory.OPENING_SECONDS = 1.0
print(len(read_gpu_memory(RobustConfig())), psutil.wait_procs(psutil.Process().children(), 9)[1])
"""


def test_a_hanging_driver_does_not_delay_a_sweep(machine_with):
    machine = machine_with(Gpu(), Gpu())
    for expected, hint in (("2 []", False), ("0 []", True)):
        words, env = [sys.executable, "-c", COUNT], {**os.environ, **machine.environ}
        ended = subprocess.run(words, env=env, capture_output=True, text=True)
        assert ended.stdout.strip() == expected, ended.stderr
        assert ("hydra.launcher.n_jobs" in ended.stderr) is hint
        machine.hang("nvmlInit")


@pytest.fixture
def watched():
    """A watch of signals, and those that it has handed on."""
    received, signals = [], SignalWatch()
    with signals, signals.hand_signals_to(received.append):
        yield signals, received


@pytest.mark.parametrize("first_forwarded", [False, True])
def test_a_forwarded_signal_counts_once(watched, first_forwarded):
    """The job has received it from elsewhere as well."""
    _, received = watched
    for signum in sorted(
        (signal.SIGTERM, signal_to_forward(signal.SIGTERM)), reverse=first_forwarded
    ):
        os.kill(os.getpid(), signum)
    assert received == [signal.SIGTERM]
    os.kill(os.getpid(), signal.SIGTERM)
    assert received == [signal.SIGTERM] * 2, "a second signal by itself means impatience"


@pytest.mark.parametrize("ends_it", [None, signal.SIGTERM, signal_to_forward(signal.SIGTERM)])
def test_a_paused_job_resumes_unless_stopped(watched, ends_it):
    """A signal may arrive during the pause."""
    signals, received = watched
    signals.pause()
    if ends_it is not None:
        os.kill(os.getpid(), ends_it)
    assert received == [signal.SIGTERM], "it is stopping already"
    assert signals.end_pause() is (ends_it is None)
    assert signals.received == (0 if ends_it is None else signal.SIGTERM)
    os.kill(os.getpid(), ends_it or signal.SIGTERM)
    assert received == [signal.SIGTERM] * 2, "a later one counts"


@pytest.mark.parametrize("first_forwarded", [False, True])
def test_a_forwarded_signal_ends_a_pause_once(watched, first_forwarded):
    """The attempt has its time for a last checkpoint, though both of them come."""
    signals, received = watched
    signals.pause()
    for signum in sorted(
        (signal.SIGINT, signal_to_forward(signal.SIGINT)), reverse=first_forwarded
    ):
        os.kill(os.getpid(), signum)
    assert received == [signal.SIGTERM], "it is stopping already"
    os.kill(os.getpid(), signal.SIGINT)
    assert received == [signal.SIGTERM, signal.SIGINT], "a second signal by itself means impatience"


def test_nothing_stops_a_job_in_a_thread(watched):
    assert watched[0].can_stop
    can_stop = []

    def work():
        with SignalWatch() as signals:
            signals.pause()
            can_stop.append(signals.can_stop or signals.received)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert can_stop == [False]


@pytest.mark.parametrize("line", range(6))
def test_a_signal_while_resuming_is_not_lost(watched, line):
    """Whichever line of the resuming of a paused job it arrives at."""
    signals, _ = watched
    signals.pause()
    lines = iter(range(line))

    def trace(frame, event, argument):
        if next(lines, None) is None:
            sys.settrace(None)
            os.kill(os.getpid(), signal.SIGINT)
        return trace

    sys.settrace(trace)
    try:
        signals.end_pause()
    finally:
        sys.settrace(None)
    if line == 5:  # after the last one
        os.kill(os.getpid(), signal.SIGINT)
    assert signals.received == signal.SIGINT


@pytest.mark.parametrize("error", [RuntimeError("a bug"), PermissionError("a bug")])
def test_an_early_unexpected_error_ends_the_sweep(error, monkeypatch, capsys):
    """Before the first job. Hydra makes a warning of an exception, and would run jobs that
    nothing records.
    """
    monkeypatch.setattr(session, "check_jobs", Mock(side_effect=error))
    config = OmegaConf.create({"hydra": {"runtime": {"choices": {}}}})
    with pytest.raises(SystemExit, match="1"):
        session.SweepCallback().on_multirun_start(config)
    assert f"{type(error).__name__}: a bug" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ends", "code"),
    [
        ([("completed", 0)], 0),
        ([("completed", 0), ("no_device", 75), ("failed", 1)], 75),
        ([("interrupted", 143), ("failed", 1)], 1),
        ([("completed", 0), ("interrupted", 143)], 143),
    ],
)
def test_the_first_failed_job_gives_the_code(ends, code):
    """The first that failed by itself gives the sweep its exit code."""
    assert exit_code_of([replace(RECORD, status=s, exit_code=c) for s, c in ends]) == code


@pytest.mark.parametrize(
    ("returncode", "status", "exit_code", "reason"),
    [
        (0, "completed", 0, None),
        (-15, "interrupted", 143, "SIGTERM"),
        (-36, "died", 1, "killed by signal 36"),
        (7, "died", 7, "code 7"),
        (None, "died", 1, "without a summary"),
    ],
)
def test_a_job_known_only_by_its_process_ends(tmp_path, returncode, status, exit_code, reason):
    """Its end is known although nothing but its process is."""
    row = build_row(RECORD, tmp_path, returncode)
    assert (row.status, row.exit_code) == (status, exit_code)
    assert reason is None or reason in row.reason


def test_ignored_sigchld_hides_no_exit_code(tmp_path):
    """The sweep was started with SIGCHLD ignored."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        job = start_job(lambda: 3, tmp_path / "output.log", lambda: None)
        wait_until(lambda: job.exitcode == 3, "its exit code")
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_the_tally_names_each_end():
    """The table has only the values in which the jobs differ."""
    rows = [replace(RECORD, status=status) for status in ("died", "completed", "not_started")]
    assert tally(rows) == "1 of 3 completed, 1 died, 1 not started"
    first, second = (SweepJob(n, ("model=cnn", f"lr={n}", "seed=1")) for n in (0, 1))
    lines = [line.split()[-1] for line in screen_table([first, second])]
    assert lines[1:] == ["lr=0", "lr=1"]
    assert screen_table([first])[1].endswith("  model=cnn lr=0 seed=1")


def test_the_live_table_has_the_jobs_that_run():
    statuses = {4: ("failed", 1), 7: ("running", None)}
    ends = [statuses.get(n, ("completed", 0)) for n in range(10)]
    rows = [SweepJob(n, (f"lr=0.{n}", "seed=1"), "", *end) for n, end in enumerate(ends)]
    _, line = screen_table(rows, {7: 0.5})
    assert line.split() == ["7", "running", "-", "-", "-", "-", "0.5", "-", "lr=0.7"]


def test_terminals_never_obey_errors_or_overrides():
    """Escape sequences in them are shown."""
    hostile = "\x1b]8;;http://x\x07[/bold]\x1b[2J\r\n\x9b1m\u202e"
    row = replace(DONE, overrides=(hostile,), devices=(hostile,), result=hostile, status=hostile)
    record = logging.makeLogRecord({"name": "robust_train", "msg": f"{hostile}\nsecond line"})
    shown = "\n".join([*screen_table([row]), *seeds_table([[row]]), ShortLines().format(record)])
    assert "[/bold]\\x1b[2J" in shown
    assert all(line.isprintable() for line in shown.split("\n"))
    assert shown.endswith("\nsecond line")


def test_a_result_of_nan_has_no_rank():
    numbers = {True: 1.0, "0.5": 0.5, 10**300: 1e300}
    for result in (*numbers, 10**400, None, math.inf, "-inf", math.nan, [1], "good"):
        row = replace(DONE, result=result)
        value = None if isinstance(result, list) else numbers.get(result)
        assert row.value == value, result
        assert (row.why is None) == (value is not None), result
        assert best_first(SweepTable("id", "basic", jobs=(row, replace(DONE, job=1)), repeat=2))


@pytest.mark.parametrize(
    ("result", "cell", "why"),
    [
        (0.5, "0.5", None),
        (True, "true", None),
        (math.nan, "nan", "not a number: nan"),
        (-math.inf, "-inf", "not finite: -inf"),
        (None, "", "not a number: None"),
        ("nan", "nan", "not a number: 'nan'"),
        ([1, 2], "[1, 2]", "not a number: [1, 2]"),
    ],
)
def test_a_rankless_result_keeps_its_value(tmp_path, result, cell, why):
    """The reason is given again in strict JSON, in the CSV and below the table."""
    why = why and f"its result is {why}"
    summary = Summary("completed", tmp_path / "0", result=result, attempts=())
    RECORD.write(summary.run_dir)
    summary.write()
    row = read_row(summary.run_dir)
    assert (repr(row.result), row.why) == (repr(result), why)
    row.write(tmp_path / "1")
    assert repr(read_record(tmp_path / "1").result) == repr(result)
    SweepTable("first", "basic", jobs=(row,)).write(tmp_path)
    text = (tmp_path / "sweep.json").read_text()
    parse_json(text)  # refuses NaN
    assert repr(read_table(tmp_path).jobs[0].result) == repr(result)
    (line,) = csv.DictReader(as_csv([row]).splitlines())
    assert (line["result"], line["reason"]) == (cell, why or "")
    other = replace(DONE, job=1)
    lines = [f"without a rank: job 0: {why}"] if why else []
    assert explain_unranked([row, other]) == lines
    assert best_first(SweepTable("id", "basic", jobs=(row, other)))[-1] == [row] if why else True


def test_a_job_elsewhere_is_found_by_a_link(tmp_path, caplog):
    """Its folder is outside of the folder of its sweep."""
    sweep = tmp_path / "sweep"
    places = [sweep / "0", tmp_path / "elsewhere/1", sweep / "../2"]
    for number, place in enumerate(places):
        replace(RECORD, job=number).write(place)
        link_outside(place, number, sweep)
        link_outside(place, number, sweep)
    assert sorted(os.listdir(sweep)) == ["0", "job-1", "job-2"]
    rows = read_rows(sweep, RECORD.sweep)
    assert {row.job: row.path for row in rows} == {
        number: place.resolve() for number, place in enumerate(places)
    }
    link_outside(places[1], 1, tmp_path / "gone")
    assert "job 1 is missing in the sweep's table" in caplog.text


def test_jobs_without_results_have_no_rank_message(tmp_path):
    assert explain_unranked([replace(DONE, result=None)] * 2) == []
    metrics = {"loss": math.nan, "objective": math.inf}
    assert with_lacked_by_json({"result": {"objective": None}, **lacked_by_json(math.inf)}) == {
        "not_finite": "inf",
        "result": {"objective": math.inf},
    }
    assert Summary("completed", result=metrics).as_json()["not_finite"] == "inf"
    result = {"loss": [1.0, math.nan], "a.b": {"0": -math.inf}, "text": "nan", "nothing": None}
    replace(DONE, result=result).write(tmp_path)
    assert repr(read_row(tmp_path).result) == repr(result)
    Summary("completed", result=result, run_dir=tmp_path).write()
    assert repr(read_summary(tmp_path).result) == repr(result)


def test_unprintable_results_and_empty_sweeps_spare_the_table(tmp_path, capsys):
    """What is not text costs no table, and a sweep that starts nothing keeps the last table."""

    def ends(*rows, launch="second"):
        table = SweepTable(launch, "basic")
        table.write(tmp_path)
        sweep = session.Sweep(
            table, tmp_path, RunLock(tmp_path, "id"), Notifier(RobustConfig().notify)
        )
        sweep.known = dict(enumerate(rows))
        code = sweep.show_and_write()
        sweep.lock.release()
        return code

    waits = replace(RECORD, status="not_started")
    assert ends(waits) == 0
    assert read_table(tmp_path) is None, "nothing has begun"
    name = os.fsdecode(b"latin-1 \xff")
    failed = replace(RECORD, sweep="first", status="failed", exit_code=1, reason=name)
    failed.write(tmp_path / "0")
    assert ends(launch="first") == 1
    assert "latin-1 ?" in (tmp_path / "sweep.csv").read_text()
    assert (tmp_path / "report.html").exists()
    assert "0 of 1 completed, 1 failed" in capsys.readouterr().out
    assert ends(waits) == 0
    assert read_table(tmp_path) is not None, "Ctrl-C at once: it can still be resumed"


def test_only_our_launcher_gets_the_parallelism(tmp_path, capsys):
    """Other launchers are not told how many jobs run."""
    for launcher, code in (("joblib", 1), ("gpu_queue", 0)):
        SweepTable("first", launcher).write(tmp_path)
        lock = RunLock(tmp_path, "first")
        assert main(["sweep", "limit", str(tmp_path), "3"]) == code
        lock.release()
    assert "hydra/launcher=joblib decides itself" in capsys.readouterr().err


def test_the_best_job_may_lack_overrides(tmp_path, capsys):
    """``detach=True`` is the sweep's, so no word is left to paste."""
    row = replace(DONE, overrides=("detach=True",), folder=str(tmp_path / "0"))
    SweepTable("first", "basic").write(tmp_path)
    assert main(["sweep", "best", str(tmp_path)]) == 1, "none has begun yet"
    capsys.readouterr()
    SweepTable("first", "basic", "ended", 0, 1.0, (row,)).write(tmp_path)
    assert main(["sweep", "best", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "\n"
    assert main(["sweep", "best", str(tmp_path), "--checkpoint"]) == 1
    assert "job 0 has reported no checkpoint" in capsys.readouterr().err


def _asked_for(sweeper, **keys):
    return OmegaConf.create({"hydra": {"sweeper": sweeper}, **keys})


@pytest.mark.parametrize(
    ("keys", "sweeper", "direction"),
    [
        ({}, None, "maximize"),
        ({"sweep_direction": "minimize"}, None, "minimize"),
        ({"objective": "val_loss"}, None, "minimize"),
        ({"optimized_metric": "test/rmse"}, None, "minimize"),
        ({"objective": "gloss_score"}, None, "maximize"),
        ({"objective": "lossless"}, None, "maximize"),
        ({"objective": "val_loss", "sweep_direction": "maximize"}, None, "maximize"),
        ({"objective": "val_loss"}, "maximize", "maximize"),
        # of several objectives
        ({}, ["minimize", "maximize"], "maximize"),
    ],
)
def test_a_sweep_knows_which_result_is_best(keys, sweeper, direction):
    assert find_direction(_asked_for({"direction": sweeper}, **keys)) == direction


def test_a_direction_taken_from_a_name_is_told(caplog):
    caplog.set_level(logging.INFO)
    find_direction(_asked_for({}, objective="val_loss"))
    assert "the smallest val_loss is best, by its name; set sweep_direction=maximize" in caplog.text


@pytest.mark.parametrize(
    ("keys", "is_told"),
    [
        ({"trainer": {"_target_": "training.train"}}, True),
        ({"trainer": {"_target_": "training.train"}, "objective": "accuracy"}, False),
        ({"trainer": {"_target_": "training.train"}, "sweep_direction": "maximize"}, False),
        # its result is called validation accuracy
        ({"trainer": {"_target_": "robust_train.vision.trainer.train"}}, False),
    ],
)
def test_the_default_direction_is_told(caplog, keys, is_told):
    caplog.set_level(logging.INFO)
    assert find_direction(_asked_for({}, **keys)) == "maximize"
    assert ("the largest result is best; set sweep_direction=minimize" in caplog.text) is is_told


def test_two_directions_are_refused():
    config = _asked_for({"direction": "minimize"}, sweep_direction="maximize")
    with pytest.raises(ConfigError, match="direction=minimize: leave one out"):
        find_direction(config)


def test_the_best_job_follows_the_direction(tmp_path, capsys):
    """The line names the direction."""
    rows = tuple(
        replace(DONE, job=number, overrides=(f"lr={number}",), result=result)
        for number, result in enumerate((0.179, 0.0483))
    )

    def best(*words):
        assert main(["sweep", "best", str(tmp_path), *words]) == 0
        return capsys.readouterr()

    SweepTable("first", "basic", "ended", 0, 1.0, rows, direction="minimize").write(tmp_path)
    smallest = best()
    assert smallest.out == "lr=1\n"
    assert smallest.err == "job 1, which has the smallest result: 0.0483\n"
    SweepTable("first", "basic", "ended", 0, 1.0, rows).write(tmp_path)
    assert best().out == "lr=0\n"
    assert best("--minimize").out == "lr=1\n"


def test_the_title_says_what_the_order_means():
    table = SweepTable("first", "basic", jobs=(DONE,))
    assert title(table) == "sweep, the largest result first:"
    assert title(replace(table, direction="minimize")) == "sweep, the smallest result first:"
    assert title(replace(table, jobs=(RECORD,))) == "sweep:"


def test_setting_aside_spares_the_new_jobs_files(tmp_path):
    for name in ("journal.jsonl", "attempt-1.log", "train_robust.log", "output.log"):
        (tmp_path / name).touch()
    for name in (".hydra", "checkpoints"):
        (tmp_path / name).mkdir()
    assert set_aside(tmp_path, OF_HYDRA) == tmp_path / "earlier-1"
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {".hydra", "train_robust.log", "output.log", "earlier-1"}
    assert set_aside(tmp_path, OF_HYDRA) is None


@pytest.mark.parametrize("text", ["", "{", "[]", "7", '{"sweep": 1}', '{"overrides": 7}'])
def test_a_record_that_cannot_be_read_is_none(tmp_path, text):
    (tmp_path / "sweep_job.json").write_text(text)
    assert read_record(tmp_path) is None


@pytest.mark.parametrize("executor", ["local", "slurm", None])
@pytest.mark.parametrize("mask", [None, "", "1,0", "GPU-11111111"])
def test_a_job_sees_its_users_gpus(mask, executor):
    """What the user saw, unless the job has an allocation."""
    environ = {"CUDA_VISIBLE_DEVICES": mask, "SUBMITIT_EXECUTOR": executor}
    environ = {name: value for name, value in environ.items() if value is not None}
    session.remember_mask(environ)
    environ["CUDA_VISIBLE_DEVICES"] = "3"
    session.restore_mask(environ)
    assert environ.get("CUDA_VISIBLE_DEVICES") == (mask if executor == "local" else "3")
