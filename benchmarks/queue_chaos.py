"""64 launchers at once on 8 simulated GPUs, a third of them killed at random: what goes wrong.

Each launcher queues and then runs a trainer that takes memory of a device which refuses to be
over-committed. What the device and the members saw is judged by a checker that shares no code with
the queue (tests/host_queue/chaos.py). Every other round has up to three jobs a GPU; half of the
rounds have jobs of one, two and four GPUs.
Needs a C compiler, no GPU.

Run: python benchmarks/queue_chaos.py [--launchers 64] [--gpus 8] [--rounds 5]
Goal: no fault of any kind.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT / "tests" / "host_queue")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--launchers", type=int, default=64)
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()

    import chaos

    from simulated_nvml import Gpu, Machine, build_nvml

    bad = 0
    for seed in range(arguments.rounds):
        per_device = 1 if seed % 2 == 0 else 3
        counts = (1,) if seed % 4 < 2 else (1, 1, 2, 4)
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            gpus = [Gpu(total_mib=40000) for _ in range(arguments.gpus)]
            machine = Machine(folder, build_nvml(folder / "libraries").parent, gpus)
            environ = machine.environment(PYTHONPATH=f"{ROOT / 'tests' / 'support'}:{ROOT / 'src'}")
            del environ["SIMULATED_NVML_CALLS"]
            log = folder / "log"
            what = chaos.Chaos(
                str(log), arguments.launchers, per_device=per_device, counts=counts, seed=seed
            )
            started = time.monotonic()
            command = [sys.executable, chaos.__file__, json.dumps(asdict(what))]
            subprocess.run(command, env=environ, check=True)
            seconds = time.monotonic() - started
            verdict = chaos.judge(log.read_text().splitlines())
            if verdict.faults:
                kept = Path(tempfile.gettempdir()) / f"queue_chaos-{seed}.jsonl"
                print(f"log: {shutil.copy(log, kept)}")
        sizes = "/".join(str(count) for count in sorted(set(counts)))
        print(f"{per_device} a GPU, of {sizes} GPUs, {seconds:.1f} s: {verdict}", flush=True)
        bad += verdict.faults
    print("nothing went wrong" if bad == 0 else f"{bad} faults")
    sys.exit(bad != 0)


if __name__ == "__main__":
    main()
