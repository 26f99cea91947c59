"""Recovery from running out of memory, side by side with what other libraries do about it.

Real out-of-memory errors on the CPU: each contestant does the same job in a process of its own,
whose private memory (RLIMIT_DATA) may grow by so much that half of the requested batch fits and the
whole does not; the limit is measured first. Two cases: memory runs out at the first step, or late,
at step 40 of 60, where the samples have become longer.

What is counted: ``wall`` and ``CPU`` from the first line of the training to the trained weights;
building the model, looking for a batch size, failing, restarting and checkpoints count, starting an
interpreter and importing libraries do not. These are in ``command``, the wall time of the whole
process. ``repeated`` are samples that were computed beyond those that are trained on, in optimizer
steps of the requested batch. ``distance`` is the largest difference of a final weight from the run
that had memory without limit, relative to the largest weight. ``peak`` is how far resident memory
grew during training.

Run: python benchmarks/recovery.py [--runs 3] [--only in_step hand_made] [--markdown]
The peers come with pip install -e '.[bench]'.
Goals: 1.10 × the ideal's wall time or less for the first step, 1.05 × for late; at most 1 step
repeated; the same weights (1e-6).
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from recovery_contestants import OURS_AND_PLAIN, Contestant
from recovery_job import METER, Job, measure_limit, warm_up
from recovery_peers import PEERS

CONTESTANTS: dict[str, Contestant] = {**OURS_AND_PLAIN, **PEERS}
# whose weights are the reference
REFERENCE = "unlimited"
CASES = ("first", "late")
MIB = 1024**2

Result = dict[str, Any]


def child(name: str, job: Job, folder: Path) -> None:
    """Be one contestant, or measure the limit; leaves ``result.json`` and ``weights.pt``."""
    warm_up()
    if name == "limit":
        (folder / "result.json").write_text(json.dumps({"limit": measure_limit(job)}))
        return
    contestant = CONTESTANTS[name]
    try:
        for module in contestant.modules:
            importlib.import_module(module)
    except ImportError as error:
        if (error.name or "").startswith("robust_train"):
            raise
        (folder / "result.json").write_text(json.dumps({"missing": str(error)}))
        return
    result: Result = {}
    weights = None
    started, cpu_started = time.perf_counter(), time.process_time()
    try:
        ending = contestant.run(job, folder)
    except Exception as error:
        result["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
    else:
        result["seconds"] = time.perf_counter() - started - ending.seconds_before
        result["cpu_seconds"] = time.process_time() - cpu_started
        result |= METER.figures() | (ending.figures or {})
        weights = ending.weights
    result["steps"] = len(METER.step_samples)
    METER.disarm()
    if weights is not None:
        vector = torch.cat([weights[key].flatten() for key in sorted(weights)])
        torch.save(vector, folder / "weights.pt")
    (folder / "result.json").write_text(json.dumps(result))


def in_a_child(name: str, job: Job, folder: Path) -> Result:
    """Run :func:`child` in a fresh interpreter, and add its wall time."""
    folder.mkdir(parents=True)
    environ = {
        **os.environ,
        # threads that spin while they wait would slow down whoever shares the machine
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        # Freed memory stays with the process as in a GPU's caching allocator. Left to itself the C
        # library gives it back and fetches it again at every step, which takes longer than the step
        # where batches are large, so that nobody could be judged by the time.
        "MALLOC_MMAP_THRESHOLD_": str(32 * MIB),
        "MALLOC_TRIM_THRESHOLD_": str(2**31),
    }
    command = [sys.executable, __file__, "--child", name, "--job", job.as_json(), "--in", folder]
    started = time.perf_counter()
    with (folder / "output.txt").open("w") as output:
        process = subprocess.run(
            command, env=environ, cwd=folder, stdout=output, stderr=output, check=False
        )
    seconds = time.perf_counter() - started
    file = folder / "result.json"
    if not file.exists():
        text = (folder / "output.txt").read_text()
        raise RuntimeError(f"{name} ended with {process.returncode}:\n{text}")
    result: Result = json.loads(file.read_text())
    return {**result, "command_seconds": seconds}


def one_round(job: Job, names: list[str], folder: Path) -> dict[str, Result]:
    """Each contestant once."""
    results = {}
    for name in names:
        limited = job if CONTESTANTS[name].is_limited else replace(job, data_limit=None)
        results[name] = in_a_child(name, limited, folder / name)
        file = folder / name / "weights.pt"
        if file.exists():
            reference = torch.load(folder / REFERENCE / "weights.pt").double()
            weights = torch.load(file).double()
            distance = (weights - reference).abs().max() / reference.abs().max()
            results[name]["distance"] = float(distance)
        say(f"  {name}: {json.dumps(short(results[name]))}")
    return results


def short(result: Result) -> Result:
    """A result without its long lists."""
    return {key: value for key, value in result.items() if key != "step_samples"}


def say(text: str) -> None:
    """Progress, which is no part of the table."""
    print(text, file=sys.stderr, flush=True)


def row(name: str, job: Job, rounds: list[dict[str, Result]]) -> list[str]:
    """A contestant's line of the table: medians over the rounds."""
    label = CONTESTANTS[name].label
    mine = [results[name] for results in rounds]
    if "missing" in mine[0]:
        return [label, "not installed", *[""] * 6]
    failed = next((result for result in mine if "error" in result), None)
    if failed is not None:
        return [label, f"failed at step {failed['steps'] + 1}", *[""] * 6]

    def ratio(key: str) -> str:
        if "ideal" not in rounds[0]:
            return ""
        return f"{statistics.median(r[name][key] / r['ideal'][key] for r in rounds):.2f}"

    def median(key: str) -> float:
        return statistics.median(result[key] for result in mine)

    repeated = (median("samples_begun") - job.steps * job.batch) / job.batch
    # a restart from scratch counts anew
    batches = mine[0]["step_samples"][-job.steps :]
    is_kept = all(samples == job.batch for samples in batches)
    return [
        label,
        ratio("seconds"),
        ratio("cpu_seconds"),
        ratio("command_seconds"),
        f"{repeated:.1f}".removesuffix(".0"),
        "yes" if is_kept else f"no ({statistics.mode(batches)})",
        f"{median('distance'):.1e}" if name != REFERENCE else "0",
        f"{median('peak_bytes') / MIB:.0f}",
    ]


def of_ideal(rounds: list[dict[str, Result]]) -> str:
    """How long the run took that all times are compared with."""
    if "ideal" not in rounds[0]:
        return ""
    ideal = statistics.median(results["ideal"]["seconds"] for results in rounds)
    return f"; times ÷ the ideal's, which took {ideal:.1f} s"


HEADER = ["", "wall", "CPU", "command", "repeated", "batch kept", "distance", "peak MiB"]


def table(rows: list[list[str]], *, markdown: bool) -> str:
    """Aligned columns, for a terminal or for the documentation."""
    if not markdown:
        rows = [[cell.replace("*", "").replace("`", "") for cell in cells] for cells in rows]
    rows = [HEADER, *rows]
    widths = [max(len(cells[column]) for cells in rows) for column in range(len(HEADER))]
    lines = [
        [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)] for cells in rows
    ]
    if not markdown:
        return "\n".join("  ".join(cells).rstrip() for cells in lines)
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS))
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--length", type=int, default=Job.length, help="of the longest samples")
    parser.add_argument("--checkpoint-every", type=int, default=Job.checkpoint_every_steps)
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--json", type=Path, help="write all results to this file after each run")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--in", dest="folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child, Job.from_json(arguments.job), arguments.folder)
        return

    order = [name for name in CONTESTANTS if name in (REFERENCE, *arguments.only)]
    names = sorted(order, key=lambda name: name != REFERENCE)
    jobs = {}
    rounds: dict[str, list[dict[str, Result]]] = {case: [] for case in arguments.cases}
    with tempfile.TemporaryDirectory() as folder_name:
        folder = Path(folder_name)
        for case in arguments.cases:
            job = Job(
                case,
                steps=arguments.steps,
                length=arguments.length,
                checkpoint_every_steps=arguments.checkpoint_every,
            )
            measured = in_a_child("limit", job, folder / case / "limit")
            jobs[case] = replace(job, data_limit=measured["limit"])
            say(f"{case}: private memory may grow by {measured['limit'] / MIB:.0f} MiB")
        for number in range(1, arguments.runs + 1):
            for case, job in jobs.items():
                say(f"run {number}, {case}")
                rounds[case].append(one_round(job, names, folder / case / str(number)))
                if arguments.json:
                    arguments.json.write_text(json.dumps(rounds))
    for case, job in jobs.items():
        title = f"Memory runs out at step {job.failing_step} of {job.steps}"
        print(f"\n{title}; medians of {arguments.runs}{of_ideal(rounds[case])}\n")
        rows = [row(name, job, rounds[case]) for name in order]
        print(table(rows, markdown=arguments.markdown))


if __name__ == "__main__":
    main()
