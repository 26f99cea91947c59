"""Options for batch and accumulation, a checkpoint with its own name every second step."""

import argparse

from learning import STEPS, finish, happens, load, one_step, save

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--resume")
options = parser.parse_args()
first, weights = load(options.resume)
for step in range(first + 1, STEPS + 1):
    happens(step, options.batch_size)
    weights = one_step(weights, step, options.batch_size, options.accumulate)
    if step % 2 == 0:
        save(f"checkpoints/step_{step}.json", step, weights)
finish(weights)
