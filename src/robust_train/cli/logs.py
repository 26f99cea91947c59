"""``robust-train logs [RUN]``: what a job's attempts have printed, and what they print now."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from robust_train.cli.output import Parser, fail
from robust_train.runfolder import run_list

POLL_SECONDS = 0.3
CHUNK_BYTES = 1 << 20
_NAME = re.compile(r"attempt-(\d+)\.log")
_LOG_LINE = re.compile(
    rb"^\[[\d-]{10} ([\d:]{8}),\d{3}\]\[[^]\n]+\]\[(?:INFO|DEBUG|([A-Z]+))\] - ", re.MULTILINE
)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the log of a job's last attempt; with ``-f`` go on until the job ends."""
    about = "Print what the last attempt of a job has printed."
    parser = Parser(prog="robust-train logs", description=about)
    add_which(parser)
    follow = "go on with what is printed, in later attempts too, until the job ends"
    parser.add_argument("-f", "--follow", action="store_true", help=follow)
    number = "that of attempt N instead of the last one"
    parser.add_argument("--attempt", type=int, metavar="N", help=number)
    arguments = parser.parse_args(argv)
    try:
        run = any_run(arguments.which)
    except run_list.NoLiveRun as problem:
        return fail("logs", str(problem))
    follows, attempt = arguments.follow and run.alive, arguments.attempt
    numbers = attempts_in(run.run_dir)
    if attempt is not None and attempt not in numbers:
        there = ", ".join(map(str, numbers)) or "none"
        return fail("logs", f"{run.id}: no log of attempt {attempt}; there are {there}")
    if not numbers and not follows:
        reason = (run.state and run.state.reason) or run.run_dir
        return fail("logs", f"{run.id} ({run.status}) has started no attempt: {reason}")
    for data in output_of(run.run_dir, attempt, follow=follows):
        sys.stdout.buffer.write(as_shown(data))
        sys.stdout.buffer.flush()
    return 0


def as_shown(data: bytes) -> bytes:
    """Return what a log holds: as it is for a pipe; with short log lines for a terminal."""

    def short(line: re.Match[bytes]) -> bytes:
        return b"%s %s" % (line[1], line[2].lower() + b": " if line[2] else b"")

    return _LOG_LINE.sub(short, data) if sys.stdout.isatty() else data


def add_which(parser: Parser, nargs: str = "?") -> None:
    """Add the argument that names a run."""
    which = "id, folder or job's name; default: the only one of yours that is alive"
    parser.add_argument("which", nargs=nargs, metavar="RUN", help=which)


def any_run(which: str | None) -> run_list.Run:
    """Return the run that is meant, live or past; by default the live one, else the newest. Raises
    NoLiveRun: none is meant, or more than one."""
    try:
        return run_list.choose_run(which, dead_too=True)
    except run_list.NothingAlive:
        if not (known := run_list.find_runs()):
            raise
        return known[-1]


def attempts_in(run_dir: Path) -> list[int]:
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
    """Yield what an attempt has printed; None: the last one, and with ``follow`` those after it. Of
    a job that goes on only whole lines: its log may still take back the last one. ``last_bytes``:
    begin so many bytes before the end, at most."""
    number, position, ends_line = attempt, 0, True
    while True:
        run = run_list.read_run(run_dir)  # before the file: what comes last is not missed
        goes_on = follow and run is not None and run.alive
        numbers = attempts_in(run_dir)
        if number is None and numbers:
            number = numbers[-1]
            if last_bytes is not None:
                position = _line_start(run_dir, number, last_bytes)
        has_ended = number is not None and number + 1 in numbers
        data = b"" if number is None else _read(run_dir, number, position)
        if goes_on and not has_ended and len(data) < CHUNK_BYTES:
            data = data[: data.rfind(b"\n") + 1]
        position += len(data)
        if data:
            yield data
            ends_line = data.endswith(b"\n")
        elif number is not None and has_ended and attempt is None:
            number, position = number + 1, 0
            yield b"%s==> attempt %d <==\n" % (b"" if ends_line else b"\n", number)
        elif has_ended or not goes_on:
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
