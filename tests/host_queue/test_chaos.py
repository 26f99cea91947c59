"""Many launchers, random kills: no GPU over-committed, nothing leaked, every survivor served.

benchmarks/queue_chaos.py runs the same as often as one likes.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import chaos
import pytest
from witness import Verdict, judge

from robust_train.queue.queue_dir import boot_name
from robust_train.queue.reservations import JobRegistry
from simulated_nvml import Gpu, Machine

TESTS = Path(__file__).resolve().parents[1]
MachineWith = Callable[..., Machine]


def let_loose(machine: Machine, log: Path, **options: object) -> Verdict:
    told = chaos.Chaos(str(log), **options)
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
    return judge(log.read_text().splitlines())


@pytest.mark.parametrize(
    ("per_device", "counts", "seed", "launchers"),
    [
        pytest.param(1, (1,), 1, 64, marks=pytest.mark.slow),
        pytest.param(1, (1, 1, 2, 4), 2, 64, marks=pytest.mark.slow),
        pytest.param(3, (1, 1, 1, 2, 4), 3, 64, marks=pytest.mark.slow),
        (3, (1, 1, 1, 2, 4), 4, 24),
    ],
)
def test_nothing_is_over_committed_or_leaked_and_every_survivor_is_served(
    machine_with: MachineWith,
    tmp_path: Path,
    per_device: int,
    counts: tuple[int, ...],
    seed: int,
    launchers: int,
) -> None:
    machine = machine_with(*(Gpu(total_mib=40000) for _ in range(8)))
    verdict = let_loose(
        machine,
        tmp_path / "log",
        launchers=launchers,
        per_device=per_device,
        counts=counts,
        seed=seed,
        longest_seconds=0.4,
    )
    assert verdict.faults == 0, verdict
    assert verdict.seen >= verdict.served > launchers // 2, verdict
    assert verdict.judged or per_device == 1, "jobs that share GPUs pass others"
    base = Path(machine.environ["ROBUST_TRAIN_QUEUE_DIR"])
    registry = JobRegistry(base)
    with registry.locked():
        assert registry.jobs(sweep=True) == []
    registry.close()
    assert list((base / boot_name()).glob("job.*")) == []
