"""Many launchers, random kills: no GPU over-committed, nothing leaked, every survivor served."""

import json
import re
import shutil
import subprocess
import sys

import chaos
import pytest

from world import ROOT


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler (cc)")
@pytest.mark.parametrize(
    ("rounds", "launchers"), [(2, 16), pytest.param(4, 64, marks=pytest.mark.slow)]
)
def test_every_survivor_of_the_chaos_is_served(rounds, launchers):
    """Nothing is over-committed or leaked."""
    script = ROOT / "benchmarks" / "queue_chaos.py"
    command = [sys.executable, script, f"--rounds={rounds}", f"--launchers={launchers}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"\bserved=[1-9]", done.stdout)) == rounds, done.stdout


def test_the_judge_sees_each_fault():
    """A chaos run that could not fail would prove nothing."""
    over = {"event": "over", "member": -1, "left_on_device": {"a": 5}, "left_locked": 2}
    arrivals = [{"event": "arrives", "member": n, "count": 1, "per_device": 1} for n in range(3)]
    rest = [
        {"event": "served", "member": 0, "gpus": ["a", "b"]},
        {"event": "takes", "member": 0, "gpu": "a", "mib": 1},
        {"event": "served", "member": 1, "gpus": ["a"]},
        {"event": "takes", "member": 1, "gpu": "a", "mib": 1},
        {"event": "refuses", "member": 1, "gpu": "a", "mib": 1},
        {"event": "error", "member": 2, "text": ""},
    ]
    verdict = chaos.judge(json.dumps(event) for event in [*arrivals, *rest, over])
    assert verdict == chaos.Verdict(
        over_commits=1,
        crowded=1,
        torn=1,
        unserved=1,
        errors=1,
        leaked_mib=5,
        leaked_locks=2,
        served=2,
        killed=0,
    )
