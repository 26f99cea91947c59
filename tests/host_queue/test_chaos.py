"""Many launchers, random kills: no GPU over-committed, nothing leaked, every survivor served.

benchmarks/queue_chaos.py runs the same as often as one likes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import chaos
import pytest

from robust_train.gpu.queue_dir import boot_name
from robust_train.gpu.reservations import Ledger
from simulated_nvml import Gpu, Machine

TESTS = Path(__file__).resolve().parents[1]
GPUS, LAUNCHERS = 8, 64


@pytest.mark.parametrize(("per_device", "seed"), [(1, 1), (1, 2), (3, 3)])
def test_nothing_is_over_committed_or_leaked_and_every_survivor_is_served(
    machine_with: Callable[..., Machine], tmp_path: Path, per_device: int, seed: int
) -> None:
    machine = machine_with(*(Gpu(total_mib=40000) for _ in range(GPUS)))
    log = tmp_path / "log"
    told = chaos.Chaos(
        str(log),
        launchers=LAUNCHERS,
        per_device=per_device,
        seed=seed,
        longest_seconds=0.4,
    )
    environ = machine.environment()
    del environ["SIMULATED_NVML_CALLS"]
    environ["PYTHONPATH"] = f"{TESTS}:{environ.get('PYTHONPATH', '')}"
    done = subprocess.run(
        [sys.executable, str(Path(chaos.__file__)), chaos.as_argument(told)],
        env=environ,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    verdict = chaos.check(log.read_text().splitlines())
    assert verdict.faults == 0, f"{verdict}\n{done.stderr}"
    base = Path(machine.environ["ROBUST_TRAIN_QUEUE_DIR"])
    ledger = Ledger(base)
    with ledger.locked():
        assert ledger.entries(sweep=True) == []
    ledger.close()
    assert list((base / boot_name()).iterdir()) == []


def test_the_checker_sees_what_it_is_there_for() -> None:
    def line(t: float, event: str, member: int, **fields: object) -> str:
        return json.dumps({"t": t, "event": event, "member": member, **fields})

    common = {"need": 4000, "gpu": "A"}
    lines = [
        line(0, "arrives", 1, need=4000, per_device=1),
        line(0, "arrives", 2, need=4000, per_device=1),
        line(0, "arrives", 3, need=4000, per_device=1),
        line(1, "granted", 2, ticket=2, decided=1, **common),
        line(1.1, "allocated", 2, gpu="A", mib=4000),
        line(2, "granted", 1, ticket=1, decided=2, **common),
        line(2.1, "allocated", 1, gpu="A", mib=4000),
        line(2.2, "overcommit", 1, gpu="A"),
        line(3, "trained", 2, gpu="A"),
        line(9, "over", -1, left_on_device={"A": 5}, gpus=["A"]),
    ]
    verdict = chaos.check(lines)
    assert verdict == chaos.Verdict(
        over_commits=1,
        leaked_bytes=5,
        unserved_survivors=1,
        errors=0,
        unlawful_passes=1,
        crowded=1,
        served=2,
        passed=1,
        killed=0,
    )
