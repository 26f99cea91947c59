"""The event channel, the screen and the log, at their edges."""

import logging
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
import tracemalloc
from io import FileIO
from pathlib import Path

import numpy
import pytest
import torch

from robust_train.attempt.run import Run, live_of
from robust_train.children import attempt_output
from robust_train.children.attempt_output import AttemptLog, OutputPump
from robust_train.files import to_plain, write_json
from robust_train.host import wire
from robust_train.host.job_logging import drop_lines_on_full_disk
from robust_train.host.screen import Screen
from robust_train.host.signals import choose_stop_signal
from robust_train.host.streams import never_blocking_output
from robust_train.host.votes import STOP, Votes
from robust_train.host.wire import EventSender, read_events
from robust_train.model.attempt import Attempt
from robust_train.model.events import (
    CheckpointSaved,
    EpochEnded,
    Finished,
    MemoryReported,
    Progress,
    TrainingStarted,
    UserEvent,
)
from robust_train.model.spec import AttemptSpec
from robust_train.report.narration import gpu_memory_summary
from world import wait_until


@pytest.fixture
def channel():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    with ours, theirs:
        yield ours, theirs


@pytest.fixture
def screen():
    """A screen on a pipe, and the descriptor that its reader has."""
    read_end, write_end = os.pipe()
    yield Screen(write_end), read_end
    os.close(read_end)
    os.close(write_end)


def test_what_json_cannot_hold_is_named_by_place(caplog):
    """The message names the place in the trainer's result."""
    result = {"loss": float("nan"), "best": {"model": object(), "scores": [1.5, float("inf")]}}
    saved = to_plain(result, "it")
    assert (saved["best"]["scores"][0], type(saved["best"]["model"])) == (1.5, str)
    assert [record.getMessage() for record in caplog.records] == [
        "it['loss'] is nan, which JSON lacks: it is saved as null",
        "it['best']['model'] is a builtins.object, which is not JSON: it is saved as text",
        "it['best']['scores'][1] is inf, which JSON lacks: it is saved as null",
    ]


def test_a_result_that_holds_itself_is_saved_once(caplog):
    """Its parts refer to it, so each level would hold it twice as often as the one before."""
    whole = {"name": "whole"}
    whole["parts"] = [{"of": whole}, {"of": whole}]
    saved = to_plain(whole, "the trainer's result")
    assert [str(part["of"])[:16] for part in saved["parts"]] == ["{'name': 'whole'"] * 2
    assert len(caplog.records) == 2


class Unprintable:
    def __repr__(self):
        raise RuntimeError("no repr")


NESTED = []
for _ in range(100_000):
    NESTED = [NESTED]


@pytest.mark.parametrize(
    "value",
    [NESTED, Unprintable(), 10**5000, {(1, 2): {3}}],
    ids=["nested", "unprintable", "long integer", "keys"],
)
def test_no_value_costs_the_result_or_an_event(value, tmp_path, channel):
    ours, theirs = channel
    send = EventSender(theirs)
    run = Run(run_dir=tmp_path, report=send)
    run.record("retry", {"found": value})
    send(Finished(to_plain([0.5, value], "the trainer's result")))
    recorded, finished = read_events(ours)
    assert recorded.fields["found"] == finished.result[1]
    assert finished.result[0] == 0.5
    write_json(tmp_path / "summary.json", {"result": finished.result})


@pytest.mark.parametrize("number", [float, numpy.int64, torch.tensor])
def test_steps_and_metrics_may_be_any_librarys_numbers(number, tmp_path, channel):
    """Otherwise the event of the attempt's end, which names the step, and with it the result would
    be lost.
    """
    ours, theirs = channel
    run = Run(run_dir=tmp_path, report=(send := EventSender(theirs)))
    run.started(number(0))
    run.progress(number(1), total_steps=number(9), loss=number(4))
    run.progress(number(2), total_steps=number(9), loss=number(3))
    live_of(run).reports.send_last_progress()
    run.checkpoint_saved(tmp_path, number(2))
    run.checkpoint_saved(tmp_path, None)
    run.epoch_ended(number(1), loss=number(3))
    live_of(run).reports.send(Finished(0.9, step=run.last_step))
    received = [*read_events(ours)]
    ours.close()
    live_of(run).reports.send(Finished(1))  # a launcher that is gone is not the trainer's trouble
    send.flush()
    assert received == [
        TrainingStarted(0),
        Progress(1, 9, {"loss": 4}),
        Progress(2, 9, {"loss": 3}),
        CheckpointSaved(str(tmp_path), 2),
        CheckpointSaved(str(tmp_path), 2),
        EpochEnded(1, 2, {"loss": 3}),
        Finished(0.9, step=2),
    ]


def all_until(last, ours, send):
    """Read events until this one comes."""
    received = []
    while last not in received[-1:]:
        received += read_events(ours)
        send.flush(0)
    return received


def test_only_progress_is_dropped_where_nobody_reads(channel):
    ours, theirs = channel
    send = EventSender(theirs)
    for event in [*map(Progress, range(2000)), *(CheckpointSaved("path", n) for n in range(2000))]:
        send(event)
    received = all_until(CheckpointSaved("path", 1999), ours, send)
    saved = [event.step for event in received if isinstance(event, CheckpointSaved)]
    assert saved == [*range(2000)]
    assert len(received) < 4000


@pytest.mark.parametrize("size", [10, 100_000, 20_000_000])
def test_an_event_of_any_size_arrives_whole(channel, size):
    """What is not an event never arrives as one."""
    ours, theirs = channel
    for packet in (b"not json", b'{"event": "finished", "step": "one"}', b'{"event": "?"}', b"\0"):
        theirs.send(packet)
    event = UserEvent("retry", {"event": "failed", "text": "x" * size})
    EventSender(theirs)(event)
    assert list(read_events(ours)) == [event]


def test_an_attempts_end_reaches_a_stopped_launcher(channel, monkeypatch):
    """It arrives however much is waiting to be read."""
    monkeypatch.setattr(wire, "MOST_WAITING_BYTES", 100_000)
    ours, theirs = channel
    send = EventSender(theirs)
    for step in range(2000):
        send(UserEvent("note", {"step": step, "text": "x" * 1000}))
    send(Finished("done"))
    received = all_until(Finished("done"), ours, send)
    steps = [event.fields["step"] for event in received if isinstance(event, UserEvent)]
    assert steps == [*range(len(steps))]
    assert len(steps) < 1000  # of the rest nothing was kept


_A_WORKER = """
import multiprocessing, os, signal, sys, time
from robust_train.attempt.signals import stop_on_signals

def ignores_sigint(ready):
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as pools of workers usually do
    ready.send(os.getpid())
    time.sleep(1000)

def has_a_handler(ready):
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
    ready.send(os.getpid())
    ready.recv()  # for ever

context = multiprocessing.get_context("fork")
with stop_on_signals(lambda: None):
    here, there = context.Pipe()
    worker = context.Process(target=globals()[sys.argv[1]], args=[there])
    worker.start()
    print(here.recv(), flush=True)
    input()
    worker.terminate()
    worker.join()
print(worker.exitcode)
"""


@pytest.mark.parametrize(
    ("work", "signum", "ending", "environ"),
    [
        ("ignores_sigint", signal.SIGINT, -signal.SIGTERM, {}),
        ("has_a_handler", signal.SIGTERM, 7, {}),
        ("ignores_sigint", signal.SIGTERM, -signal.SIGTERM, {"SUBMITIT_EXECUTOR": "slurm"}),
    ],
)
def test_a_worker_postpones_a_signal_from_elsewhere(work, signum, ending, environ):
    """Its parent ends it, even if it ignores that signal or waits in its own handler."""
    program = subprocess.Popen(
        [sys.executable, "-c", _A_WORKER, work],
        env={**os.environ, **environ},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    worker = int(program.stdout.readline())
    os.kill(worker, signum)
    while _is_pending(worker, signum):  # a second one like it would be lost
        time.sleep(0.01)
    shown, _ = program.communicate("continue\n", timeout=60)
    assert shown.strip() == str(ending)


def _is_pending(pid, signum):
    pending = re.search(r"^ShdPnd:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return pending is not None and bool(int(pending[1], 16) >> (signum - 1) & 1)


_UNDER_SUBMITIT = """
import os, signal, subprocess, sys
from robust_train.attempt.signals import stop_on_signals
stops = []
with stop_on_signals(lambda: stops.append(1), is_script=sys.argv[1] == "script"):
    os.kill(os.getpid(), signal.SIGTERM)
    child = subprocess.Popen(["sleep", "20"])
    child.terminate()
    print(len(stops), child.wait())
"""


@pytest.mark.parametrize(("kind", "shown"), [("function", "0 -15"), ("script", "1 -15")])
def test_sigterm_under_submitit_stops_only_scripts(kind, shown):
    """A script received it from the scheduler as well and may end as if it had completed; what a
    trainer terminates ends.
    """
    environ = {**os.environ, "SUBMITIT_EXECUTOR": "slurm"}
    program = [sys.executable, "-c", _UNDER_SUBMITIT, kind]
    assert subprocess.check_output(program, env=environ, text=True).strip() == shown


@pytest.mark.parametrize(("is_ignored", "signum"), [(False, signal.SIGINT), (True, signal.SIGUSR2)])
def test_submitits_stop_signal_is_never_ignored(is_ignored, signum):
    """It is another one for an attempt that ignores SIGINT, as after ``command &`` in a shell's
    script.
    """
    before = signal.signal(signal.SIGINT, signal.SIG_IGN if is_ignored else signal.SIG_DFL)
    try:
        assert choose_stop_signal({"SUBMITIT_EXECUTOR": "local"}) == signum
        assert choose_stop_signal({}) == signal.SIGTERM
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_checkpoint_without_a_step_has_the_latest():
    """It has the step that was reported last."""
    attempt = Attempt(1, AttemptSpec((), 8, 1))
    assert attempt.after(CheckpointSaved("a")).saved_step is None
    assert attempt.after(Progress(5)).after(CheckpointSaved("a")).saved_step == 5


def test_a_script_may_report_any_single_memory_figure():
    attempt = Attempt(1, AttemptSpec((), 8, 1)).after(MemoryReported("mine", max_allocated=2**30))
    assert "Max Allocated: 1.00 GiB" in gpu_memory_summary(attempt)


def test_dropped_output_is_reported_later(screen):
    screen, read_end = screen
    for _ in range(300):
        screen.write(b"x" * 10_000)
    screen.finish(0.0)  # nobody reads: it comes back
    shown = b""
    while select.select([read_end], [], [], 0.1)[0]:
        shown += os.read(read_end, 1 << 16)
        screen.show_waiting()
    assert len(shown) < 2_000_000
    assert b"Output truncated: no one was reading" in shown


def test_a_reader_that_stays_away_delays_output_once(screen, monkeypatch):
    screen, read_end = screen
    screen.write(b"x" * 200_000)
    screen.finish(0.01)
    slept = []
    monkeypatch.setattr("time.sleep", slept.append)
    screen.finish(0.01)
    assert slept == []
    os.read(read_end, 100_000)
    screen.finish(0.01)
    assert slept, "it may be reading again"


def test_a_programs_log_lines_wait_for_no_reader(monkeypatch):
    read_end, write_end = os.pipe()
    logger = logging.getLogger("robust_train")
    with os.fdopen(write_end, "w", encoding="latin-1") as stream:
        monkeypatch.setattr("sys.stderr", stream)
        handler = logging.StreamHandler(stream)
        monkeypatch.setattr(logger, "handlers", [*logger.handlers, handler])
        with never_blocking_output():
            assert handler.stream is sys.stderr is not stream
            print("8 → 4", file=sys.stderr)
        assert handler.stream is stream
    assert os.read(read_end, 100) == b"8 ? 4\n", "what an encoding lacks ends nothing"
    os.close(read_end)


def test_an_endless_bar_costs_the_same_for_weeks(tmp_path):
    """A progress bar that never ends its line."""
    log = AttemptLog(FileIO(tmp_path / "log", "ab"))
    log.write(b"first line\n")
    tracemalloc.start()
    for step in range(50_000):
        log.write(b"\rstep %d" % step)
    assert tracemalloc.get_traced_memory()[1] < 100_000  # of the 500 kB that were printed
    tracemalloc.stop()
    log.close()
    assert (tmp_path / "log").read_text() == "first line\nstep 49999"


def test_the_groups_lock_outlives_its_holder():
    """It waits for slow ranks."""
    votes = Votes(2)
    pid = os.fork()
    if pid == 0:
        with votes.locked():
            os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(0)
    wait_until(lambda: os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT | os.WNOHANG), "it stops")
    votes.raise_flag(STOP)  # takes no lock
    other = os.fork()
    if other == 0:
        votes.read_flag(STOP, 0)
        os._exit(0)
    time.sleep(1.2)  # longer than a rank was patient once
    assert os.waitpid(other, os.WNOHANG) == (0, 0), "it waits"
    os.kill(pid, signal.SIGKILL)
    assert os.waitpid(other, 0)[1] == os.waitpid(pid, 0)[0] - pid == 0
    assert votes.read_flag(STOP, 1)


@pytest.mark.parametrize(
    ("printed", "kept"),
    [
        # an unfinished line of one stream takes nothing of another
        (
            [(b"\rstep 1", 0), (b"a line on stderr\n", 1), (b"\rstep 2\n", 0)],
            b"a line on stderr\nstep 2\n",
        ),
        ([(b"x" * 700_000, 0)] * 3 + [(b"\n", 0)], b"x" * 2_100_000 + b"\n"),
    ],
    ids=["two streams", "a long line"],
)
def test_a_log_loses_nothing_but_what_was_rewritten(tmp_path, printed, kept):
    log = AttemptLog(FileIO(tmp_path / "log", "ab"))
    for data, stream in printed:
        log.write(data, stream)
    log.close()
    assert (tmp_path / "log").read_bytes() == kept


def test_a_full_disk_loses_log_lines_without_tracebacks(capsys):
    handler, root = logging.FileHandler("/dev/full"), logging.getLogger()
    root.addHandler(handler)
    drop_lines_on_full_disk()
    root.removeHandler(handler)

    def error_after(message, *arguments):
        handler.handle(logging.LogRecord("x", logging.INFO, "x.py", 1, message, arguments, None))
        return capsys.readouterr().err

    assert error_after("a line") == ""
    assert "a mistake" in error_after("a mistake: %d", "no number"), "that is the program's"
    with pytest.raises(OSError, match="No space left"):
        handler.close()


@pytest.mark.parametrize("are_one", [True, False])
def test_streams_into_one_file_keep_their_order(tmp_path, monkeypatch, are_one):
    """Two pipes would be read one after the other."""
    names = ["both", "both"] if are_one else ["out", "err"]
    with (tmp_path / names[0]).open("a") as out, (tmp_path / names[1]).open("a") as err:
        monkeypatch.setattr(attempt_output, "standard_output", lambda: out)
        monkeypatch.setattr(attempt_output, "standard_error", lambda: err)
        pump = OutputPump()
        streams = {"stdout": pump.stdout.child_fd, "stderr": pump.stderr.child_fd}
        subprocess.run(["sh", "-c", "for n in 1 2 3; do echo $n; echo e$n >&2; done"], **streams)
        pump.close()
    text = "".join((tmp_path / name).read_text() for name in dict.fromkeys(names)).split()
    assert text == (
        ["1", "e1", "2", "e2", "3", "e3"] if are_one else ["1", "2", "3", "e1", "e2", "e3"]
    )


def test_the_last_step_is_reported_before_the_end(tmp_path):
    """Steps in quick succession are thinned out; the event after them shows the last."""
    heard = []
    run = Run(run_dir=tmp_path, report=heard.append)
    for step in (1, 2):
        run.progress(step, loss=1 / step)
    run.epoch_ended(0, loss=0.5)
    kinds = [(type(event), event.step) for event in heard]
    assert kinds == [(Progress, 1), (Progress, 2), (EpochEnded, 2)]
