"""``robust-train wait RUN…``: until jobs or sweeps have ended; their exit code."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from robust_train.cli.logs import add_which, any_run
from robust_train.cli.output import EXIT_NOT_DONE, Parser, fail
from robust_train.readable import shortened
from robust_train.runfolder.lock import is_held
from robust_train.runfolder.run_list import NoLiveRun, read_run
from robust_train.sweep.sweep_table import read_table

_POLL_SECONDS = 0.5


def main(argv: Sequence[str] | None = None) -> int:
    """Wait for each; return the code of the first one that did not complete, else 0."""
    about = "Wait until jobs have ended; the exit code is theirs."
    parser = Parser(prog="robust-train wait", description=about)
    add_which(parser, "*")
    try:
        folders = [any_run(which).run_dir for which in parser.parse_args(argv).which or [None]]
    except NoLiveRun as problem:
        return fail("wait", str(problem))
    codes = [wait_for(folder) for folder in folders]
    return next((code for code in codes if code), 0)


def wait_for(folder: Path) -> int:
    """Wait for the job or sweep in a folder; print how it ended and return its exit code."""
    if (folder / "sweep.json").is_file():
        while is_held(folder):
            time.sleep(_POLL_SECONDS)
        table = read_table(folder)
        code = None if table is None else table.exit_code
        print(f"{folder}: {'died' if code is None else f'ended with exit code {code}'}")
        return EXIT_NOT_DONE if code is None else code
    while (run := read_run(folder)) is not None and run.alive:
        time.sleep(_POLL_SECONDS)
    if run is None:
        return fail("wait", f"{folder} is gone")
    state = run.state
    reason = f": {shortened(state.reason, 200)}" if state is not None and state.reason else ""
    print(f"{run.id} {run.status}{reason}; {folder}")
    code = state.exit_code if state is not None and state.is_final else None
    return EXIT_NOT_DONE if code is None else code
