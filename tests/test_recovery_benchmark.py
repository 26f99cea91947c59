"""The benchmark of recovery still runs, and tells a kept batch from one that was changed."""

import json
import subprocess
import sys

import pytest

from world import ROOT

STEPS = 6


@pytest.mark.slow
def test_in_step_recovery_repeats_one_step_and_a_hand_made_restart_begins_anew(tmp_path):
    results = tmp_path / "results.json"
    process = subprocess.run(
        [
            sys.executable,
            str(ROOT / "benchmarks" / "recovery.py"),
            *("--runs", "1", "--cases", "late", "--only", "in_step", "hand_made", "isolated"),
            *("--steps", str(STEPS), "--length", "88", "--json", str(results)),
        ],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    (late,) = json.loads(results.read_text())["late"]

    batch = 32
    assert late["unlimited"]["samples_begun"] == STEPS * batch

    # the fourth step is where the samples become too long
    assert late["in_step"]["samples_begun"] == (STEPS + 1) * batch
    assert late["in_step"]["step_samples"] == [batch] * STEPS
    assert late["in_step"]["distance"] < 1e-6

    assert late["hand_made"]["samples_begun"] == (STEPS + 4) * batch
    assert late["hand_made"]["step_samples"] == [batch] * 3 + [batch // 2] * 2 * STEPS

    assert late["isolated"]["step_samples"] == [batch] * (3 + STEPS)  # no checkpoint yet

    row = next(line for line in process.stdout.splitlines() if "hand-made" in line)
    assert "no (16)" in row
    assert "(16)" not in next(line for line in process.stdout.splitlines() if "in the step" in line)
