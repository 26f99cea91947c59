"""How large a journal gets, and what reading it costs, after an hour and after weeks.

    python benchmarks/journal_bounds.py [--events 20000000] [--folder /tmp/journal_bounds]

Writes progress events as a launcher does, ten a second by their own clock, and prints the size of
the journal, the time a next launch takes to read it and the time the report takes to read the run
folder: for an hour's worth (36,000 events) and for ``--events`` (20 million are 23 days).
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from robust_train.folder import journal as journal_module
from robust_train.folder.journal import Journal, attempts_in
from robust_train.model.events import AttemptStarted, CheckpointSaved, MemoryReported, Progress
from robust_train.model.spec import AttemptSpec
from robust_train.report.sources import read_sources

AN_HOUR = 36_000
A_DAY_BEGINS = 1.7e9


class TenASecond:
    """The writer's clock."""

    def __init__(self) -> None:
        self.seconds = A_DAY_BEGINS

    def time(self) -> float:
        self.seconds += 0.1
        return self.seconds


def write(folder: Path, events: int) -> float:
    """Write a journal of so many events; the CPU seconds that it took."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    journal_module.time = TenASecond()  # type: ignore[assignment]
    began = time.process_time()
    journal = Journal(folder / "journal.jsonl")
    journal.write(AttemptStarted(AttemptSpec((), 64, 1)), 1)
    for step in range(events):
        if step % 3000 == 0:
            journal.write(CheckpointSaved(f"checkpoints/step-{step:08d}.pt", step), 1)
            journal.write(MemoryReported(f"epoch {step // 3000}", resident=2**30), 1)
        journal.write(Progress(step, events, {"loss": 1 / (step + 1), "lr": 1e-3}), 1)
    return time.process_time() - began


def median_of(read: Callable[[], object], repeats: int = 7) -> float:
    """Median of the CPU seconds that ``read`` takes."""
    took = []
    for _ in range(repeats):
        began = time.process_time()
        read()
        took.append(time.process_time() - began)
    return statistics.median(took)


def main() -> None:
    """Print one line for each number of events."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=20_000_000)
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir(), "journal_bounds")
    )
    arguments = parser.parse_args()
    print(
        f"{'events':>12} {'kB':>8} {'lines':>7} {'attempts_in ms':>16} {'read_sources ms':>16} "
        f"{'write µs/event':>15}"
    )
    for events in (AN_HOUR, arguments.events):
        wrote = write(arguments.folder, events)
        path = arguments.folder / "journal.jsonl"
        lines = path.read_bytes().count(b"\n")
        earlier = median_of(lambda path=path: attempts_in(path))
        sources = median_of(lambda: read_sources(arguments.folder))
        print(
            f"{events:>12,} {path.stat().st_size / 1000:>8.0f} {lines:>7} {1000 * earlier:>16.1f} "
            f"{1000 * sources:>16.1f} {1e6 * wrote / events:>15.1f}",
            flush=True,
        )
    shutil.rmtree(arguments.folder)


if __name__ == "__main__":
    main()
