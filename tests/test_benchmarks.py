"""Each benchmark runs with its smallest settings, ends with 0 and prints its figures.

Every test starts the real command. So short, the figures themselves mean nothing: none is compared.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest

from world import ROOT

BENCHMARKS = ROOT / "benchmarks"
X = r"[\d.]+"  # a figure
PACKING = rf"{X} s, {X} × perfect packing"

# a command, and what its output has to match; " … " there is anything in between
SMALLEST = {
    "attempt_start.py --runs 1": rf"cold interpreter ÷ retry: {X} ×",
    "auto_batch.py --only 'cnn, 96 × 96' --at-most 2": (
        rf"robust-train \| 1 \| 2 \| {X} \| {X} … bisection \| 1 \| 2 \| {X} \| {X}"
    ),
    "goodput.py --every 5 --minutes 0.05": rf"ours +{X}\ntorchrun 300 s +{X}\ntorchrun 10 s +{X}",
    "gpu_queue.py --rounds 2": rf"reservation: {X} ms … a poll … {X} ms … hand-over: median {X} ms",
    "journal_bounds.py --events 4000 --folder journal": rf"36,000( +{X}){{5}}\n +4,000( +{X}){{5}}",
    # processes that die change no bit of the weights
    "kill_and_resume.py --kills=4 --epochs=1": r'"kills": 4, … "bitwise_equal": true',
    "micro_batch_overhead.py --steps 2": rf"backward alone: {X} µs",
    "micro_batch_overhead.py --check --steps 2": rf"a check, once: {X} ms",
    "micro_batch_overhead.py --frameworks --steps 5 --rounds 1": (
        rf"accelerate: … × {X} … Lightning: … × {X} … transformers: … × {X}"
    ),
    # So short a program is measured for its next run only.
    "need_accuracy.py --only 'no accumulation' --step-seconds 0.4 --together 1": (
        rf"no accumulation +\d+ +4000 +- +- +{X} +{X} %"
    ),
    "packing.py --jobs 4 --gpus 1 --job-seconds 1": (
        rf"packed: {X} s, … 0 lost to memory, 0 over-commits … packed ÷ alone: {X}\n"
        rf"reserved ÷ true peak: {X} to {X}"
    ),
    "published_queues.py --job-seconds 0.5": rf"gpu_queue: {PACKING}",
    "queue_chaos.py --rounds 1 --launchers 6 --gpus 2": r"served=\d … nothing went wrong",
    "ranks_overhead.py --sharded --steps 1": rf"with run.backward: {X} ms … alone: {X} µs",
    # the fourth of six steps is where samples become too long; a restart begins anew
    "recovery.py --runs 1 --cases late --only in_step hand_made isolated --steps 6 --length 88": (
        # the repeated step, and the check of its split
        r"hand-made.* 4 +no \(16\) … in the step +[1-3](\.\d)? +yes +\d\.\de-(0[7-9]|1\d) … "
        r"processes +4 +yes"
    ),
    "requests_overhead.py --steps 5": rf"step of a run that takes them: {X} µs",
    "sampler.py --rounds 2 --block-seconds 0.05": rf"network: … {X} % … Python alone: … {X} %",
    "save_stall.py --gigabytes 0.01 --saves 1": rf"run.save +-?{X} s lost a save = +-?{X} copies",
    "scheduler.py --jobs 40 --gpus 8 --days 1": rf"memory in use: {X}% … of 4 GPUs \| fifo \| {X}",
    "search.py --pruned --trials 1": r"to the end: 1 trials, 0 of … successive_halving: 1 trials",
    "search.py --job-seconds 0.2 --trials 4": rf"robust_optuna: 4 trials, {PACKING}",
    "selection_latency.py --rounds 2": rf"ratio: {X}",
    "sharded_saves.py --megabytes 16 --saves 1": rf"time × {X}, memory × {X}",
    "startup.py --runs 1 --job-seconds 0": rf"difference: [+-]{X} s",
    "sweep.py --job-seconds 0.5 --poll-seconds 0.5": rf"sweep, … {PACKING} … poll … {PACKING}",
}
ON_A_GPU = {
    "empty_cache.py --steps 5 --rounds 1": rf"as a run does: {X} ms",
    "gpu_check.py nvml": "all as expected",
}
ELSEWHERE = {"goodput_trainer.py": "goodput.py starts it"}


def run(command, folder, **variables):
    """Run a benchmark to its end; return what it printed."""
    script, *options = shlex.split(command)
    if "build_nvml" in (BENCHMARKS / script).read_text() and shutil.which("cc") is None:
        pytest.skip("no C compiler")
    surroundings = {"env": {**os.environ, **variables}, "cwd": folder, "timeout": 240}
    program = [sys.executable, BENCHMARKS / script, *options]
    ended = subprocess.run(program, capture_output=True, text=True, **surroundings)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def has(output, figures):
    return re.search(figures.replace(" … ", r"[\s\S]*\s"), output) is not None


@pytest.mark.slow
@pytest.mark.parametrize("command", SMALLEST)
def test_a_benchmark_runs_and_prints_its_figures(command, tmp_path):
    output = run(command, tmp_path, CUDA_VISIBLE_DEVICES="")
    assert has(output, SMALLEST[command]), output


@pytest.mark.gpu
@pytest.mark.parametrize("command", ON_A_GPU)
def test_one_that_needs_a_gpu_runs_on_one(command, tmp_path):
    output = run(command, tmp_path)
    assert has(output, ON_A_GPU[command]), output


def test_every_benchmark_is_run_by_a_test():
    programs = {file.name for file in BENCHMARKS.glob("*.py") if "__main__" in file.read_text()}
    assert programs == {command.split()[0] for command in (*SMALLEST, *ON_A_GPU)} | {*ELSEWHERE}
