"""The live status on a terminal: what it says, and that everything else stays whole."""

import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import termios
from dataclasses import replace

import pytest
from rich.text import Text

from attempts import built, gpu
from robust_train.features.speed.record import SpeedNote
from robust_train.folder.state import RunState
from robust_train.host import screen
from robust_train.host.live_area import LiveArea
from robust_train.model.attempt import Attempt
from robust_train.model.spec import AttemptSpec, Speed
from robust_train.report.status import status_lines
from terminal_screen import showing_lines

GROUP = (gpu(1, 20), gpu(2, 20))
RUNNING = RunState(
    *("1-a", "lora_flowers102", "/run", 7, "box", "me", 0.0, 0.0),
    state="running",
    attempt=built(
        Attempt,
        2,
        AttemptSpec(GROUP, 16, 4, ranks=2),
        end_step=100,
        total_steps=400,
        micro_batch=8,
        loss=0.123456,
        memory={"allocated": 3 << 30},
        speed=(Speed(100, 0.5, 0.6, samples_per_second=256.0),),
    ),
    checkpoint="/run/checkpoints/step-50.pt",
    checkpoint_step=50,
)


def test_the_status_says_everything_about_a_running_attempt():
    assert status_lines(RUNNING, 75.0, 160)[0] == (
        "running 1:15 · attempt 2 on cuda:1,cuda:2 · "
        "micro-batch 16 → 8 × accumulation 4 × 2 processes"
    )
    assert status_lines(RUNNING, 20.0, 160)[1:] == [
        "━" * 12 + "─" * 36 + "  25 %",
        "step 100/400 · 512 samples/s · 2:30 left · loss 0.1235 · memory 3.0 GiB"
        " · checkpoint step 50",
    ]


SLOW = Speed(2, 100.0, 100.0, seconds_per_step_now=120.0)
WAITS = "for a GPU with 4000 MiB free, 59:00 left; GPU 0 is held by anna"
SCRIPT = Attempt(1, AttemptSpec((), 1, 1, has_batch=False))


@pytest.mark.parametrize(
    ("changes", "lines"),
    [
        (
            {"state": "waiting", "attempt": None, "waiting": {"reason": f"waiting {WAITS}"}},
            [f"waiting 0:01 · {WAITS}"],
        ),
        # it knows no batch and no steps
        ({"attempt": SCRIPT, "checkpoint": None}, ["running 0:01 · attempt 1 on the CPU"]),
        ({"state": "completed"}, []),
    ],
)
def test_a_status_has_what_is_known(changes, lines):
    assert status_lines(replace(RUNNING, **changes), 1.0, 160) == lines


def test_steps_are_counted_if_no_samples_are_reported():
    shown = replace(RUNNING, attempt=RUNNING.attempt.having(SpeedNote((SLOW,))))
    assert "0.008333 steps/s · 10:00:00 left" in status_lines(shown, 0.0, 160)[2]


@pytest.mark.parametrize("columns", [20, 80, 120, 160])
@pytest.mark.parametrize(
    "state", ["starting", "waiting", "running", "between attempts", "stopping"]
)
def test_no_status_line_is_wider_than_the_terminal(state, columns):
    shown = replace(RUNNING, state=state, reason="why " * 40, waiting={"reason": "why " * 40})
    lines = status_lines(shown, 90.0, columns)
    assert lines
    assert max(map(len, lines)) <= columns


@pytest.fixture(autouse=True)
def xterm(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")


@pytest.fixture
def terminal():
    """Both ends of a terminal: a person's and ours."""
    ours, theirs = pty.openpty()
    os.set_blocking(ours, False)
    yield ours, theirs
    os.close(theirs)
    with contextlib.suppress(OSError):  # a test has closed it
        os.close(ours)


def resize(terminal, columns):
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))


def shown_on(terminal):
    written = b""
    while True:
        screen.show_waiting()
        try:
            written += os.read(terminal, 1 << 16)
        except BlockingIOError:
            return written.decode()


def test_a_line_between_two_bars_stays_whole(terminal):
    """The bars resume below it."""
    reads, descriptor = terminal
    resize(descriptor, 80)
    with LiveArea(descriptor) as area:
        for number in (1, 2):
            area.show([Text(f"step {number}")])
            bars = b"\router %d\n\rinner %d\x1b[A" % (number, number)
            screen.show(descriptor, bars, source="bars")
        seen = shown_on(reads)
        assert showing_lines(seen, 80) == ["outer 2", "inner 2", "step 2"]
        screen.show(descriptor, b"a line\n")
        screen.show(descriptor, bars, source="bars")
    seen += shown_on(reads)
    shown = [line for line in showing_lines(seen, 80) if line]
    assert shown == ["outer 2", "inner 2", "a line", "outer 2", "inner 2"]


@pytest.mark.parametrize("columns", [80, 120, 160])
def test_output_scrolls_above_the_status(terminal, columns):
    """Progress bars stay whole."""
    reads, descriptor = terminal
    resize(descriptor, columns)
    area = LiveArea(descriptor)
    with area:
        area.show([Text("running"), Text("step 1")])
        screen.show(descriptor, b"a line\n")
        screen.show(descriptor, b"\r 10%|#", source="bar")
        screen.show(descriptor, b"x" * columns + b"y\n")
        screen.show(descriptor, b"\r 20%|##", source="bar")
        area.show([Text("running"), Text("step 2")])
        seen = shown_on(reads)
        whole = ["a line", "x" * columns, "y"]
        assert showing_lines(seen, columns) == [*whole, " 20%|##", "running", "step 2"]
        screen.show(descriptor, b"\r100%|##########\n", source="bar")
        screen.end_line(descriptor, source="bar")
    seen += shown_on(reads)
    assert [line for line in showing_lines(seen, columns) if line] == [*whole, "100%|##########"]
    assert "\x1b[?25l" not in seen, "who is killed cannot bring the cursor back"


def test_a_terminal_that_became_narrower_keeps_its_lines(terminal):
    reads, descriptor = terminal
    area = LiveArea(descriptor)
    with area:
        screen.show(descriptor, b"a line\n")
        area.show([Text("s" * 70)])
        shown_on(reads)
        resize(descriptor, 40)
        area.show([Text("s" * 30)])
        seen = shown_on(reads)
    reflowed = "a line\r\n\r\n" + "s" * 40 + "\r\n" + "s" * 30 + "\x1b[2A\r"
    assert showing_lines(reflowed + seen, 40) == ["a line", "", "s" * 30]


def test_the_status_goes_on_where_somebody_reads_again(terminal):
    reads, descriptor = terminal
    with LiveArea(descriptor) as area:
        screen.show(descriptor, b"z" * 30_000 + b"\n")
        seen = b""
        while b"running again" not in seen:
            area.show([Text("running again")])
            assert select.select([reads], [], [], 5.0)[0], "no more output arrives"
            seen += os.read(reads, 1 << 16)


def test_a_terminal_that_is_gone_ends_nothing(terminal):
    reads, descriptor = terminal
    with LiveArea(descriptor) as area:
        area.show([Text("running")])
        os.close(reads)
        screen.show(descriptor, b"a line\n")
        area.show([Text("running")])


def test_the_shells_last_lines_are_left_alone(terminal, monkeypatch):
    reads, descriptor = terminal
    of_the_shell = ("os.tcgetpgrp", lambda descriptor: 1)
    with LiveArea(descriptor) as area:
        area.show([Text("running"), Text("step 1")])
        shown_on(reads)
        with monkeypatch.context() as patch:
            patch.setattr(*of_the_shell)
            screen.show(descriptor, b"a line\n")
            area.show([Text("running"), Text("step 2")])
            assert shown_on(reads) == "a line\r\n"
        area.show([Text("step 3")])
        seen = shown_on(reads)
        assert showing_lines("$ fg\r\n" + seen, 80) == ["$ fg", "", "step 3"]
        monkeypatch.setattr(*of_the_shell)
    assert "\x1b" not in shown_on(reads)


def test_ctrl_z_leaves_the_shell_no_status(terminal, monkeypatch):
    """The shell would write into it."""
    reads, descriptor = terminal
    stopped = []
    monkeypatch.setattr("os.kill", lambda pid, signum: stopped.append((pid, signum)))
    with LiveArea(descriptor) as area:
        for step in (1, 2):
            screen.show(descriptor, b"loss 0.5")
            area.show([Text("running"), Text(f"step {step}")])
            signal.raise_signal(signal.SIGTSTP)
            shown = showing_lines(shown_on(reads) + "[1]+  Stopped\r\n$", 80)
            said = "stopped by Ctrl-Z: training continues in the meantime; fg shows it again"
            assert shown == ["loss 0.5", said, "[1]+  Stopped", "$"], f"step {step}"
    assert stopped == [(os.getpid(), signal.SIGTSTP)] * 2
    assert signal.getsignal(signal.SIGTSTP) == signal.SIG_DFL
