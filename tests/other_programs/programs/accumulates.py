"""Options for batch and accumulation, a checkpoint with its own name every second step."""

import argparse

from learning import finish, save, trained

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--resume")
options = parser.parse_args()
for step, weights in trained(options.resume, options.batch_size, options.accumulate):
    if step % 2 == 0:
        save(f"checkpoints/step_{step}.json", step, weights)
finish(weights)
