"""Many launchers, random kills: no GPU over-committed, nothing leaked, every survivor served.

benchmarks/queue_chaos.py runs the same as often as one likes.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import chaos
import pytest

from robust_train.queue.queue_dir import boot_name
from simulated_nvml import Gpu, Machine

SUPPORT = Path(__file__).resolve().parents[1] / "support"
MachineWith = Callable[..., Machine]


@pytest.mark.parametrize(
    ("per_device", "counts", "seed", "launchers", "signum"),
    [
        pytest.param(1, (1,), 1, 64, signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param(1, (1, 1, 2, 4), 2, 64, signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param(3, (1, 1, 1, 2, 4), 3, 64, signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param(1, (1, 1, 2), 5, 64, signal.SIGTERM, marks=pytest.mark.slow),
        (3, (1, 1, 1, 2, 4), 4, 24, signal.SIGKILL),
    ],
)
def test_nothing_is_over_committed_or_leaked_and_every_survivor_is_served(
    machine_with, tmp_path, per_device, counts, seed, launchers, signum
):
    machine = machine_with(*(Gpu(total_mib=40000) for _ in range(8)))
    what = chaos.Chaos(
        str(tmp_path / "log"),
        launchers=launchers,
        per_device=per_device,
        counts=counts,
        seed=seed,
        longest_seconds=0.4,
        signum=signum,
    )
    environ = machine.environment()
    del environ["SIMULATED_NVML_CALLS"]
    environ["PYTHONPATH"] = f"{SUPPORT}:{environ.get('PYTHONPATH', '')}"
    done = subprocess.run(
        [sys.executable, str(Path(chaos.__file__)), json.dumps(asdict(what))],
        env=environ,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    verdict = chaos.judge((tmp_path / "log").read_text().splitlines())
    assert verdict.faults == 0, verdict
    assert verdict.served > launchers // 2, verdict
    base = Path(machine.environ["ROBUST_TRAIN_QUEUE_DIR"])
    assert list((base / boot_name()).glob("record.*")) == []


def test_the_judge_sees_each_fault() -> None:
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
