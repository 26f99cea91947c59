"""``robust-train logs``, ``attach`` and ``wait``: follow a job."""

from __future__ import annotations

import re
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from robust_train.cli.command import CommandFailed
from robust_train.folder import run_list
from robust_train.folder.lock import is_held
from robust_train.host import screen
from robust_train.model.errors import EXIT_FAILED
from robust_train.readable import shortened
from robust_train.sweep.record import read_table

POLL_SECONDS = 0.3
CHUNK_BYTES = 1 << 20
_ATTACH_BYTES = 4096
_NAME = re.compile(r"attempt-(\d+)\.log")
_LOG_LINE = re.compile(
    rb"^\[[\d-]{10} ([\d:]{8}),\d{3}\]\[[^]\n]+\]\[(?:INFO|DEBUG|([A-Z]+))\] - ",
    re.MULTILINE,
)


def logs(arguments: Namespace) -> int:
    """Print the output of a job's last attempt; with ``-f`` continue until the job ends."""
    run = _any_run(arguments.which)
    follows, attempt = arguments.follow and run.alive, arguments.attempt
    numbers = _attempts_in(run.run_dir)
    if attempt is not None and attempt not in numbers:
        there = ", ".join(map(str, numbers)) or "none"
        raise CommandFailed(f"{run.id}: no log of attempt {attempt}; there are {there}")
    if not numbers and not follows:
        reason = (run.state and run.state.reason) or run.run_dir
        raise CommandFailed(f"{run.id} ({run.status}) has started no attempt: {reason}")
    for data in output_of(run.run_dir, attempt, follow=follows):
        sys.stdout.buffer.write(as_shown(data))
        sys.stdout.buffer.flush()
    return 0


def attach(arguments: Namespace) -> int:
    """Show a job's output and status until it ends; return its exit code, 0 after Ctrl-C."""
    from robust_train.report.status import LiveStatus

    run = run_list.choose_run(arguments.which)
    name = "" if run.state is None else f" ({run.state.name})"
    print(f"attached to {run.id}{name}; Ctrl-C leaves it running", flush=True)
    try:
        with (
            screen.never_blocking_output(),
            LiveStatus(is_wanted=True) as live,
        ):
            for data in output_of(run.run_dir, follow=True, last_bytes=_ATTACH_BYTES):
                screen.show(sys.stdout.fileno(), as_shown(data))
                now = run_list.read_run(run.run_dir)
                if now is not None and now.alive and now.state is not None:
                    live.show(now.state)
    except KeyboardInterrupt:
        print(f"\n{run.id} keeps running; robust-train attach {run.id} shows it again")
        return 0
    return _wait_for(run.run_dir)


def wait(arguments: Namespace) -> int:
    """Wait for each job or sweep; return the code of the first that did not complete, else 0."""
    folders = [_any_run(which).run_dir for which in arguments.which or [None]]
    codes = [_wait_for(folder) for folder in folders]
    return next((code for code in codes if code), 0)


def _wait_for(folder: Path) -> int:
    """Wait for the job or sweep in a folder; print how it ended and return its exit code."""
    if (folder / "sweep.json").is_file():
        while is_held(folder):
            time.sleep(POLL_SECONDS)
        table = read_table(folder)
        code = None if table is None else table.exit_code
        print(f"{folder}: {'died' if code is None else f'ended with exit code {code}'}")
        return EXIT_FAILED if code is None else code
    while (run := run_list.read_run(folder)) is not None and run.alive:
        time.sleep(POLL_SECONDS)
    if run is None:
        raise CommandFailed(f"{folder} is gone")
    state = run.state
    reason = (
        f": {shortened(state.reason, 200)}"
        if state is not None and state.reason
        else ""
    )
    print(f"{run.id} {run.status}{reason}; {folder}")
    code = state.exit_code if state is not None and state.is_final else None
    return EXIT_FAILED if code is None else code


def as_shown(data: bytes) -> bytes:
    """Return a part of a log: unchanged in a pipe, with short log lines on a terminal."""
    if not sys.stdout.isatty():
        return data

    def short(line: re.Match[bytes]) -> bytes:
        level = line[2].lower() + b": " if line[2] else b""
        return b"%s %s" % (line[1], level)

    return _LOG_LINE.sub(short, data)


def _any_run(which: str | None) -> run_list.Run:
    """Return the run that is meant, live or past; by default the live one, else the newest.

    Raises NoLiveRun if there is none, or more than one.
    """
    try:
        return run_list.choose_run(which, dead_too=True)
    except run_list.NothingAlive:
        known = run_list.find_runs()
        if not known:
            raise
        return known[-1]


def _attempts_in(run_dir: Path) -> list[int]:
    """Return the numbers of the attempts that have a log."""
    found = (_NAME.fullmatch(path.name) for path in run_dir.glob("attempt-*.log"))
    return sorted(int(match[1]) for match in found if match)


def output_of(
    run_dir: Path,
    attempt: int | None = None,
    *,
    follow: bool = False,
    last_bytes: int | None = None,
) -> Iterator[bytes]:
    """Yield what an attempt has printed.

    Of a job that is alive only whole lines are shown: its log may still take back the last one.

    Args:
        run_dir: the run folder.
        attempt: the attempt's number; None for the last one, and with ``follow`` those after it.
        follow: continue until the job ends.
        last_bytes: begin at most this many bytes before the end.
    """
    number, position, ends_line = attempt, 0, True
    while True:
        # read before the log, so that the last output is not missed
        run = run_list.read_run(run_dir)
        is_alive = follow and run is not None and run.alive
        numbers = _attempts_in(run_dir)
        if number is None and numbers:
            number = numbers[-1]
            if last_bytes is not None:
                position = _line_start(run_dir, number, last_bytes)
        has_ended = number is not None and number + 1 in numbers
        data = b"" if number is None else _read(run_dir, number, position)
        if is_alive and not has_ended and len(data) < CHUNK_BYTES:
            data = data[: data.rfind(b"\n") + 1]
        position += len(data)
        if data:
            yield data
            ends_line = data.endswith(b"\n")
        elif number is not None and has_ended and attempt is None:
            number, position = number + 1, 0
            yield b"%s==> attempt %d <==\n" % (b"" if ends_line else b"\n", number)
        elif has_ended or not is_alive:
            return
        else:
            yield b""
            time.sleep(POLL_SECONDS)


def _line_start(run_dir: Path, number: int, last_bytes: int) -> int:
    """Return where the first whole line of the last bytes of a log begins."""
    try:
        size = (run_dir / f"attempt-{number}.log").stat().st_size
    except OSError:
        return 0
    start = max(size - last_bytes, 0)
    return start and start + _read(run_dir, number, start).find(b"\n") + 1


def _read(run_dir: Path, number: int, position: int) -> bytes:
    try:
        with (run_dir / f"attempt-{number}.log").open("rb") as file:
            file.seek(position)
            return file.read(CHUNK_BYTES)
    except OSError:
        return b""
