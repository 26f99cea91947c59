"""Fills this process's memory to the last byte, and records what fills it, again and again."""

from __future__ import annotations

import faulthandler
import sys
from pathlib import Path

import torch

from memory_limit import lift_limit, limit_growth
from robust_train.attempt.memory_upkeep import AttemptMemory
from robust_train.attempt.run import Run
from robust_train.config.checks import checked
from robust_train.config.composition import complete
from robust_train.failures import classify_failure
from robust_train.model.events import OutOfMemory

LONGEST_ROUND_SECONDS = 60


def fill(held: list[bytearray]) -> None:
    size = 1 << 20
    while size >= 32:
        try:
            held.append(bytearray(size))
        except MemoryError:
            size //= 4


def main(rounds: int) -> None:
    config = checked(complete({"device": "cpu", "memory": {"sample_interval_ms": 0}}))
    tensors = [torch.zeros(1000) for _ in range(1000)]
    for number in range(1, rounds + 1):
        faulthandler.dump_traceback_later(LONGEST_ROUND_SECONDS, exit=True)
        seen = []
        run = Run(run_dir=Path.cwd(), report=seen.append, attempt=number)
        error, held = MemoryError(), []
        with AttemptMemory(run, config) as memory:
            limit_growth(32 << 20)
            fill(held)
            memory.ran_out(error, classify_failure(error))
            lift_limit()
        assert [event for event in seen if isinstance(event, OutOfMemory)], number
        assert Path(f"oom-attempt-{number}.json").stat().st_size > 100
    print(f"recorded {rounds} times beside {len(tensors)} tensors")


main(int(sys.argv[1]))
