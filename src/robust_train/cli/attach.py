"""``robust-train attach [RUN]``: a live job as its own terminal would show it."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from robust_train.cli.logs import add_which, as_shown, output_of
from robust_train.cli.output import Parser, fail
from robust_train.cli.wait import wait_for
from robust_train.execution import screen
from robust_train.report.status import LiveStatus
from robust_train.runfolder.run_list import NoLiveRun, choose_run, read_run

_LAST_BYTES = 4096


def main(argv: Sequence[str] | None = None) -> int:
    """Show a job's output and status until it ends; return its exit code, 0 after Ctrl-C."""
    about = "Show a live job's output and status; Ctrl-C leaves it running."
    parser = Parser(prog="robust-train attach", description=about)
    add_which(parser)
    try:
        run = choose_run(parser.parse_args(argv).which)
    except NoLiveRun as problem:
        return fail("attach", str(problem))
    name = "" if run.state is None else f" ({run.state.name})"
    print(f"attached to {run.id}{name}; Ctrl-C leaves it running", flush=True)
    try:
        with screen.never_blocking_output(), LiveStatus(is_wanted=sys.stdout.isatty()) as live:
            for data in output_of(run.run_dir, follow=True, last_bytes=_LAST_BYTES):
                screen.show(sys.stdout.fileno(), as_shown(data))
                now = read_run(run.run_dir)
                if now is not None and now.alive and now.state is not None:
                    live.show(now.state)
    except KeyboardInterrupt:
        print(f"\n{run.id} goes on; robust-train attach {run.id} comes back to it")
        return 0
    return wait_for(run.run_dir)
