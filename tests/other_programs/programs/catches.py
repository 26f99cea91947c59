"""Catches what it takes for a lack of memory and leaves the batch out, as fairseq does."""

import sys

from learning import STEPS, finish, happens, one_step

size, weights = int(sys.argv[1]), [0.0, 0.0]
for step in range(1, STEPS + 1):
    try:
        happens(step, size)
    except (MemoryError, RuntimeError) as error:
        print(f"WARNING: ran out of memory with exception: {error}; skipping batch", flush=True)
        continue
    weights = one_step(weights, step, size)
finish(weights)
