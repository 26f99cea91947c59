"""The launcher from Python: ``launch(trainer, cfg)`` in a script and in a notebook-like session."""

import code
import contextlib
import functools
import io
import json
import logging
import os
import pkgutil
import re
import signal
import subprocess
import sys
import threading
import time

import pytest
from omegaconf.errors import ConfigAttributeError

import trainers
import warm
from robust_train import (
    AttemptsExhaustedError,
    ConfigError,
    JobInterrupted,
    TrainerFailedError,
    UserError,
    launch,
)
from robust_train.attempt.loading import load
from robust_train.config.trainers import TrainerRef
from robust_train.folder.identity import read_identity
from robust_train.folder.lock import is_held
from robust_train.folder.state import read_state, read_summary
from robust_train.host import search
from robust_train.host.signals import SignalWatch
from robust_train.launcher import job as launcher
from robust_train.launcher.hooks import Hooks
from robust_train.queue.host_queue import HostQueue
from robust_train.report.sources import read_sources
from robust_train.report.story import story_of

SCRIPT = """
import pathlib, sys
from robust_train import launch
sys.path.append(pathlib.Path("no string"))

FACTOR = int(sys.argv[2])
print("module loaded as", __name__)

def train(cfg, run):
    if cfg.training.batch_size > 4:
        raise MemoryError
    return cfg.training.batch_size * FACTOR * cfg.mine

if __name__ == "__main__":
    cfg = {"training": {"batch_size": 16, "num_workers": 0}, "mine": 5}
    summary = launch(train, cfg, run_dir=sys.argv[1])
    print("result", summary.result, len(summary.attempts), "torch" in sys.modules)
"""
WITHOUT_A_GUARD = """
import os
from robust_train import launch
def train(cfg):
    return os.getpid()
summary = launch(train, run_dir='run')
print('apart', summary.result != os.getpid())
launch(train, {'training': {'batchsize': 1}})
"""
STOPPED_TWICE = """
import os, signal
from robust_train import JobInterrupted, launch
def stopped(cfg):
    os.kill(os.getpid(), signal.SIGTERM)
try:
    launch(stopped, {'isolation': 'none'})
except JobInterrupted as error:
    print('caught', error.exit_code)
launch(stopped, {'isolation': 'none'})
"""
FAILS = """
from robust_train import launch
def train(cfg):
    return undefined_name
launch(train, {'isolation': 'none'})
"""
STOPPED_EARLY = """
from omegaconf import OmegaConf
from robust_train import launch
def stopped():
    raise KeyboardInterrupt
OmegaConf.register_new_resolver('stopped', stopped)
launch(print, {'job_name': '${stopped:}'})
"""


@pytest.fixture
def run_script(tmp_path):
    def run(source, *arguments, start=warm.run, cwd=tmp_path):
        (tmp_path / "my_script.py").write_text(source)
        return start((str(tmp_path / "my_script.py"), *arguments), os.environ, cwd)

    return run


def cold(argv, environ, cwd):
    """Run an interpreter as users do."""
    command = [sys.executable, *argv]
    return subprocess.run(command, env=environ, cwd=cwd, capture_output=True, text=True)


def test_a_function_of_the_script_itself_is_launched(tmp_path, run_script):
    """With the script's own path and arguments: not with modules of the working directory."""
    (elsewhere := tmp_path / "elsewhere").mkdir()
    (elsewhere / "random.py").write_text("raise ImportError('not the standard library')")
    process = run_script(SCRIPT, str(tmp_path / "run"), "3", start=cold, cwd=elsewhere)
    assert process.returncode == 0, process.stdout + process.stderr
    assert "result 60 3 False" in process.stdout
    assert (tmp_path / "run" / "summary.json").exists()


def test_a_script_without_a_guard_can_launch(run_script):
    """Its import in the attempt ends where it calls ``launch`` for this trainer."""
    process = run_script(WITHOUT_A_GUARD, start=cold)
    assert process.returncode == 2
    assert process.stdout.count("apart True") == 1, process.stdout + process.stderr
    assert "completed after" in process.stdout, "the launcher's lines are on the screen"
    (line,) = process.stderr.splitlines()
    assert "did you mean training.batch_size?" in line


def test_an_uncaught_stop_exits_with_its_code(run_script):
    """There is no traceback."""
    process = run_script(STOPPED_TWICE)
    assert process.returncode == 143, process.stderr
    assert "caught 143" in process.stdout
    assert "Traceback" not in process.stderr
    process = run_script(STOPPED_EARLY)
    assert (process.returncode, process.stderr) == (130, ""), "also before the job has begun"


def test_an_uncaught_failure_ends_like_the_command(run_script):
    """The trainer's traceback once, without our frames; the last line resumes it."""
    process = run_script(FAILS)
    assert process.returncode == 1
    assert process.stderr.count("Traceback") == process.stderr.count("NameError: ") == 1
    assert "robust_train" not in process.stderr
    assert re.search(r"after fixing it: robust-train resume [0-9a-f]{8}\n$", process.stdout)


def test_a_missing_key_names_its_reader(tmp_path, caplog):
    """The message is one line."""

    def train(cfg):
        return cfg.training.momentum

    with caplog.at_level("INFO", "robust_train"), pytest.raises(ConfigAttributeError) as raised:
        launch(train, {"isolation": "none"}, run_dir=tmp_path)
    said = r"test_api\.py, line \d+, reads training\.momentum, which the config lacks"
    assert re.search(said, caplog.text)
    assert "/omegaconf/" not in str(raised.value.__cause__), "not the config's own frames"


@pytest.mark.parametrize("trainer", [trainers.Scaled(3).train, trainers.decorated, trainers.scaled])
def test_an_unreachable_trainer_is_sent_by_value(trainer):
    """Its name leads elsewhere: a method would lose its object, a decorated copy its decorator."""
    assert load(TrainerRef.of(trainer))(None) == trainer(None)


class Cell(io.TextIOBase):
    """A notebook's stream: what is written to its descriptor is shown elsewhere."""

    def __init__(self):
        self.text = ""

    def write(self, text):
        self.text += text
        return len(text)

    def fileno(self):
        return 1


NOTEBOOK = """
import os, pickle

class Net:
    size = 3

def double(number):
    return 2 * number

def train(cfg, run):
    print("printed by the trainer")
    copied = pickle.loads(pickle.dumps(Net()))
    return [double(copied.size), os.getpid()]
"""


def test_a_notebooks_function_runs_in_its_own_process(tmp_path, monkeypatch):
    notebook = code.InteractiveConsole({"__name__": "__main__", "launch": launch})
    assert not notebook.runsource(NOTEBOOK, symbol="exec")
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # pytest's own
    monkeypatch.setattr(Cell, "__module__", "ipykernel.iostream")
    monkeypatch.setattr(sys, "stdout", cell := Cell())
    notebook.runsource(f"summary = launch(train, run_dir={str(tmp_path)!r})", symbol="exec")
    monkeypatch.undo()
    result = notebook.locals["summary"].result
    assert result[0] == 6
    assert result[1] != os.getpid()
    assert "printed by the trainer" in cell.text
    assert re.search(r"(?m)^\d\d:\d\d:\d\d completed after ", cell.text), "by the time of day"


def test_the_last_lines_name_outcome_and_next_command(tmp_path, caplog, monkeypatch):
    # a job that a program has started, whatever runs this test
    monkeypatch.setattr(sys.modules["__main__"], "__file__", __file__, raising=False)

    def mistaken(cfg):
        raise UserError("no weights here")

    with caplog.at_level("INFO", "robust_train"):
        launch(lambda cfg: None, {"isolation": "none"}, run_dir=tmp_path / "a")
        with pytest.raises(UserError):
            launch(mistaken, {"isolation": "none"}, run_dir=tmp_path / "b")
    said = [record.message for record in caplog.records]
    (completed,) = [line for line in said if line.startswith("completed after")]
    assert completed.endswith("on cpu with micro-batch 64; result: none")
    assert said[said.index(completed) + 1] == f"run folder: {tmp_path / 'a'}"
    assert re.fullmatch(r"after fixing it: robust-train resume [0-9a-f]{8}", said[-1])
    failed = read_summary(tmp_path / "b")
    assert repr(failed).startswith("Summary(failed, reason='no weights here', 1 attempt in ")
    assert (tmp_path / "b" / "report.html").as_uri() in failed._repr_html_()
    with caplog.at_level("INFO", "robust_train"):
        launch(lambda cfg: 0.5, {"isolation": "none"}, run_dir=tmp_path / "b")
    tables = [record.message for record in caplog.records if record.message.startswith("attempts:")]
    first, second = tables[-1].splitlines()[2:]
    assert first.startswith("1 ")
    assert first.endswith("user error"), "of the launch before"
    assert second.startswith("2 "), "as in attempt-2.log"
    assert "user error" in next(line for line in said[::-1] if line.startswith("attempts:"))


@pytest.mark.parametrize("isolation", ["process", "none"])
def test_the_trainers_own_exception_keeps_its_traceback(tmp_path, isolation):
    with pytest.raises(KeyError) as caught:
        launch(trainers.has_a_bug, {"isolation": isolation}, run_dir=tmp_path)
    assert isinstance(caught.value.__cause__, TrainerFailedError)
    assert "in _deep_down" in str(caught.value.__cause__)


@pytest.mark.parametrize("isolation", ["process", "none"])
def test_a_signal_after_the_return_changes_nothing(tmp_path, monkeypatch, isolation):
    """To launcher and attempt before the result is reported, and to the launcher at the end."""
    stop = functools.partial(os.kill, os.getpid(), signal.SIGTERM)
    monkeypatch.setattr(launcher.Summary, "write", lambda summary: stop())
    monkeypatch.setattr(Hooks, "end", lambda hooks, summary, write: stop() or summary)
    trainer = trainers.is_stopped_when_it_has_returned
    summary = launch(trainer, {"isolation": isolation}, run_dir=tmp_path)
    assert (summary.status, summary.result) == ("completed", 0.5)
    assert read_state(tmp_path).exit_code == 0
    assert read_identity(tmp_path).completed is not None


@pytest.mark.parametrize("isolation", ["process", "none"])
@pytest.mark.parametrize("trainer", [trainers.takes_short_steps, trainers.fails_after_short_steps])
def test_a_short_job_reports_its_final_figures(tmp_path, trainer, isolation):
    """Its steps are shorter than the interval at which reports are passed on."""
    with contextlib.suppress(ZeroDivisionError):
        launch(trainer, {"isolation": isolation}, run_dir=tmp_path)
    last = read_state(tmp_path).attempt
    assert (last.step, last.loss) == (9, 1 / 9)
    story = story_of(read_sources(tmp_path))
    assert [curve.points[-1] for curve in story.curves][-1:] == [(9, 1 / 9)]


def test_screen_report_and_commands_show_one_duration(tmp_path, caplog, says):
    with caplog.at_level("INFO", "robust_train"), pytest.raises(KeyError):
        launch(trainers.has_a_bug, {"isolation": "none"}, run_dir=tmp_path)
    state = json.loads((tmp_path / "state.json").read_text())
    state |= {"started": 1000.0, "ended": 1070.9, "updated": 1072.0}
    (tmp_path / "state.json").write_text(json.dumps(state))
    with caplog.at_level("INFO", "robust_train"):
        launch(lambda cfg: None, {"isolation": "none"}, run_dir=tmp_path)
    ending = next(
        record.message for record in caplog.records if "completed after" in record.message
    )
    took = re.match(r"completed after (1 min \d+ s)", ending)[1]
    assert re.search(rf"time +{took}\n", says("status").out)
    assert story_of(read_sources(tmp_path)).sentence.startswith(f"Completed in {took} ")


def test_repeated_ctrl_c_still_releases_and_records(tmp_path, monkeypatch):
    """The GPU is released and the end recorded, however often it is pressed."""

    def train(cfg):
        os.kill(os.getpid(), signal.SIGINT)

    done = []

    def interrupt(owner, name):
        act = getattr(owner, name)

        def slow(self):
            for _ in range(3):
                os.kill(os.getpid(), signal.SIGINT)
            act(self)
            done.append(name)

        monkeypatch.setattr(owner, name, slow)

    interrupt(HostQueue, "release")
    interrupt(launcher.Summary, "write")
    with pytest.raises(JobInterrupted):
        launch(train, {"isolation": "none"}, run_dir=tmp_path)
    assert {*done} == {"release", "write"}
    assert read_state(tmp_path).exit_code == 130
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "interrupted"


@pytest.mark.parametrize("moment", ["begin_job", "open_requests"])
def test_an_early_stop_is_recorded_and_releases_everything(tmp_path, monkeypatch, moment):
    """Before the first attempt, and even at a line after which something has to be released or the
    other half written.
    """
    act = pkgutil.resolve_name(path := f"robust_train.launcher.run_folder.{moment}")

    def is_stopped_first(*given, **more):
        os.kill(os.getpid(), signal.SIGTERM)
        return act(*given, **more)

    monkeypatch.setattr(path, is_stopped_first)
    with pytest.raises(JobInterrupted):
        launch(lambda cfg: None, {"isolation": "none"}, run_dir=tmp_path)
    assert (read_summary(tmp_path).status, read_summary(tmp_path).attempts) == ("interrupted", ())
    assert read_state(tmp_path).exit_code == 143
    assert not is_held(tmp_path)


@pytest.mark.parametrize("isolation", ["process", "none"])
def test_a_stop_reaches_jobs_despite_blocked_signals(tmp_path, isolation):
    """Whoever started the job has blocked the signal."""
    launcher = os.getpid()

    def train(cfg):
        os.kill(launcher, signal.SIGTERM)
        time.sleep(10)

    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        with pytest.raises(JobInterrupted):
            launch(train, {"isolation": isolation}, run_dir=tmp_path)
        assert signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ()), "as it was"
    finally:
        signal.sigtimedwait({signal.SIGTERM}, 0)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_a_stop_while_explaining_keeps_the_attempt(tmp_path, monkeypatch):
    """An attempt whose end is being explained at that moment is recorded."""

    def train(cfg):
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
        raise RuntimeError("a" * 40 + "!")

    monkeypatch.setattr(search, "LIMIT_SECONDS", 2.0)  # which this pattern takes
    rules = {"rules": [{"message": "(a+)+$", "then": "retry"}]}
    with pytest.raises(JobInterrupted):
        launch(train, {"isolation": "none", "retry": rules}, run_dir=tmp_path)
    (attempt,) = read_summary(tmp_path).attempts
    assert (attempt.outcome, attempt.action) == ("bug", "stopped")


@pytest.mark.slow
def test_user_rules_count_when_a_time_slice_ends(tmp_path, monkeypatch):
    watches = []

    class Kept(SignalWatch):
        def __init__(self):
            super().__init__()
            watches.append(self)

    def train(cfg, run):
        assert not run.should_stop()  # who has looked once is not interrupted
        if run.attempt == 1:
            watches[0].pause()
            raise RuntimeError("the licence server is busy")
        return run.attempt

    monkeypatch.setattr(launcher, "SignalWatch", Kept)
    rules = {"rules": [{"message": "licence server", "then": "retry"}]}
    summary = launch(train, {"isolation": "none", "retry": rules}, run_dir=tmp_path)
    assert summary.result == 2


def test_a_trainer_that_was_stopped_has_not_completed(tmp_path):
    """It returns because it was stopped."""
    trainer = trainers.returns_when_it_is_stopped
    with pytest.raises(JobInterrupted):
        launch(trainer, {"isolation": "none"}, run_dir=tmp_path)
    assert read_identity(tmp_path).completed is None
    # nor where somebody has stopped nothing but the attempt
    with pytest.raises(TrainerFailedError, match="asked to stop"):
        launch(trainer, run_dir=tmp_path)
    assert read_identity(tmp_path).completed is None


def test_deaths_and_final_memory_errors_have_our_exceptions(tmp_path):
    def train(cfg):
        raise MemoryError

    with pytest.raises(TrainerFailedError, match="SIGSEGV"):
        launch(trainers.dies_of_segfault, run_dir=tmp_path / "a")
    cfg = {"isolation": "none", "training": {"batch_size": 8, "num_workers": 2}}
    with pytest.raises(AttemptsExhaustedError, match="cpu at micro-batch 8, 4"):
        launch(train, cfg, run_dir=tmp_path / "b")


def test_a_run_folder_in_the_config_is_named(tmp_path, caplog, monkeypatch):
    """It is an argument of launch(), and a key of the trainer's own elsewhere."""
    monkeypatch.chdir(tmp_path)
    cfg = {"isolation": "none", "run_dir": "mine"}
    launch(lambda cfg: 1, cfg)
    assert "the run folder is an argument of its own: launch(…, run_dir=…)" in caplog.text
    caplog.clear()
    launch(lambda cfg: 1, cfg, run_dir="theirs")
    assert "run_dir" not in caplog.text


def test_a_refused_launch_has_written_nothing(tmp_path):
    lock = threading.Lock()
    for trainer, words in ((lambda cfg: lock, "cannot pickle.*isolation=none"), ("no.x", "'no'")):
        with pytest.raises(ConfigError, match=words):
            launch(trainer, run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_an_inline_job_restores_the_allocators_variable(tmp_path, monkeypatch):
    """A later job would take it for a setting of the user."""
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    cfg = {"isolation": "none", "auto_device": False, "device": "cpu"}
    launch(lambda cfg: 1, cfg, run_dir=tmp_path)
    assert "PYTORCH_CUDA_ALLOC_CONF" not in os.environ
