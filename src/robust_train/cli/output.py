"""``robust-train logs`` and ``attach``: prints the output of a job's attempts from its run folder.

Both run in the command's process, and follow a live job by polling its log files.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from robust_train.cli.runs import POLL_SECONDS, wait_for
from robust_train.folder.run_list import choose_run, read_run
from robust_train.host import screen, streams
from robust_train.model.errors import NotDoneError

CHUNK_BYTES = 1 << 20
_ATTACH_BYTES = 4096  # end of the output that `attach` shows first
_LOG = "attempt-{}.log"
_LOG_NAME = re.compile(r"attempt-(\d+)\.log")


def logs(arguments: Namespace) -> int:
    """Print the output of a job's last attempt. With ``-f``, continue until the job ends."""
    run = choose_run(arguments.which, dead_too=True, command="logs")
    is_followed = arguments.follow and run.alive
    attempt = arguments.attempt
    numbers = _list_attempts(run.run_dir)
    if attempt is not None and attempt not in numbers:
        listed = ", ".join(str(number) for number in numbers) or "none"
        raise NotDoneError(f"{run.id}: no log of attempt {attempt}; attempts with a log: {listed}")
    if not numbers and not is_followed:
        reason = None if run.state is None else run.state.reason
        raise NotDoneError(
            f"{run.id} ({run.status}) has started no attempt: {reason or run.run_dir}"
        )
    for data in read_output(run.run_dir, attempt or 0, follow=is_followed):
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    return 0


def attach(arguments: Namespace) -> int:
    """Show a job's output and status until it ends. Returns its exit code, 0 after Ctrl-C.

    For a job that has ended, show its last output and how it ended.
    """
    from robust_train.report.status import LiveStatus

    run = choose_run(arguments.which, dead_too=True, command="attach")
    if run.alive:
        print(f"attached to {run.id}; Ctrl-C leaves it running", flush=True)
    live = LiveStatus(is_wanted=sys.stdout.isatty())
    try:
        with streams.never_blocking_output(), live:
            for data in read_output(run.run_dir, follow=True, last_bytes=_ATTACH_BYTES):
                screen.show(sys.stdout.fileno(), data)
                now = read_run(run.run_dir)
                if now is not None and now.alive and now.state is not None:
                    live.show(now.state)
    except KeyboardInterrupt:
        print(f"\n{run.id} keeps running; robust-train attach {run.id} shows it again")
        return 0
    return wait_for(run.run_dir)


def read_output(
    run_dir: Path, attempt: int = 0, *, follow: bool = False, last_bytes: int = 0
) -> Iterator[bytes]:
    """Yield the output of an attempt.

    For a live job, only whole lines are shown, because its log may still change the last line.

    Args:
        run_dir: the run folder.
        attempt: the attempt's number. 0 means the last attempt, and with ``follow`` all later
            attempts too.
        follow: continue until the job ends. An empty value is yielded at each poll without output.
        last_bytes: start this many bytes before the end. 0 means at the start.
    """
    number = attempt
    position = 0
    while True:
        # The state is read before the log. Otherwise output of a job that ends in between is lost.
        run = read_run(run_dir)
        is_alive = follow and run is not None and run.alive
        numbers = _list_attempts(run_dir)
        is_first = number == 0
        if is_first and numbers:
            number = numbers[-1]
        has_ended = number > 0 and number + 1 in numbers
        data = b""
        path = run_dir / _LOG.format(number)
        # The log may not exist yet, and the folder may be removed at any time.
        with contextlib.suppress(OSError), path.open("rb") as file:
            if is_first and last_bytes:
                end = file.seek(0, os.SEEK_END)
                position = max(end - last_bytes, 0)
            file.seek(position)
            data = file.read(CHUNK_BYTES)
        if is_alive and not has_ended and len(data) < CHUNK_BYTES:
            data = data[: data.rfind(b"\n") + 1]
        position += len(data)
        if data:
            yield data
        elif has_ended and not attempt:
            number += 1
            position = 0
            yield b"\n==> attempt %d <==\n" % number
        elif has_ended or not is_alive:
            return
        else:
            yield b""
            time.sleep(POLL_SECONDS)


def _list_attempts(run_dir: Path) -> list[int]:
    """Return the numbers of the attempts that have a log."""
    matches = [_LOG_NAME.fullmatch(path.name) for path in run_dir.glob(_LOG.format("*"))]
    return sorted(int(match[1]) for match in matches if match)
