"""``robust-train runs``: your jobs, live and past; ``robust-train run list``: the live ones."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence

from robust_train.cli.output import Parser, plain_lines, print_json
from robust_train.events import Json
from robust_train.readable import as_clock, shortened
from robust_train.runfolder.run_list import DIED, Run, find_runs, state_directory
from robust_train.runfolder.summary import read_summary
from robust_train.sweep.sweep_table import short_result

COLUMNS = ("id", "state", "job", "where", "step", "time", "result", "run folder")
_RIGHT = {"step", "time"}
USUALLY = 20


def main(argv: Sequence[str] | None = None) -> int:
    """List the user's jobs, the newest first."""
    about = "Your jobs, live and past, the newest first."
    parser = Parser(prog="robust-train runs", description=about)
    parser.add_json()
    meaning = f"older ones than the newest {USUALLY} as well"
    parser.add_argument("--all", action="store_true", help=meaning)
    arguments = parser.parse_args(argv)
    found = find_runs()[::-1]
    if not found and not arguments.json:
        print(f"no run of yours is on the list in {state_directory()}")
        return 0
    return show(found, arguments.json, None if arguments.all else USUALLY)


def show(runs: Sequence[Run], as_json: bool, most: int | None = None) -> int:
    """Print the first ``most`` of these runs, and how those that were interrupted go on."""
    shown = runs[:most]
    if as_json:
        print_json({"runs": [{**run.about(), **_result(run)} for run in shown]})
        return 0
    if not runs:
        print("no run of yours is alive on this machine; robust-train runs lists earlier ones")
        return 0
    _print([_row(run) for run in shown])
    if len(shown) < len(runs):
        print(f"{len(runs) - len(shown)} older ones: --all")
    for run in shown:
        if run.status == DIED and run.state is not None and run.state.resume_command:
            print(f"{run.id} was interrupted: {run.why_died}. To go on:")
            print(f"  {run.state.resume_command}")
    return 0


def _print(rows: Sequence[Sequence[str]]) -> None:
    """Print one line a job; on a terminal without the folder where that does not fit."""
    lines = plain_lines(COLUMNS, rows, _RIGHT)
    if sys.stdout.isatty():
        width = shutil.get_terminal_size().columns
        if max(map(len, lines)) > width:
            narrow = plain_lines(COLUMNS[:-1], [row[:-1] for row in rows], _RIGHT)
            lines = [line[:width] for line in narrow]
    print("\n".join(lines))


def _row(run: Run) -> list[str]:
    about, state = run.about(), run.state
    result = _result(run).get("result")
    reason = state.reason if state is not None and not run.alive else None
    cells = (
        run.id,
        "interrupted" if about["state"] == DIED else about["state"],
        about.get("name"),
        (about.get("device") or "-") + ("" if run.is_here else f" on {about['host']}"),
        step_of(about),
        as_clock(int(about["seconds"])) if "seconds" in about else None,
        shortened(reason, 60) if reason and result is None else short_result(result),
        run.run_dir,
    )
    return ["-" if cell is None else str(cell) for cell in cells]


def _result(run: Run) -> dict[str, Json]:
    """Return ``result`` of a job that completed."""
    summary = read_summary(run.run_dir) if run.status == "completed" else None
    return {} if summary is None else {"result": summary.objective}


def step_of(about: dict[str, Json]) -> str | None:
    """Return ``12/400``, or ``12`` where the number of all steps is unknown."""
    step, total = about.get("step"), about.get("total_steps")
    return None if step is None else f"{step}/{total}" if total is not None else str(step)
